"""The factor and its packed triangle."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfold._algebra._factor import centre, factor
from jaxfold._algebra._triangle import pack_triangle, triangle_size, unpack_triangle

SHAPES = [(3, 8), (5, 5), (9, 4), (1, 6), (4, 1)]


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("shape", SHAPES)
def test_factor(shape: tuple[int, int], lead: tuple[int, ...]) -> None:
    """RᵀR = T Tᵀ, Tᵀ = U R with orthonormal columns, R trapezoidal with a diagonal that is not negative."""
    rows = np.random.default_rng(0).normal(size=(*lead, *shape))
    alone = factor(rows).upper
    upper, basis = factor(rows, with_basis=True)
    assert basis is not None
    assert upper.shape == (*lead, min(shape), shape[0])
    # A few hundred operations on numbers of size 1 in float64.
    np.testing.assert_allclose(alone, upper, atol=1e-13)
    np.testing.assert_allclose(np.swapaxes(upper, -1, -2) @ upper, rows @ np.swapaxes(rows, -1, -2), atol=1e-13)
    np.testing.assert_allclose(basis @ upper, np.swapaxes(rows, -1, -2), atol=1e-13)
    np.testing.assert_allclose(np.swapaxes(basis, -1, -2) @ basis - np.eye(min(shape)), 0, atol=1e-13)
    assert not np.any(np.tril(upper, -1))
    assert not np.any(np.signbit(np.tril(upper, -1)))
    assert np.all(np.diagonal(upper, axis1=-2, axis2=-1) >= 0)


def test_centre() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 5, 33))
    before = rows.copy()
    np.testing.assert_allclose(centre(rows), rows - rows.mean(axis=-1, keepdims=True), atol=1e-15)
    assert np.array_equal(rows, before)
    assert not np.any(centre(np.full((2, 33), 0.1)))


@pytest.mark.parametrize("shape", [(3, 4), (4, 4), (9, 4), (1, 1), (1, 2), (5, 1)])
def test_triangle(shape: tuple[int, int]) -> None:
    kernel = np.tril(np.random.default_rng(0).normal(size=(2, *shape)))  # Rᵀ: (d, k)
    packed = pack_triangle(kernel)
    assert packed.shape == (2, triangle_size(*shape)) == (2, np.count_nonzero(kernel[0]))
    assert np.array_equal(unpack_triangle(packed, *shape), kernel)
    on_device = unpack_triangle(jnp.asarray(packed[0], jnp.float32), *shape)
    assert np.array_equal(on_device, kernel[0].astype(np.float32))
