"""Measuring a folded function, and the original beside it, against the function in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._block._verdict import EQUAL, OTHER, verdict
from jaxfold._block._verify import Errors
from jaxfold._extend import enable_x64
from jaxfold._fold._wide import Wide, is_ordinary, widened

if TYPE_CHECKING:
    from jaxfold._fold._trace import Trace


@dataclasses.dataclass(frozen=True)
class FoldCertificate:
    """What :meth:`Folded.verify` measured; prints as a short table.

    The error of an entry is its absolute error over the largest absolute value of its array.

    Attributes:
        outputs: errors of the outputs; "contracted" stands for the folded function.
        gradients: errors of the gradients in the floating inputs, for a fixed random cotangent; None without these.
        parts: errors of the outputs of folds that only ``"contract"``, ``"centre"`` or ``"absorb"``, where this changes
            anything.
        dtype: the coarsest dtype of the outputs.
        own_dtype: operations that could not be evaluated in float64: the yardstick has their own rounding.
        verdict: what the typical errors of outputs and gradients say, the worse of the two: as that of a
            :class:`Certificate`.

    Example:
        >>> import jaxfold
        >>> errors = jaxfold.Errors(2e-7, 5e-8, contracted_max=1e-7, contracted_typical=2e-8, unit=6e-8)
        >>> certificate = jaxfold.FoldCertificate(errors, None, {}, dtype="float32", verdict="equal to rounding")
        >>> str(certificate).splitlines()[-1]
        'equal to rounding'
    """

    outputs: Errors
    gradients: Errors | None
    parts: dict[str, Errors]
    dtype: str
    own_dtype: tuple[str, ...] = ()
    verdict: str = ""

    def __str__(self) -> str:
        from jaxfold._report import fold_certificate_table, render

        return render(fold_certificate_table(self))


def certify(trace: Trace, params: Any, inputs: tuple[Any, ...], folded: Callable[..., Any], parts: Any) -> Any:
    """Return the certificate of a function folded at these inputs; ``parts`` are folds with one kind of change."""
    original = _Run(lambda *given: trace.function(params, *given), inputs)
    truth, left = _truth(trace, params, inputs, original)
    after = _Run(folded, inputs)
    outputs = _errors(truth[0], original.outputs, after.outputs)
    gradients = _errors(truth[1], original.gradients, after.gradients) if original.gradients else None
    each = {
        name: _errors(truth[0], original.outputs, _Run(function, inputs, gradients=False).outputs)
        for name, function in parts.items()
    }
    return FoldCertificate(
        outputs, gradients, each, max((str(out.dtype) for out in original.outputs), key=_eps), left,
        _worst([_verdict(errors) for errors in (outputs, gradients) if errors is not None]),
    )  # fmt: skip


class _Run:
    """Outputs of a function, and gradients in its inputs: of those that are ordinary floats."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], gradients: bool = True) -> None:
        leaves, structure = jax.tree.flatten(inputs)
        self.places = [i for i, leaf in enumerate(leaves) if is_ordinary(jnp.result_type(leaf))]

        def floats(*given: Any) -> list[Any]:
            all_of_them = list(leaves)
            for place, leaf in zip(self.places, given, strict=True):
                all_of_them[place] = leaf
            return _floats(jax.tree.leaves(function(*structure.unflatten(all_of_them))))

        given = [jnp.asarray(leaves[place]) for place in self.places]
        self.gradients: list[Any] = []
        if not (gradients and given):
            self.outputs = floats(*given)
            return
        self.outputs, pullback = jax.vjp(floats, *given)
        self.cotangents = _cotangents(self.outputs)
        self.gradients = list(pullback(self.cotangents))


def _cotangents(outputs: list[Any]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(out.shape), out.dtype) for out in outputs]


def _floats(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if is_ordinary(jnp.result_type(leaf))]


def _truth(
    trace: Trace, params: Any, inputs: tuple[Any, ...], run: _Run
) -> tuple[tuple[list[np.ndarray], list[np.ndarray]], tuple[str, ...]]:
    """Outputs and gradients in float64, and the operations that were not."""
    wide = Wide()
    given, leaves = [*jax.tree.leaves(params), *jax.tree.leaves(inputs)], jax.tree.leaves(inputs)
    offset = len(given) - len(leaves)
    is_float = [is_ordinary(aval.dtype) for aval in trace.closed.out_avals]
    with enable_x64():
        arrays = [widened(leaf) for leaf in given]

        def floats(*own: Any) -> list[Any]:
            everything = list(arrays)
            for place, leaf in zip(run.places, own, strict=True):
                everything[offset + place] = leaf
            outputs = wide.evaluate(trace.closed, everything)
            return [out for out, yes in zip(outputs, is_float, strict=True) if yes]

        own = [arrays[offset + place] for place in run.places]
        if not run.gradients:
            outputs, gradients = floats(*own), []
        else:
            outputs, pullback = jax.vjp(floats, *own)
            gradients = pullback([widened(cotangent) for cotangent in run.cotangents])
        return ([np.asarray(out) for out in outputs], [np.asarray(g) for g in gradients]), tuple(wide.left)


def _errors(truth: list[np.ndarray], original: list[Any], folded: list[Any]) -> Errors:
    before, after = _relative(truth, original), _relative(truth, folded)
    unit = max((_eps(str(value.dtype)) for value in folded), default=0.0) / 2
    return Errors(*_summary(before), *_summary(after), unit)


def _relative(truth: list[np.ndarray], found: list[Any]) -> np.ndarray:
    errors = [np.zeros(0)]
    for true, value in zip(truth, found, strict=True):
        size = np.abs(true).max(initial=0.0) or 1.0
        errors.append(np.abs(np.asarray(value).astype(np.float64) - true).ravel() / size)
    return np.concatenate(errors)


def _summary(errors: np.ndarray) -> tuple[float, float]:
    return float(errors.max(initial=0.0)), float(np.sqrt(np.mean(errors**2))) if errors.size else 0.0


def _eps(dtype: str) -> float:
    return float(jnp.finfo(dtype).eps)


def _verdict(errors: Errors) -> str:
    return verdict(errors.original_typical, errors.contracted_typical, errors.unit)


def _worst(found: list[str]) -> str:
    return max(found, key=lambda said: (said == OTHER, said != EQUAL))
