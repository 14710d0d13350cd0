"""Figures: what they draw is what the report and the certificate say, entry by entry."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

import jaxfold

BLOCKS = {
    "layer_0": (4, 64, 8),  # contracted
    "layer_1": (100, 64, 8),  # would grow
    "layer_2": (4, 32, 16),  # contracted
}


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def report() -> jaxfold.FoldReport:
    rng = np.random.default_rng(0)
    params = {
        name: {
            "up": {"kernel": rng.normal(size=(d, n))},
            "norm": {"bias": np.ones(n)},
            "down": {"kernel": rng.normal(size=(n, m))},
        }
        for name, (d, n, m) in BLOCKS.items()
    }
    paths = jaxfold.BlockPaths(producer="layer_*/up", norm="layer_*/norm", consumers="layer_*/down", epsilon=1e-5)
    return jaxfold.contract_tree(params, paths)[1]


def _first_row_is_on_top(ax: Any) -> bool:
    bottom, top = ax.get_ylim()
    return bottom > top


def _legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def _bars(ax: Any) -> list[float]:
    return [patch.get_width() for patch in ax.patches]


def _texts(ax: Any) -> list[str]:
    return [text.get_text().strip() for text in ax.texts]


@pytest.mark.parametrize("quantity", ["parameters", "bytes", "flops"])
def test_report(report: jaxfold.FoldReport, quantity: Any) -> None:
    """A pair of bars for each block that has costs, in the order of the rows, and a sentence for the others."""
    ax = report.plot(quantity=quantity)
    pairs = [
        (getattr(row.original, quantity), getattr(row.contracted, quantity))
        for row in report.rows
        if row.decision == "contracted"
    ]
    assert len(pairs) == 2
    assert _bars(ax) == [value for pair in pairs for value in pair]
    changes = [f"−{1 - after / before:.0%}" for before, after in pairs]
    assert _texts(ax) == [changes[0], "left alone", changes[1]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["layer_0/up", "layer_1/up", "layer_2/up"]
    before, after = getattr(report, quantity)
    of_what = "all of these" if quantity == "flops" else "the whole tree"
    assert ax.get_title(loc="left") == f"{of_what}: {before:,} → {after:,}"
    assert _first_row_is_on_top(ax)
    assert _legend(ax) == ["before", "after"]
    assert ax.get_xlim()[1] > max(_bars(ax))


def test_bars_lie_on_their_rows(report: jaxfold.FoldReport) -> None:
    ax: Any = report.plot()
    assert [round(patch.get_y() + patch.get_height() / 2, 9) for patch in ax.patches] == [0, 0, 2, 2]


def test_report_of_folded_function() -> None:
    """A norm that is centred costs what it did, but has fewer sums over its features, in every layer of a stack."""
    row = jaxfold.FoldRow(
        producer="", norm=None, consumers="", decision="centred", reason="", epsilon=1e-6, norm_type="layernorm",
        form="direct", width=8, original=jaxfold.Cost(30, 120, 60), reductions=(2, 1), stack=6,
        source="Model/block_3/norm at model.py:12:3 (f)",
    )  # fmt: skip
    report = jaxfold.FoldReport(rows=(row,), unmatched=(), parameters=(10, 10), bytes=(40, 40))
    ax = report.plot(quantity="reductions")
    assert _bars(ax) == [12, 6]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["Model/block_3/norm × 6"]
    assert ax.get_title(loc="left") == "all of these: 12 → 6"
    ax = report.plot()
    assert _bars(ax) == [30]
    assert _texts(ax) == ["LayerNorm → RMSNorm"]


def test_empty_report() -> None:
    report = jaxfold.FoldReport(rows=(), unmatched=("up",), parameters=(3, 3), bytes=(12, 12))
    ax = report.plot()
    assert _bars(ax) == []
    assert list(ax.get_xticks()) == []
    assert ax.get_legend() is None


def test_growth_and_standstill(report: jaxfold.FoldReport) -> None:
    """A block may grow where that was allowed; then the bar of what it became is the longer one."""
    small, large = jaxfold.Cost(10, 40, 5), jaxfold.Cost(15, 60, 5)
    row = dataclasses.replace(report.rows[0], original=small, contracted=large)
    grown = dataclasses.replace(report, rows=(row,))
    assert _texts(grown.plot()) == ["+50%"]
    assert _texts(grown.plot(quantity="flops")) == ["as it was"]


def test_given_axes(report: jaxfold.FoldReport) -> None:
    _, (left, right) = pyplot.subplots(1, 2)
    figures = pyplot.get_fignums()
    assert report.plot(ax=left) is left
    assert _certificate().plot(ax=right) is right
    assert pyplot.get_fignums() == figures
    assert left.patches
    assert right.lines


def test_unknown_quantity(report: jaxfold.FoldReport) -> None:
    with pytest.raises(jaxfold.OptionError, match="quantity: got 'params'; expected one of 'parameters', 'bytes'"):
        report.plot(quantity="params")  # type: ignore[arg-type]


OUTPUTS = jaxfold.Errors(8e-7, 1e-7, contracted_max=4e-7, contracted_typical=5e-8, unit=2.0**-24)
GRADIENTS = jaxfold.Errors(9e-7, 3e-7, contracted_max=2e-7, contracted_typical=6e-8, unit=2.0**-8)


def _certificate(outputs: jaxfold.Errors = OUTPUTS) -> jaxfold.Certificate:
    return jaxfold.Certificate(outputs, GRADIENTS, condition=3.0, variance_lower_bound=0.1, rows=2000, dtype="float32")


def _points(ax: Any) -> list[tuple[float, float]]:
    lines = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines]


def test_certificate() -> None:
    ax = _certificate().plot()
    assert _points(ax) == [(1e-7, 0), (8e-7, 0), (5e-8, 1), (4e-7, 1), (3e-7, 2), (9e-7, 2), (6e-8, 3), (2e-7, 3)]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [f"{x}, {y}" for x in ("outputs", "input gradients") for y in ("original", "contracted")]
    lines: Any = ax.lines
    assert [line.get_xdata()[0] for line in lines if line.get_linestyle() == "--"] == [2.0**-24]
    assert ax.get_title(loc="left") == "2,000 rows"
    assert _legend(ax) == ["typical", "largest", "half an ulp of float32"]
    assert _first_row_is_on_top(ax)


@pytest.mark.parametrize(("error", "text"), [(0.0, "no error at all"), (np.inf, "not finite"), (np.nan, "not finite")])
def test_certificate_without_a_figure(error: float, text: str) -> None:
    """What a logarithmic axis can't show is said in words, and the rest is drawn."""
    ax = _certificate(dataclasses.replace(OUTPUTS, contracted_max=error, contracted_typical=error)).plot()
    assert _texts(ax) == [text]
    assert len(_points(ax)) == 6


def test_of_a_real_block() -> None:
    rng = np.random.default_rng(0)
    layers: Any = (
        {"kernel": rng.normal(size=(4, 32)).astype("float32")},
        None,
        {"kernel": rng.normal(size=(32, 8)).astype("float32")},
    )
    certificate = jaxfold.verify(
        jaxfold.Block(*layers, epsilon=1e-6),
        jaxfold.contract(*layers, epsilon=1e-6),
        rng.normal(size=(50, 4)).astype("float32"),
    )
    ax = certificate.plot()
    ax.figure.canvas.draw()
    assert (certificate.outputs.contracted_max, 1) in _points(ax)


def test_without_matplotlib(report: jaxfold.FoldReport, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    for plot in (report.plot, _certificate().plot):
        with pytest.raises(ImportError, match=r"jaxfold\[plots\]"):
            plot()
