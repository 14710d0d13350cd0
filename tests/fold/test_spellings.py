"""However a norm is spelled, and with whatever library, it is contracted, and as accurately as the original."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfold
from tests.factories import Case, make_case
from tests.fold.checks import FLOAT64, decisions
from tests.reference import row_errors, two_pass

EPSILON = 1e-3
N, M = 64, 7
Made = tuple[Callable[..., Any], Any]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How to make the function and its parameters from a case, and what the reference has to know.

    Attributes:
        factor: by which the norm's output differs from that of the reference: divisors other than the width.
    """

    make: Callable[[Case], Made]
    norm_type: str = "layernorm"
    scale: bool = True
    offset: bool = True
    epsilon: float = EPSILON
    factor: float = 1.0

    def case(self, seed: int, dtype: Any) -> Case:
        offset = self.offset
        case = make_case(5, N, M, seed=seed, scale=self.scale, offset=offset, norm_type=self.norm_type, dtype=dtype)
        return dataclasses.replace(case, options={"epsilon": self.epsilon, "norm_type": self.norm_type})

    def truth(self, case: Case, *, extra: float = 0.0, drop: str = "") -> np.ndarray:
        """``extra`` is added to epsilon and the leaf ``drop`` of the producer is left out: for the controls."""
        scale = case.norm.get("scale", np.ones(N)).astype(np.float64) * self.factor
        producer = {key: leaf for key, leaf in case.producer.items() if key != drop}
        options = {**case.options, "epsilon": self.epsilon + extra}
        return two_pass(producer, {**case.norm, "scale": scale}, case.consumer, case.x, **options)


def linen(kind: Any, **options: Any) -> Callable[[Case], Made]:
    def make(case: Case) -> Made:
        module = nn.Sequential([nn.Dense(N), kind(epsilon=EPSILON, **options), nn.Dense(M)])
        layers = {f"layers_{index}": layer for index, layer in enumerate(case.layers) if layer}
        return module.apply, {"params": jax.tree.map(jnp.asarray, layers)}

    return make


class Block(nnx.Module):
    def __init__(self, kind: Any, options: Any) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.norm = nnx.Linear(5, N, rngs=rngs), kind(N, epsilon=EPSILON, rngs=rngs, **options)
        self.down = nnx.Linear(N, M, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.norm(self.up(x)))


def from_nnx(kind: Any, **options: Any) -> Callable[[Case], Made]:
    def make(case: Case) -> Made:
        module = Block(kind, options)
        for name, layer in zip(("up", "norm", "down"), case.layers, strict=True):
            for key, leaf in layer.items():
                setattr(getattr(module, name), key, nnx.Param(jnp.asarray(leaf)))
        graph, state = nnx.split(module)
        return lambda params, x: nnx.merge(graph, params)(x), state

    return make


def haiku(kind: Callable[[], Any], name: str) -> Callable[[Case], Made]:
    def make(case: Case) -> Made:
        network = hk.without_apply_rng(hk.transform(lambda x: hk.Sequential([hk.Linear(N), kind(), hk.Linear(M)])(x)))
        linear = [{"w": layer["kernel"], "b": layer["bias"]} for layer in (case.producer, case.consumer)]
        norm = {{"bias": "offset"}.get(key, key): leaf for key, leaf in case.norm.items()}
        params = {"linear": linear[0], **({name: norm} if norm else {}), "linear_1": linear[1]}
        return network.apply, jax.tree.map(jnp.asarray, params)

    return make


def equinox(kind: Callable[[], Any]) -> Callable[[Case], Made]:
    def make(case: Case) -> Made:
        key = jax.random.key(0)
        up, down = eqx.nn.Linear(5, N, key=key), eqx.nn.Linear(N, M, key=key)
        up, down = (
            eqx.tree_at(
                lambda m: (m.weight, m.bias), module, (jnp.asarray(layer["kernel"].T), jnp.asarray(layer["bias"]))
            )
            for module, layer in ((up, case.producer), (down, case.consumer))
        )
        norm = kind()
        if case.norm:
            names = {"scale": "weight", "bias": "bias"}
            where = lambda m: [getattr(m, names[key]) for key in case.norm]  # noqa: E731
            norm = eqx.tree_at(where, norm, [jnp.asarray(leaf) for leaf in case.norm.values()])
        params, static = eqx.partition(eqx.nn.Sequential([up, norm, down]), eqx.is_array)
        return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params

    return make


def hand(norm: Callable[[Any], Any]) -> Callable[[Case], Made]:
    def make(case: Case) -> Made:
        def fn(layers: Any, x: Any) -> Any:
            producer, gain, consumer = layers
            y = norm(x @ producer["kernel"] + producer["bias"][None])
            y = y * gain["scale"][None] + gain["bias"][None]
            return y @ consumer["kernel"] + consumer["bias"][None]

        return fn, jax.tree.map(jnp.asarray, case.layers)

    return make


def mean(h: Any) -> Any:
    return jnp.mean(h, axis=-1, keepdims=True)


def var(h: Any, **options: Any) -> Any:
    return jnp.var(h, axis=-1, keepdims=True, **options)


def std(h: Any) -> Any:
    return jnp.std(h, axis=-1, keepdims=True)


def by_einsum(h: Any) -> Any:
    centred = h - jnp.einsum("bn->b", h)[:, None] / N
    return centred / jnp.sqrt(jnp.einsum("bn->b", centred * centred)[:, None] / N + EPSILON)


def transposed(h: Any) -> Any:
    h = h.T
    return ((h - h.mean(0)[None]) * jax.lax.rsqrt(h.var(0) + EPSILON)[None]).T


@jax.jit
def jitted(h: Any) -> Any:
    return (h - mean(h)) * jax.lax.rsqrt(jax.jit(var)(h) + EPSILON)


def clamped_fast(h: Any) -> Any:
    return (h - mean(h)) * jax.lax.rsqrt(jnp.maximum(0.0, mean(h * h) - mean(h) ** 2) + EPSILON)


def norm_of_rows(h: Any) -> Any:
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


BESSEL = (N - 1) / N
SPELLINGS: dict[str, Spelling] = {
    "linen LayerNorm": Spelling(linen(nn.LayerNorm)),
    "linen LayerNorm, two-pass": Spelling(linen(nn.LayerNorm, use_fast_variance=False)),
    "linen LayerNorm, no scale": Spelling(linen(nn.LayerNorm, use_scale=False), scale=False),
    "linen LayerNorm, no bias": Spelling(linen(nn.LayerNorm, use_bias=False), offset=False),
    "linen LayerNorm, neither": Spelling(
        linen(nn.LayerNorm, use_scale=False, use_bias=False), scale=False, offset=False
    ),
    "linen RMSNorm": Spelling(linen(nn.RMSNorm), "rmsnorm", offset=False),
    "linen RMSNorm, no scale": Spelling(linen(nn.RMSNorm, use_scale=False), "rmsnorm", scale=False, offset=False),
    "linen RMSNorm, two-pass": Spelling(linen(nn.RMSNorm, use_fast_variance=False), "rmsnorm", offset=False),
    "nnx LayerNorm": Spelling(from_nnx(nnx.LayerNorm)),
    "nnx LayerNorm, two-pass": Spelling(from_nnx(nnx.LayerNorm, use_fast_variance=False)),
    "nnx LayerNorm, neither": Spelling(
        from_nnx(nnx.LayerNorm, use_scale=False, use_bias=False), scale=False, offset=False
    ),
    "nnx RMSNorm": Spelling(from_nnx(nnx.RMSNorm), "rmsnorm", offset=False),
    "nnx RMSNorm, no scale": Spelling(from_nnx(nnx.RMSNorm, use_scale=False), "rmsnorm", scale=False, offset=False),
    "haiku LayerNorm": Spelling(haiku(lambda: hk.LayerNorm(-1, True, True, EPSILON), "layer_norm")),
    "haiku LayerNorm, neither": Spelling(
        haiku(lambda: hk.LayerNorm(-1, False, False, EPSILON), "layer_norm"), scale=False, offset=False
    ),
    "haiku RMSNorm": Spelling(haiku(lambda: hk.RMSNorm(-1, EPSILON), "rms_norm"), "rmsnorm", offset=False),
    "equinox LayerNorm": Spelling(equinox(lambda: eqx.nn.LayerNorm(N, EPSILON))),
    "equinox LayerNorm, neither": Spelling(
        equinox(lambda: eqx.nn.LayerNorm(N, EPSILON, use_weight=False, use_bias=False)), scale=False, offset=False
    ),
    "equinox RMSNorm": Spelling(equinox(lambda: eqx.nn.RMSNorm(N, EPSILON, use_bias=False)), "rmsnorm", offset=False),
    "mean, var, rsqrt": Spelling(hand(lambda h: (h - mean(h)) * jax.lax.rsqrt(var(h) + EPSILON))),
    "mean, var, / sqrt": Spelling(hand(lambda h: (h - mean(h)) / jnp.sqrt(var(h) + EPSILON))),
    "** -0.5": Spelling(hand(lambda h: (h - mean(h)) * (mean((h - mean(h)) ** 2) + EPSILON) ** -0.5)),
    "torch": Spelling(hand(lambda h: (h - h.mean(-1, keepdims=True)) / (h.var(-1, keepdims=True) + EPSILON) ** 0.5)),
    "std": Spelling(hand(lambda h: (h - mean(h)) / std(h)), epsilon=0.0),
    "clamped std": Spelling(hand(lambda h: (h - mean(h)) / jnp.maximum(std(h), 1e-6)), epsilon=0.0),
    "clamped": Spelling(hand(lambda h: (h - mean(h)) * jnp.maximum(var(h), 1e-9) ** -0.5), epsilon=0.0),
    "clamped fast variance": Spelling(hand(clamped_fast)),
    "unclamped fast variance": Spelling(
        hand(lambda h: (h - mean(h)) * jax.lax.rsqrt(mean(jnp.square(h)) - jnp.square(mean(h)) + EPSILON))
    ),
    "ddof=1": Spelling(
        hand(lambda h: (h - mean(h)) * jax.lax.rsqrt(var(h, ddof=1) + EPSILON)),
        epsilon=EPSILON * BESSEL,
        factor=BESSEL**0.5,
    ),
    "sum / width": Spelling(hand(lambda h: h / jnp.sqrt((h**2).sum(-1, keepdims=True) / N + EPSILON)), "rmsnorm"),
    "reciprocal": Spelling(hand(lambda h: h * (1 / jnp.sqrt(mean(h**2) + EPSILON))), "rmsnorm"),
    "linalg.norm": Spelling(hand(norm_of_rows), "rmsnorm", epsilon=0.0, factor=N**-0.5),
    "einsum": Spelling(hand(by_einsum)),
    "transposed": Spelling(hand(transposed)),
    "jitted inside": Spelling(hand(jitted)),
    "remat inside": Spelling(hand(lambda h: jax.checkpoint(jitted)(h) * 1.0)),
}
OUTER = {"jit": jax.jit, "remat": jax.checkpoint, "jit of remat": lambda fn: jax.jit(jax.checkpoint(fn))}
ENTERED = [name for name in SPELLINGS if name != "remat inside"]


def outputs(spelling: Spelling, case: Case, wrap: Any = lambda fn: fn) -> tuple[Any, list[Any], jaxfold.Folded]:
    """The original's output, and those of both contractions."""
    fn, params = spelling.make(case)
    fn = wrap(fn)
    folded = jaxfold.fold(fn, params, case.x)
    run = jax.jit(folded.apply)
    contracted = [folded.contract(params), folded.contract_traced(params)]
    return jax.jit(fn)(params, case.x), [run(each, case.x) for each in contracted], folded


@pytest.mark.usefixtures("x64", "usual")
@pytest.mark.parametrize("name", ENTERED)
def test_contracted_and_right(name: str) -> None:
    spelling = SPELLINGS[name]
    case = spelling.case(0, np.float64)
    original, results, folded = outputs(spelling, case)
    assert decisions(folded) == ["contracted"]
    before, after = folded.report.parameters
    assert before - after > 0.8 * before
    truth = spelling.truth(case)
    for result in results:
        assert row_errors(truth, original).max() < FLOAT64
        assert row_errors(truth, result).max() < FLOAT64
        assert row_errors(spelling.truth(case, extra=1e-6), result).max() > 1e4 * FLOAT64  # controls
        assert row_errors(spelling.truth(case, drop="bias"), result).max() > 1e6 * FLOAT64


@pytest.mark.usefixtures("x64", "usual")
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("name", ["linen LayerNorm", "nnx RMSNorm", "haiku LayerNorm", "equinox LayerNorm", "torch"])
def test_through_transforms(name: str, outer: str) -> None:
    spelling = SPELLINGS[name]
    case = spelling.case(1, np.float64)
    _, results, folded = outputs(spelling, case, OUTER[outer])
    assert decisions(folded) == ["contracted"]
    for result in results:
        assert row_errors(spelling.truth(case), result).max() < FLOAT64


@pytest.mark.usefixtures("x64", "usual")
def test_norm_alone_behind_remat() -> None:
    """The border of the remat separates the norm from its Dense layers; the mean is gone before it."""
    spelling = SPELLINGS["remat inside"]
    case = spelling.case(0, np.float64)
    _, results, folded = outputs(spelling, case)
    assert decisions(folded) == ["centred"]
    for result in results:
        assert row_errors(spelling.truth(case), result).max() < FLOAT64


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("name", ENTERED)
def test_float32(name: str) -> None:
    """At most twice the original's own error, for both flavours: typical, and 99th percentile."""
    spelling, before, after = SPELLINGS[name], [], ([], [])
    fn, params = spelling.make(spelling.case(0, np.float32))
    folded = jaxfold.fold(fn, params, spelling.case(0, np.float32).x)
    original, run = jax.jit(fn), jax.jit(folded.apply)
    for seed in range(4):
        case = spelling.case(seed, np.float32)
        _, params = spelling.make(case)
        truth = spelling.truth(case)
        before.append(row_errors(truth, original(params, case.x)).ravel())
        for found, contracted in zip(after, (folded.contract(params), folded.contract_traced(params)), strict=True):
            found.append(row_errors(truth, run(contracted, case.x)).ravel())
    base = np.concatenate(before)
    for found in map(np.concatenate, after):
        assert np.sqrt(np.mean(found**2)) <= 2 * np.sqrt(np.mean(base**2))
        assert np.quantile(found, 0.99) <= 2 * np.quantile(base, 0.99)
