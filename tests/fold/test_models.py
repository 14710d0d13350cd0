"""Trained weights, and arrangements of whole networks that the other files do not have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._demo import EPSILON, HEADS, load_heads
from tests.fold.checks import check, decisions, difference, layer_norm, primitives, weights
from tests.reference import row_errors, two_pass

# As in tests/fold/test_spellings.py.
FLOAT64 = 1e-12


def head(params: Any, x: Any) -> Any:
    """Linear, LayerNorm, Linear, as the trained heads of the demo are."""
    h = x @ params["producer"]["kernel"] + params["producer"].get("bias", 0.0)
    centred = h - h.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
    y = y * params["norm"]["scale"] + params["norm"]["bias"]
    return y @ params["consumer"]["kernel"] + params["consumer"].get("bias", 0.0)


@pytest.mark.usefixtures("x64", "usual")
@pytest.mark.parametrize("name", HEADS)
def test_trained_heads(name: str) -> None:
    """One of the four is worth contracting; of the other three, the norms lose mean, scale and bias."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), load_heads()[name]._asdict())
    x = np.random.default_rng(0).normal(size=(40, params["producer"]["kernel"].shape[0]))
    folded = jaxfold.fold(head, params, x)
    (row,) = folded.report.rows
    outputs = folded.apply(folded.contract(params), x)
    truth = two_pass(params["producer"], params["norm"], params["consumer"], x, epsilon=EPSILON)
    assert row_errors(truth, outputs).max() < FLOAT64
    assert row.decision == ("contracted" if name == "y_edges" else "centred")
    assert row.weightless
    if name == "y_edges":
        assert folded.report.parameters[1] < 0.2 * folded.report.parameters[0]
    else:
        before, after = folded.report.parameters
        assert after == before - 2 * params["norm"]["scale"].size


@pytest.mark.usefixtures("x64", "usual")
def test_norm_linear_norm() -> None:
    """A chain: both wide arrays are gone, and with them both norms, each epsilon included."""
    x = np.random.default_rng(1).normal(size=(9, 4))

    def fn(p: Any, x: Any) -> Any:
        y = layer_norm(x @ p["A"] + p["a"]) @ p["B"]
        return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 0.3) @ p["W"]

    params = weights(A=(4, 48), a=(48,), B=(48, 40), W=(40, 3))
    folded = check(fn, params, x)
    assert decisions(folded) == ["contracted", "contracted"]
    jaxpr = jax.make_jaxpr(folded.apply)(folded.contract(params), x)
    assert max(np.prod(v.aval.shape) for e in jaxpr.jaxpr.eqns for v in e.outvars) < 9 * 40
    # The control: the scale of x matters by the epsilons alone.
    wrong = jaxfold.fold(lambda p, x: fn(p, 1.01 * x), params, x)
    assert difference(wrong.apply(wrong.contract(params), x), fn(params, x)) > 1e-3


@pytest.mark.usefixtures("x64", "usual")
def test_batch_norm_in_inference_mode() -> None:
    """An affine map between two affine maps needs no denominator: the three are one product."""
    x = np.random.default_rng(2).normal(size=(9, 4))
    params = weights(A=(4, 48), a=(48,), mean=(48,), var=(48,), g=(48,), b=(48,), W=(48, 5))
    params["var"] = jnp.square(params["var"]) + 0.1

    def fn(p: Any, x: Any) -> Any:
        h = x @ p["A"] + p["a"]
        return ((h - p["mean"]) * jax.lax.rsqrt(p["var"] + 1e-5) * p["g"] + p["b"]) @ p["W"]

    folded = check(fn, params, x)
    assert folded.report.rows == ()  # a constant denominator is no norm
    assert folded.report.parameters[1] == 4 * 5 + 5
    assert len(primitives(jax.make_jaxpr(folded.apply)(folded.contract(params), x))) == 1


@pytest.mark.usefixtures("x64", "usual")
def test_tokens_of_one_number() -> None:
    """Each token is a number times its own vector, as in FT-Transformer: one factor and one table a token."""
    x = np.random.default_rng(3).normal(size=(9, 6))
    params = weights(E=(6, 64), e=(6, 64), W=(64, 3))
    folded = check(lambda p, x: layer_norm(x[..., None] * p["E"] + p["e"]) @ p["W"], params, x)
    assert decisions(folded) == ["contracted"]
    # Of each token: R (2, 2), D (2, 3).
    assert folded.report.parameters == (2 * 6 * 64 + 64 * 3, 6 * (4 + 6))
