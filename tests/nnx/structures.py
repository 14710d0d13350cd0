"""Blocks of NNX layers in every accepted spelling, with variables none of which is trivial."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

D, N = 4, 24

as_flax_needs = functools.partial(jax.numpy_dtype_promotion, "standard")
"""Flax's own norms promote implicitly; what is jaxfold's runs under the strict setting of the session."""


def without_mesh() -> Any:
    """Lets variables with sharding metadata be made where there is no mesh; older versions never ask for one."""
    switch: Any = getattr(nnx, "use_eager_sharding", None)
    return switch(False) if switch else contextlib.nullcontext()


Rngs = nnx.Rngs
OPTIONS: dict[str, Any] = {"param_dtype": jnp.float64, "kernel_init": nnx.initializers.ones}  # drawing takes seconds
List: Any = getattr(nnx, "List", list)


def linear(*sizes: Any, **options: Any) -> nnx.Linear:
    return nnx.Linear(*sizes, **(OPTIONS | {"rngs": Rngs(0)} | options))


def general(*sizes: Any, **options: Any) -> nnx.LinearGeneral:
    return nnx.LinearGeneral(*sizes, **(OPTIONS | {"rngs": Rngs(0)} | options))


def einsum(*sizes: Any, **options: Any) -> nnx.Einsum:
    return nnx.Einsum(*sizes, **(OPTIONS | {"rngs": Rngs(0)} | options))


def layer_norm(**options: Any) -> nnx.LayerNorm:
    return nnx.LayerNorm(N, **({"param_dtype": jnp.float64, "epsilon": 1e-3, "rngs": Rngs(0)} | options))


def rms_norm(**options: Any) -> nnx.RMSNorm:
    return nnx.RMSNorm(N, **({"param_dtype": jnp.float64, "epsilon": 1e-3, "rngs": Rngs(0)} | options))


def attention(**options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        2, N, 6, **(OPTIONS | {"decode": False, "out_features": 5, "rngs": Rngs(0)} | options)
    )


class Renamed(nnx.Linear):
    """A subclass that computes what its base does."""


STRUCTURES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "linear": lambda: (linear(D, N), layer_norm(), linear(N, 3)),
    "subclass": lambda: (Renamed(D, N, **OPTIONS, rngs=Rngs(0)), layer_norm(), linear(N, 3)),
    "no biases": lambda: (linear(D, N, use_bias=False), layer_norm(use_bias=False), linear(N, 3, use_bias=False)),
    "bias of the norm alone": lambda: (linear(D, N, use_bias=False), layer_norm(), linear(N, 3, use_bias=False)),
    "bare norm": lambda: (linear(D, N), layer_norm(use_bias=False, use_scale=False), linear(N, 3)),
    "rmsnorm": lambda: (linear(D, N), rms_norm(), linear(N, 3)),
    "bare rmsnorm": lambda: (linear(D, N), rms_norm(use_scale=False), linear(N, 3)),
    "general": lambda: (general(D, N), layer_norm(), general(N, (2, 3), axis=(-1,))),
    "einsum": lambda: (
        einsum("...d,dn->...n", (D, N), (N,)),
        layer_norm(use_fast_variance=False),
        einsum("bn,nhk->bhk", (N, 2, 3), (2, 3)),
    ),
    "einsum without bias": lambda: (einsum("bd,dn->bn", (D, N)), rms_norm(), linear(N, 3)),
    "several": lambda: (
        linear(D, N),
        layer_norm(),
        {"query": general(N, (2, 3)), "gate": linear(N, 5, use_bias=False)},
    ),
}


def randomise(*modules: Any, seed: int = 0) -> None:
    """Sets every Param to random values of the same shape and dtype; scales of both signs, none near zero."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        value = rng.uniform(0.5, 1.5, leaf.shape) * rng.choice([-1.0, 1.0], leaf.shape)
        return jnp.asarray(value / np.sqrt(leaf.shape[-2] if "kernel" in str(path) else 1), leaf.dtype)

    for module in modules:
        if isinstance(module, Mapping):
            randomise(*module.values(), seed=seed)
        else:
            state = nnx.state(module, nnx.Param)
            nnx.update(module, jax.tree_util.tree_map_with_path(draw, state))


def make(name: str, seed: int = 0) -> tuple[Any, Any, Any]:
    layers = STRUCTURES[name]()
    randomise(*layers, seed=seed)
    return layers


def original(layers: tuple[Any, Any, Any], x: Any) -> Any:
    """What the layers themselves compute."""
    producer, norm, consumers = layers
    with as_flax_needs():
        y = norm(producer(jnp.asarray(x)))
        return {name: layer(y) for name, layer in consumers.items()} if isinstance(consumers, Mapping) else consumers(y)


def inputs(rows: int = 11, dtype: Any = np.float64) -> Any:
    return np.random.default_rng(7).normal(size=(rows, D)).astype(dtype)


def error(truth: Any, result: Any) -> float:
    """The largest absolute difference over the largest absolute value, of all outputs."""
    pairs = zip(jax.tree.leaves(truth), jax.tree.leaves(result), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max()) for a, b in pairs)


def values(module: Any) -> Any:
    """The state of a module as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(module))


def equal(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))
