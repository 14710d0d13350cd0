"""What the documentation promises: complete, linked, runnable from the first cell, and with measured figures only."""

from __future__ import annotations

import ast
import json
import pathlib
import re
from typing import Any

import pytest

import jaxfold
from benchmarks.results import COMMANDS, excerpted, replaced
from tests.test_package import LIBRARIES, NAMES

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
RESULTS = (ROOT / "docs" / "results.md").read_text("utf-8")


def _name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_public_name_has_an_entry() -> None:
    listed = re.findall(
        r"^\.\. auto(?:function|class|exception):: (\S+)$",
        "\n".join(path.read_text("utf-8") for path in ROOT.glob("docs/api/*.rst")),
        re.MULTILINE,
    )
    assert len(listed) == len(set(listed))
    extend = ast.parse((ROOT / "jaxfold" / "extend.py").read_text("utf-8"))
    rules = [alias.name for node in extend.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    public = [f"jaxfold.{name}" for name in NAMES] + [f"jaxfold.extend.{name}" for name in rules]
    # isometry is one function with two names.
    public += [f"jaxfold.{library}.{name}" for library in ("linen", "nnx") for name in LIBRARIES]
    assert set(listed) == set(public) - {"jaxfold.nnx.isometry"}


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_of_pages(page: pathlib.Path) -> None:
    """Links are relative, so that they hold in a clone, offline, and in the pages that are built."""
    for link in _links(page.read_text("utf-8")):
        if not link.startswith("https://"):
            assert (page.parent / link.split("#")[0]).exists(), link


def _cells(path: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def test_there_are_four_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=_name)
def test_notebook(path: pathlib.Path) -> None:
    """Without output, of any machine or kernel that had a name of its own; and the first cell of code installs."""
    notebook = json.loads(path.read_text("utf-8"))
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = _cells(path, "code")
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert re.search(r'^%pip install --quiet "\{source\}\[plots', "".join(code[0]["source"]), re.MULTILINE)
    for cell in _cells(path, "markdown"):
        for link in _links("".join(cell["source"])):
            assert link.startswith("https://") or (path.parent / link.split("#")[0]).exists(), link
    text = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert "jaxfold._" not in text, "what a reader copies is public"


@pytest.mark.parametrize("name", COMMANDS)
def test_results_were_measured(name: str) -> None:
    """Each section has the table that its command printed, from code as it is in a commit."""
    section = RESULTS.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0].strip()
    origin, table = section.split("\n", 1)
    assert origin.startswith(f"`python -m {COMMANDS[name]}`: jaxfold ")
    assert "with changes" not in origin
    assert "\n|---|" in table


def test_a_section_is_replaced_as_a_whole() -> None:
    page = "a\n<!-- x -->\nold \\1\n<!-- end of x -->\nb <!-- y --><!-- end of y -->"
    assert replaced(page, "x", r"new \2") == page.replace("\nold \\1\n", "\n\nnew \\2\n\n")
    with pytest.raises(ValueError, match="needs <!-- z -->"):
        replaced(page, "z", "")


def _tables(text: str) -> dict[tuple[str, ...], list[list[str]]]:
    """The Markdown tables of a text: rows by header."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        tables.setdefault(tuple(header), []).extend(rows)
    return tables


def _measured(name: str, title: str, batch: str) -> list[str]:
    """The row of one batch, in the table of which the title begins so."""
    section = RESULTS.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    (table,) = [part for part in re.split(r"^\*\*", section, flags=re.MULTILINE) if re.match(rf"{title}\W", part)]
    (row,) = [row for rows in _tables(table + "\n").values() for row in rows if row[0] == batch]
    return row


README = _tables((ROOT / "README.md").read_text("utf-8"))
SPEED = README["d/n/m", "batch", "times faster than stock Flax", "time over one bare Dense(d→m)"]
TRAINING = README["d/n/m", "batch", "gradient step, times faster", "temporary memory, MB"]


@pytest.mark.parametrize("row", SPEED, ids=" ".join)
def test_speed_in_the_readme(row: list[str]) -> None:
    size, batch, faster, slower = row
    if size.startswith("y_edges"):
        measured = _measured("block", "y_edges", f"({batch.replace(',', '')},)")
    else:
        measured = _measured("block", f"d/n/m = {size}", batch)
    assert [cell.split(" ")[0] for cell in measured[1:3]] == [faster, slower]


@pytest.mark.parametrize("row", TRAINING, ids=" ".join)
def test_training_in_the_readme(row: list[str]) -> None:
    size, batch, faster, memory = row
    measured = _measured("training", f"d/n/m = {size}", batch)
    assert [measured[1].split(" ")[0], measured[2]] == [faster, memory]


def test_excerpts_follow_the_page() -> None:
    """Figures that are changed in the page change in the README's rows, and nothing else does."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert excerpted(readme, RESULTS) == readme
    faster = _measured("block", "d/n/m = 17/512/2048", "1,024")[1]
    changed = excerpted(readme, RESULTS.replace(faster, "99.99 (1–2)")).splitlines()
    differing = [new for new, old in zip(changed, readme.splitlines(), strict=True) if new != old]
    assert differing == [line for line in changed if line.startswith("| 17/512/2048 | 1,024 | 99.99 |")]


def test_citation() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {jaxfold.__version__}\n" in text
    assert f"\n## {jaxfold.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
