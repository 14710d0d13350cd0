"""Blocks to test with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """The leaves of a block, inputs for it, and the options that say what the block computes."""

    producer: dict[str, np.ndarray]
    norm: dict[str, np.ndarray]
    consumer: dict[str, np.ndarray]
    x: np.ndarray
    options: dict[str, Any]

    @property
    def layers(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        return self.producer, self.norm, self.consumer

    def astype(self, dtype: Any) -> Case:
        """The same with leaves and inputs rounded to ``dtype``."""

        def cast(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {key: leaf.astype(dtype) for key, leaf in tree.items()}

        producer, norm, consumer = (cast(tree) for tree in self.layers)
        return Case(producer, norm, consumer, self.x.astype(dtype), self.options)


def make_case(
    d: int = 5,
    n: int = 16,
    features: int | tuple[int, ...] = 7,
    *,
    seed: int = 0,
    rows: int = 33,
    producer_bias: bool = True,
    scale: bool = True,
    offset: bool = True,
    consumer_bias: bool = True,
    epsilon: float = 1e-3,
    norm_type: str = "layernorm",
    dtype: Any = np.float64,
) -> Case:
    """A well-conditioned block with scales of both signs, none of whose leaves is trivial."""
    rng = np.random.default_rng(seed)
    features = features if isinstance(features, tuple) else (features,)
    producer = {"kernel": rng.normal(size=(d, n)) / np.sqrt(d)}
    if producer_bias:
        producer["bias"] = 0.5 * rng.normal(size=n)
    norm = {}
    if scale:
        norm["scale"] = rng.uniform(0.5, 1.5, size=n) * rng.choice([-1.0, 1.0], size=n)
    if offset:
        norm["bias"] = 0.3 * rng.normal(size=n)
    consumer = {"kernel": rng.normal(size=(n, *features)) / np.sqrt(n)}
    if consumer_bias:
        consumer["bias"] = 0.1 * rng.normal(size=features)
    options = {"epsilon": epsilon, "norm_type": norm_type}
    return Case(producer, norm, consumer, rng.normal(size=(rows, d)), options).astype(dtype)
