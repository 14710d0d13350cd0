"""Tables for people."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from jaxfold._block._plan import Plan
    from jaxfold._block._verify import Certificate


def render(renderable: Any, width: int = 100) -> str:
    """Plain text of anything that rich can print, without colour or trailing blanks."""
    console = Console(file=io.StringIO(), width=width, no_color=True, color_system=None)
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
    result.caption = (
        f"{certificate.rows:,} rows against float64; condition of R {certificate.condition:.3g}; "
        f"variance at least {certificate.variance_lower_bound:.3g}"
    )
    return result
