"""Cholesky factors of matrices of any size, from LAPACK's factors of small ones.

JAX's CPU backend calls a LAPACK whose threads go on spinning for milliseconds after every call that woke them, and take
the cores from whatever XLA runs next: a training step with one such call in it was up to twice as slow as without.
Calls on up to :data:`LARGEST` rows wake none. Larger matrices are therefore factored by blocks,

    [S₁₁  S₂₁ᵀ]   [L₁₁    ] [L₁₁ᵀ  L₂₁ᵀ]
    [S₂₁  S₂₂ ] = [L₂₁  I ] [S₂₂ − L₂₁L₂₁ᵀ]   and so on with the lower right.

A triangular solve for L₂₁ would wake the threads again. But the rows of L₂₁ that belong to one block of rows are also
rows of the factor of the principal submatrix that consists of that block and the first: Cholesky does the solve itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = 126  # rows; OpenBLAS starts threads for a float64 factor of 128


def cholesky(matrix: jax.Array) -> jax.Array:
    """Lower triangular L with ``L Lᵀ = matrix``, symmetric and positive definite: ``(..., p, p)`` → ``(..., p, p)``.

    NaN where the matrix isn't positive definite in working precision.
    """
    size = matrix.shape[-1]
    if size <= LARGEST:
        return lax.linalg.cholesky(matrix, symmetrize_input=False)
    count = -(-size // (LARGEST // 2))
    width = -(-size // count)
    padding = [(0, 0)] * (matrix.ndim - 2) + [(0, count * width - size)] * 2
    beyond = jnp.diag(jnp.where(jnp.arange(count * width) < size, 0.0, 1.0).astype(matrix.dtype))
    rest = jnp.pad(matrix, padding) + beyond.reshape((1,) * (matrix.ndim - 2) + beyond.shape)
    columns = []
    while rest.shape[-1] > LARGEST:
        first, below = rest[..., :width, :width], rest[..., width:, :width]
        blocks = below.reshape(*below.shape[:-2], -1, width, width)
        diagonal = jnp.stack([rest[..., i : i + width, i : i + width] for i in range(width, rest.shape[-1], width)], -3)
        upper = jnp.concatenate([jnp.broadcast_to(first[..., None, :, :], blocks.shape), blocks.mT], -1)
        lower = jnp.concatenate([blocks, diagonal], -1)
        pairs = lax.linalg.cholesky(jnp.concatenate([upper, lower], -2), symmetrize_input=False)
        solved = pairs[..., width:, :width].reshape(below.shape)
        columns.append(jnp.concatenate([pairs[..., 0, :width, :width], solved], -2))
        rest = rest[..., width:, width:] - jnp.matmul(solved, solved.mT, precision=lax.Precision.HIGHEST)
    columns.append(lax.linalg.cholesky(rest, symmetrize_input=False))
    above = [[(0, 0)] * (matrix.ndim - 2) + [(count * width - column.shape[-2], 0), (0, 0)] for column in columns]
    factor = jnp.concatenate([jnp.pad(column, pad) for column, pad in zip(columns, above, strict=True)], -1)
    return factor[..., :size, :size]
