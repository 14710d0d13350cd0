"""Rounding to a storage dtype: what is lost is either rounding or an error."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfold import CoefficientError
from jaxfold._algebra._storage import round_to

EXACT = np.zeros(())


def _round(value: Any, dtype: Any, resolution: Any = EXACT) -> np.ndarray:
    return round_to("leaf", np.asarray(value, np.float64), np.dtype(dtype), np.asarray(resolution))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, jnp.bfloat16])
def test_rounds_to_nearest(dtype: Any) -> None:
    values = np.random.default_rng(0).normal(size=(7, 5))
    stored = _round(values, dtype)
    assert stored.dtype == dtype
    assert np.all(np.abs(stored.astype(np.float64) - values) <= float(jnp.finfo(dtype).eps) / 2 * np.abs(values))


@pytest.mark.parametrize(
    ("dtype", "largest"), [(np.float16, 65504.0), (jnp.bfloat16, 3.38953139e38), (np.float32, 3.4028235e38)]
)
def test_overflow(dtype: Any, largest: float) -> None:
    assert _round([largest], dtype)[0] == np.asarray(largest).astype(dtype)
    with pytest.raises(
        CoefficientError, match=r"leaf: got a coefficient of size .*; expected at most .*wider .*dtype='float"
    ):
        _round([1.01 * largest], dtype)


def test_underflow_of_the_whole_is_an_error_of_a_part_is_not() -> None:
    """float16 ends at 6e-8: beside a coefficient of 1, or below what the float64 value is known to, 1e-9 is nothing."""
    with pytest.raises(CoefficientError, match="underflow"):
        _round([[1e-9, 2e-9]], np.float16)
    with pytest.raises(CoefficientError, match="underflow"):
        _round([[1.3e-7, 2.7e-7]], np.float16)  # not to zero, but to one digit
    assert _round([[1.0, 1e-9]], np.float16)[0, 1] == 0
    assert not np.any(_round([[1e-17, -1e-17]], np.float16, resolution=1e-16))


def test_each_member_of_a_stack_counts() -> None:
    """The first member is large enough to hide the second, if the stack were taken as a whole."""
    with pytest.raises(CoefficientError, match="underflow"):
        _round([[1.0, 2.0], [1e-9, 2e-9]], np.float16, resolution=np.zeros(2))


def test_squares_neither_overflow_nor_underflow() -> None:
    assert np.array_equal(_round([[1e-200, 1e300]], np.float64), [[1e-200, 1e300]])
    with pytest.raises(CoefficientError, match="underflow"):
        _round([[1e-200]], np.float32)
