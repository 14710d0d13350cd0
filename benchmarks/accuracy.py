"""Errors of the contracted block and of the original against float64, over families that are hard on float32.

    python -m benchmarks.accuracy [--quick] [--markdown] [--seeds N] [--sizes d/n/m ...]

Each error is relative to the largest output of its row. The truth is a two-pass evaluation in float64; the original is
evaluated in two passes too, in the dtypes of its leaves, unless the row says Flax. "largest" is over all entries of all
rows and seeds, "typical" the root mean square over them. Ratios are contracted over original, so below 1 the contracted
block is nearer to the truth. "gradients" are those in the inputs. Nothing is timed.
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import numpy as np

import jaxfold
from benchmarks.tables import show
from jaxfold._block._shape import Form
from tests.families import EPSILON, FAMILIES, draw

Size = tuple[int, int, int]

SIZES: list[Size] = [(82, 512, 512), (16, 128, 128), (5, 16, 7), (40, 16, 7), (100, 64, 32)]
QUICK: list[Size] = [(5, 16, 7), (40, 16, 7)]
FLAX = ["bias mean 1e3", "bias mean 1e4", "common-mode kernel, ×100"]
FORMS: list[Form] = ["direct", "standard"]
COLUMNS = (
    "family",
    "original",
    *(f"{form}: {what}" for form in FORMS for what in ("largest", "typical", "grad. largest", "grad. typical")),
)


def main() -> None:
    options = _options()
    for size in options.sizes:
        rows = [[name, *_row(name, size, options.seeds)] for name in FAMILIES]
        rows += [[f"{name}; Flax's default variance", *_row(name, size, options.seeds, flax=True)] for name in FLAX]
        d, n, _ = size
        title = f"d/n/m = {'/'.join(map(str, size))}{', wide: d > n' if d > n else ''}; {options.seeds} seeds"
        show(title, COLUMNS, rows, markdown=options.markdown, width=170)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two small sizes, unless others are given")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--seeds", type=int, default=8, help="blocks of each family (default: %(default)s)")
    parser.add_argument("--sizes", type=_size, nargs="+", metavar="d/n/m")
    options = parser.parse_args()
    options.sizes = options.sizes or (QUICK if options.quick else SIZES)
    return options


def _size(text: str) -> Size:
    d, n, m = map(int, text.split("/"))
    return d, n, m


def _row(name: str, size: Size, seeds: int, *, flax: bool = False) -> list[str]:
    """The original's largest error, then ratios to it for each form: outputs, then gradients in the inputs."""
    row = []
    for form in FORMS:
        certificates = [_measure(name, size, seed, form, flax=flax) for seed in range(seeds)]
        outputs = _pool([certificate.outputs for certificate in certificates])
        gradients = _pool([certificate.gradients for certificate in certificates])
        row = row or [f"{outputs.original_max:.1e}"]
        row += [f"{r:.2g}" for r in (outputs.ratio, outputs.typical_ratio, gradients.ratio, gradients.typical_ratio)]
    return row


def _measure(name: str, size: Size, seed: int, form: Form, *, flax: bool) -> jaxfold.Certificate:
    case = draw(name, size, seed)
    block = jaxfold.Block(*case.layers, **case.options)
    contracted = jaxfold.contract(*case.layers, **case.options, form=form, allow_growth=True)
    return jaxfold.verify(block, contracted, case.x, original_fn=_flax(case.layers) if flax else None)


def _flax(layers: Any) -> Any:
    """The block as stock Flax modules evaluate it, with the variance that is their default."""
    n, m = layers[2]["kernel"].shape
    model = nn.Sequential([nn.Dense(n), nn.LayerNorm(epsilon=EPSILON), nn.Dense(m)])
    variables = {"params": {f"layers_{index}": layer for index, layer in enumerate(layers)}}
    return lambda x: model.apply(variables, x)


def _pool(errors: list[jaxfold.Errors]) -> jaxfold.Errors:
    """The largest of the largest and the root mean square of the typical, over the seeds."""
    return jaxfold.Errors(
        original_max=max(error.original_max for error in errors),
        original_typical=float(np.sqrt(np.mean([error.original_typical**2 for error in errors]))),
        contracted_max=max(error.contracted_max for error in errors),
        contracted_typical=float(np.sqrt(np.mean([error.contracted_typical**2 for error in errors]))),
        unit=errors[0].unit,
    )


if __name__ == "__main__":
    main()
