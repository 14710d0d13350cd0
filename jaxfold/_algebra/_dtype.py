"""Promotion of floating dtypes as JAX does it by default, whatever ``jax_numpy_dtype_promotion`` says.

The block's casts are explicit ones: under strict promotion it must neither fail nor compute anything else.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def promote(*operands: Any) -> np.dtype:
    """The dtype that arithmetic on all of these arrays or dtypes has.

    >>> promote(np.dtype("float16"), np.zeros(3, jnp.bfloat16))
    dtype('float32')
    """
    dtypes = [np.dtype(getattr(operand, "dtype", operand)) for operand in operands]
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(lambda a, b: np.dtype(jnp.promote_types(a, b)), dtypes)


def compute_dtype(dtype: Any) -> np.dtype:
    """The dtype that a result of this dtype is computed in: at least float32."""
    return promote(dtype, np.dtype(np.float32))
