"""Speed of a contracted block beside the original and beside one bare Dense, as ratios from one process.

    python -m benchmarks.block [--quick] [--markdown] [--rounds N] [--sizes d/n/m ...] [--batches B ...]

original      flax.linen Dense(n), LayerNorm, Dense(m), jitted, parameters as an argument
two-pass      the same with LayerNorm(use_fast_variance=False)
contracted    jaxfold.apply(contraction, x)
bare Dense    flax.linen Dense(m) on the same d inputs: the least that any d → m layer costs

All float32, on the default device. A ratio is that of the medians; in brackets the quartiles of the ratios round by
round. Absolute times, in the last column, mean nothing on a shared machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxfold
from benchmarks.tables import show
from benchmarks.timing import interleaved, ratio
from jaxfold._demo import EPSILON, PAIRS, atom_pairs, load_heads

Size = tuple[int, int, int]

SIZES: list[Size] = [(82, 512, 512), (16, 128, 128), (17, 512, 2048), (64, 1024, 192), (512, 512, 512)]
BATCHES = [1, 8, 32, 256, 1024, 4096, 16384, 65536]
LARGEST = 2e9  # bytes of the original's activations: what needs more is left out
COLUMNS = (
    "batch",
    "original / contracted",
    "contracted / bare Dense",
    "two-pass / contracted",
    "rounds",
    "µs, indicative: original, contracted, Dense",
)


class Limits(NamedTuple):
    """How long each comparison may go on."""

    rounds: int
    seconds: float


def main() -> None:
    options = _options()
    limits = Limits(options.rounds, 2.0 if options.quick else 5.0)
    for size in options.sizes:
        rows = [_block_row(size, batch, limits) for batch in options.batches if _bytes(size, batch) <= LARGEST]
        show(f"d/n/m = {size_name(size)}", COLUMNS, rows, markdown=options.markdown)
    rows = [_heads_row(shape, limits) for shape in (PAIRS, (-1,))]
    show("y_edges, trained: 16/128/128, no producer bias, 62,500 rows", COLUMNS, rows, markdown=options.markdown)
    columns = ("512/2048/512, float32 leaves", "ratio", "rounds", "ms, indicative: contract, QR + product")
    show("Contracting", columns, [_contract_row(limits)], markdown=options.markdown)
    columns = ("82/512/512, batch 256", "dot", "fusion", "FLOPs per row")
    show("As compiled for this device", columns, _compiled_rows((82, 512, 512), 256), markdown=options.markdown)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, three batches, unless others are given")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--rounds", type=int, default=40, help="at most, for each row (default: %(default)s)")
    parser.add_argument("--sizes", type=size_of, nargs="+", metavar="d/n/m")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B")
    options = parser.parse_args()
    options.sizes = options.sizes or (SIZES[:1] if options.quick else SIZES)
    options.batches = options.batches or ([1, 256, 4096] if options.quick else BATCHES)
    return options


def size_of(text: str) -> Size:
    d, n, m = map(int, text.split("/"))
    return d, n, m


def size_name(size: Size) -> str:
    return "/".join(map(str, size))


def _bytes(size: Size, batch: int) -> float:
    """Of the original's activations in float32: before the norm, after it, and the output."""
    _, n, m = size
    return 4.0 * batch * (2 * n + m)


def block_layers(size: Size) -> Any:
    d, n, m = size
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    return (
        {"kernel": draw(d, n), "bias": draw(n)},
        {"scale": draw(n), "bias": draw(n)},
        {"kernel": draw(n, m), "bias": draw(m)},
    )


def _original(layers: Any, epsilon: float, *, fast: bool = True) -> tuple[Callable[..., Any], Any]:
    """The block in stock Flax, jitted, and its variables."""
    producer, _, consumer = layers
    n, m = consumer["kernel"].shape
    dense = nn.Dense(n, use_bias="bias" in producer)
    module = nn.Sequential([dense, nn.LayerNorm(epsilon=epsilon, use_fast_variance=fast), nn.Dense(m)])
    return jax.jit(module.apply), {"params": {f"layers_{index}": layer for index, layer in enumerate(layers)}}


def _functions(layers: Any, x: jax.Array, epsilon: float) -> dict[str, Callable[[], Any]]:
    contraction = jaxfold.contract(*layers, epsilon=epsilon, allow_growth=True)
    original, variables = _original(layers, epsilon)
    two_pass, _ = _original(layers, epsilon, fast=False)
    dense = jax.jit(nn.Dense(contraction.c.shape[-1]).apply)
    bare = {"params": {"kernel": contraction.D[: x.shape[-1]], "bias": contraction.c}}
    return {
        "original": lambda: original(variables, x),
        "two-pass": lambda: two_pass(variables, x),
        "contracted": lambda: jaxfold.apply(contraction, x),
        "bare Dense": lambda: dense(bare, x),
    }


def _row(label: str, functions: dict[str, Callable[[], Any]], limits: Limits) -> list[str]:
    times = interleaved(functions, rounds=limits.rounds, seconds=limits.seconds)
    return [
        label,
        ratio(times, "original", "contracted"),
        ratio(times, "contracted", "bare Dense"),
        ratio(times, "two-pass", "contracted"),
        str(len(times["original"])),
        ", ".join(f"{np.median(times[name]) * 1e6:,.0f}" for name in ("original", "contracted", "bare Dense")),
    ]


def _block_row(size: Size, batch: int, limits: Limits) -> list[str]:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(batch, size[0])), jnp.float32)
    return _row(f"{batch:,}", _functions(block_layers(size), x, 1e-6), limits)


def _heads_row(shape: tuple[int, ...], limits: Limits) -> list[str]:
    """With the leading axes that the model has, on which stock Dense is slow here, and with a single one."""
    layers = jax.tree.map(jnp.asarray, tuple(load_heads()["y_edges"]))
    x = jnp.asarray(atom_pairs()).reshape(*shape, 16)
    return _row(f"{x.shape[:-1]}", _functions(layers, x, EPSILON), limits)


def _contract_row(limits: Limits) -> list[str]:
    """``contract`` beside what it cannot do without: one float64 QR for R, one product for D."""
    layers = jax.tree.map(np.asarray, block_layers((512, 2048, 512)))
    producer, norm, consumer = jax.tree.map(lambda leaf: leaf.astype(np.float64), layers)
    rows = np.concatenate([producer["kernel"], producer["bias"][None]])
    rows -= rows.mean(axis=1, keepdims=True)

    def bare() -> Any:
        return np.linalg.qr(rows.T, mode="r"), (rows * norm["scale"]) @ consumer["kernel"]

    functions = {"contract": lambda: jaxfold.contract(*layers, epsilon=1e-6), "bare": bare}
    times = interleaved(functions, rounds=limits.rounds, seconds=2 * limits.seconds)
    milliseconds = ", ".join(f"{np.median(times[name]) * 1e3:,.0f}" for name in ("contract", "bare"))
    return ["contract / (NumPy QR + product)", ratio(times, "contract", "bare"), str(len(times["bare"])), milliseconds]


def _compiled_rows(size: Size, batch: int) -> list[list[str]]:
    """How many products and fusions XLA made of the block, and its own count of the arithmetic."""
    layers = block_layers(size)
    x = jnp.zeros((batch, size[0]))
    original, variables = _original(layers, 1e-6)
    contraction = jaxfold.contract(*layers, epsilon=1e-6, allow_growth=True)
    lowered = {
        "original": jax.jit(original).lower(variables, x),
        "contracted": jax.jit(jaxfold.apply).lower(contraction, x),
    }
    return [[name, *_compiled(stage, batch)] for name, stage in lowered.items()]


def _compiled(lowered: Any, batch: int) -> tuple[str, str, str]:
    executable = lowered.compile()
    text = executable.as_text()
    cost = executable.cost_analysis()
    flops = (cost[0] if isinstance(cost, list) else cost)["flops"]
    return f"{text.count(' dot(')}", f"{text.count(' fusion(')}", f"{flops / batch:,.0f}"


if __name__ == "__main__":
    main()
