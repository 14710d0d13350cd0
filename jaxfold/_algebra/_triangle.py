"""Packed storage of the factor's triangle.

R (k, p) is zero below its diagonal. Its last column, the constant's where there is one, is stored as a bias of its own.
What is packed here is the block over x, ``(d, k)`` in Flax layout: entry ``(j, i)`` is ``R[i, j]`` and is zero for
``i > j``. Packing keeps the entries with ``i <= j``, column by column of R.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def triangle_size(features: int, rank: int) -> int:
    """The number of entries of a ``(features, rank)`` kernel on and below its diagonal.

    >>> triangle_size(3, 2)  # rows of 1, 2 and 2 entries
    5
    """
    full = min(features, rank)
    return full * (full + 1) // 2 + (features - full) * rank


def pack_triangle(kernel: Any) -> Any:
    """``(..., d, k)`` → ``(..., triangle_size(d, k))``."""
    row, column = np.tril_indices(kernel.shape[-2], 0, kernel.shape[-1])
    return kernel[..., row, column]


def unpack_triangle(packed: Any, features: int, rank: int) -> Any:
    """The inverse of :func:`pack_triangle`, NumPy to NumPy and JAX to JAX, as one gather from ``packed`` and a zero."""
    row, column = np.tril_indices(features, 0, rank)
    position = np.full((features, rank), row.size)
    position[row, column] = np.arange(row.size)
    xp = np if isinstance(packed, np.ndarray) else jnp
    return xp.concatenate([packed, xp.zeros_like(packed[..., :1])], axis=-1)[..., position]
