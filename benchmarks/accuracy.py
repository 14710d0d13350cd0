"""Errors of the contracted block and of the original against float64, over families that are hard on float32.

    python -m benchmarks.accuracy [--quick] [--markdown]

Each error is relative to the largest output of its row. "largest" is over all entries of all rows and seeds, "typical"
the root mean square over them. The original is evaluated in two passes, in the dtypes of its leaves; the truth is a
two-pass evaluation in float64. The ratios are contracted over original, so below 1 the contracted block is nearer.
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import numpy as np
from rich.console import Console

import jaxfold
from jaxfold._report import table
from tests.families import EPSILON, FAMILIES, draw

SIZES = ((82, 512, 512), (16, 128, 128), (24, 64, 32), (5, 16, 7), (40, 16, 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two small sizes, two seeds")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    for size in SIZES[2:4] if options.quick else SIZES:
        rows = [[name, *measure(name, size, 2 if options.quick else options.seeds)] for name in FAMILIES]
        rows += [_flax(f"bias mean {mean}", size) for mean in ("1e3", "1e4")]
        _print(size, rows, markdown=options.markdown)


def measure(name: str, size: tuple[int, int, int], seeds: int) -> list[str]:
    """Errors of outputs, then ratios for the gradient in the inputs, pooled over the seeds."""
    certificates = []
    for seed in range(seeds):
        case = draw(name, size, seed)
        block = jaxfold.Block(*case.layers, **case.options)
        contracted = jaxfold.contract(*case.layers, **case.options, allow_growth=True)
        certificates.append(jaxfold.verify(block, contracted, case.x))
    before, after, largest, typical = _pool([certificate.outputs for certificate in certificates])
    _, _, gradient_largest, gradient_typical = _pool([certificate.gradients for certificate in certificates])
    return [
        f"{before:.1e}",
        f"{after:.1e}",
        *map(_format, (largest, typical, gradient_largest, gradient_typical)),
    ]


def _format(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.01 <= ratio < 100 or ratio == 0 else f"{ratio:.0e}"


def _pool(errors: list[Any]) -> tuple[float, float, float, float]:
    pooled = jaxfold.Errors(
        max(e.original_max for e in errors),
        float(np.sqrt(np.mean([e.original_typical**2 for e in errors]))),
        max(e.contracted_max for e in errors),
        float(np.sqrt(np.mean([e.contracted_typical**2 for e in errors]))),
        errors[0].unit,
    )
    return pooled.original_max, pooled.contracted_max, pooled.ratio, pooled.typical_ratio


def _flax(name: str, size: tuple[int, int, int]) -> list[str]:
    """The family once more, with Flax's own LayerNorm and its default variance as the original."""
    case = draw(name, size, 0)
    _, n, m = size
    model = nn.Sequential([nn.Dense(n), nn.LayerNorm(epsilon=EPSILON), nn.Dense(m)])
    variables = {"params": {f"layers_{index}": layer for index, layer in enumerate(case.layers)}}
    block = jaxfold.Block(*case.layers, **case.options)
    contracted = jaxfold.contract(*case.layers, **case.options, allow_growth=True)
    certificate = jaxfold.verify(block, contracted, case.x, original_fn=lambda x: model.apply(variables, x))
    outputs, gradients = certificate.outputs, certificate.gradients
    ratios = (outputs.ratio, outputs.typical_ratio, gradients.ratio, gradients.typical_ratio)
    errors = (f"{outputs.original_max:.1e}", f"{outputs.contracted_max:.1e}")
    return [f"{name}, original by Flax's default variance", *errors, *map(_format, ratios)]


def _print(size: tuple[int, int, int], rows: list[list[str]], *, markdown: bool) -> None:
    title = f"d/n/m = {'/'.join(map(str, size))}"
    columns = ("family", "original, largest", "contracted", "ratio", "typical", "gradients", "typical")
    if markdown:
        print(f"\n**{title}**\n")
        print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
        for row in rows:
            print(f"| {' | '.join(row)} |")
        return
    result = table(*columns, title=title)
    for row in rows:
        result.add_row(*row)
    Console(width=130, highlight=False).print(result, "")


if __name__ == "__main__":
    main()
