"""Whole networks folded, beside themselves, and what folding costs: ratios from one process.

    python -m benchmarks.fold [--quick] [--markdown] [--rounds N] [--batches B ...]

actor         SimBa-like: Dense 128 on 17 observations, one pre-LN residual block, LayerNorm, Dense 6
critic        the same 512 wide on observations and 6 actions, two members by nn.vmap
transformer   one layer on 8 tokens made of one number each, as in FT-Transformer, pre-LN, 64 wide

All float32, jitted, parameters as an argument, on the default device. A ratio is that of the medians; in brackets the
quartiles of the ratios round by round. Absolute times mean nothing on a shared machine.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxfold
from benchmarks.tables import show
from benchmarks.timing import interleaved, ratio

OBSERVATION, ACTION, TOKENS = 17, 6, 8
COLUMNS = ("batch", "original / folded", "rounds", "µs, indicative: original, folded")
BAR = 3  # times jax.make_jaxpr


class Residual(nn.Module):
    """Pre-LN, four times as wide inside."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(x)
        return x + nn.Dense(self.width)(nn.relu(nn.Dense(4 * self.width)(h)))


class SimBa(nn.Module):
    width: int
    outputs: int
    blocks: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width)(x)
        for _ in range(self.blocks):
            x = Residual(self.width)(x)
        return nn.Dense(self.outputs)(nn.LayerNorm()(x))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        members = nn.vmap(
            SimBa, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        return members(512, 1)(jnp.concatenate([observation, action], axis=-1))


class Transformer(nn.Module):
    """Each feature is a token of its own, x w + b, so that d = 1 before the first norm."""

    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1], self.width)
        weight = self.param("weight", nn.initializers.normal(1.0), shape)
        bias = self.param("bias", nn.initializers.normal(1.0), shape)
        h = x[..., None] * weight + bias
        h = h + nn.SelfAttention(num_heads=4)(nn.LayerNorm()(h))
        h = h + nn.Dense(self.width)(nn.relu(nn.Dense(2 * self.width)(nn.LayerNorm()(h))))
        return nn.Dense(1)(nn.relu(nn.LayerNorm()(h.mean(axis=-2))))


class PreNorm(nn.Module):
    """Layers for the cost of the analysis."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = x + nn.SelfAttention(num_heads=2)(nn.LayerNorm()(x))
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return x


def networks() -> dict[str, tuple[nn.Module, Callable[[int], tuple[jax.Array, ...]]]]:
    """Each with how to draw inputs."""
    rng = np.random.default_rng(0)

    def draw(*sizes: int) -> Callable[[int], tuple[jax.Array, ...]]:
        return lambda batch: tuple(jnp.asarray(rng.normal(size=(batch, size)), jnp.float32) for size in sizes)

    return {
        "actor, 17 → 128 → 6": (SimBa(128, ACTION), draw(OBSERVATION)),
        "critic, 23 → 512 → 1, two members": (Critic(), draw(OBSERVATION, ACTION)),
        "transformer, 8 tokens with d = 1": (Transformer(), draw(TOKENS)),
    }


def main() -> None:
    options = _options()
    seconds = 2.0 if options.quick else 5.0
    for name, (model, draw) in networks().items():
        params = jax.tree.map(jnp.asarray, model.init(jax.random.key(0), *draw(1)))
        rows, saved = [], ""
        for batch in options.batches:
            inputs = draw(batch)
            folded = jaxfold.fold(model.apply, params, *inputs)
            contracted = folded.contract(params)
            before, after = folded.report.parameters
            saved = f"{before:,} → {after:,} parameters ({1 - after / before:.0%} fewer)"
            decisions = Counter(row.decision for row in folded.report.rows)
            saved += ", norms: " + ", ".join(f"{count} {decision}" for decision, count in decisions.items())
            rows.append(_row(batch, model.apply, params, folded.apply, contracted, inputs, options.rounds, seconds))
        show(f"{name}: {saved}", COLUMNS, rows, markdown=options.markdown)
    columns = ("pre-LN layers", "fold / make_jaxpr", f"at most {BAR}", "equations", "ms, indicative: fold, make_jaxpr")
    rows = [_cost(layers, 5 if options.quick else 9) for layers in (12, 24, 48)]
    show("Folding itself", columns, rows, markdown=options.markdown)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two batches, shorter, unless others are given")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--rounds", type=int, default=40, help="at most, for each row (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B")
    options = parser.parse_args()
    options.batches = options.batches or ([1, 256] if options.quick else [1, 32, 256, 1024])
    return options


def _row(
    batch: int, fn: Any, params: Any, apply: Any, contracted: Any, inputs: Any, rounds: int, seconds: float
) -> list[str]:
    original, folded = jax.jit(fn), jax.jit(apply)
    functions = {"original": lambda: original(params, *inputs), "folded": lambda: folded(contracted, *inputs)}
    times = interleaved(functions, rounds=rounds, seconds=seconds)
    return [
        f"{batch:,}",
        ratio(times, "original", "folded"),
        str(len(times["original"])),
        ", ".join(f"{np.median(times[name]) * 1e6:,.0f}" for name in ("original", "folded")),
    ]


def _cost(layers: int, rounds: int) -> list[str]:
    """Folding against tracing, each of a function that was not traced before, with no jitted helper cached."""
    model, x = PreNorm(layers), jnp.zeros((2, 8, 16))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    equations = len(jax.make_jaxpr(model.apply)(params, x).eqns)

    def sample(call: Callable[..., Any]) -> float:
        jax.clear_caches()
        gc.collect()
        fresh = lambda params, x: model.apply(params, x)  # noqa: E731  # make_jaxpr remembers functions
        start = time.perf_counter()
        call(fresh, params, x)
        return time.perf_counter() - start

    def trace(fn: Any, params: Any, x: Any) -> Any:
        return jax.make_jaxpr(fn)(params, x)

    times: dict[str, list[float]] = {"fold": [], "make_jaxpr": []}
    for index in range(rounds):
        pair = [("fold", jaxfold.fold), ("make_jaxpr", trace)]
        for name, call in pair if index % 2 else pair[::-1]:
            times[name].append(sample(call))
    arrays = {name: np.array(values) for name, values in times.items()}
    met = "yes" if np.median(arrays["fold"]) <= BAR * np.median(arrays["make_jaxpr"]) else "NO"
    milliseconds = ", ".join(f"{np.median(arrays[name]) * 1e3:,.0f}" for name in ("fold", "make_jaxpr"))
    return [str(layers), ratio(arrays, "fold", "make_jaxpr"), met, f"{equations:,}", milliseconds]


if __name__ == "__main__":
    main()
