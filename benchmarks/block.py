"""Speed of a contracted block beside the original and beside one bare Dense, as ratios from one process.

    python -m benchmarks.block [--quick] [--markdown] [--rounds N]

original      flax.linen Dense(n), LayerNorm, Dense(m), jitted, parameters as an argument
two-pass      the same with LayerNorm(use_fast_variance=False)
contracted    jaxfold.apply(contraction, x)
bare Dense    flax.linen Dense(m) on the same d inputs: the least that any d → m layer costs

All float32, on the default device. A ratio is that of the medians; in brackets the quartiles of the ratios round by
round. Absolute times, in the last column, mean nothing on a shared machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import jaxfold
from benchmarks.timing import interleaved, ratio
from jaxfold._demo import EPSILON, atom_pairs, load_heads
from jaxfold._report import table

SIZES = ((82, 512, 512), (16, 128, 128), (17, 512, 2048), (64, 1024, 192), (512, 512, 512))
BATCHES = (1, 8, 32, 256, 1024, 4096, 16384, 65536)
LARGEST = 5e8  # bytes of the original's widest activations: what is larger is left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, three batches")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    console = Console(width=110, highlight=False)

    sizes, batches = (SIZES[:1], (1, 256, 1024)) if options.quick else (SIZES, BATCHES)
    for size in sizes:
        _print(console, f"d/n/m = {'/'.join(map(str, size))}", _block_rows(size, batches, options.rounds), options)
    _print(console, "y_edges, trained weights", [_heads_row(options.rounds)], options)
    _print_contract(console, options.rounds)
    _print_compiled(console)


def _layers(d: int, n: int, m: int) -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    return (
        {"kernel": draw(d, n), "bias": draw(n)},
        {"scale": draw(n), "bias": draw(n)},
        {"kernel": draw(n, m), "bias": draw(m)},
    )


def _functions(layers: Any, x: jax.Array, epsilon: float) -> dict[str, Any]:
    producer, _, consumer = layers
    n, m = consumer["kernel"].shape
    contraction = jaxfold.contract(*layers, epsilon=epsilon, allow_growth=True)

    def compiled(module: nn.Module, params: Any) -> Any:
        apply = jax.jit(module.apply)
        return lambda: apply({"params": params}, x)

    def original(fast: bool) -> nn.Module:
        dense = nn.Dense(n, use_bias="bias" in producer)
        return nn.Sequential([dense, nn.LayerNorm(epsilon=epsilon, use_fast_variance=fast), nn.Dense(m)])

    trained = {f"layers_{index}": layer for index, layer in enumerate(layers)}
    bare = {"kernel": jnp.asarray(contraction.D)[: x.shape[-1]], "bias": jnp.asarray(contraction.c)}
    return {
        "original": compiled(original(True), trained),
        "two-pass": compiled(original(False), trained),
        "contracted": lambda: jaxfold.apply(contraction, x),
        "bare Dense": compiled(nn.Dense(m), bare),
    }


def _row(label: str, functions: dict[str, Any], rounds: int) -> list[str]:
    times = interleaved(functions, rounds=rounds)
    micro = " / ".join(f"{np.median(times[name]) * 1e6:,.0f}" for name in ("original", "contracted", "bare Dense"))
    return [
        label,
        ratio(times, "original", "contracted"),
        ratio(times, "two-pass", "contracted"),
        ratio(times, "contracted", "bare Dense"),
        micro,
    ]


def _block_rows(size: tuple[int, int, int], batches: tuple[int, ...], rounds: int) -> list[list[str]]:
    layers, rows = _layers(*size), []
    for batch in batches:
        if 4.0 * batch * max(size) > LARGEST:
            continue
        x = jnp.asarray(np.random.default_rng(1).normal(size=(batch, size[0])), jnp.float32)
        rows.append(_row(f"{batch:,}", _functions(layers, x, 1e-6), rounds if batch < 16384 else max(9, rounds // 4)))
    return rows


def _heads_row(rounds: int) -> list[str]:
    layers = jax.tree.map(jnp.asarray, tuple(load_heads()["y_edges"]))
    return _row("62,500", _functions(layers, jnp.asarray(atom_pairs()), EPSILON), rounds)


def _print(console: Console, title: str, rows: list[list[str]], options: argparse.Namespace) -> None:
    columns = ("batch", "original/contracted", "two-pass/contracted", "contracted/bare Dense", "µs here")
    if options.markdown:
        print(f"\n**{title}**\n")
        print(f"| {' | '.join(columns)} |\n|{'---:|' * len(columns)}")
        for row in rows:
            print(f"| {' | '.join(row)} |")
        return
    result = table(*columns, title=title)
    for row in rows:
        result.add_row(*row)
    console.print(result, "")


def _print_contract(console: Console, rounds: int) -> None:
    """``contract`` beside what it cannot do without: one float64 QR for R, one product for D."""
    layers = jax.tree.map(np.asarray, _layers(512, 2048, 512))
    producer, norm, consumer = jax.tree.map(lambda leaf: leaf.astype(np.float64), layers)
    rows = np.concatenate([producer["kernel"], producer["bias"][None]])
    rows -= rows.mean(axis=1, keepdims=True)

    def bare() -> Any:
        return np.linalg.qr(rows.T, mode="r"), (rows * norm["scale"]) @ consumer["kernel"]

    times = interleaved({"contract": lambda: jaxfold.contract(*layers, epsilon=1e-6), "bare": bare}, rounds=rounds)
    console.print(f"contract at 512/2048/512 / (NumPy QR + product): {ratio(times, 'contract', 'bare')}", "")


def _print_compiled(console: Console) -> None:
    """What XLA made of it, at 82/512/512 and batch 256."""
    layers = _layers(82, 512, 512)
    x = jnp.zeros((256, 82))
    contraction = jaxfold.contract(*layers, epsilon=1e-6)
    block = jax.jit(lambda layers, x: jaxfold.Block(*layers, epsilon=1e-6)(x))
    lowered = {"original": block.lower(layers, x), "contracted": jax.jit(jaxfold.apply).lower(contraction, x)}
    for name, stage in lowered.items():
        executable = stage.compile()
        text = executable.as_text() or ""
        entry = text[text.index("\nENTRY") :].splitlines()
        work = sum(" fusion(" in line or " dot(" in line or " custom-call(" in line for line in entry)
        cost = executable.cost_analysis()
        flops = (cost[0] if isinstance(cost, list) else cost or {}).get("flops", float("nan"))
        console.print(f"{name} as compiled for this device: {work} fused operations, {flops / 256:,.0f} FLOPs per row")


if __name__ == "__main__":
    main()
