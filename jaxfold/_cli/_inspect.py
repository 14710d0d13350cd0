"""``jaxfold inspect``."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from typing import Any

from jaxfold._cli._block_option import PLACEHOLDERS
from jaxfold._cli._candidates import Candidate, candidates
from jaxfold._cli._layers import torch_weight
from jaxfold._errors import printable
from jaxfold._files._checkpoint import Checkpoint, leaves
from jaxfold._files._formats import read_checkpoint
from jaxfold._files._leaf import StoredLeaf
from jaxfold._tree._paths import join

WARNING = (
    "These are candidates by path and shape. Shapes cannot tell: how the model connects the layers, and whether "
    "anything stands between them; epsilon; norm_type (a scale without a bias may be LayerNorm or RMSNorm); "
    "unit_offset (whether the norm multiplies by 1 + scale); keep_producer (whether anything else reads the "
    "producer's output). Read them from the model's code, put what is right in place of EPSILON and NORM_TYPE, and "
    "add unit_offset and keep_producer where they hold."
)
TORCH = (
    "{!r} is named as PyTorch names weights, and those are (out, in): nothing is found in such groups. Rename "
    "the weight of each linear layer to kernel and transpose it to (in, out), and rename the weight of each norm "
    "to scale."
)


def inspect(options: argparse.Namespace) -> int:
    """Prints the candidates and returns the exit status."""
    checkpoint = read_checkpoint(options.checkpoint)
    torch = torch_weight(checkpoint.tree)
    note = None if torch is None else TORCH.format(torch)
    found = candidates(checkpoint.tree)
    shown = found if options.all else [candidate for candidate in found if candidate.plan.pays()]
    if options.json:
        print(json.dumps({**_plain(checkpoint, shown), "notes": [note] if note else []}, indent=2))
    else:
        print(printable(_text(checkpoint, shown, len(found) - len(shown))))
        if note:
            print("\n" + printable(textwrap.fill(note, 100, break_long_words=False)))
    return 0


def block_option(candidate: Candidate) -> str | None:
    """The option that names it, or None where a key holds a character that the option has another meaning for."""
    keys = [str(key) for path in candidate.paths for key in path]
    stars = sum(str(key).count("*") for key in candidate.producer)
    unsayable = any(not key.isprintable() or set(key) & set(",=/") or key != key.strip() for key in keys)
    if unsayable or not all(keys) or stars > (candidate.count > 1):
        return None
    parts = [f"producer={join(candidate.producer)}", f"norm={join(candidate.norm)}"]
    for name, path in candidate.consumers.items():
        parts.append(f"{'consumer' if name is None else f'consumers.{name}'}={join(path)}")
    asked = ["epsilon"] if candidate.norm_bias else ["epsilon", "norm_type"]
    parts += [f"{key}={PLACEHOLDERS[key]}" for key in asked]
    return ",".join([*parts, *(["stacked"] if candidate.stacked else [])])


def _totals(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Arrays, parameters, bytes."""
    arrays = [leaf for _, leaf in leaves(checkpoint.tree) if isinstance(leaf, StoredLeaf)]
    return len(arrays), sum(leaf.size for leaf in arrays), sum(leaf.nbytes for leaf in arrays)


def _text(checkpoint: Checkpoint, shown: list[Candidate], hidden: int) -> str:
    from jaxfold._report import render, table

    count, parameters, size = _totals(checkpoint)
    lines = [
        f"{checkpoint.path} ({checkpoint.format}): {count:,} arrays, {parameters:,} parameters, {size:,} bytes",
        "",
    ]
    more = f"{hidden:,} more would not become smaller: --all lists them." if hidden else ""
    if not shown:
        return "\n".join(
            [*lines, "No Dense-norm-Dense block that would become smaller was found.", *filter(None, [more])]
        )
    result = table("", "blocks", "d/n/m", "parameters", "contracted", "saved")
    for number, candidate in enumerate(shown, 1):
        result.add_row(
            f"{number}",
            f"{candidate.count}",
            "/".join(map(str, candidate.sizes)),
            f"{candidate.before:,}",
            f"{candidate.after:,}",
            f"{_saved(candidate):.1%}",
        )
    lines += [render(result), ""]
    for number, candidate in enumerate(shown, 1):
        option = block_option(candidate)
        note = "its keys hold , = / * or what cannot be printed, which --block cannot say: use jaxfold.contract_tree"
        lines.append(f"{number}: {note if option is None else f'--block {shlex.quote(option)}'}")
    return "\n".join([*lines, "", *filter(None, [more]), textwrap.fill(WARNING, 100)])


def _saved(candidate: Candidate) -> float:
    return 1 - candidate.after / candidate.before


def _plain(checkpoint: Checkpoint, shown: list[Candidate]) -> dict[str, Any]:
    count, parameters, size = _totals(checkpoint)
    rows = []
    for candidate in shown:
        consumers = {name: join(path) for name, path in candidate.consumers.items()}
        rows.append(
            {
                "producer": join(candidate.producer),
                "norm": join(candidate.norm),
                "consumers": consumers.get(None, consumers),
                "stacked": candidate.stacked,
                "blocks": candidate.count,
                **dict(zip(("features", "width", "outputs"), candidate.sizes, strict=True)),
                "parameters": {"before": candidate.before, "after": candidate.after},
                "saved": _saved(candidate),
                "pays": candidate.plan.pays(),
                "block": block_option(candidate),
            }
        )
    return {
        "checkpoint": str(checkpoint.path),
        "format": checkpoint.format,
        "arrays": count,
        "parameters": parameters,
        "bytes": size,
        "candidates": rows,
        "warning": WARNING,
    }
