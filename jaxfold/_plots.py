"""Figures for people, by matplotlib: where savings are, and how large errors are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxfold._errors import OptionError
from jaxfold._report import DECISIONS, place_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxfold._block._verify import Certificate
    from jaxfold._tree._fold_report import FoldReport, FoldRow

Quantity = Literal["parameters", "bytes", "flops", "reductions"]

# Two colours that stay apart for colour-blind readers and in grey.
ORIGINAL, CONTRACTED, REFERENCE = "#e69f00", "#0072b2", "0.55"
LABELS = {
    "parameters": "parameters",
    "bytes": "bytes of parameters",
    "flops": "FLOPs",
    "reductions": "sums over the features",
}
ROW_INCHES = 0.42


def report_axes(report: FoldReport, quantity: Quantity, ax: Axes | None) -> Axes:
    """A bar for each block, of what it was and of what it is; see :meth:`jaxfold.FoldReport.plot`."""
    if quantity not in get_args(Quantity):
        raise OptionError("quantity", repr(quantity), f"one of {', '.join(map(repr, get_args(Quantity)))}")
    own, ax = ax is None, _new_axes(len(report.rows)) if ax is None else ax
    pairs = [_costs(row, quantity) for row in report.rows]
    largest = max((max(before, after or 0) for before, after in pairs), default=0)
    for position, (row, (before, after)) in enumerate(zip(report.rows, pairs, strict=True)):
        if before:
            ax.barh(position, before, 0.7, color=ORIGINAL, alpha=0.45, label="before")
        if after is None:
            ax.text(before, position, f" {DECISIONS[row.decision]}", va="center", color=REFERENCE)
            continue
        ax.barh(position, after, 0.4, color=CONTRACTED, label="after")
        ax.text(max(before, after), position, f" {_change(before, after)}", va="center")
    ax.set_yticks(range(len(report.rows)), [_label(row) for row in report.rows])
    ax.set_ylim(len(report.rows) - 0.4, -0.6)  # the first block on top, as in the table
    ax.set_xlim(0, 1.25 * largest or 1)  # room for the figures at the ends of the bars
    ax.set_xlabel(LABELS[quantity])
    ax.locator_params(axis="x", nbins=6, integer=True)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    before, after = getattr(report, quantity)
    whole = "the whole tree" if quantity in ("parameters", "bytes") else "all of these"
    ax.set_title(f"{whole}: {before:,} → {after:,}", loc="left")
    if largest:
        _legend(ax, own)
    else:
        ax.set_xticks([])
    return ax


def certificate_axes(certificate: Certificate, ax: Axes | None) -> Axes:
    """Typical and largest errors on one logarithmic axis; see :meth:`jaxfold.Certificate.plot`."""
    own, ax = ax is None, _new_axes(4) if ax is None else ax
    labels = []
    for name, errors in (("outputs", certificate.outputs), ("input gradients", certificate.gradients)):
        for kind, colour in (("original", ORIGINAL), ("contracted", CONTRACTED)):
            typical, largest = getattr(errors, f"{kind}_typical"), getattr(errors, f"{kind}_max")
            position = len(labels)
            labels.append(f"{name}, {kind}")
            if not (math.isfinite(largest) and largest > 0):
                # A logarithmic axis has no place for it.
                text = "no error at all" if largest == 0 else "not finite"
                ax.text(0.01, position, text, va="center", color=colour, transform=ax.get_yaxis_transform())
                continue
            ax.plot([typical, largest], [position] * 2, color=colour, linewidth=2)
            ax.plot([typical], [position], "o", color=colour, markerfacecolor="white")
            ax.plot([largest], [position], "o", color=colour)
    ax.plot(
        [], [], "o", color=REFERENCE, markerfacecolor="white", label="typical"
    )  # for the legend, in no one's colour
    ax.plot([], [], "o", color=REFERENCE, label="largest")
    ax.axvline(certificate.outputs.unit, color=REFERENCE, linestyle="--", label=f"half an ulp of {certificate.dtype}")
    ax.set_xscale("log")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set_xlabel("error against float64, relative to the row's largest entry")
    ax.set_title(f"{certificate.rows:,} rows", loc="left")
    _legend(ax, own)
    return ax


def _new_axes(rows: int) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("figures need matplotlib, which comes with the extra 'plots': jaxfold[plots]") from error
    return pyplot.subplots(figsize=(8, 1.4 + ROW_INCHES * rows), layout="constrained")[1]


def _legend(ax: Axes, own: bool) -> None:
    """Each label once: right of the title in a figure of one's own, in the caller's axes wherever there is room."""
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if own:
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(once)}
    else:
        place = {"loc": "best", "fontsize": "small"}
    style = {"frameon": False, "columnspacing": 1.2, "handlelength": 1.4, "borderaxespad": 0.2}
    ax.legend(once.values(), once.keys(), **style, **place)


def _costs(row: FoldRow, quantity: Quantity) -> tuple[int, int | None]:
    """Before and after; none after where nothing came of it, and nothing before where the costs are not known."""
    if quantity == "reductions":
        before, after = row.reductions or (0, None)
        return before * (row.stack or 1), after if after is None else after * (row.stack or 1)
    before = 0 if row.original is None else getattr(row.original, quantity)
    return before, None if row.contracted is None else getattr(row.contracted, quantity)


def _change(before: int, after: int) -> str:
    return f"{after / before - 1:+.0%}".replace("-", "−") if before and before != after else "as it was"


def _label(row: FoldRow) -> str:
    """The end of its path or of its module's, which tells blocks apart; without either, the line of code."""
    module, _, line = place_of(row).rpartition(" at ")
    place = module or line
    times = f" × {row.stack}" if row.stack else ""
    return ("…" + place[-39:] if len(place) > 40 else place) + times
