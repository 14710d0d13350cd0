"""What is a mean: a sum times 1/n as the program's own dtype has it, and no other multiple."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfold._fold._numbers import exactly, written
from tests.fold.checks import check, decisions, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

N = 48
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64]
X = np.random.default_rng(4).normal(size=(7, 6))


def total(h: Any) -> Any:
    return jnp.sum(h, -1, keepdims=True)


def constant(number: float, h: Any) -> Any:
    return np.asarray(number, h.dtype)


def spelled(mean: Callable[[Any], Any], square: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """A norm with such a mean: in two passes, or with ``square``, the mean of the squares, in one."""

    def norm(h: Any) -> Any:
        centred = h - mean(h)
        variance = mean(centred * centred) if square is None else square(h * h) - mean(h) ** 2
        return centred * jax.lax.rsqrt(variance + constant(1e-3, h))

    return norm


MEANS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda h: h.mean(-1, keepdims=True),
    "sum over n": lambda h: total(h) / N,
    "sum times 1/n": lambda h: total(h) * constant(1 / N, h),
    "sum in its own dtype": lambda h: jax.lax.reduce_sum_p.bind(h, axes=(1,), **OWN)[:, None] / N,
    "in two steps": lambda h: total(h) / 6 * constant(1 / 8, h),
    "minus": lambda h: -(total(h) / -N),
}
OWN = {} if jax.__version_info__ < (0, 7) else {"out_sharding": None}


def function(norm: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A norm over a stream: only without its mean is anything gained."""
    return lambda p, x: norm(jnp.tanh(x @ p["A"]) @ p["S"] + p["a"] + constant(0.5, x)) @ p["W"]


def folded(norm: Callable[[Any], Any], dtype: Any) -> list[str]:
    p = {k: v.astype(dtype) for k, v in weights(A=(6, N), S=(N, N), a=(N,), W=(N, 5)).items()}
    # The mean is about as large as the deviation: h is rounded to that, some eight times, and a variance in one pass,
    # of squares twice as large as what is left of them, as often.
    return decisions(check(function(norm), p, X.astype(dtype), tolerance=16 * float(jnp.finfo(dtype).eps)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", MEANS)
def test_every_spelling_of_a_mean(name: str, dtype: Any) -> None:
    assert folded(spelled(MEANS[name]), dtype) == ["centred"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", ["mean", "sum times 1/n"])
def test_every_spelling_of_a_variance(name: str, dtype: Any) -> None:
    assert folded(spelled(MEANS[name], MEANS["mean"]), dtype) == ["centred"]
    assert folded(spelled(MEANS[name], MEANS["sum times 1/n"]), dtype) == ["centred"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_flax(dtype: Any) -> None:
    norm = nn.LayerNorm(use_scale=False, use_bias=False, dtype=dtype)
    assert folded(lambda h: norm.apply({}, h), dtype) == ["centred"]


def some(factor: float) -> Callable[[Any], Any]:
    return lambda h: constant(factor, h) * h.mean(-1, keepdims=True)


NEARLY: list[tuple[str, Callable[[Any], Any], list[Any]]] = [
    ("0.9", some(0.9), DTYPES),
    ("0.99", some(0.99), DTYPES),
    ("1 - 1e-6", some(1 - 1e-6), DTYPES[2:]),
    ("1 - 1e-14", some(1 - 1e-14), DTYPES[3:]),
    ("one over n + 1", lambda h: total(h) / (N + 1), DTYPES),
    ("one over n - 1", lambda h: total(h) / (N - 1), DTYPES),
    ("times 1 over n + 1", lambda h: total(h) * constant(1 / (N + 1), h), DTYPES),
    ("a power of two", lambda h: total(h) / 64, DTYPES),
    ("1/n of another dtype", lambda h: total(h) * jnp.bfloat16(1 / N).astype(h.dtype), DTYPES[1:]),
]


@pytest.mark.parametrize(("name", "mean", "dtypes"), NEARLY, ids=[name for name, *_ in NEARLY])
def test_nearly_the_mean_is_another_function(name: str, mean: Callable[[Any], Any], dtypes: list[Any]) -> None:
    for dtype in dtypes:
        assert folded(spelled(mean), dtype) == ["skipped"]
        # So it is with a variance in one pass.
        assert folded(spelled(mean, MEANS["mean"]), dtype) == ["skipped"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_bounds_are_what_rounds_to_a_constant(dtype: Any) -> None:
    """Against NumPy's rounding, on both sides of powers of two, for subnormals and for negative numbers."""
    rng = np.random.default_rng(0)
    tiny = float(jnp.finfo(dtype).tiny)
    for exact in [1 / N, 1.0, 2.0, 0.5, -1.0, 1 / 3, tiny, tiny / 3, *rng.normal(size=50)]:
        value = float(np.asarray(exact).astype(dtype))
        bounds = written(value, dtype)
        assert bounds.low < value < bounds.high
        assert bounds.may_be(exact)
        for end in (bounds.low, bounds.high):
            inside, outside = value + (end - value) * 0.999, value + (end - value) * 1.001
            if dtype is not jnp.float64:
                assert float(np.asarray(inside).astype(dtype)) == value
                assert float(np.asarray(outside).astype(dtype)) != value
            else:  # half a unit is no number of float64: a whole one is what is left
                assert abs(end - value) <= 2 * np.spacing(abs(value))


def test_bounds_of_products_hold_the_exact_ones() -> None:
    rng = np.random.default_rng(1)
    for a, b in rng.normal(size=(50, 2)):
        x, y = exactly(float(a)), exactly(float(b))
        exact = {
            x.times(y): Fraction(float(a)) * Fraction(float(b)),
            x.plus(y, -1.0): Fraction(float(a)) - Fraction(float(b)),
            x.inverse(): 1 / Fraction(float(a)),
        }
        assert all(Fraction(found.low) <= truth <= Fraction(found.high) for found, truth in exact.items())
    assert written(0.0, np.float32).inverse().may_be(7.0)
