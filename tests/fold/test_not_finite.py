"""NaN and infinity in front of a norm stay NaN behind it, whatever is left out for being constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.fold.checks import FLOAT64, decisions, named, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

N = 64
X = np.random.default_rng(6).normal(size=(7, 6))
ROWS = np.zeros((7, 1))
ROWS[2], ROWS[4], ROWS[5] = np.nan, -np.inf, np.inf
FIXED = np.arange(7)[:, None] < 4
Added = Callable[[Any, Any], Any]

ADDED: dict[str, Added] = {
    "a constant": lambda h, x: h + ROWS,
    "a constant, subtracted": lambda h, x: ROWS - h,
    "NaN by rows": lambda h, x: jnp.where(x[:, :1] > 0, h, jnp.nan),
    "NaN by fixed rows": lambda h, x: jnp.where(FIXED, h, jnp.nan),
    "infinity by rows": lambda h, x: jnp.where(x[:, :1] > 0, h, -jnp.inf),
    "a logarithm": lambda h, x: h + jnp.log(x[:, :1]),
    "a quotient": lambda h, x: h + x[:, :1] / jnp.maximum(x[:, 1:2], 0),
    "a logarithm, repeated": lambda h, x: jnp.broadcast_to(jnp.log(x[:, :1]), h.shape) + h,
    "a number": lambda h, x: h + jnp.nan,
    "an infinite number": lambda h, x: h - jnp.inf,
    "rows behind": lambda h, x: jnp.concatenate([h, jnp.full((2, N), jnp.nan)]),
    "rows put in": lambda h, x: jax.lax.dynamic_update_slice(h, jnp.full((2, N), jnp.nan), (1, 0)),
    "padding": lambda h, x: jnp.pad(h, ((1, 0), (0, 0)), constant_values=jnp.inf),
    "a residual after it": lambda h, x: jnp.where(x[:, :1] > 0, h, jnp.nan) + jnp.tanh(x[:, 1:2] * 3),
}


def params() -> dict[str, jax.Array]:
    return weights(A=(6, N), S=(N, N), a=(N,), W=(N, 5))


def norm(h: Any) -> Any:
    centred = h - h.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)


def stream(added: Added) -> Callable[[Any, Any], Any]:
    return lambda p, x: norm(added(jnp.tanh(x @ p["A"]) @ p["S"] + p["a"], x)) @ p["W"]


def equal(ours: Any, theirs: Any) -> bool:
    """With NaN in the same places."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return (
        bool((np.isnan(ours) == np.isnan(theirs)).all()) and not np.nanmax(np.abs(ours - theirs), initial=0) > FLOAT64
    )


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("name", ADDED)
def test_what_is_not_finite_stays_so_behind_a_centred_norm(name: str) -> None:
    fn = stream(ADDED[name])
    folded, truth = jaxfold.fold(fn, params(), X), fn(params(), X)
    assert np.isnan(truth).any()
    assert decisions(folded) == ["centred"]
    assert equal(folded.apply(folded.contract(params()), X), truth)
    # Compiled, x - x is still NaN where x is.
    assert equal(jax.jit(folded.apply)(folded.contract(params()), X), truth)


@pytest.mark.parametrize("name", ["a logarithm", "NaN by rows", "infinity by rows", "a quotient"])
def test_what_is_not_finite_stays_so_behind_a_contracted_norm(name: str) -> None:
    fn = lambda p, x: norm(ADDED[name](x @ p["A"] + p["a"], x)) @ p["W"]  # noqa: E731
    folded, truth = jaxfold.fold(fn, params(), X), fn(params(), X)
    assert equal(folded.apply(folded.contract(params()), X), truth)


def test_constants_that_are_not_finite_in_an_affine_map() -> None:
    """Computed with NumPy they are an error, by name; with JAX they are what they are."""
    fn = lambda p, x: norm(x @ p["A"] + jnp.nan) @ p["W"]  # noqa: E731
    folded = jaxfold.fold(fn, params(), X)
    assert np.isnan(folded.apply(folded.contract_traced(params()), X)).all()


def test_finite_constants_cost_nothing() -> None:
    """A mask of -1e9 becomes zero beforehand, as it always did; rounding of the one and the other is alike."""

    def masked(number: float) -> list[str]:
        fn = stream(lambda h, x: jnp.where(x[:, :1] > 0, h, number))
        folded = jaxfold.fold(fn, params(), X)
        assert decisions(folded) == ["centred"]
        np.testing.assert_allclose(folded.apply(folded.contract(params()), X), fn(params(), X), atol=1e-5)
        return named(folded.apply, folded.contract(params()), X)

    assert masked(-1e9).count("sub") == 0
    assert masked(-1e9) == masked(0.0)
