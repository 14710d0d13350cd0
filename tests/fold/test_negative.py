"""What cannot be contracted, or does not pay: left alone with its reason, or as far as it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.fold.checks import FLOAT64, check, decisions, layer_norm, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

RNG = np.random.default_rng(5)
X = RNG.normal(size=(7, 4))
SHAPES = {"A": (4, 64), "a": (64,), "g": (64,), "b": (64,), "W": (64, 3), "V": (64, 5), "S": (64, 64), "K": (4, 4)}


def up(p: Any, x: Any) -> Any:
    return x @ p["A"] + p["a"]


def scaled(p: Any, y: Any) -> Any:
    return y * p["g"] + p["b"]


class Alone(NamedTuple):
    """A function whose norm is not contracted, and what the reason must say, or that its input can lose its mean."""

    fn: Callable[..., Any]
    reason: str
    decision: str = "skipped"


class Right(NamedTuple):
    """A function whose norm is contracted although other things read what is around it."""

    fn: Callable[..., Any]
    kept: set[str]


def masked(p: Any, x: Any) -> Any:
    h = up(p, x)
    mask = h > 0
    centred = h - h.mean(-1, keepdims=True, where=mask)
    return centred * jax.lax.rsqrt(h.var(-1, keepdims=True, where=mask) + 1e-5) @ p["W"]


def weighted(p: Any, x: Any) -> Any:
    h = up(p, x)
    return h * jax.lax.rsqrt((h * h * jax.nn.sigmoid(x[:, :1] * h)).sum(-1, keepdims=True) + 1e-5) @ p["W"]


def per_channel(p: Any, x: Any) -> Any:
    """Statistics over the batch: a BatchNorm in training."""
    h = up(p, x)
    return (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5) @ p["W"]


def per_head(p: Any, x: Any) -> Any:
    h = up(p, x).reshape(7, 16, 4)
    return layer_norm(h).reshape(7, 64) @ p["W"]


@jax.custom_vjp
def custom(h: Any) -> Any:
    return layer_norm(h)


custom.defvjp(lambda h: (layer_norm(h), h), lambda h, g: (jax.vjp(layer_norm, h)[1](g)[0],))


def in_while(p: Any, x: Any) -> Any:
    body = lambda carry: (carry[0] + 1, layer_norm(up(p, carry[1])) @ p["A"].T)  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]


ALONE = {
    "post-LN": Alone(lambda p, x: layer_norm(x + jnp.tanh(x @ p["K"])) @ p["A"], "no affine map"),
    "post-LN, wide": Alone(lambda p, x: layer_norm(jax.nn.relu(up(p, x))) @ p["W"], "no affine map"),
    "PReLU between": Alone(
        lambda p, x: (lambda y: jnp.where(y >= 0, y, 0.25 * y))(scaled(p, layer_norm(up(p, x)))) @ p["W"],
        "",
        "centred",
    ),
    "input-dependent scale": Alone(lambda p, x: (layer_norm(up(p, x)) * (1 + x @ p["A"])) @ p["W"], "", "centred"),
    "select on runtime values": Alone(
        lambda p, x: jnp.where(x[:, :1] > 0, layer_norm(up(p, x)), up(p, x)) @ p["W"], ""
    ),
    "select before the norm": Alone(
        lambda p, x: layer_norm(jnp.where(x[:, :1] > 0, up(p, x), 2.0 * up(p, x))) @ p["W"], "", "centred"
    ),
    "product of two runtime arrays": Alone(lambda p, x: layer_norm(up(p, x) * (x @ p["A"])) @ p["W"], "no affine map"),
    "masked": Alone(masked, "mask"),
    "weighted": Alone(weighted, "mask or weights"),
    # The mean over the batch of x A is that of x, times A.
    "statistics of the batch": Alone(per_channel, "", "centred"),
    "per head, narrow": Alone(per_head, "", "centred"),
    "Dense used twice": Alone(lambda p, x: layer_norm(up(p, x)) @ p["W"] + jnp.tanh(up(p, 2 * x)) @ p["W"], "save"),
    "custom_vjp": Alone(lambda p, x: custom(up(p, x)) @ p["W"], "custom_vjp_call"),
    "cond": Alone(
        lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda x: layer_norm(up(p, x)) @ p["W"], lambda x: x[:, :3] * 1.0, x),
        "inside a cond",
    ),
    "while": Alone(in_while, "inside a while"),
    "all returned": Alone(lambda p, x: (layer_norm(up(p, x)) @ p["W"], p, up(p, x)), ""),
    "narrow": Alone(lambda p, x: layer_norm(x @ p["K"]) @ p["A"], "", "centred"),
    "narrow, no mean": Alone(
        lambda p, x: (h := x @ p["K"]) * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) @ p["A"],
        "contracted it would take 272",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_left_alone(name: str) -> None:
    """The function, bit for bit, and why; under strict the same reason is raised."""
    fn, reason, decision = ALONE[name]
    params = weights(**SHAPES)
    folded = check(fn, params, X, tolerance=1e-14 if decision == "skipped" else FLOAT64)
    assert set(decisions(folded)) == {decision}
    if decision != "skipped":
        assert jaxfold.fold(fn, params, X, strict=True).report.rows[0].reductions == (3, 1)
        return
    row = folded.report.rows[0]
    assert row.reason
    assert reason in row.reason
    before, after = folded.report.parameters
    assert before - after <= sum(params[key].size for key in SHAPES)  # unused ones only
    with pytest.raises(jaxfold.NotFoldedError):
        jaxfold.fold(fn, params, X, strict=True)


def partial_variance(p: Any, x: Any) -> Any:
    """Squares over the first half only."""
    h = up(p, x)
    return h * jax.lax.rsqrt((h[:, :32] ** 2).mean(-1, keepdims=True) + 1e-5) @ p["W"]


def two_axes(p: Any, x: Any) -> Any:
    h = up(p, x)
    return (h - h.mean()) * jax.lax.rsqrt(h.var() + 1e-5) @ p["W"]


def other_divisor(p: Any, x: Any) -> Any:
    h = up(p, x)
    centred = h - h.sum(-1, keepdims=True) / 50  # no mean
    return centred * jax.lax.rsqrt((centred**2).sum(-1, keepdims=True) / 70 + 1e-5) @ p["W"]


def mixed(p: Any, x: Any) -> Any:
    """The variance of one Dense scales another."""
    return up(p, x) * jax.lax.rsqrt((x @ p["A"]).var(-1, keepdims=True) + 1e-5) @ p["W"]


def too_much(p: Any, x: Any) -> Any:
    """E[h²] − 3 E[h]² + 4: negative for some h, no norm's sum of squares."""
    h = up(p, x)
    q = (h * h).mean(-1, keepdims=True) - 3 * h.mean(-1, keepdims=True) ** 2 + 4.0
    return h * jax.lax.rsqrt(jnp.maximum(q, 0.1)) @ p["W"]


RIGHT = {
    "residual on the norm's input": Right(
        lambda p, x: jnp.tanh(up(p, x) + layer_norm(up(p, x)) @ p["S"]) @ p["W"], {"W"}
    ),
    "norm returned": Right(lambda p, x: (y := layer_norm(up(p, x)), y @ p["W"]), set()),
    "narrow residual": Right(lambda p, x: x + layer_norm(up(p, x)) @ p["A"].T, set()),
    "activation returned": Right(lambda p, x: (layer_norm(up(p, x)) @ p["W"], up(p, x)), set()),
    "parameter returned": Right(lambda p, x: (layer_norm(up(p, x)) @ p["W"], p["W"] * 1.0, p["W"]), {"W"}),
    "tied": Right(lambda p, x: jnp.tanh(scaled(p, layer_norm(up(p, x))) @ p["A"].T) @ p["A"], {"A"}),
    "narrow factor": Right(lambda p, x: (layer_norm(up(p, x)) * jnp.tanh(x[:, :1])) @ p["W"], set()),
    "half of the features": Right(partial_variance, set()),
    "two axes": Right(two_axes, set()),
    "another divisor": Right(other_divisor, set()),
    "another Dense's variance": Right(mixed, set()),
    "two consumers, one nonlinear": Right(
        lambda p, x: layer_norm(up(p, x)) @ p["W"] + jnp.tanh(layer_norm(up(p, x)) @ p["V"])[:, :3], set()
    ),
    "indefinite": Right(too_much, set()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    """Whatever is decided, the outputs agree, and what is read elsewhere stays."""
    fn, kept = RIGHT[name]
    params = weights(**SHAPES)
    folded = check(fn, params, X)
    assert kept <= set(folded.contract(params)["params"])
    for row in folded.report.rows:
        assert row.reason == "" if row.decision in ("contracted", "centred") else row.reason


@pytest.mark.parametrize("name", ["narrow residual", "narrow factor", "two axes", "parameter returned"])
def test_and_contracted(name: str) -> None:
    """Of the norm over two axes only what reads it: its variance needs the wide array."""
    folded = check(RIGHT[name].fn, weights(**SHAPES), X)
    assert decisions(folded) == ["absorbed" if name == "two axes" else "contracted"]


def test_controls() -> None:
    """The comparison notices each of the confusions above: what a wrong rule would have made of them."""
    p = weights(**SHAPES)
    whole = lambda p, x: up(p, x) * jax.lax.rsqrt((up(p, x) ** 2).mean(-1, keepdims=True) + 1e-5) @ p["W"]  # noqa: E731
    ordinary = lambda p, x: layer_norm(up(p, x)) @ p["W"]  # noqa: E731
    for right, wrong in (
        (partial_variance, whole),
        (masked, ordinary),
        (two_axes, ordinary),
        (other_divisor, ordinary),
    ):
        truth, other = right(p, X), wrong(p, X)
        assert float(jnp.abs(truth - other).max()) > 1e-3 * float(jnp.abs(truth).max())


def test_names_out_of_order() -> None:
    """``Dense(3)(LayerNorm()(Dense(32)(x)))``: Flax numbers the layers as they are constructed, outermost first."""

    class Nested(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            wide = {"param_dtype": jnp.float64}
            return nn.Dense(3, **wide)(nn.LayerNorm(**wide)(nn.Dense(32, **wide)(x)))

    params = Nested().init(jax.random.key(0), X)
    folded = check(Nested().apply, params, X)
    (row,) = folded.report.rows
    assert (row.producer, row.decision, row.width) == ("params/Dense_1", "contracted", 32)
    assert "params/Dense_0" in row.consumers


def test_integers_and_complex_numbers() -> None:
    """Neither is ever contracted; what is beside them still is."""
    params = {**weights(**SHAPES), "n": jnp.arange(4), "z": jnp.asarray(RNG.normal(size=(3, 2)) + 1j)}

    def fn(p: Any, x: Any) -> Any:
        table = layer_norm(up(p, x[:, p["n"]])) @ p["W"]
        return table.astype(np.complex128) @ p["z"], (x > 0).astype(int) @ p["n"], p["n"] + 1

    folded = check(fn, params, X)
    assert decisions(folded) == ["contracted"]
    assert {"n", "z"} <= set(folded.contract(params)["params"])


def test_complex_norm() -> None:
    """Σ h² of a complex h is no sum of squares."""
    params = {key: leaf + 0.3j * leaf[::-1] for key, leaf in weights(**SHAPES).items()}
    fn = lambda p, x: layer_norm(up(p, x)) @ p["W"]  # noqa: E731
    folded = check(fn, params, X.astype(np.complex128), tolerance=1e-14)
    assert decisions(folded) in ([], ["skipped"])


def test_integer_inputs() -> None:
    params = weights(**SHAPES)
    fn = lambda p, x: layer_norm(up(p, x)) @ p["W"]  # noqa: E731
    check(fn, params, RNG.integers(-5, 5, size=(7, 4)))
