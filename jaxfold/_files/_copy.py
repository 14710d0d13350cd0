"""Writing a file of which most is copied from another.

Where source and target lie alike on the pages of the file system, the operating system is asked to copy: the bytes do
not pass through the process, and a file system that can share them does not copy them at all. Elsewhere that is slower
than a buffer that fits the processor's cache, by half on Linux, and a larger buffer is slower still, four times.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxfold._files._leaf import Span, truncated

Advance = Callable[[int], None]
SMALL = 1 << 16  # bytes: a copy up to here is not worth a system call of its own
PENDING = 1 << 20  # bytes gathered before they are written
CHUNK = 1 << 26  # bytes between two looks at the progress, and at signals
BUFFER = 1 << 18
PAGE = 1 << 12


class Writer:
    """A file under construction: bytes are appended, and spans of other files.

    Spans that follow each other in their file are copied in one piece.
    """

    def __init__(self, file: Any, advance: Advance) -> None:
        self._file = file
        self._advance = advance
        self._pending = bytearray()
        self._span: Span | None = None
        self._sources: dict[pathlib.Path, Any] = {}
        self._position = 0

    @property
    def position(self) -> int:
        """Bytes appended so far."""
        return self._position

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends bytes."""
        self._copy_span()
        self._position += len(data)
        if len(data) < PENDING:
            self._pending += data
        if len(data) >= PENDING or len(self._pending) >= PENDING:
            self._write_pending()
        if len(data) >= PENDING:
            self._write_through(memoryview(data))

    def copy(self, span: Span) -> None:
        """Appends the bytes of a span, perhaps later."""
        last = self._span
        if last is not None and (last.path, last.offset + last.length) == (span.path, span.offset):
            self._span = Span(last.path, last.offset, last.length + span.length)
        else:
            self._copy_span()
            self._span = span
        self._position += span.length

    def finish(self) -> None:
        """Writes what is left, and closes the files that were copied from."""
        try:
            self._copy_span()
            self._write_pending()
        finally:
            self.close()

    def close(self) -> None:
        """Closes the files that were copied from."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, bytearray()
        self._write_through(memoryview(pending))

    def _write_through(self, data: memoryview) -> None:
        while data:
            done = self._file.write(data[:CHUNK])
            self._advance(done)
            data = data[done:]

    def _copy_span(self) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        if span.length <= SMALL:
            self._pending += span.read()
            return
        self._write_pending()
        if span.path not in self._sources:
            self._sources[span.path] = span.path.open("rb", buffering=0)
        source = self._sources[span.path]
        done = _copy_in_kernel(source, self._file, span, self._advance)
        source.seek(span.offset + done)
        buffer = memoryview(bytearray(min(BUFFER, span.length - done)))
        while done < span.length:
            count = source.readinto(buffer[: span.length - done])
            if not count:
                raise truncated(span.path, span.offset + span.length)
            self._write_through(buffer[:count])
            done += count


def _copy_in_kernel(source: Any, target: Any, span: Span, advance: Advance) -> int:
    """How many bytes could be copied so: all, or none where the system has no such call for these files."""
    copy_file_range = getattr(os, "copy_file_range", None)
    done = 0
    if (target.tell() - span.offset) % PAGE:
        return done
    while copy_file_range is not None and done < span.length:
        length = min(CHUNK, span.length - done)
        try:
            count = copy_file_range(source.fileno(), target.fileno(), length, span.offset + done)
        except OSError:
            break  # another file system, say; a full disk is met again, and reported, by the copy through the buffer
        if not count:
            break
        advance(count)
        done += count
    return done


@contextlib.contextmanager
def writing(path: pathlib.Path, advance: Advance) -> Iterator[Writer]:
    """A :class:`Writer` of a new file."""
    with path.open("xb", buffering=0) as file:
        writer = Writer(file, advance)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()
