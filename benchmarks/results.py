"""Runs benchmarks and writes what they measured into docs/results.md, each table beside the command that makes it.

The two tables of README.md are excerpts: its rows are looked up anew.

    python -m benchmarks.results [NAME ...]        all of them take 20 minutes on 2 cores that do nothing else

Only the sections that are named change, and of these only what stands between their two comments; the sentences around
them are written by hand. Each says which versions were measured, and which commit of the library.

Needs the extras cli, test and examples: pip install -e '.[dev]'.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
COMMANDS = {
    "block": "benchmarks.block --markdown",
    "training": "benchmarks.training --markdown",
    "trajectories": "benchmarks.trajectories --markdown",
    "accuracy": "benchmarks.accuracy --markdown",
    "fold": "benchmarks.fold --markdown",
    "model": "benchmarks.model --markdown",
    "checkpoints": "benchmarks.checkpoints --markdown",
}


def main() -> None:
    """Runs one after the other, and writes after each, so that an interruption loses no more than one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)}")
    names = parser.parse_args().names or list(COMMANDS)
    if unknown := set(names) - set(COMMANDS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    for name in names:
        print(f"python -m {COMMANDS[name]}", file=sys.stderr, flush=True)
        measured = subprocess.run(
            [sys.executable, "-m", *COMMANDS[name].split()], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        page = replaced(PAGE.read_text("utf-8"), name, f"{_origin(name)}\n\n{measured.strip()}")
        PAGE.write_text(page, "utf-8")
        README.write_text(excerpted(README.read_text("utf-8"), page), "utf-8")


def replaced(page: str, name: str, text: str) -> str:
    """The page with another text between the comments of a section."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"{PAGE.name} needs {start} and {end}, once each")
    return re.sub(f"{start}.*?{end}", lambda _: f"{start}\n\n{text}\n\n{end}", page, flags=re.DOTALL)


def excerpted(readme: str, page: str) -> str:
    """The README with the figures of the page in the rows of its own two tables, whichever rows these are."""
    section, lines = "", []
    for line in readme.splitlines():
        cells = _cells(line)
        if cells[:2] == ["d/n/m", "batch"]:
            section = "block" if "stock Flax" in line else "training"
        elif not line.startswith("|"):
            section = ""
        elif section and not line.startswith("|---"):
            faster, other = _row(page, section, *cells[:2])[1:3]
            other = other if section == "training" else other.split(" ")[0]
            line = f"| {cells[0]} | {cells[1]} | {faster.split(' ')[0]} | {other} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _row(page: str, section: str, size: str, batch: str) -> list[str]:
    """The row of one batch, from the table of one size."""
    title = f"**d/n/m = {size}"
    if size.startswith("y_edges"):
        title, batch = "**y_edges", f"({batch.replace(',', '')},)"
    part = page.split(f"<!-- {section} -->")[1].split(f"<!-- end of {section} -->")[0]
    table = part[part.index(title) + 2 :].split("\n**")[0]
    return next(cells for cells in map(_cells, table.splitlines()) if cells[0] == batch)


def _origin(name: str) -> str:
    """The command, what it ran with, and when."""
    libraries = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in ("jax", "jaxlib", "flax", "numpy"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "jaxfold"], check=False).returncode
    version = f"jaxfold {importlib.metadata.version('jaxfold')}"
    if commit.returncode == 0:
        version += f" at {commit.stdout.strip()}{' with changes' if changed else ''}"
    return (
        f"`python -m {COMMANDS[name]}`: {version}, {libraries}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPU cores, {datetime.date.today():%Y-%m-%d}."
    )


if __name__ == "__main__":
    main()
