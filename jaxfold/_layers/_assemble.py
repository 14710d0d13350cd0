"""From the layers as they were read to a block, its contraction, and the dtype and precision of its output."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxfold._algebra._dtype import promote
from jaxfold._block._block import Block
from jaxfold._block._contract import contract
from jaxfold._block._contraction import Contraction
from jaxfold._block._shape import Form, consumer_path
from jaxfold._errors import OptionError, ShapeError
from jaxfold._layers._layer import (
    STACK_AXIS,
    Affine,
    Norm,
    canonical_dtype,
    canonical_epsilon,
    canonical_precision,
    is_stacked,
)


@dataclasses.dataclass(frozen=True)
class ReadBlock:
    """A block whose options come from the modules. ``dtype`` and ``precision`` are those of the output."""

    layers: tuple[Any, Any, Any]
    options: dict[str, Any]
    dtype: np.dtype | None
    precision: Any

    def block(self) -> Block:
        """The original."""
        return Block(*self.layers, **self.options)

    def contract(self, form: Form, dtype: Any, allow_growth: bool) -> Contraction:
        """The contraction, stored in ``dtype``."""
        return contract(*self.layers, **self.options, form=form, dtype=dtype, allow_growth=allow_growth)


def assemble(producer: Affine, norm: Norm, consumers: dict[str | None, Affine]) -> ReadBlock:
    """Checks the layers against each other; a single consumer goes by the name None.

    Raises:
        JaxfoldError: naming the layer, leaf or attribute at fault.
    """
    if len(producer.declared) != 2:
        got = repr(tuple(producer.declared[1:]))
        raise OptionError(f"producer.{producer.features_attribute}", got, "one output axis, the one that is normed", "")
    epsilon = canonical_epsilon("norm", norm.epsilon)
    stacked = is_stacked("producer", producer)
    for name, layer in consumers.items():
        if is_stacked(consumer_path(name), layer) != stacked:
            shape = tuple(layer.leaves["kernel"].shape)
            expected = f"{'a leading axis' if stacked else 'no leading axis'} over layers, as in producer['kernel']"
            hint = "Either all layers of a block are stacked or none is."
            raise ShapeError(f"{consumer_path(name)}['kernel']", f"shape {shape}", expected, hint)
    leaves: dict[Any, Any] = {name: layer.leaves for name, layer in consumers.items()}
    layers = (producer.leaves, norm.leaves, leaves.get(None, leaves))
    options = {"epsilon": epsilon, "norm_type": norm.norm_type, "stacked": stacked}
    try:
        block = Block(*layers, **options)
    except ShapeError as error:
        if not stacked or error.hint:
            raise
        raise ShapeError(error.argument, error.got, error.expected, STACK_AXIS) from None
    return ReadBlock(layers, options, _output_dtype(block, producer, norm, consumers), _precision(producer, consumers))


def _output_dtype(block: Block, producer: Affine, norm: Norm, consumers: dict[str | None, Affine]) -> np.dtype | None:
    """Each layer's dtype, where it has one, replaces that of its input and leaves; None if only they decide."""
    leaves = block.layers
    before = canonical_dtype("producer", producer.dtype)
    middle = canonical_dtype("norm", norm.dtype)
    own: dict[str | None, np.dtype | None] = {}
    promoted: dict[str | None, np.dtype] = {}
    for name, layer in consumers.items():
        group = leaves.consumers[name].values()
        own[name] = canonical_dtype(consumer_path(name), layer.dtype)
        if own[name] is None and middle is not None:
            own[name] = promote(middle, *group)
        elif own[name] is None and before is not None:
            own[name] = promote(before, *leaves.norm.values(), *group)
        promoted[name] = own[name] or promote(*leaves.producer.values(), *leaves.norm.values(), *group)
    first = next(iter(own))
    for name in own:
        if (own[name], promoted[name]) != (own[first], promoted[first]):
            got, expected = (f"outputs of dtype {promoted[key]}" for key in (name, first))
            hint = "All outputs of a contracted block have one dtype: contract these consumers in blocks of their own."
            raise OptionError(f"{consumer_path(name)}.dtype", got, f"{expected}, as {consumer_path(first)} has", hint)
    return own[first]


def _precision(producer: Affine, consumers: dict[str | None, Affine]) -> Any:
    given = {name: canonical_precision(layer.precision) for name, layer in consumers.items()}
    first = next(iter(given))
    for name, precision in given.items():
        if precision != given[first]:
            hint = "One product makes all outputs: contract these consumers in blocks of their own."
            expected = f"{given[first]!r}, as {consumer_path(first)} has"
            raise OptionError(f"{consumer_path(name)}.precision", repr(precision), expected, hint)
    return canonical_precision(producer.precision) if given[first] is None else given[first]
