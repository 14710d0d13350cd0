"""Blocks of Linen layers in every accepted spelling, with leaves none of which is trivial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

D, N = 4, 24

as_flax_needs = functools.partial(jax.numpy_dtype_promotion, "standard")
"""Flax's own norms promote implicitly; what is jaxfold's runs under the strict setting of the session."""

dense = functools.partial(nn.Dense, param_dtype=jnp.float64)
general = functools.partial(nn.DenseGeneral, param_dtype=jnp.float64)
einsum = functools.partial(nn.Einsum, param_dtype=jnp.float64)
layer_norm = functools.partial(nn.LayerNorm, param_dtype=jnp.float64, epsilon=1e-3)
rms_norm = functools.partial(nn.RMSNorm, param_dtype=jnp.float64, epsilon=1e-3)


class Renamed(nn.Dense):
    """A subclass that computes what its base does."""


# Producer, norm, consumers. Functions, since a definition is not to be made before float64 is on.
STRUCTURES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "dense": lambda: (dense(N), layer_norm(), dense(3)),
    "subclass": lambda: (Renamed(N, param_dtype=jnp.float64), layer_norm(), dense(3)),
    "no biases": lambda: (dense(N, use_bias=False), layer_norm(use_bias=False), dense(3, use_bias=False)),
    "bias of the norm alone": lambda: (dense(N, use_bias=False), layer_norm(), dense(3, use_bias=False)),
    "bare norm": lambda: (dense(N), layer_norm(use_bias=False, use_scale=False), dense(3)),
    "rmsnorm": lambda: (dense(N), rms_norm(), dense(3)),
    "bare rmsnorm": lambda: (dense(N), rms_norm(use_scale=False), dense(3)),
    "two-pass variance": lambda: (dense(N), layer_norm(use_fast_variance=False), dense(3)),
    "axes as tuples": lambda: (dense(N), layer_norm(reduction_axes=(-1,), feature_axes=[-1]), dense(3)),
    "dense general": lambda: (general((N,)), layer_norm(), general((2, 3), axis=(-1,))),
    "einsum": lambda: (einsum((D, N), "...d,dn->...n"), layer_norm(), einsum((N, 2, 3), "bn, nhk -> bhk")),
    "einsum without bias": lambda: (einsum((D, N), "bd,dn->bn", use_bias=False), rms_norm(), dense(3)),
    "several": lambda: (dense(N), layer_norm(), {"query": general((2, 3)), "gate": dense(5, use_bias=False)}),
}


def randomise(tree: Any, seed: int = 0) -> Any:
    """The same tree with random leaves of the same shapes and dtypes; scales of both signs, none near zero."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        value = rng.uniform(0.5, 1.5, leaf.shape) * rng.choice([-1.0, 1.0], leaf.shape)
        return jnp.asarray(value / np.sqrt(leaf.shape[-2] if "kernel" in str(path[-1]) else 1), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, tree)


def init(model: Any, *args: Any) -> Any:
    """The params that a model makes, as shapes."""
    with as_flax_needs():
        return jax.eval_shape(lambda: model.init(jax.random.key(0), *args)).get("params", {})


def run(model: Any, params: Any, *args: Any) -> Any:
    """What a Flax model computes."""
    with as_flax_needs():
        return model.apply({"params": params}, *args)


def with_params(structure: tuple[Any, Any, Any], seed: int = 0) -> tuple[Any, Any, Any]:
    """Each layer as a pair (definition, params)."""
    producer, norm, consumers = structure
    x, h = jnp.zeros((2, D)), jnp.zeros((2, N))

    def pair(layer: Any, inputs: Any, salt: int) -> Any:
        params = init(layer, inputs)
        return layer, randomise(params, seed + salt)

    if isinstance(consumers, Mapping):
        last: Any = {name: pair(layer, h, 2 + i) for i, (name, layer) in enumerate(consumers.items())}
    else:
        last = pair(consumers, h, 2)
    return pair(producer, x, 0), pair(norm, h, 1), last


def original(layers: tuple[Any, Any, Any], x: Any) -> Any:
    """What the layers themselves compute."""
    producer, norm, consumers = layers

    y = run(*norm, run(*producer, x))
    if isinstance(consumers, Mapping):
        return {name: run(*layer, y) for name, layer in consumers.items()}
    return run(*consumers, y)


def inputs(rows: int = 11, dtype: Any = np.float64) -> Any:
    return np.random.default_rng(7).normal(size=(rows, D)).astype(dtype)


def error(truth: Any, result: Any) -> float:
    """The largest absolute difference over the largest absolute value, of all outputs."""
    pairs = zip(jax.tree.leaves(truth), jax.tree.leaves(result), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max()) for a, b in pairs)
