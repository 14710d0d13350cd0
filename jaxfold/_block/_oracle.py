"""The original block and its input gradient in float64 NumPy, layer by layer and in two passes.

This is the yardstick of :func:`jaxfold.verify`, so it shares nothing with the contraction, nor with JAX: no QR, no
folded coefficient, no automatic differentiation. Flax's own LayerNorm cannot serve as one: its default
variance, the mean of the squares less the square of the mean, loses all its digits in float32 when the mean is large.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxfold._block._block import Block
from jaxfold._block._leaves import to_host


def oracle(block: Block, x: np.ndarray) -> dict[str | None, np.ndarray]:
    """The outputs by consumer: ``(..., d)`` → ``(..., *features)``; with a leading axis over a stack on both."""
    return _map_stack(block, lambda layers, x: _forward(block, layers, x)[0], x)


def mean_squares(block: Block, x: np.ndarray) -> np.ndarray:
    """Return for each row the mean square of the activation, over what the norm divides by, squared."""

    def ratio(layers: Any, x: np.ndarray) -> np.ndarray:
        _, _, s = _forward(block, layers, x)
        h = x @ layers["producer"]["kernel"] + layers["producer"].get("bias", 0.0)
        return np.mean(h * h, axis=-1, keepdims=True) * s * s

    return _map_stack(block, ratio, x)


def oracle_gradient(block: Block, x: np.ndarray, cotangents: dict[str | None, np.ndarray]) -> np.ndarray:
    """The gradient in ``x`` of the sum over all outputs of output times cotangent.

    With ŷ = s·P h the normalised activation and g the cotangent of ŷ, the cotangent of h is
    ``s (g − ŷ · mean(g ŷ))``, less its own mean for LayerNorm, since P is symmetric.
    """

    def gradient(layers: Any, x: np.ndarray, cotangents: Any) -> np.ndarray:
        _, normalised, s = _forward(block, layers, x)
        g = np.zeros_like(normalised)
        for name, cotangent in cotangents.items():
            kernel = layers["consumers"][name]["kernel"]
            g += cotangent.reshape(*x.shape[:-1], -1) @ kernel.reshape(kernel.shape[0], -1).T
        g = g * _scale(block, layers)
        g = s * (g - normalised * np.mean(g * normalised, axis=-1, keepdims=True))
        if block.norm_type == "layernorm":
            g = g - g.mean(axis=-1, keepdims=True)
        return g @ layers["producer"]["kernel"].T

    return _map_stack(block, gradient, x, cotangents)


def _forward(block: Block, layers: Any, x: np.ndarray) -> tuple[dict[str | None, np.ndarray], np.ndarray, np.ndarray]:
    h = x @ layers["producer"]["kernel"] + layers["producer"].get("bias", 0.0)
    if block.norm_type == "layernorm":
        h = h - h.mean(axis=-1, keepdims=True)
        h = h - h.mean(axis=-1, keepdims=True)
    s = 1.0 / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + block.epsilon)
    normalised = h * s
    y = normalised * _scale(block, layers) + layers["norm"].get("bias", 0.0)
    outputs = {
        name: np.tensordot(y, group["kernel"], 1) + group.get("bias", 0.0)
        for name, group in layers["consumers"].items()
    }
    return outputs, normalised, s


def _scale(block: Block, layers: Any) -> Any:
    scale = layers["norm"].get("scale")
    if scale is None:
        return 1.0
    return 1.0 + scale if block.unit_offset else scale


def _map_stack(block: Block, function: Any, *arrays: Any) -> Any:
    """``function(layers, *arrays)`` in float64, member by member of a stack."""
    host = {
        "producer": {k: to_host(f"producer[{k!r}]", v) for k, v in block.layers.producer.items()},
        "norm": {k: to_host(f"norm[{k!r}]", v) for k, v in block.layers.norm.items()},
        "consumers": {
            name: {k: to_host(f"consumers[{name!r}][{k!r}]", v) for k, v in group.items()}
            for name, group in block.layers.consumers.items()
        },
    }
    if block.shape.stack is None:
        return function(host, *arrays)

    def member(tree: Any, index: int) -> Any:
        return {k: member(v, index) for k, v in tree.items()} if isinstance(tree, dict) else tree[index]

    results = [function(member(host, i), *(member(a, i) for a in arrays)) for i in range(block.shape.stack)]
    if isinstance(results[0], dict):
        return {name: np.stack([result[name] for result in results]) for name in results[0]}
    return np.stack(results)
