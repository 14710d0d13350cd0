"""A progress bar for people who wait at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

WORTH_A_BAR = 1 << 26  # bytes


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that takes how many bytes more are done, and shows them on a terminal where there are many.

    Example:
        >>> from jaxfold._files._progress import progress
        >>> with progress("writing", 100) as advance:
        ...     advance(100)
    """
    if total < WORTH_A_BAR or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
