"""One gradient step in all source leaves, with the original block and with the block contracted inside the step.

    python -m benchmarks.training [--markdown] [--rounds N] [--sizes d/n/m ...] [--batches B ...]

original      Dense, LayerNorm in two passes, Dense, as jaxfold.Block evaluates them
contracted    jaxfold.apply(jaxfold.contract_traced(...), x): one factorisation a step

Both are jitted functions of the same leaves, inputs and cotangents that give ⟨cotangents, outputs⟩ and its gradient in
the six leaves, in float32 on the default device: the cotangents stand for the rest of a network, of which only the
block is timed. Ratios are those of the medians, in brackets the quartiles of the ratios round by round.
Memory is the temporary memory of the compiled step, by XLA's own analysis.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfold
from benchmarks.block import Limits, Size, block_layers, size_name, size_of
from benchmarks.tables import show
from benchmarks.timing import interleaved, ratio

SIZES: list[Size] = [(16, 1024, 256), (17, 512, 2048), (82, 512, 512), (128, 2048, 512)]
BATCHES = [8, 16, 32, 64, 128, 256, 1024, 8192]
COLUMNS = ("batch", "original / contracted", "temporary memory, MB", "ratio", "ms, indicative")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--rounds", type=int, default=20, help="at most, for each row (default: %(default)s)")
    parser.add_argument("--sizes", type=size_of, nargs="+", metavar="d/n/m", default=SIZES)
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", default=BATCHES)
    options = parser.parse_args()
    limits = Limits(options.rounds, 6.0)
    for size in options.sizes:
        measured = [_measure(size, batch, limits) for batch in options.batches]
        gains = [np.median(times["original"]) / np.median(times["contracted"]) for times, _ in measured]
        planned = jaxfold.plan(*block_layers(size)).training_batch
        even = f"pays from batch {_break_even(options.batches, gains)}, planned {planned}"
        rows = [_row(batch, *figures) for batch, figures in zip(options.batches, measured, strict=True)]
        show(f"d/n/m = {size_name(size)}: {even}", COLUMNS, rows, markdown=options.markdown)


def _break_even(batches: list[int], gains: list[float]) -> str:
    """Where the ratio of times last rises through 1, by interpolation in the logarithms."""
    behind = [index for index, gain in enumerate(gains) if gain < 1]
    if not behind:
        return f"{batches[0]} or less"
    last = behind[-1]
    if last + 1 == len(gains):
        return f"more than {batches[-1]}"
    low, high = np.log(gains[last : last + 2])
    return f"{batches[last] * (batches[last + 1] / batches[last]) ** (low / (low - high)):.0f}"


def _measure(size: Size, batch: int, limits: Limits) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Seconds of each step, round by round, and megabytes of temporary memory."""
    layers = block_layers(size)
    rng = np.random.default_rng(1)
    x, cotangents = (jnp.asarray(rng.normal(size=(batch, width)), jnp.float32) for width in (size[0], size[2]))
    arguments = (layers, x, cotangents)

    def original(layers: Any, x: Any, cotangents: Any) -> Any:
        return jnp.vdot(cotangents, jaxfold.Block(*layers, epsilon=1e-6)(x))

    def contracted(layers: Any, x: Any, cotangents: Any) -> Any:
        block = jaxfold.contract_traced(*layers, epsilon=1e-6, allow_growth=True)
        return jnp.vdot(cotangents, jaxfold.apply(block, x))

    steps = {f.__name__: jax.jit(jax.value_and_grad(f)).lower(*arguments).compile() for f in (original, contracted)}
    memory = {name: _temporary_megabytes(step) for name, step in steps.items()}
    calls = {name: (lambda step=step: step(*arguments)) for name, step in steps.items()}
    # A loop repeats its step: the first calls after another function's are not what it sees.
    times = interleaved(calls, rounds=limits.rounds, seconds=limits.seconds, least=0.05)
    return times, memory


def _row(batch: int, times: dict[str, np.ndarray], memory: dict[str, float]) -> list[str]:
    return [
        f"{batch:,}",
        ratio(times, "original", "contracted"),
        f"{memory['original']:.1f} → {memory['contracted']:.1f}",
        f"{memory['original'] / memory['contracted']:.1f}",
        ", ".join(f"{np.median(times[name]) * 1e3:.1f}" for name in times),
    ]


def _temporary_megabytes(step: Any) -> float:
    return step.memory_analysis().temp_size_in_bytes / 1e6


if __name__ == "__main__":
    main()
