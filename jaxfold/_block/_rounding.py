"""How large rounding errors are, to first order, for the verdict of a certificate.

Rounding errors are taken as independent of each other. A product of a row v with a column a, whose factors err by one
unit each, then errs by units of ``sqrt(Σ vᵢ² aᵢ²)``; its sum of p terms, one after another, by √p such units. For

    f = s·x̄D + c,   s = 1/sqrt(q/n + ε),   q = ‖z‖²,   z = x̄Rᵀ

this is ``e_D = sqrt(x̄² D²)`` for the numerator and ``e_z = sqrt(x̄² (R²)ᵀ)`` for z. An error of z changes q by at most
2‖e_z‖‖z‖, and s by a factor of ‖e_z‖‖z‖/(q + nε). Together

    e_f = s·e_D + s·|x̄D|·‖e_z‖‖z‖/(q + nε) + |c|

in units of: the storage dtype once, the dtype of the arithmetic √p times, the dtype of the outputs once. The standard
form computes x̄D as z times V, to which the error of z and that of the second product add.

An original that computes the variance as the mean of the squares less the square of the mean, as Flax does by default,
rounds the mean square m: the variance errs by units of m, and s by a factor of half of m/(variance + ε).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._algebra._dtype import compute_dtype
from jaxfold._block._contraction import Contraction

# Of the model above, which neglects that a maximum over columns or a run of equal signs adds up errors.
MARGIN = 4.0


def on_host(contraction: Contraction) -> Contraction:
    """Return the contraction with its leaves as float64 NumPy arrays, wherever they are placed."""
    host = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), contraction.params)
    return dataclasses.replace(contraction, params=host)


def contraction_rounding(
    contraction: Contraction, x: np.ndarray, sizes: dict[str | None, np.ndarray], dtype: Any, storage: Any
) -> float:
    """Return the root mean square error that rounding explains in a contraction of host arrays.

    Args:
        contraction: with leaves in float64.
        x: ``(*lead, ..., d)`` in float64; lead is the axis of a stack.
        sizes: the largest entry of each true row by consumer, ``(*lead, ..., 1)``.
        dtype: of the outputs.
        storage: the coarsest dtype among the coefficients.
    """
    stack = x.shape[:1] if contraction.R.ndim == 3 else (1,)
    rows = x.reshape(*stack, -1, x.shape[-1])
    if contraction.has_bias:
        rows = np.concatenate([rows, np.ones_like(rows[..., :1])], axis=-1)
    factor = contraction.R.reshape(*stack, *contraction.R.shape[-2:]).swapaxes(-1, -2)
    z, squares = rows @ factor, rows**2
    errors_of_z = np.sqrt(squares @ factor**2)
    q = np.sum(z**2, axis=-1, keepdims=True)
    s = 1 / np.sqrt(q / contraction.width + contraction.epsilon)
    of_s = _norm(errors_of_z) * _norm(z) / (q + contraction.width * contraction.epsilon)
    terms = []
    for name, group in contraction.consumers.items():
        numerator = _of(contraction.D, name).reshape(*stack, factor.shape[-2], -1)
        of_numerator = np.sqrt(squares @ numerator**2)
        if contraction.form == "standard":
            kernel = group["kernel"].reshape(*stack, factor.shape[-1], -1) ** 2 * contraction.rank / contraction.width
            of_numerator = of_numerator + np.sqrt(errors_of_z**2 @ kernel) + np.sqrt(z**2 @ kernel)
        offset = np.abs(_of(contraction.c, name)).reshape(*stack, 1, -1)
        error = s * (of_numerator + np.abs(rows @ numerator) * of_s) + offset
        terms.append((error / sizes[name].reshape(*stack, -1, 1)).ravel())
    units = unit_of(storage) + np.sqrt(rows.shape[-1]) * unit_of(compute_dtype(dtype)) + unit_of(dtype)
    return MARGIN * float(units) * _root_mean_square(np.concatenate(terms))


def original_rounding(own: float, means: np.ndarray, dtype: Any, unit: float) -> float:
    """Return the largest root mean square error that rounding explains in an original that the caller gives.

    Args:
        own: the error of the block itself, evaluated in two passes in ``dtype``.
        means: the mean square of the activation over its variance plus epsilon, one number a row.
        dtype: of the block's outputs.
        unit: half a unit in the last place of the given original's outputs, relative.
    """
    arithmetic = unit_of(compute_dtype(dtype))
    if np.max(means) * arithmetic > 0.1:
        return np.inf  # the variance has no digits left, so anything may come of it
    return MARGIN * max(1.0, unit / unit_of(dtype)) * (max(own, unit_of(dtype)) + arithmetic * _root_mean_square(means))


def unit_of(dtype: Any) -> float:
    """Return half a unit in the last place of the dtype, relative."""
    return float(jnp.finfo(dtype).eps) / 2


def _of(value: Any, name: str | None) -> np.ndarray:
    return value if name is None else value[name]


def _norm(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(vectors**2, axis=-1, keepdims=True))


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
