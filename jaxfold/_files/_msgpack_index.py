"""Where the leaves of a msgpack file lie, found without reading their values.

A value is one byte that says its kind, a length for some kinds, and that many bytes or values. Flax packs an array as
an extension of type 1 that holds (shape, name of the dtype, bytes), a NumPy scalar likewise as type 3, and an array
above 1 GiB as a map with the array's shape and its flat chunks.

Source: the msgpack specification; flax.serialization.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any, BinaryIO, NamedTuple, NoReturn

import flax.serialization
import msgpack
import numpy as np

from jaxfold._errors import StructureError
from jaxfold._files._leaf import Span, StoredLeaf, StoredValue, from_buffer, truncated
from jaxfold._files._nest import DEEPEST

ARRAY, SCALAR = 1, 3  # Flax's types of extensions
CHUNKED = "__msgpack_chunked_array__"
# The bytes that follow a first byte; the size of the length that follows it, for values of any length.
FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
FIXED |= {0xCC + i: 2**i for i in range(4)} | {0xD0 + i: 2**i for i in range(4)}
SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
FIXED_EXTENSIONS = {0xD4 + i: 2**i for i in range(5)}
EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
LISTS = {0xDC: 2, 0xDD: 4}
MAPS = {0xDE: 2, 0xDF: 4}


class Encoded(NamedTuple):
    """The bytes of a leaf with all that belongs to it."""

    span: Span


class Head(NamedTuple):
    """The kind of a value: how many bytes, entries or pairs follow; the type of an extension."""

    kind: str
    length: int
    extension: int = -1


class Index:
    """A walk over an open file."""

    def __init__(self, path: pathlib.Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size

    def read(self) -> Any:
        """The tree.

        Raises:
            StructureError: if the file is not in the format, or not whole.
        """
        tree = self._value("", 0)
        if self._file.tell() != self._size:
            self._malformed(f"{self._size - self._file.tell():,} bytes after the end of the tree")
        return tree

    def _value(self, name: str, depth: int) -> Any:
        if depth > DEEPEST:
            self._malformed(f"values nested more than {DEEPEST} deep")
        start = self._file.tell()
        head = self._head()
        if head.kind == "map":
            return self._map(name, start, head.length, depth)
        if head.kind == "list":
            return [self._value(f"{name}/{index}", depth + 1) for index in range(head.length)]
        if head.kind == "extension" and head.extension in (ARRAY, SCALAR):
            return self._array(name, start, self._file.tell() + head.length)
        self._skip(head.length)
        content = self._restore(start)
        return None if content is None else StoredValue(content, Encoded(self._span(start)))  # None is no leaf

    def _map(self, name: str, start: int, length: int, depth: int) -> Any:
        tree: dict[Any, Any] = {}
        for _ in range(length):
            key_start = self._file.tell()
            self._skip(self._head().length)
            key = self._restore(key_start)
            if not isinstance(key, (str, int, bytes)) or key in tree:
                self._malformed(f"the key {key!r}{' twice' if isinstance(key, str) else ''} in {name or 'the root'!r}")
            tree[key] = self._value(f"{name}/{key}" if name else str(key), depth + 1)
        return self._chunked(name, tree, self._span(start)) if CHUNKED in tree else tree

    def _array(self, name: str, start: int, end: int) -> StoredLeaf:
        head = self._head()
        position = self._file.tell()
        if head != Head("list", 3):
            self._malformed(f"no array at {name!r}")
        self._skip_list()
        shape = tuple(self._restore(position))
        position = self._file.tell()
        self._skip(self._head().length)
        dtype = self._dtype(name, self._restore(position))
        data = self._head()
        span = Span(self._path, self._file.tell(), data.length)
        self._skip(data.length)
        whole = all(type(size) is int and size >= 0 for size in shape)
        if not whole or span.length != math.prod(shape) * dtype.itemsize or self._file.tell() != end:
            self._malformed(f"{span.length:,} bytes for {name!r}, {dtype} of shape {shape}")
        return StoredLeaf(shape, dtype, lambda: from_buffer(span.read(), dtype, shape), Encoded(self._span(start)))

    def _skip_list(self) -> None:
        head = self._head()
        if head.kind != "list":
            self._malformed("an array without a shape")
        for _ in range(head.length):
            self._skip(self._head().length)

    def _chunked(self, name: str, tree: dict[Any, Any], span: Span) -> StoredLeaf:
        try:
            shape = tuple(tree["shape"][str(index)].content for index in range(len(tree["shape"])))
            chunks = [tree["chunks"][str(index)] for index in range(len(tree["chunks"]))]
            dtype = chunks[0].dtype
            whole = sum(chunk.size for chunk in chunks) == math.prod(shape)
        except (KeyError, AttributeError, IndexError, TypeError):
            self._malformed(f"chunks of {name!r} without a shape")
        if not whole or any(chunk.dtype != dtype for chunk in chunks):
            self._malformed(f"chunks of {name!r} that do not make an array")

        def load() -> np.ndarray:
            result, done = np.empty(math.prod(shape), dtype), 0  # one chunk in memory beside it, not all
            for chunk in chunks:
                result[done : done + chunk.size] = np.asarray(chunk).reshape(-1)
                done += chunk.size
            return result.reshape(shape)

        return StoredLeaf(shape, dtype, load, Encoded(span))

    def _dtype(self, name: str, spelled: Any) -> np.dtype:
        try:
            dtype = np.dtype(spelled.decode() if isinstance(spelled, bytes) else spelled)
        except (TypeError, ValueError, SyntaxError):  # by the kind of mistake in the name
            dtype = None
        if dtype is None or spelled is None or dtype.hasobject or dtype.subdtype:  # NumPy takes None for float64
            self._malformed(f"the dtype {spelled!r} of {name!r}")
        return dtype

    def _head(self) -> Head:
        first = self._number(1)
        for low, high, kind in ((0x80, 0x8F, "map"), (0x90, 0x9F, "list"), (0xA0, 0xBF, "other")):
            if low <= first <= high:
                return Head(kind, first - low)
        if first <= 0x7F or first >= 0xE0:
            return Head("other", 0)
        if first in FIXED:
            return Head("other", FIXED[first])
        for table, kind in ((SIZED, "other"), (LISTS, "list"), (MAPS, "map")):
            if first in table:
                return Head(kind, self._number(table[first]))
        if first in FIXED_EXTENSIONS or first in EXTENSIONS:
            length = FIXED_EXTENSIONS[first] if first in FIXED_EXTENSIONS else self._number(EXTENSIONS[first])
            return Head("extension", length, self._number(1))
        self._malformed(f"the byte {first:#x} at {self._file.tell() - 1:,}")

    def _number(self, size: int) -> int:
        data = self._file.read(size)
        if len(data) < size:
            raise truncated(self._path, self._file.tell() + size)
        return int.from_bytes(data, "big")

    def _skip(self, length: int) -> None:
        position = self._file.tell() + length
        if position > self._size:
            raise truncated(self._path, position)
        self._file.seek(position)

    def _span(self, start: int) -> Span:
        return Span(self._path, start, self._file.tell() - start)

    def _restore(self, start: int) -> Any:
        """The value between ``start`` and here, as Flax restores it; the file stays where it is."""
        end = self._file.tell()
        self._file.seek(start)
        data = self._file.read(end - start)
        try:
            return flax.serialization.msgpack_restore(data)
        except (ValueError, TypeError, msgpack.UnpackException):
            self._malformed(f"a value that cannot be decoded at {start:,}")

    def _malformed(self, got: str) -> NoReturn:
        raise StructureError(
            str(self._path), got, "a file written by flax.serialization", "It is damaged, or of another format."
        )
