"""Inputs of other shapes: the first trace's coefficients serve if they mean the same, and are refused otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._fold._fingerprint import canonical
from tests.fold.checks import FLOAT64, check, decisions, difference, layer_norm, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

N = 48
RNG = np.random.default_rng(4)
X = RNG.normal(size=(4, 4))
SHAPES = {"A": (4, N), "a": (N,), "W": (N, N), "g": (N,), "V": (N, 3), "C": (N, 3), "t": (1, 1, N), "k": (4,)}
SHAPES |= {"B": (4, 49), "r": (7,), "R": (7, 3), "O": (49, 3)}
SHAPES |= {"L": (3, 4, N), "M": (3, N, 4), "s": (3, N, N)}
LARGE = RNG.normal(size=(N, 120))  # more entries than a constant has that is looked at


@pytest.fixture
def params(x64: None) -> dict[str, Any]:
    return weights(**SHAPES)


def norm(p: Any, x: Any) -> Any:
    return layer_norm(x @ p["A"] + p["a"])


def square(p: Any, x: Any) -> Any:
    """The output of a norm along two axes of features of one size."""
    return layer_norm(x @ p["B"]).reshape(*x.shape[:-1], 7, 7)


def flat(h: Any) -> Any:
    return h.reshape(*h.shape[:-2], 49)


def quantised(levels: float) -> Callable[[Any], Any]:
    """A straight-through quantiser, made anew at each call."""

    @jax.custom_vjp
    def quantise(w: Any) -> Any:
        return jnp.round(w * levels) / levels

    quantise.defvjp(lambda w: (quantise(w), None), lambda _, cotangent: (cotangent,))
    return quantise


def layers(p: Any, x: Any, order: Any) -> Any:
    """A scan over layers, the kernels of which come in some order."""
    step = lambda c, layer: (c + jnp.tanh(layer_norm(c @ layer[0]) @ layer[1]), None)  # noqa: E731
    return jax.lax.scan(step, x, (p["L"], p["M"][order]))[0]


def shared(p: Any, x: Any, kernel: Any) -> Any:
    """A scan whose layers share their parameters."""
    step = lambda c, _: (c + jnp.tanh(layer_norm(c @ kernel) @ p["M"][0]), None)  # noqa: E731
    return jax.lax.scan(step, x, None, length=2)[0]


# Functions whose parameters meet in one way up to a batch of 4, and in another above. Sizes and names are the same.
OTHERWISE: dict[str, Callable[[Any, Any, bool], Any]] = {
    "a scale over other axes": lambda p, x, big: norm(p, x) @ (p["W"] * p["g"].reshape((N, 1) if big else (1, N))),
    "a sum over other axes": lambda p, x, big: norm(p, x) @ (p["W"] * p["W"].sum(int(big))),
    "a mean over other axes": lambda p, x, big: norm(p, x) @ (p["W"] - p["W"].mean(int(big), keepdims=True)),
    "a transposed square": lambda p, x, big: norm(p, x) @ (p["W"].T if big else p["W"]),
    "other letters": lambda p, x, big: jnp.einsum(
        "bi,ij,ij->bj" if big else "bi,ij,ji->bj", norm(p, x), p["W"], p["W"]
    ),
    "another product": lambda p, x, big: norm(p, x) @ jnp.einsum("ij,jk->ik" if big else "ij,kj->ik", p["W"], p["W"]),
    "a diagonal": lambda p, x, big: norm(p, x) @ (p["s"][0] if big else p["s"][1]),
    "a reversal": lambda p, x, big: norm(p, x) @ (jnp.flip(p["W"], 1) if big else jnp.flip(p["W"], 0)),
    "other random numbers": lambda p, x, big: norm(p, x) @ (p["V"] * jax.random.normal(jax.random.key(big), (N, 3))),
    "a cast": lambda p, x, big: norm(p, x) @ p["V"].astype(np.float32 if big else jnp.bfloat16).astype(np.float64),
    "a sort": lambda p, x, big: norm(p, x) @ jnp.sort(p["W"], axis=int(big)),
    "another result": lambda p, x, big: norm(p, x) @ jnp.linalg.qr(p["W"])[int(big)],
    "features scaled along another axis": lambda p, x, big: (
        flat(square(p, x) * (p["r"][:, None] if big else p["r"][None])) @ p["O"]
    ),
    "features summed along another axis": lambda p, x, big: square(p, x).sum(-2 if big else -1) @ p["R"],
    "features multiplied along another axis": lambda p, x, big: jnp.einsum(
        "bij,ik->bjk" if big else "bij,jk->bik", square(p, x), p["R"]
    ),
    "features in another order": lambda p, x, big: (
        flat(square(p, x).swapaxes(-1, -2) if big else square(p, x)) @ p["O"]
    ),
    "other features": lambda p, x, big: (
        norm(p, x)[:, : N // 2] @ p["V"][: N // 2] if big else (norm(p, x)[:, N // 2 :] @ p["V"][: N // 2])
    ),
    "features joined otherwise": lambda p, x, big: (
        lambda a, b: jnp.concatenate([a, b] if big else [b, a], -1) @ p["V"]
    )(norm(p, x)[:, : N // 3], norm(p, x)[:, N // 3 :]),
    "a roll": lambda p, x, big: norm(p, x) @ jnp.roll(p["W"], 1, axis=int(big)),
    "a cumulative sum": lambda p, x, big: norm(p, x) @ jnp.cumsum(p["W"], axis=int(big)),
    "a gather": lambda p, x, big: norm(p, x) @ p["W"][:, jnp.arange(N) if big else jnp.arange(N)[::-1]],
    "a join": lambda p, x, big: norm(p, x) @ jnp.concatenate([p["V"], p["C"]][:: -1 if big else 1], 1),
    "another constant": lambda p, x, big: norm(p, x) @ (p["V"] * (2.0 if big else 3.0)),
    "another array": lambda p, x, big: norm(p, x) @ (p["W"] @ (LARGE if big else LARGE[::-1].copy())[:, :5]),
    "another nonlinearity": lambda p, x, big: norm(p, x) @ (jnp.tanh(p["V"]) if big else jnp.sin(p["V"])),
    "another quantiser": lambda p, x, big: norm(p, x) @ quantised(8.0 if big else 4.0)(p["V"]),
    "a reshape of other axes": lambda p, x, big: (
        norm(p, x) @ (p["W"].reshape(6, 8, N) if big else p["W"].reshape(8, 6, N).transpose(1, 0, 2)).reshape(N, N)
    ),
    "a tile": lambda p, x, big: norm(p, x) @ (jnp.tile(p["g"], (N, 1)) if big else jnp.tile(p["g"], (N, 1)).T),
    "a repeat": lambda p, x, big: (
        norm(p, x) @ (p["V"] * (jnp.tile(p["g"][:24], 2) if big else jnp.repeat(p["g"][:24], 2))[:, None])
    ),
    "layers in another order": lambda p, x, big: layers(p, x, np.array([0, 1, 2] if big else [2, 1, 0])),
    "another shared kernel": lambda p, x, big: shared(p, x, p["L"][0] if big else p["L"][1]),
    "a square kernel of a shared layer": lambda p, x, big: shared(
        p, x, p["A"] * (p["k"][:, None] if big else p["k"][None] @ p["A"])
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_coefficients_are_refused(name: str, params: Any) -> None:
    """Each is contracted at the first batch, right at another one of its kind, and refused at one of the other."""
    made = OTHERWISE[name]
    fn = lambda p, x: made(p, x, len(x) > 4)  # noqa: E731
    folded = jaxfold.fold(fn, params, X)
    assert "contracted" in decisions(folded)
    contracted = folded.contract(params)
    assert difference(folded.apply(contracted, X[:3]), fn(params, X[:3])) < FLOAT64
    large = RNG.normal(size=(6, 4))
    assert difference(made(params, large, False), fn(params, large)) > 1e-3  # the control: that would be wrong
    with pytest.raises(jaxfold.ShapeError, match=r"The coefficients of .*test_other_shapes\.py:\d+ .* in another way"):
        folded.apply(contracted, large)


def rescaled(z: Any) -> Any:
    return jnp.tanh(z) + 1.0 * z


def vision(p: Any, x: Any, token: Any) -> Any:
    """A stream of a class token and two patches, without a mean; ``token`` brings the token to the batch."""
    h = jnp.concatenate([token(p["t"], x.shape[:-1]), jnp.tanh(jnp.stack([x, 2 * x], -2)) @ p["A"]], -2)
    h = h + jnp.tanh(layer_norm(h) @ p["W"])
    return layer_norm(h) @ p["V"]


# Functions that make the same of their parameters whatever the batch.
LIKEWISE: dict[str, Callable[[Any, Any], Any]] = {
    "one value and the same with an axis more": lambda p, x: (lambda z: (z, z[None]))(norm(p, x) @ p["V"]),
    "one value read twice": lambda p, x: rescaled(norm(p, x) @ p["V"]),
    "a quantiser": lambda p, x: norm(p, x) @ quantised(8.0)(p["V"]),
    "random numbers": lambda p, x: norm(p, x) @ (p["V"] * jax.random.normal(jax.random.key(3), (N, 3))),
    "an array made at each call": lambda p, x: norm(p, x) @ (p["W"] @ jnp.asarray(LARGE.copy())[:, :5]),
    "a tiled bias": lambda p, x: layer_norm(x @ p["A"] + jnp.tile(p["a"], (len(x), 1))) @ p["V"],
    "a repeated bias": lambda p, x: layer_norm(x @ p["A"] + jnp.repeat(p["a"][None], len(x), 0)) @ p["V"],
    "a broadcast bias, scaled": lambda p, x: (
        layer_norm(x @ p["A"] + 2.0 * jnp.broadcast_to(p["a"], (len(x), N)).reshape(len(x), 1, N)[:, 0]) @ p["V"]
    ),
    "a tiled token": lambda p, x: vision(p, x, lambda t, batch: jnp.tile(t, (*batch, 1, 1))),
    "a broadcast token": lambda p, x: vision(p, x, lambda t, batch: jnp.broadcast_to(t, (*batch, 1, N))),
    "a repeated token": lambda p, x: vision(p, x, lambda t, batch: jnp.repeat(t, batch[0], 0)),
    "layers": lambda p, x: layers(p, x, np.array([2, 0, 1])),
    "a shared layer": lambda p, x: shared(p, x, p["A"] * p["k"][:, None]),
}


@pytest.mark.parametrize("name", LIKEWISE)
def test_any_batch_size(name: str, params: Any) -> None:
    fn = LIKEWISE[name]
    folded = check(fn, params, X)
    assert set(decisions(folded)) <= {"contracted", "centred"}
    for size in (1, 2, 6):
        x = RNG.normal(size=(size, 4))
        assert difference(folded.apply(folded.contract(params), x), fn(params, x)) < FLOAT64


@pytest.mark.parametrize("picked", [0, 1, 2])
def test_a_norm_that_the_caller_picked(picked: int, params: Any) -> None:
    """One of three norms of a stream, by its place in the report: at every batch size the same one."""

    def fn(p: Any, x: Any) -> Any:
        h = jnp.tanh(x) @ p["A"]
        h = h + jnp.tanh(layer_norm(h) @ p["W"])
        h = h + jnp.tanh(layer_norm(h) @ (p["W"].T * p["g"]))
        return layer_norm(h) @ p["V"]

    lines = [row.source for row in jaxfold.fold(fn, params, X).report.rows]
    folded = check(fn, params, X, where=lambda row: row.source == lines[picked])
    large = RNG.normal(size=(9, 4))
    assert difference(folded.apply(folded.contract(params), large), fn(params, large)) < FLOAT64
    again = folded._traces[max(folded._traces, key=lambda key: str(key).count("9"))]
    assert [norm.decision for norm in again.norms] == decisions(folded)


def test_static_parameters_are_compared_by_what_they_are() -> None:
    key = jax.random.key(3)
    same = [1, 2.0, None, "a", np.float32, np.dtype("int8"), (1, [2]), {"b": 1, "a": (2,)}, {3, 1}, LARGE, key]
    for value in same:
        assert canonical(value) == canonical(value)
    assert canonical(LARGE) == canonical(LARGE.copy())
    assert canonical(key) == canonical(jax.random.key(3))
    different = [1, 1.0, True, "1", (1,), [1], {1}, {"1": 1}, np.ones(1), np.ones(1, np.float32), jnp.ones((1, 1)), key]
    assert len({repr(canonical(value)) for value in different}) == len(different)
    unknown = object.__new__(type("Unknown", (), {}))
    assert canonical(unknown) != canonical(unknown)
    assert canonical(lambda: 1) != canonical(lambda: 1)
