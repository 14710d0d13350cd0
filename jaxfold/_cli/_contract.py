"""``jaxfold contract``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from jaxfold._cli._block_option import parse_block
from jaxfold._errors import OptionError
from jaxfold._files._contract_checkpoint import contract_checkpoint
from jaxfold._files._output import replacing
from jaxfold._tree._fold_report import FoldReport, FoldRow


def contract(options: argparse.Namespace) -> int:
    """Contracts, prints the report, and returns the exit status."""
    blocks = [parse_block(text) for text in options.block]
    if options.report is not None and not options.report.absolute().parent.is_dir():
        raise OptionError("--report", f"{options.report}", "a path in a directory that is there", "")
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
    print(report)
    if report.contracted:
        print("\nIn the model, each contracted block is one module:")
        for line in _modules(report):
            print(line)
        print(f"\nwritten: {options.out}")
    else:
        print("jaxfold: nothing was contracted, so nothing was written", file=sys.stderr)
    if any("dtype |V" in row.reason for row in report.skipped):
        print(
            "jaxfold: NumPy's .npz has no bfloat16 and keeps such leaves as bytes of unknown meaning (|V2). They were "
            "left as they are. Save the checkpoint as msgpack or safetensors to contract it.",
            file=sys.stderr,
        )
    if options.report is not None:
        with replacing(options.report.absolute(), overwrite=True) as beside:
            beside.write_text(report.to_json() + "\n", encoding="utf-8")
    return 1 if report.skipped or report.unmatched else 0


def _modules(report: FoldReport) -> Iterator[str]:
    """The module that takes the place of each contracted block, by its path."""
    for row in report.contracted:
        yield f"  {row.to}: {module_of(row)}" + (f", {row.stack} times (nn.scan or nn.vmap)" if row.stack else "")


def module_of(row: FoldRow) -> str:
    """The constructor call of jaxfold.linen.ContractedDense that fits the leaves of a contracted block."""
    outputs = [features[0] if len(features) == 1 else features for features in row.outputs or ()]
    features = outputs[0] if isinstance(row.consumers, str) else dict(zip(row.consumers, outputs, strict=True))
    arguments = f"width={row.width}, epsilon={row.epsilon}, form={row.form!r}, use_bias={row.use_bias}"
    if row.norm_type != "layernorm":
        arguments += f", norm_type={row.norm_type!r}"
    return f"ContractedDense(features={features}, {arguments})"
