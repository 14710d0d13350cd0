"""The part of JAX that is for those who extend it, and that changes with its versions: imported here, nowhere else."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["Primitive", "ad", "batching", "enable_x64", "mlir"]


def enable_x64() -> Any:
    """A context in which functions traced by this thread may use float64, whatever ``jax_enable_x64`` says."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # before JAX 0.8

    return enable_x64()
