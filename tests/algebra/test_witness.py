"""R under tracing: by QR, and on CPU in float32 by a Cholesky factor in float64 that must be as good."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfold._algebra._cholesky import LARGEST, cholesky
from jaxfold._algebra._product import long_product
from jaxfold._algebra._witness import by_cholesky, by_qr, witness
from tests.x64 import set_x64

EPS = float(np.finfo(np.float32).eps)


def _rows(p: int, n: int, rank: int | None = None, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if rank is None:
        return rng.normal(size=(p, n)).astype(np.float32)
    return (rng.normal(size=(p, rank)) @ rng.normal(size=(rank, n))).astype(np.float32)


def _spread(p: int, n: int) -> np.ndarray:
    return _rows(p, n) * np.logspace(-18, 18, p, dtype=np.float32)[:, None]


def _with_zeros(p: int, n: int) -> np.ndarray:
    rows = _rows(p, n)
    rows[[0, -1]] = 0
    return rows


ROWS = {
    "one row": _rows(1, 5),
    "tall": _rows(6, 40),
    "square": _rows(9, 9),
    "wide": _rows(20, 8),
    "rank 2": _rows(17, 64, 2),
    "rank 0": _rows(6, 32, 0),
    "zero rows": _with_zeros(7, 30),
    "lengths from 1e-18 to 1e18": _spread(19, 64),
    "equal rows": np.repeat(_rows(10, 64), 4, axis=0),
    "nearly parallel": 1 + 1e-6 * _rows(12, 64),
    "blocks": _rows(LARGEST + 3, 200),
    "blocks of rank 5": _rows(2 * LARGEST + 9, 300, 5),
}


def _error(rows: np.ndarray, upper: Any) -> float:
    """The largest of ‖R w‖ − ‖w T‖ over directions w, each over the sum of its terms' lengths, in float64.

    Among the directions are the small ones of T itself, where Rᵀ R from float32 would be all wrong.
    """
    wide, upper = rows.astype(np.float64), np.asarray(upper, np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    unit = wide / np.where(lengths == 0, 1, lengths)[:, None]
    small = np.linalg.svd(unit, full_matrices=True)[0].T  # left singular vectors, the small ones last
    directions = np.concatenate([small, np.random.default_rng(1).normal(size=(50, len(rows)))])
    directions = directions / np.where(lengths == 0, 1, lengths)
    terms = np.linalg.norm(directions * lengths, axis=1)
    error = np.linalg.norm(directions @ upper.T, axis=1) - np.linalg.norm(directions @ wide, axis=1)
    return float(np.max(np.abs(error) / np.where(terms == 0, 1, terms)))


@pytest.mark.parametrize("name", ROWS)
def test_norms_are_those_of_the_rows(name: str) -> None:
    """Rounding R to float32 moves ‖R w‖ by up to an ulp of the terms, the shift by √(2p)/4 more: see _witness.py."""
    rows = ROWS[name]
    upper = jax.jit(witness)(rows)
    assert upper.dtype == jnp.float32
    assert upper.shape == (min(rows.shape), len(rows))
    np.testing.assert_array_equal(upper, np.triu(upper))
    limit = (1 + np.sqrt(2 * len(rows)) / 4) * EPS
    # QR, which the wide rows take, errs in proportion to the number of reflections.
    assert _error(rows, upper) < (limit if len(rows) <= rows.shape[1] else len(rows) * EPS)


def test_the_gram_matrix_in_float32_would_not_do() -> None:
    """The control: the same way in float32 misses the same limit by far."""
    rows = ROWS["nearly parallel"]
    gram = rows @ rows.T
    narrow = np.linalg.cholesky(gram + 1e-5 * np.diag(np.diag(gram))).T
    assert _error(rows, narrow) > 100 * (1 + np.sqrt(2 * len(rows)) / 4) * EPS


@pytest.mark.parametrize("name", ["tall", "rank 2", "blocks"])
def test_a_batch_is_the_sum_of_its_members(name: str) -> None:
    rows = np.stack([ROWS[name], 2 * ROWS[name], ROWS[name] - 1])
    together = jax.jit(jax.vmap(witness, in_axes=1))(np.moveaxis(rows, 0, 1))
    np.testing.assert_allclose(together, np.stack([jax.jit(witness)(member) for member in rows]), rtol=1e-5, atol=1e-5)


def test_where_cholesky_fails_qr_steps_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which matrices it fails on depends on the LAPACK, hundreds of exactly parallel rows on some: here, on all."""
    monkeypatch.setattr("jaxfold._algebra._witness.cholesky", lambda matrix: matrix * np.nan)
    rows = _rows(7, 31)  # a shape of its own: others may have been compiled before
    np.testing.assert_array_equal(jax.jit(witness)(rows), jax.jit(by_qr)(rows))


def test_hundreds_of_parallel_rows() -> None:
    rng = np.random.default_rng(0)
    rows = np.outer(rng.integers(1, 2**12, size=600), rng.integers(-(2**11), 2**11, size=601)).astype(np.float32)
    assert _error(rows, jax.jit(witness)(rows)) < len(rows) * EPS


def test_what_is_not_finite_stays_so() -> None:
    rows = ROWS["tall"].copy()
    rows[2, 3] = np.nan
    assert not bool(jnp.isfinite(jax.jit(witness)(rows)).all())


def test_no_derivative_passes_through() -> None:
    gradient = jax.grad(lambda rows: jnp.sum(witness(rows) ** 2))(jnp.asarray(ROWS["tall"]))
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.usefixtures("x64")
def test_float64_rows_take_qr() -> None:
    rows = jnp.asarray(ROWS["blocks"], jnp.float64)
    np.testing.assert_array_equal(witness(rows), jax.jit(by_qr)(rows))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [1, LARGEST, LARGEST + 1, 2 * LARGEST + 1, 401])
def test_cholesky_by_blocks(size: int) -> None:
    """Against NumPy's, which is backward stable: both are within p ulp of the exact factor for a condition near 1."""
    rows = np.random.default_rng(size).normal(size=(2, size, 4 * size))
    gram = rows @ np.swapaxes(rows, 1, 2)
    expected = np.linalg.cholesky(gram)
    result = jax.jit(cholesky)(gram)
    np.testing.assert_allclose(result, expected, rtol=0, atol=size * 1e-15 * np.abs(expected).max())
    gram[1, -1, -1] = -1
    assert np.isnan(jax.jit(cholesky)(gram)[1]).any()


@pytest.mark.parametrize("width", [512, 513, 1024, 1100, 2048])
def test_long_products(width: int) -> None:
    """A running sum of n random terms of size 1 is √k after k of them, each rounded by up to 2⁻²⁴ of it, uniformly.

    The n roundings add up to 2⁻²⁴ √(n/6) of the sum's own size √n: 4.6 of 2⁻²⁴ for pieces of 128.
    """
    rng = np.random.default_rng(width)
    a, b = rng.normal(size=(66, width)).astype(np.float32), rng.normal(size=(width, 256)).astype(np.float32)
    truth = a.astype(np.float64) @ b.astype(np.float64)
    result, tangent = jax.jit(lambda a, b: jax.jvp(long_product, (a, b), (2 * a, b)))(a, b)
    error = np.sqrt(np.mean((result - truth) ** 2)) / np.sqrt(width)
    assert error < 2.0**-24 * (5 if width > 512 else np.sqrt(width / 6))
    np.testing.assert_allclose(tangent, 3 * truth, rtol=0, atol=1e-4 * np.sqrt(width))


@pytest.mark.parametrize("name", ["rank 2", "rank 0", "zero rows", "equal rows", "nearly parallel", "blocks of rank 5"])
def test_the_shift_keeps_every_pivot_positive(name: str) -> None:
    """Without it QR would have to step in, and nothing but time would tell."""
    with set_x64(True):
        assert bool(jnp.isfinite(jax.jit(by_cholesky)(ROWS[name])).all())


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_float64_is_for_the_cpu_alone(platform: str) -> None:
    """Accelerators factor in the rows' own dtype: float64 is slow on many of them and not to be had on others."""
    lowered = jax.export.export(jax.jit(witness), platforms=[platform])(ROWS["tall"]).mlir_module()
    assert ("f64" in lowered) == (platform == "cpu")
    assert ("potrf" in lowered) == (platform == "cpu")
