"""The sizes of a block, read from shapes and dtypes alone and checked against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from jaxfold._algebra._dtype import promote
from jaxfold._block._leaves import read_group, unbox
from jaxfold._errors import OptionError, ShapeError, StructureError, kind_of

NormType = Literal["layernorm", "rmsnorm"]
Form = Literal["direct", "packed", "standard"]
NORM_TYPES: tuple[NormType, ...] = ("layernorm", "rmsnorm")
FORMS: tuple[Form, ...] = ("direct", "packed", "standard")


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """What of a block is known without its values.

    ``outputs`` maps the name of each consumer to its features; the name of a single one is ``None``. ``stack`` is the
    length of the leading axis, or ``None``; counts and sizes are those of one member of the stack.
    """

    features: int
    width: int
    outputs: dict[str | None, tuple[int, ...]]
    stack: int | None
    producer_bias: bool
    scale: bool
    offset: bool
    consumer_bias: dict[str | None, bool]
    parameters: int
    nbytes: int
    producer_parameters: int
    producer_bytes: int
    factor_dtype: np.dtype
    kernel_dtypes: dict[str | None, np.dtype]

    @property
    def rows(self) -> int:
        """p, the rows of T: one for each feature, and one for the constant where the producer has a bias."""
        return self.features + self.producer_bias

    @property
    def rank(self) -> int:
        """k = min(n, p), the rows of R. Not the numerical rank of T: no row is dropped."""
        return min(self.width, self.rows)

    @property
    def output_size(self) -> int:
        """m, the output features of all the consumers together."""
        return sum(int(np.prod(features)) for features in self.outputs.values())


@dataclasses.dataclass(frozen=True)
class Layers:
    """The unboxed leaves of a block. A single consumer goes by the name ``None``."""

    producer: dict[str, Any]
    norm: dict[str, Any]
    consumers: dict[str | None, dict[str, Any]]

    def named(self) -> dict[str, Any]:
        """Every leaf by the path that an error message or a report gives it."""
        groups = {"producer": self.producer, "norm": self.norm}
        groups |= {consumer_path(name): group for name, group in self.consumers.items()}
        return {f"{group}[{key!r}]": leaf for group, leaves in groups.items() for key, leaf in leaves.items()}


def consumer_path(name: str | None) -> str:
    return "consumers" if name is None else f"consumers[{name!r}]"


def choose(argument: str, value: Any, accepted: tuple[Any, ...]) -> Any:
    """``value`` if it is one of ``accepted``, else an :class:`OptionError`."""
    if not isinstance(value, str) or value not in accepted:
        raise OptionError(argument, repr(value), " or ".join(map(repr, accepted)), "")
    return value


def flag(argument: str, value: Any) -> bool:
    """``value`` if it is a boolean, else an :class:`OptionError`."""
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(argument, repr(value), "True or False", "")
    return bool(value)


def read_layers(
    producer: Any, norm: Any, consumers: Any, *, stacked: bool, read_leaf: Callable[[Any], Any] = unbox
) -> tuple[Layers, BlockShape]:
    """Unboxes the three arguments and checks names, dtypes and shapes; values are not looked at."""
    stacked = flag("stacked", stacked)
    layers = Layers(
        read_group("producer", producer, ("kernel",), ("bias",), read_leaf),
        {} if norm is None else read_group("norm", norm, (), ("scale", "bias"), read_leaf),
        {
            name: read_group(consumer_path(name), group, ("kernel",), ("bias",), read_leaf)
            for name, group in _by_name(consumers).items()
        },
    )
    stack = _stack_of(layers) if stacked else None
    lead = () if stack is None else (stack,)
    note = (
        "Leaves of a stack (nn.scan, nn.vmap) have one leading axis more: pass stacked=True. "
        "A kernel of several output axes is reshaped to (in, out) first, as is what follows it."
    )
    expected = "three axes, (layers, in, out)" if stacked else "two axes, (in, out)"
    kernel = layers.producer["kernel"].shape
    if len(kernel) != 2 + len(lead):
        raise ShapeError("producer['kernel']", f"shape {kernel}", expected, "" if stacked else note)
    features, width = kernel[-2:]
    turned = _turned(layers, features, width, len(lead))

    outputs: dict[str | None, tuple[int, ...]] = {}
    for name, group in layers.consumers.items():
        path, shape = f"{consumer_path(name)}['kernel']", tuple(group["kernel"].shape)
        if len(shape) < 2 + len(lead):
            raise ShapeError(path, f"shape {shape}", f"shape {(*lead, width)} + features, a tuple", "")
        outputs[name] = shape[1 + len(lead) :]
        _check_shape(
            path,
            shape,
            (*lead, width, *outputs[name]),
            f"{width} is the width of producer['kernel'] {tuple(kernel)}: kernels are (in, out), .T turns them."
            + turned,
        )
        if "bias" in group:
            _check_shape(f"{consumer_path(name)}['bias']", group["bias"].shape, (*lead, *outputs[name]))
    for path, leaf in layers.named().items():
        if path in ("producer['bias']", "norm['scale']", "norm['bias']"):
            _check_shape(path, leaf.shape, (*lead, width), f"the width of the producer.{turned}")
    for path, leaf in layers.named().items():
        if any(size < 1 for size in leaf.shape):
            raise ShapeError(path, f"shape {tuple(leaf.shape)}", "no empty axis", "")
    return layers, _describe(layers, features, width, outputs, stack)


def _turned(layers: Layers, features: int, width: int, lead: int) -> str:
    """A sentence for kernels in (out, in): that more leaves fit the producer's first axis than its width, if so."""
    meets = {path: leaf.shape[-1:] for path, leaf in layers.named().items() if path.startswith(("producer", "norm"))}
    del meets["producer['kernel']"]
    for name, group in layers.consumers.items():
        meets[f"{consumer_path(name)}['kernel']"] = group["kernel"].shape[lead : lead + 1]
    fitting = [path for path, own in meets.items() if own == (features,)]
    if features == width or len(fitting) <= sum(own == (width,) for own in meets.values()):
        return ""
    return f" It may be producer['kernel'] that is to be turned: its first axis, {features}, fits {', '.join(fitting)}."


def _by_name(consumers: Any) -> Mapping[Any, Any]:
    """A single consumer as a mapping with the name ``None``."""
    if not isinstance(consumers, Mapping):
        raise StructureError(
            "consumers",
            kind_of(consumers),
            "a mapping with a 'kernel', or a mapping of names to such",
            "Pass leaves: params['Dense_1'] of Linen variables, nnx.state(layer) of an NNX layer.",
        )
    if not consumers:
        raise StructureError("consumers", "an empty mapping", "at least one consumer", "")
    if not all(isinstance(group, Mapping) for group in consumers.values()):
        return {None: consumers}
    for name in consumers:
        if not isinstance(name, str):
            raise StructureError("consumers", f"the name {name!r}", "names that are strings", "")
    return consumers


def _stack_of(layers: Layers) -> int:
    first, leaf = "producer['kernel']", layers.producer["kernel"]
    if not leaf.shape:
        raise ShapeError(first, "shape ()", "a leading axis over the layers, since stacked=True", "")
    for path, other in layers.named().items():
        if other.shape[:1] != leaf.shape[:1]:
            expected = f"a leading axis of length {leaf.shape[0]}, as in {first}, since stacked=True"
            raise ShapeError(path, f"shape {tuple(other.shape)}", expected, "")
    return int(leaf.shape[0])


def _check_shape(path: str, got: Any, expected: tuple[int, ...], why: str = "the features of its kernel.") -> None:
    if tuple(got) != expected:
        raise ShapeError(path, f"shape {tuple(got)}", f"shape {expected}", why[0].upper() + why[1:])


def _count(leaves: Iterable[Any], stack: int | None, *, in_bytes: bool = False) -> int:
    """Entries, or bytes, of one member of the stack."""
    sizes = (int(np.prod(leaf.shape)) * (np.dtype(leaf.dtype).itemsize if in_bytes else 1) for leaf in leaves)
    return sum(sizes) // (stack or 1)


def _describe(
    layers: Layers, features: int, width: int, outputs: dict[str | None, tuple[int, ...]], stack: int | None
) -> BlockShape:
    # A coefficient gets the dtype that JAX promotes its own sources to, so that apply's output dtype comes out right.
    producer, norm = list(layers.producer.values()), list(layers.norm.values())
    return BlockShape(
        features=int(features),
        width=int(width),
        outputs=outputs,
        stack=stack,
        producer_bias="bias" in layers.producer,
        scale="scale" in layers.norm,
        offset="bias" in layers.norm,
        consumer_bias={name: "bias" in group for name, group in layers.consumers.items()},
        parameters=_count(layers.named().values(), stack),
        nbytes=_count(layers.named().values(), stack, in_bytes=True),
        producer_parameters=_count(producer, stack),
        producer_bytes=_count(producer, stack, in_bytes=True),
        factor_dtype=promote(*producer),
        kernel_dtypes={name: promote(*producer, *norm, *group.values()) for name, group in layers.consumers.items()},
    )
