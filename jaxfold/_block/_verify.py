"""Measuring a contraction, and the original beside it, against float64."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxfold._algebra._dtype import promote
from jaxfold._block._apply import apply
from jaxfold._block._block import Block
from jaxfold._block._check import check_contraction, require_contraction
from jaxfold._block._contraction import Contraction
from jaxfold._block._leaves import require_floating, to_host
from jaxfold._block._oracle import mean_squares, oracle, oracle_gradient
from jaxfold._block._rounding import contraction_rounding, on_host, original_rounding, unit_of
from jaxfold._block._shape import Layers
from jaxfold._block._verdict import EQUAL, OTHER, verdict
from jaxfold._errors import ShapeError, StructureError, kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of the original and of the contracted block against float64.

    The error of an entry is its absolute error over the largest absolute value in its true row (the absolute error
    itself where the true row is zero).

    Attributes:
        original_max, contracted_max: the largest error of all entries.
        original_typical, contracted_typical: the root mean square over all entries.
        unit: half a unit in the last place of the dtype, relative: the error of perfect rounding.

    Example:
        >>> import jaxfold
        >>> jaxfold.Errors(2e-7, 1e-7, contracted_max=1e-7, contracted_typical=2e-8, unit=6e-8).ratio
        0.5
    """

    original_max: float
    original_typical: float
    contracted_max: float
    contracted_typical: float
    unit: float

    @property
    def ratio(self) -> float:
        """The contracted block's largest error over the original's (over ``unit`` where the original has none)."""
        return self.contracted_max / (self.original_max or self.unit)

    @property
    def typical_ratio(self) -> float:
        """The same of the typical errors."""
        return self.contracted_typical / (self.original_typical or self.unit)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What :func:`verify` measured; prints as a short table.

    The yardstick is float64. For a float64 block the figures therefore say only that it agrees with the yardstick to
    rounding, and their ratio favours the original, which rounds as the yardstick does.

    Attributes:
        outputs: errors of the outputs.
        gradients: errors of the gradient in the inputs, for a fixed random cotangent.
        condition: of R, its largest singular value over its smallest; infinite if T lacks full rank.
        variance_lower_bound: ρ²/n, below which the variance falls for no input; ρ is R's last diagonal entry where
            the producer has a bias and n > d, and zero otherwise. Add epsilon for the effective epsilon of the block.
        rows: how many rows were measured.
        dtype: of the outputs.
        storage: the coarsest dtype among the coefficients. Where that is a half-precision one and ``dtype`` is not, the
            printed table says what to do about it.
        verdict: what the typical errors of the outputs say. ``"equal to rounding"``: the contracted block's is at most
            twice the original's. ``"worse than the original's rounding: …"``: it is larger, and rounding explains it.
            ``"not this function: check epsilon, norm type, layers"``: rounding does not explain the error of the
            contracted block, or of ``original_fn``, or the contraction has another epsilon than the original.

    Example:
        >>> import numpy as np, jaxfold
        >>> layers = {"kernel": np.eye(2, 8, dtype="float32")}, None, {"kernel": np.eye(8, 4, dtype="float32")}
        >>> contracted = jaxfold.contract(*layers, epsilon=1e-6)
        >>> certificate = jaxfold.verify(jaxfold.Block(*layers, epsilon=1e-6), contracted, np.eye(2, dtype="float32"))
        >>> str(certificate).splitlines()[0]
        'relative error, float32    original   contracted   contracted / original'
    """

    outputs: Errors
    gradients: Errors
    condition: float
    variance_lower_bound: float
    rows: int
    dtype: str
    storage: str = ""
    verdict: str = ""

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draws the errors on a logarithmic axis: typical and largest, of outputs and gradients, before and after.

        Needs matplotlib, the extra ``plots``.

        Args:
            ax: where to draw; by default the axes of a new figure, so that ``plot().figure.savefig(path)`` keeps it.

        Returns:
            The matplotlib ``Axes``.

        Raises:
            ImportError: if matplotlib is not installed.

        Example:
            >>> import jaxfold
            >>> errors = jaxfold.Errors(2e-7, 5e-8, contracted_max=1e-7, contracted_typical=2e-8, unit=6e-8)
            >>> ax = jaxfold.Certificate(errors, errors, 1.0, 0.0, rows=100, dtype="float32").plot()
            >>> ax.get_xscale(), ax.get_title(loc="left")
            ('log', '100 rows')
        """
        from jaxfold._plots import certificate_axes

        return certificate_axes(self, ax)

    def __str__(self) -> str:
        from jaxfold._report import certificate_table, render

        return render(certificate_table(self))


def verify(
    original: Block, contracted: Contraction, inputs: ArrayLike, *, original_fn: Callable[[Any], Any] | None = None
) -> Certificate:
    """Measures a contraction and its original against a two-pass float64 evaluation, on given inputs.

    Args:
        original: the :class:`Block` as it was trained.
        contracted: what was made of it, in any form.
        inputs: ``(..., d)`` of a floating dtype, real inputs of the block by preference, since the errors depend on
            them; at least one row. For a stack the leading axis runs over it.
        original_fn: the block as it really runs, ``inputs`` to output, in JAX: a Flax ``apply``, say. By default the
            original is evaluated by ``original(inputs)``, in two passes, in the dtypes of its leaves.

    Returns:
        A :class:`Certificate`.

    Raises:
        ShapeError: if sizes of original, contracted and inputs do not agree, or there is no row.
        StructureError: if an argument is of another kind, ``contracted`` does not hang together, or it or
            ``original_fn`` has other outputs than the original.
        DtypeError: if the inputs, or a leaf of ``contracted``, are not real floating.
        OptionError: if a static field of ``contracted`` is not accepted.
        ConcretenessError, CoefficientError: if a leaf or the inputs have no values, or values that are not finite.

    Example:
        >>> import numpy as np, jaxfold
        >>> rng = np.random.default_rng(0)
        >>> producer = {"kernel": rng.normal(size=(4, 64)).astype("float32")}
        >>> consumer = {"kernel": rng.normal(size=(64, 8)).astype("float32")}
        >>> block = jaxfold.Block(producer, None, consumer, epsilon=1e-6)
        >>> contracted = jaxfold.contract(producer, None, consumer, epsilon=1e-6)
        >>> certificate = jaxfold.verify(block, contracted, rng.normal(size=(100, 4)).astype("float32"))
        >>> certificate.outputs.contracted_max < 1e-5, certificate.rows
        (True, 100)
    """
    given = _check_inputs(original, contracted, inputs)
    if not (original_fn is None or callable(original_fn)):
        raise StructureError("original_fn", kind_of(original_fn), "a function of the inputs, or None", "")
    wide = to_host("inputs", given)
    # How arrays are spread over devices is no matter of rounding, and not every product has a rule for it.
    original, contracted, x = _gathered_block(original), _gathered(contracted), _gathered(given)
    reference = oracle(original, wide)
    rng = np.random.default_rng(0)
    cotangents = {name: rng.standard_normal(value.shape) for name, value in reference.items()}
    evaluate = apply if original.shape.stack is None else jax.vmap(apply)

    outputs, gradient = _run("contracted", lambda x: evaluate(contracted, x), x, cotangents)
    before, gradient_before = _run("original_fn", original_fn or original, given if original_fn else x, cotangents)
    # The blocks saw cotangents that were rounded to the dtype of the outputs; the oracle gets the same numbers.
    rounded = {name: cotangents[name].astype(value.dtype).astype(np.float64) for name, value in outputs.items()}
    true_gradient = oracle_gradient(original, wide, rounded)
    lead = wide.ndim - 1

    def in_order(named: dict[str | None, Any]) -> list[Any]:
        return [named[name] for name in reference]

    dtype = promote(*outputs.values())
    storage = max((leaf.dtype for leaf in jax.tree.leaves(contracted.params)), key=unit_of)
    errors = _compare(in_order(reference), in_order(before), in_order(outputs), lead)
    host = on_host(contracted)
    limit = math.inf
    if original_fn is not None:
        own = _named(original(jnp.asarray(x)))
        own_error = _rms(_entry_errors(in_order(reference), in_order(own), lead))
        unit = max(unit_of(value.dtype) for value in before.values())
        limit = original_rounding(own_error, mean_squares(original, wide), promote(*own.values()), unit)
    sizes = {name: _row_sizes(true, lead).reshape(*wide.shape[:-1], 1) for name, true in reference.items()}
    judged = verdict(
        errors.original_typical,
        errors.contracted_typical,
        errors.unit,
        expected=contraction_rounding(host, wide, sizes, dtype, storage),
        original_limit=limit,
    )
    # Another epsilon is another function, whatever these inputs show (up to the digits that float32 stores); a norm
    # of the other type is not if the producer is centred already, and then the figures say so.
    same_epsilon = math.isclose(contracted.epsilon, original.epsilon, rel_tol=1e-6)
    same_type = contracted.norm_type == original.norm_type or judged == EQUAL
    return Certificate(
        outputs=errors,
        gradients=_compare([true_gradient], [gradient_before], [gradient], lead),
        condition=float(np.max(_condition(host.R))),
        variance_lower_bound=float(np.min(_variance_lower_bound(host))),
        rows=int(np.prod(wide.shape[:-1])),
        dtype=str(dtype),
        storage=str(storage),
        verdict=judged if same_epsilon and same_type else OTHER,
    )


def _run(
    argument: str, function: Callable[[Any], Any], x: Any, cotangents: dict[str | None, np.ndarray]
) -> tuple[dict[str | None, Any], Any]:
    """Outputs by consumer, and the gradient in the inputs for the given cotangents."""

    # Not under jit, where XLA would take the parameters for constants and fold products of them.
    outputs, pullback = jax.vjp(lambda x: _named(function(x)), jnp.asarray(x))
    got = {name: tuple(value.shape) for name, value in outputs.items()}
    expected = {name: value.shape for name, value in cotangents.items()}
    if got != expected:
        raise StructureError(
            argument,
            f"outputs {_describe(got)}",
            f"{_describe(expected)}, those of the original",
            "Compare like with like.",
        )
    rounded = {name: cotangents[name].astype(value.dtype) for name, value in outputs.items()}
    return outputs, pullback({name: _placed_as(outputs[name], value) for name, value in rounded.items()})[0]


def _placed_as(like: jax.Array, value: np.ndarray) -> jax.Array:
    """``value`` on the devices of ``like``; the axes of an explicit mesh are part of a cotangent's type."""
    return jnp.asarray(value) if len(like.devices()) == 1 else jax.device_put(value, like.sharding)


def _gathered(tree: Any) -> Any:
    """The tree with all arrays that several devices share as NumPy arrays, the others as they are."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1 else leaf, tree
    )


def _gathered_block(block: Block) -> Block:
    gathered = copy.copy(block)
    layers = block.layers
    gathered.layers = Layers(*_gathered((layers.producer, layers.norm, layers.consumers)))
    return gathered


def _named(outputs: Any) -> dict[str | None, Any]:
    return dict(outputs) if isinstance(outputs, Mapping) else {None: outputs}


def _describe(shapes: dict[str | None, tuple[int, ...]]) -> str:
    return ", ".join(f"{'a single one' if n is None else repr(n)} of shape {shape}" for n, shape in shapes.items())


def _check_inputs(original: Block, contracted: Contraction, inputs: ArrayLike) -> Any:
    x: Any = inputs
    if not isinstance(original, Block):
        hint = "Make one with jaxfold.Block(producer, norm, consumers, epsilon=...)."
        raise StructureError("original", kind_of(original), "a jaxfold.Block", hint)
    require_contraction("contracted", contracted)
    lead = check_contraction("contracted", contracted)
    require_floating("inputs", x)
    shape = original.shape
    stack = () if shape.stack is None else (shape.stack,)
    if (contracted.features, contracted.width, lead) != (shape.features, shape.width, stack):
        raise ShapeError(
            "contracted",
            f"{contracted.features} features and width {contracted.width}" + (f", {lead[0]} times" if lead else ""),
            f"those of the original, {shape.features} and {shape.width}" + (f", {stack[0]} times" if stack else ""),
            "Pass the contraction of this very block.",
        )
    if x.shape[: len(lead)] != lead or x.shape[-1:] != (original.shape.features,) or x.ndim <= len(lead) or not x.size:
        expected = f"shape {(*lead, '...', original.shape.features)} with at least one row".replace("'", "")
        raise ShapeError("inputs", f"shape {x.shape}", expected, "")
    return x


def _compare(truth: list[np.ndarray], original: list[Any], contracted: list[Any], lead: int) -> Errors:
    before, after = _entry_errors(truth, original, lead), _entry_errors(truth, contracted, lead)
    unit = max(float(jnp.finfo(result.dtype).eps) for result in contracted) / 2
    return Errors(float(before.max()), _rms(before), float(after.max()), _rms(after), unit)


def _entry_errors(truth: list[np.ndarray], results: list[Any], lead: int) -> np.ndarray:
    """The errors of all entries, of one output after the other."""
    errors = []
    for true, result in zip(truth, results, strict=True):
        size = _row_sizes(true, lead)
        difference = np.abs(np.asarray(result).astype(np.float64) - true).reshape(len(size), -1)
        errors.append((difference / size).ravel())
    return np.concatenate(errors)


def _row_sizes(true: np.ndarray, lead: int) -> np.ndarray:
    """The largest entry of each row, 1 where all are zero: ``(rows, 1)``."""
    size = np.abs(true.reshape(int(np.prod(true.shape[:lead])), -1)).max(axis=-1, keepdims=True)
    return np.where(size == 0, 1.0, size)


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _condition(factor: np.ndarray) -> np.ndarray:
    values = np.linalg.svd(factor, compute_uv=False)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values[..., -1] > 0, values[..., 0] / values[..., -1], np.inf)


def _variance_lower_bound(contracted: Contraction) -> np.ndarray:
    factor = contracted.R
    if not contracted.has_bias or factor.shape[-2] < factor.shape[-1]:
        return np.zeros(factor.shape[:-2])
    return factor[..., -1, -1] ** 2 / contracted.width
