"""Derivatives of ``apply ∘ contract_traced`` are those of the function that was folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.fold.checks import GRADIENT64, decisions, difference, layer_norm, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

X = np.random.default_rng(2).normal(size=(6, 4))
P = {"A": (4, 48), "a": (48,), "g": (48,), "b": (48,), "W": (48, 3), "V": (48, 4), "K": (4, 4), "pos": (6, 48)}
LAYERS = {"A": (3, 4, 48), "a": (3, 48), "V": (3, 48, 4)}


def one(p: Any, x: Any) -> Any:
    return (layer_norm(x @ p["A"] + p["a"]) * p["g"] + p["b"]) @ p["W"]


def two(p: Any, x: Any) -> Any:
    x = jnp.tanh((layer_norm(x @ p["A"] + p["a"]) * p["g"]) @ p["V"])
    return one(p, x)


def consumers(p: Any, x: Any) -> Any:
    y = layer_norm(x @ p["A"] + p["a"]) * p["g"] + p["b"]
    return y @ p["W"], jnp.tanh(y @ p["V"])


def residual(p: Any, x: Any) -> Any:
    x = x + layer_norm(jnp.tanh(x @ p["K"]) @ p["A"] + p["a"]) @ p["V"]
    return layer_norm(x) @ p["K"]


def rms_of_sum(p: Any, x: Any) -> Any:
    h = x @ p["A"] + jnp.sin(x) @ p["V"].T + p["pos"]
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-4) @ p["W"]


def norm_of_norm(p: Any, x: Any) -> Any:
    return layer_norm(layer_norm(x @ p["A"] + p["a"]) @ p["V"] @ p["A"]) @ p["W"]


def body(x: Any, layer: Any) -> Any:
    return x + jnp.tanh(layer_norm(jnp.sin(x) @ layer["A"] + layer["a"]) @ layer["V"]), x.sum()


def scan(p: Any, x: Any) -> Any:
    return jax.lax.scan(body, x, p)


def scan_of_remat(p: Any, x: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(body), x, p, reverse=True)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "one": (one, P),
    "two": (two, P),
    "several consumers": (consumers, P),
    "residual": (residual, P),
    "sum of sources": (rms_of_sum, P),
    "norm of a norm": (norm_of_norm, P),
    "remat": (jax.checkpoint(one), P),
    "scan": (scan, LAYERS),
    "scan of remat": (scan_of_remat, LAYERS),
}


def losses(name: str) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """The folded function's loss and the original's, of parameters and inputs, and the parameters."""
    fn, shapes = CASES[name]
    params = weights(**shapes)
    folded = jaxfold.fold(fn, params, X)
    assert "contracted" in decisions(folded)

    def loss(outputs: Any) -> Any:
        leaves = jax.tree.leaves(outputs)
        return sum(jnp.sum(jnp.sin(leaf + 0.3 * index)) for index, leaf in enumerate(leaves, start=1))

    return (
        lambda p, x: loss(folded.apply(folded.contract_traced(p), x)),
        lambda p, x: loss(fn(p, x)),
        params,
    )


def directions(params: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), (params, X))


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    """In every parameter and in the input, also jitted."""
    folded, original, params = losses(name)
    expected = jax.jit(jax.grad(original, (0, 1)))(params, X)
    assert difference(jax.jit(jax.grad(folded, (0, 1)))(params, X), expected) < GRADIENT64
    moved = jax.tree.map(lambda leaf: leaf * (1 + 1e-6), params)  # a control: the comparison sees a millionth
    assert difference(jax.jit(jax.grad(original, (0, 1)))(moved, X), expected) > 1e3 * GRADIENT64


@pytest.mark.parametrize("name", CASES)
def test_jvp(name: str) -> None:
    folded, original, params = losses(name)
    tangents = directions(params, 3)
    run = [jax.jit(lambda p, x, t, f=f: jax.jvp(f, (p, x), t)) for f in (folded, original)]
    assert difference(run[0](params, X, tangents), run[1](params, X, tangents)) < GRADIENT64


@pytest.mark.maths
@pytest.mark.parametrize("name", ["one", "several consumers", "sum of sources", "scan of remat"])
def test_hessian_vector_product(name: str) -> None:
    """Forward over reverse, in parameters and inputs together."""
    folded, original, params = losses(name)
    tangents = directions(params, 4)

    def product(f: Any) -> Any:
        return jax.jit(lambda p, x, t: jax.jvp(lambda p, x: jax.grad(f, (0, 1))(p, x), (p, x), t)[1])

    ours, theirs = product(folded)(params, X, tangents), product(original)(params, X, tangents)
    assert difference(ours, theirs) < 10 * GRADIENT64  # second derivatives are of the size of 1/σ²


@pytest.mark.maths
@pytest.mark.parametrize("name", ["one", "residual"])
def test_reverse_over_reverse(name: str) -> None:
    folded, original, params = losses(name)

    def penalty(f: Any) -> Any:
        return jax.jit(jax.grad(lambda p: jnp.sum(jax.grad(f, 1)(p, jnp.asarray(X)) ** 2)))

    assert difference(penalty(folded)(params), penalty(original)(params)) < 10 * GRADIENT64


def test_per_example() -> None:
    """vmap of grad, over inputs, with the contraction shared."""
    params = weights(**P)
    folded = jaxfold.fold(one, params, X[:1])
    ours = lambda p, x: jnp.sum(jnp.sin(folded.apply(folded.contract_traced(p), x[None])))  # noqa: E731
    theirs = lambda p, x: jnp.sum(jnp.sin(one(p, x[None])))  # noqa: E731
    per_example = [jax.jit(jax.vmap(jax.grad(f), (None, 0)))(params, X) for f in (ours, theirs)]
    assert difference(*per_example) < GRADIENT64


def test_ensemble() -> None:
    """vmap over parameters, through contract_traced."""
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.7, -leaf]), weights(**P))
    folded = jaxfold.fold(one, weights(**P), X)
    run = jax.vmap(lambda p: folded.apply(folded.contract_traced(p), X))
    assert difference(jax.jit(run)(params), jax.vmap(one, (0, None))(params, X)) < 1e-12


def test_stop_gradient() -> None:
    """Where the function stops a derivative it is stopped: here in the scale, and in a parameter."""

    def fn(p: Any, x: Any) -> Any:
        h = x @ p["A"] + jax.lax.stop_gradient(p["a"])
        s = jax.lax.stop_gradient(jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5))
        return (h - h.mean(-1, keepdims=True)) * s @ p["W"]

    params = weights(**P)
    folded = jaxfold.fold(fn, params, X)
    ours = jax.grad(lambda p: jnp.sum(jnp.sin(folded.apply(folded.contract_traced(p), X))))(params)
    theirs = jax.grad(lambda p: jnp.sum(jnp.sin(fn(p, X))))(params)
    assert difference(ours, theirs) < GRADIENT64
    assert not np.asarray(ours["a"]).any()


def test_descent_reaches_the_same_parameters() -> None:
    """Twenty steps of gradient descent."""
    folded, original, params = losses("two")
    trained = []
    for loss in (folded, original):
        step = jax.jit(lambda p, loss=loss: jax.tree.map(lambda a, g: a - 0.01 * g, p, jax.grad(loss)(p, X)))
        p = params
        for _ in range(20):
            p = step(p)
        trained.append(p)
    assert difference(*trained) < 1e-10
