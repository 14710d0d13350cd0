"""Standard output and error that never stop the work: not by a closed pipe, a full disk or a narrow encoding."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Lenient:
    """A stream that keeps the first error of the one below it and drops what cannot be written from then on.

    Attributes:
        error: the first error, or None. A pipe that its reader closed, as ``head`` does, is none.
    """

    def __init__(self, stream: Any) -> None:
        self.error: OSError | None = None
        self._stream = stream
        self._lost = stream is None  # as Python has it where the descriptor is closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, unless an earlier attempt failed."""
        with self._attempt():
            if not self._lost:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes, unless an earlier attempt failed."""
        with self._attempt():
            if not self._lost:
                self._stream.flush()

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._lost = True
            if not isinstance(error, BrokenPipeError):
                self.error = error
            _discard(self._stream)


@contextlib.contextmanager
def lenient() -> Iterator[Lenient]:
    """Replaces both standard streams for the while, and gives the one for output."""
    standard: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in standard:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for the lines of a table
    out, err = Lenient(sys.stdout), Lenient(sys.stderr)
    streams: Any = (out, err)
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            yield out
        finally:
            out.flush()
            err.flush()


def _discard(stream: Any) -> None:
    """Sends what the stream still holds nowhere: the interpreter flushes it again on its way out."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
