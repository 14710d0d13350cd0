"""Random programs, folded and compared with themselves in float64.

    python -m benchmarks.programs [--count N] [--first SEED] [--tolerance T]

Prints every program whose folded outputs differ, the largest difference, and the share of norms that were contracted.
The difference is relative to the largest entry of an output and to how much rounding alone moves that output: a program
that ends in the difference of two nearly equal arrays has no better answer.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np

import jaxfold
from tests.fold.programs import draw

TOLERANCE = 1e-9
# Below this share of what went into it an entry is rounding: 1 ulp of the inputs must not be taken for a result.
NOISE = 1e-13


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one program.

    Attributes:
        error: the larger of those of contract and contract_traced; NaN if only one of original and folded is finite.
        norms, contracted: rows of the report, and those that were contracted.
        before, after: parameters.
    """

    seed: int
    error: float
    norms: int
    contracted: int
    before: int
    after: int


def examine(seed: int, *, spoil: float = 0.0) -> Outcome:
    """Draws a program, folds it and runs it both ways; coefficients are multiplied by ``1 + spoil``, for controls."""
    fn, params, x = draw(seed)
    folded = jaxfold.fold(fn, params, x)
    truth = fn(params, x)
    moved = fn(jax.tree.map(lambda leaf: leaf * (1 + NOISE), params), x * (1 - NOISE))
    error = 0.0
    for contracted in (folded.contract(params), folded.contract_traced(params)):
        if spoil:
            contracted["blocks"] = jax.tree.map(lambda leaf: leaf * (1 + spoil), contracted["blocks"])
        error = max(error, *_differences(folded.apply(contracted, x), truth, moved))
    rows = folded.report.rows
    return Outcome(seed, error, len(rows), len(folded.report.contracted), *folded.report.parameters)


def _differences(result: Any, truth: Any, moved: Any) -> list[float]:
    errors = []
    for ours, theirs, other in zip(
        map(np.asarray, result), map(np.asarray, truth), map(np.asarray, moved), strict=True
    ):
        if ours.shape != theirs.shape or (np.isfinite(ours) != np.isfinite(theirs)).any():
            errors.append(float("inf"))
            continue
        finite = np.isfinite(theirs) & np.isfinite(other)
        ours, theirs, other = (array[finite] for array in (ours, theirs, other))
        if theirs.size:
            amplified = float(np.abs(other - theirs).max()) / NOISE  # by so much are errors of the inputs
            size = max(float(np.abs(theirs).max()), amplified, 1e-30)
            errors.append(float(np.abs(ours - theirs).max()) / size)
    return errors or [0.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="(default: %(default)s)")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    outcomes, wrong = [], 0
    for seed in range(options.first, options.first + options.count):
        outcome = examine(seed)
        outcomes.append(outcome)
        if not outcome.error < options.tolerance:
            wrong += 1
            print(f"program {seed}: {outcome.error:.1e}", flush=True)
        if seed % 50 == 49:
            jax.clear_caches()  # no two programs share compiled operations of odd shapes
    norms, contracted = sum(o.norms for o in outcomes), sum(o.contracted for o in outcomes)
    some = sum(o.contracted > 0 for o in outcomes)
    before, after = sum(o.before for o in outcomes), sum(o.after for o in outcomes)
    print(f"{len(outcomes):,} programs, {wrong} wrong, largest error {max(o.error for o in outcomes):.1e}")
    print(f"{contracted:,} of {norms:,} norms contracted ({contracted / max(norms, 1):.0%}), in {some:,} programs")
    print(f"{before:,} parameters before, {after:,} after")


if __name__ == "__main__":
    main()
