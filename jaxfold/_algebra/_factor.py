"""The factor R whose norm is the norm of the centred activation, computed once on the host in float64.

Write the producer in homogeneous coordinates, ``h = x̄ [A; a]`` with ``x̄ = [x, 1]`` (``x̄ = x`` without a bias).
LayerNorm sees only ``P h``, the deviation from the mean over the n features, and P is linear, so it moves into the
parameters:

    P h = x̄ T,    T = [A; a] P,    shape (p, n),  p = d + 1  (or d)

With the reduced QR of the transpose, ``Tᵀ = U R``, the n wide columns of T disappear from the norm, for U has
orthonormal columns:

    ‖P h‖ = ‖Tᵀ x̄ᵀ‖ = ‖U R x̄ᵀ‖ = ‖R x̄ᵀ‖,    R of shape (k, p),  k = min(n, p)

Every row of R is kept, whatever the rank of T, so nothing is approximated and there is no threshold to choose. The Gram
matrix T Tᵀ would give the same quadratic form at the square of the condition number, and is never formed.

Derivation: docs/maths.md, The theorem.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Factor(NamedTuple):
    """``Tᵀ = basis @ upper``: orthonormal columns ``(..., n, k)`` and an upper trapezoid ``(..., k, p)``."""

    upper: np.ndarray
    basis: np.ndarray | None


def centre(rows: np.ndarray) -> np.ndarray:
    """Subtracts from every row of ``(..., n)`` its mean over the n features.

    Twice: the rounding error of the first mean is a common offset, in proportion to the mean; a second subtraction, of
    values that are small by then, takes it out. A row of equal entries becomes zero exactly.
    """
    centred = rows - rows.mean(axis=-1, keepdims=True)
    centred -= centred.mean(axis=-1, keepdims=True)
    centred[np.all(rows == rows[..., :1], axis=-1)] = 0.0
    return centred


def factor(rows: np.ndarray, *, with_basis: bool = False) -> Factor:
    """Factors ``rows`` (..., p, n) as in the module's docstring; the basis costs as much again, so only on request.

    QR leaves the sign of every row of R open. They are chosen so that the diagonal is never negative, which makes R
    the same on every LAPACK whenever T has full rank.
    """
    columns = np.swapaxes(rows, -1, -2)
    if with_basis:
        basis, upper = np.linalg.qr(columns, mode="reduced")
    else:
        basis, upper = None, np.asarray(np.linalg.qr(columns, mode="r"))
    signs = np.where(np.diagonal(upper, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    upper = upper * signs[..., :, None] + 0.0  # the zeros below the diagonal stay +0
    return Factor(upper, None if basis is None else basis * signs[..., None, :])
