"""``jaxfold contract``."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator

from jaxfold._cli._block_option import parse_block
from jaxfold._errors import OptionError
from jaxfold._files._contract_checkpoint import contract_checkpoint
from jaxfold._files._formats import format_of
from jaxfold._files._output import check_kind, replacing
from jaxfold._tree._fold_report import FoldReport, FoldRow


def contract(options: argparse.Namespace) -> int:
    """Contracts, prints the report, and returns the exit status."""
    blocks = [parse_block(text) for text in options.block]
    if options.report is not None:
        _check_report(options)
    report = contract_checkpoint(
        options.checkpoint,
        blocks,
        options.out,
        form=options.form,
        dtype=options.dtype,
        allow_growth=options.allow_growth,
        strict=options.strict,
        rows=options.rows,
        overwrite=options.overwrite,
    )
    options.written = bool(report.contracted)  # whatever fails from here on
    print(report)
    if report.contracted:
        print("\nIn the model, each contracted block is one module:")
        for line in _modules(report):
            print(line)
        why = "" if options.out.suffix else ", as the checkpoint that was read: --out has no suffix"
        print(f"\nwritten: {options.out} ({format_of(options.out)}{why})")
    else:
        print("jaxfold: nothing was contracted, so nothing was written", file=sys.stderr)
    if any("dtype |V" in row.reason for row in report.skipped):
        print(
            "jaxfold: NumPy's .npz has no bfloat16 and keeps such leaves as bytes of unknown meaning (|V2). They were "
            "left as they are. Save the checkpoint as msgpack or safetensors to contract it.",
            file=sys.stderr,
        )
    if options.report is not None:
        with replacing(options.report.absolute(), overwrite=options.overwrite) as beside:
            beside.write_text(report.to_json() + "\n", encoding="utf-8")
    if not report.contracted:
        return 2
    return 1 if report.skipped or report.unmatched else 0


def _check_report(options: argparse.Namespace) -> None:
    """Refuses a place for the report that is taken, or would be by the checkpoints."""
    report = pathlib.Path(os.path.realpath(options.report))
    if not report.parent.is_dir():
        raise OptionError("--report", f"{options.report}", "a path in a directory that is there", "")
    for other, what in ((options.checkpoint, "the checkpoint that is read"), (options.out, "the path of --out")):
        place = pathlib.Path(os.path.realpath(other))
        same = report == place or (report.exists() and place.exists() and report.samefile(place))
        if same or place in report.parents:
            got = f"{options.report}, which is {what}" if same else f"{options.report}, which lies in {what}"
            raise OptionError("--report", got, "a path beside the checkpoints", "")
    check_kind("--report", report)
    if report.is_dir():
        raise OptionError("--report", f"{options.report}, a directory", "the path of a file", "")
    if report.exists() and not options.overwrite:
        got = f"{options.report}, which is there already"
        raise OptionError("--report", got, "a path that is free", "Choose another, or pass --overwrite.")


def _modules(report: FoldReport) -> Iterator[str]:
    """The module that takes the place of each contracted block, by its path."""
    for row in report.contracted:
        yield f"  {row.to}: {module_of(row)}" + (f", {row.stack} times (nn.scan or nn.vmap)" if row.stack else "")


def module_of(row: FoldRow) -> str:
    """The constructor call of jaxfold.linen.ContractedDense that fits the leaves of a contracted block."""
    arguments = {key: value for key, value in row.module_kwargs.items() if (key, value) != ("norm_type", "layernorm")}
    return f"ContractedDense({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
