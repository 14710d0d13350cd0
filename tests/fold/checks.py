"""What the tests of fold share: comparisons with the function that was folded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfold

# float64, some thirty roundings of 1e-16 and sums of at most 100 terms, relative to the largest entry of an output.
FLOAT64 = 1e-12
GRADIENT64 = 1e-11


def difference(result: Any, truth: Any) -> float:
    """The largest over all leaves of ``|result − truth|`` over the largest entry of the true leaf; inf if it is NaN."""
    assert jax.tree.structure(result) == jax.tree.structure(truth)
    worst = 0.0
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(truth), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if ours.size:
            error = np.abs(ours.astype(np.complex128) - theirs).max() / max(float(np.abs(theirs).max()), 1e-30)
            worst = max(worst, float("inf") if np.isnan(error) else float(error))
    return worst


def check(fn: Any, params: Any, *inputs: Any, tolerance: float = FLOAT64, **options: Any) -> jaxfold.Folded:
    """Folds; both flavours of contraction must agree with the function, operation by operation: nothing to compile."""
    folded = jaxfold.fold(fn, params, *inputs, **options)
    truth = fn(params, *inputs)
    assert difference(folded.apply(folded.contract(params), *inputs), truth) < tolerance
    assert difference(folded.apply(folded.contract_traced(params), *inputs), truth) < tolerance
    return folded


def decisions(folded: jaxfold.Folded) -> list[str]:
    return [row.decision for row in folded.report.rows]


def primitives(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr, those of calls of jitted functions in place of the calls."""
    found = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name in ("jit", "pjit"):
            found += primitives(equation.params["jaxpr"])
        else:
            found.append(equation)
    return found


def named(fn: Any, *arguments: Any) -> list[str]:
    """Names of a function's primitives, in order."""
    return [equation.primitive.name for equation in primitives(jax.make_jaxpr(fn)(*arguments))]


def layer_norm(h: Any, epsilon: float = 1e-5) -> Any:
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + epsilon)


def weights(**shapes: Any) -> dict[str, jax.Array]:
    """Random parameters by name, of about unit gain."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape) / (np.sqrt(shape[-2]) if len(shape) > 1 else 2.0))
        for name, shape in shapes.items()
    }
