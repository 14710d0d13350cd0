"""One table, for the terminal or for the documentation."""

from __future__ import annotations

from rich.console import Console

from jaxfold._report import table


def show(title: str, columns: tuple[str, ...], rows: list[list[str]], *, markdown: bool, width: int = 140) -> None:
    """Prints the rows: the first column is text, the others numbers."""
    if markdown:
        print(f"\n**{title}**\n")
        print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)
        return
    result = table(*columns, title=title)
    for row in rows:
        result.add_row(*row)
    Console(width=width, highlight=False).print(result, "")
