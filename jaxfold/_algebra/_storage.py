"""Rounding float64 coefficients to the dtype they are stored in, without losing them on the way."""

from __future__ import annotations

import numpy as np
from jax import numpy as jnp

from jaxfold._errors import CoefficientError


def require_finite(name: str, value: np.ndarray) -> None:
    """Raises :class:`CoefficientError` if any entry of the input leaf ``name`` is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(value.sum()):  # NaN and infinity survive any sum, and most trees hold neither
            return
    finite = np.isfinite(value)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise CoefficientError(
            name,
            f"{int((~finite).sum())} non-finite of {value.size} entries, the first at {where}: {value[where]}",
            "finite values only",
            "Find out where they come from first: whatever is computed from them would not be finite either.",
        )


def round_to(name: str, value: np.ndarray, dtype: np.dtype, resolution: np.ndarray) -> np.ndarray:
    """Rounds the float64 coefficient ``name`` to ``dtype``.

    Args:
        name: the path of the coefficient, for messages.
        value: ``(*lead, ...)``, float64.
        dtype: the storage dtype.
        resolution: ``lead``, the size (Frobenius norm) of the rounding error that ``value`` already carries.

    Raises:
        CoefficientError: if an entry overflows, or if so much underflows that a member of the stack as a whole
            (Frobenius norm) changes by more than rounding to nearest and its own resolution account for.
    """
    limits = jnp.finfo(dtype)
    wider = f"Choose a wider storage dtype: dtype='float{64 if dtype.itemsize == 4 else 32}'."
    size = np.abs(value)
    largest = float(size.max(initial=0.0))
    if not np.isfinite(largest):
        raise CoefficientError(name, "a value beyond the range of float64", "parameters of moderate size", "")
    with np.errstate(over="ignore", under="ignore"):
        stored = value.astype(dtype)
    if not np.isfinite(stored).all():
        raise CoefficientError(
            name, f"a coefficient of size {largest:.3g}", f"at most {float(limits.max):.3g}, the largest {dtype}", wider
        )
    if np.count_nonzero(size < float(limits.tiny)) == value.size - np.count_nonzero(value):
        return stored  # nothing below the normal range but zeros: no underflow
    axes = tuple(range(resolution.ndim, value.ndim))
    # Relative to the largest entry, so that the squares cannot underflow themselves.
    scale = size.max(axis=axes, keepdims=True, initial=0.0)
    scale = np.where(scale == 0, 1.0, scale)
    norm = np.sqrt(np.sum((value / scale) ** 2, axis=axes))
    lost = np.sqrt(np.sum(((stored.astype(np.float64) - value) / scale) ** 2, axis=axes))
    if np.any(lost > float(limits.eps) * norm + resolution / scale.reshape(resolution.shape)):
        raise CoefficientError(
            name,
            f"coefficients of size at most {largest:.3g}, some of which underflow",
            f"sizes well above {float(limits.tiny):.3g}, the smallest normal {dtype}",
            wider,
        )
    return stored
