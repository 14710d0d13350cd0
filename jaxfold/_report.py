"""Tables for people."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxfold._errors import printable
from jaxfold._tree._fold_report import shown

if TYPE_CHECKING:
    from jaxfold._block._plan import Plan
    from jaxfold._block._verify import Certificate
    from jaxfold._fold._certificate import FoldCertificate
    from jaxfold._tree._fold_report import FoldReport, FoldRow


def render(renderable: Any, width: int = 100) -> str:
    """Plain text of anything that rich can print, without colour or trailing blanks."""
    # In a notebook rich would display the table by itself and leave nothing to return.
    # Names come from files: what looks like markup in them is a part of the name.
    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    console = Console(file=io.StringIO(), width=width, no_color=True, color_system=None, force_jupyter=False, **plain)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table: the first column is text, the others numbers."""
    result = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if index else "left", no_wrap=True)
    return result


def plan_table(plan: Plan) -> Table:
    result = table("", "parameters", "bytes", "FLOPs per row", "pays")
    rows = (("original", plan.original), ("direct", plan.direct), ("packed", plan.packed), ("standard", plan.standard))
    for name, cost in rows:
        pays = "" if name == "original" else "yes" if plan.pays(name) else "no"  # type: ignore[arg-type]
        result.add_row(name, f"{cost.parameters:,}", f"{cost.bytes:,}", f"{cost.flops:,}", pays)
    from_batch = "at no batch" if plan.training_batch is None else f"from batch {plan.training_batch:,}"
    result.caption = f"training through contract_traced pays {from_batch}"
    return result


def certificate_table(certificate: Certificate) -> Table:
    result = table(f"relative error, {certificate.dtype}", "original", "contracted", "contracted / original")
    for name, errors in (("outputs", certificate.outputs), ("input gradients", certificate.gradients)):
        result.add_row(
            f"{name}, largest", f"{errors.original_max:.1e}", f"{errors.contracted_max:.1e}", f"{errors.ratio:.2f}"
        )
        result.add_row(
            f"{name}, typical",
            f"{errors.original_typical:.1e}",
            f"{errors.contracted_typical:.1e}",
            f"{errors.typical_ratio:.2f}",
        )
    result.caption = (f"{certificate.verdict}\n" if certificate.verdict else "") + (
        f"{certificate.rows:,} rows against float64\ncondition of R {certificate.condition:.3g}; "
        f"variance at least {certificate.variance_lower_bound:.3g}"
    )
    if certificate.storage in HALF and certificate.dtype not in HALF:
        result.caption += f"\ncoefficients are {certificate.storage}: contract with dtype={certificate.dtype!r}"
    return result


def fold_certificate_table(certificate: FoldCertificate) -> Table:
    result = table(f"relative error, {certificate.dtype}", "original", "folded", "folded / original")
    rows = {"outputs": certificate.outputs, "input gradients": certificate.gradients}
    rows |= {f"outputs, {kind} alone": errors for kind, errors in certificate.parts.items()}
    for name, errors in rows.items():
        if errors is not None:
            figures = errors.original_typical, errors.contracted_typical
            result.add_row(name, *(f"{figure:.1e}" for figure in figures), f"{errors.typical_ratio:.2f}")
    left = f"in their own dtypes, not in float64: {', '.join(certificate.own_dtype)}\n" if certificate.own_dtype else ""
    result.caption = f"typical errors, against float64\n{left}{certificate.verdict}"
    return result


HALF = ("float16", "bfloat16")
DECISIONS = {
    "contracted": "contracted",
    "centred": "LayerNorm → RMSNorm",
    "absorbed": "scale and bias absorbed",
    "skipped": "left alone",
}


COLUMNS = ("block", "d/n/m", "parameters", "saved", "error", "original's")


def fold_text(report: FoldReport) -> str:
    """The table of the blocks, then the reasons, the notes and the patterns that matched nothing, a line each."""
    rows = [(printable(_name(row)), *_figures(row)) for row in report.rows]
    filled = max(map(len, rows), default=0)  # fold measures no errors, and a row that is no contraction saves nothing
    result = table(*COLUMNS[: max(filled, 3)])
    result.columns[0].no_wrap, result.columns[0].overflow = False, "fold"  # a path may be long; figures stay whole
    for row in rows:
        result.add_row(*row)
    before, after = report.parameters
    decided = [("contracted", report.contracted), ("centred", report.centred), ("absorbed", report.absorbed)]
    counts = ", ".join(f"{len(rows)} {name}" for name, rows in decided if rows)
    only = f"{len(report.contracted)} of {len(report.rows)} blocks contracted"
    norms = "1 norm" if len(report.rows) == 1 else f"{len(report.rows)} norms"
    lines = [
        render(result, width=160),
        f"{f'{norms}: {counts}' if report.centred or report.absorbed else only}; the whole tree: "
        f"{before:,} → {after:,} parameters, {report.bytes[0]:,} → {report.bytes[1]:,} bytes",
    ]
    if any(row.reductions is not None for row in report.rows):
        lines.append(f"sums over the features of these norms: {report.reductions[0]} → {report.reductions[1]}")
    if report.unread:
        lines.append(
            f"the function never reads {report.unread:,} of the parameters that were passed; they are not counted"
        )
    if report.merged:
        times = "" if report.merged == 1 else f" in {report.merged} places"
        lines.append(f"affine maps in a row, with no norm between them, were merged{times}")
    lines += [f"{place_of(row)}: left alone. {row.reason}" for row in report.skipped]
    lines += [f"{place_of(row)}: scale and bias absorbed. {row.reason}" for row in report.absorbed if row.reason]
    lines += [f"{row.producer}: it stays, and is counted" for row in report.contracted if row.keep_producer]
    lines += [f"{row.producer}: {note}" for row in report.rows for note in row.notes]
    hints = report.hints or ("",) * len(report.unmatched)
    lines += [f"{p}: matched nothing. {hint}".rstrip() for p, hint in zip(report.unmatched, hints, strict=True)]
    return printable("\n".join(lines))


def _name(row: FoldRow) -> str:
    times = f", {row.stack} times" if row.stack else ""
    return (f"{row.producer} → {row.to}" if row.to else place_of(row)) + times


def place_of(row: FoldRow) -> str:
    """Where it was found: in the tree, or in the code."""
    return shown(row.source) if row.source else row.producer


def _figures(row: FoldRow) -> tuple[str, ...]:
    outputs = "" if row.outputs is None else f"/{sum(math.prod(features) for features in row.outputs)}"
    known = "" if row.width is None else f"{'' if row.features is None else row.features}/{row.width}{outputs}"
    if row.original is None or row.contracted is None:
        return known, DECISIONS[row.decision] + (", weightless" if row.weightless else "")
    before, after = row.original.parameters, row.contracted.parameters
    sizes = known, f"{before:,} → {after:,}", f"{1 - after / before:.0%}"
    if row.certificate is None:
        return sizes
    errors = row.certificate.outputs
    return (*sizes, f"{errors.contracted_max:.0e}", f"{errors.original_max:.0e}")
