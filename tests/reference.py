"""What the tests compare with: nothing here imports jaxfold, factors a matrix, or differentiates automatically."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mpmath
import numpy as np


def two_pass(
    producer: Mapping[str, Any],
    norm: Mapping[str, Any] | None,
    consumer: Mapping[str, Any],
    x: Any,
    *,
    epsilon: float,
    norm_type: str = "layernorm",
    unit_offset: bool = False,
) -> np.ndarray:
    """Dense, norm, Dense as written, in float64 NumPy; the mean is subtracted before anything is squared."""
    wide = {key: np.asarray(leaf).astype(np.float64) for key, leaf in producer.items()}
    gain = {key: np.asarray(leaf).astype(np.float64) for key, leaf in (norm or {}).items()}
    last = {key: np.asarray(leaf).astype(np.float64) for key, leaf in consumer.items()}
    h = np.asarray(x).astype(np.float64) @ wide["kernel"]
    if "bias" in wide:
        h = h + wide["bias"]
    if norm_type == "layernorm":
        h = h - np.mean(h, axis=-1, keepdims=True)
        h = h - np.mean(h, axis=-1, keepdims=True)  # the first mean's own rounding
    y = h / np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + epsilon)
    if "scale" in gain:
        y = y * (gain["scale"] + (1.0 if unit_offset else 0.0))
    if "bias" in gain:
        y = y + gain["bias"]
    out = np.einsum("...n,nm->...m", y, last["kernel"].reshape(h.shape[-1], -1))
    out = out.reshape(*out.shape[:-1], *last["kernel"].shape[1:])
    return out + last["bias"] if "bias" in last else out


def row_errors(truth: np.ndarray, result: Any, features: int = 1) -> np.ndarray:
    """Errors of all entries, each over the largest entry of its row; a row is the last ``features`` axes."""
    rows = truth.reshape(*truth.shape[: truth.ndim - features], -1)
    size = np.abs(rows).max(axis=-1, keepdims=True)
    size = np.where(size == 0, 1.0, size)
    return np.abs(np.asarray(result).astype(np.float64).reshape(rows.shape) - rows) / size


def mp_matrix(array: Any) -> mpmath.matrix:
    """A 2-D array as an mpmath matrix, every entry exactly."""
    return mpmath.matrix([[mpmath.mpf(float(entry)) for entry in row] for row in np.asarray(array).astype(np.float64)])


def mp_centre(rows: mpmath.matrix) -> mpmath.matrix:
    """Every row less its own mean."""
    result = rows.copy()
    for i in range(rows.rows):
        mean = mpmath.fsum(rows[i, :]) / rows.cols
        for j in range(rows.cols):
            result[i, j] = rows[i, j] - mean
    return result


def mp_block(
    producer: Mapping[str, Any],
    norm: Mapping[str, Any],
    consumer: Mapping[str, Any],
    x: np.ndarray,
    *,
    epsilon: float,
    centred: bool = True,
) -> mpmath.matrix:
    """Dense, norm, Dense as written, in the working precision of mpmath; all biases and the scale given."""
    h = mp_matrix(x) * mp_matrix(producer["kernel"])
    bias, scale, shift = (np.asarray(leaf) for leaf in (producer["bias"], norm["scale"], norm["bias"]))
    for i in range(h.rows):
        for j in range(h.cols):
            h[i, j] += mpmath.mpf(float(bias[j]))
    if centred:
        h = mp_centre(h)
    for i in range(h.rows):
        variance = mpmath.fsum(entry**2 for entry in h[i, :]) / h.cols
        s = 1 / mpmath.sqrt(variance + mpmath.mpf(epsilon))
        for j in range(h.cols):
            h[i, j] = h[i, j] * s * mpmath.mpf(float(scale[j])) + mpmath.mpf(float(shift[j]))
    out = h * mp_matrix(consumer["kernel"])
    for i in range(out.rows):
        for j in range(out.cols):
            out[i, j] += mpmath.mpf(float(np.asarray(consumer["bias"])[j]))
    return out


def two_pass_gradients(
    producer: Mapping[str, Any],
    norm: Mapping[str, Any],
    consumer: Mapping[str, Any],
    x: Any,
    cotangents: Any,
    *,
    epsilon: float,
    norm_type: str = "layernorm",
) -> tuple[tuple[dict[str, np.ndarray], ...], np.ndarray]:
    """The gradient of ⟨cotangents, outputs⟩ in the three layers' leaves and in x: the chain rule by hand, in float64.

    For one consumer with features (m,), without ``unit_offset``; x is (rows, d).
    """
    layers = (producer, norm, consumer)
    wide, gain, last = ({key: np.asarray(leaf).astype(np.float64) for key, leaf in layer.items()} for layer in layers)
    x, dy = np.asarray(x).astype(np.float64), np.asarray(cotangents).astype(np.float64)
    h = x @ wide["kernel"] + wide.get("bias", 0.0)
    if norm_type == "layernorm":
        h = h - np.mean(h, axis=-1, keepdims=True)
        h = h - np.mean(h, axis=-1, keepdims=True)
    s = 1 / np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + epsilon)
    normalised = h * s
    scale = gain.get("scale", np.ones(h.shape[-1]))
    output = normalised * scale + gain.get("bias", 0.0)
    dlast = {"kernel": output.T @ dy, "bias": dy.sum(axis=0)}
    doutput = dy @ last["kernel"].T
    dgain = {"scale": (doutput * normalised).sum(axis=0), "bias": doutput.sum(axis=0)}
    dnormalised = doutput * scale
    # d(h s) = s (dh − ĥ ⟨ĥ, dh⟩ / n) with ĥ = h s; its transpose has the same form.
    dh = s * (dnormalised - normalised * np.mean(normalised * dnormalised, axis=-1, keepdims=True))
    if norm_type == "layernorm":
        dh = dh - np.mean(dh, axis=-1, keepdims=True)
    dwide = {"kernel": x.T @ dh, "bias": dh.sum(axis=0)}
    all_leaves = zip((dwide, dgain, dlast), layers, strict=True)
    return tuple({key: leaves[key] for key in layer} for leaves, layer in all_leaves), dh @ wide["kernel"].T
