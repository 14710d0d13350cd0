"""Leaves of a checkpoint that stay in their file until someone asks for their values."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfold._errors import StructureError


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    path: pathlib.Path
    offset: int
    length: int

    def read(self) -> bytearray:
        """The bytes.

        Raises:
            StructureError: if the file has become shorter.
        """
        data = bytearray(self.length)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            view, done = memoryview(data), 0
            while done < self.length:
                count = file.readinto(view[done:])
                if not count:
                    raise truncated(self.path, self.offset + self.length)
                done += count
        return data


class StoredLeaf:
    """An array in a checkpoint: its shape and dtype at once, its values as NumPy by ``numpy.asarray``.

    Nothing is kept: each call reads the file again, so that a tree of such leaves takes no memory.

    Attributes:
        shape, dtype: of the array, as NumPy has them.
        origin: where the format that read it finds its bytes again, in that format's own terms.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, load: Callable[[], np.ndarray], origin: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.origin = origin
        self._load = load

    def __repr__(self) -> str:
        return f"StoredLeaf({self.shape}, {self.dtype})"

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values in memory."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Loads it; always a new array."""
        array = self._load()
        return array if dtype is None else array.astype(dtype)


class StoredValue:
    """What a checkpoint holds that is no array: a number, a string, a file of another kind.

    Attributes:
        content: in Python's terms, or ``None`` where it has none.
        origin: as for :class:`StoredLeaf`.
    """

    def __init__(self, content: Any, origin: Any) -> None:
        self.content = content
        self.origin = origin

    def __repr__(self) -> str:
        return f"StoredValue({self.content!r})"


def from_buffer(data: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array over a buffer of its bytes in C order, of any dtype of NumPy or ml_dtypes."""
    return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)


def to_buffer(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order, without a copy where it lies so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def truncated(path: pathlib.Path, expected: int) -> StructureError:
    return StructureError(
        str(path), f"a file that ends before byte {expected:,}", "the whole checkpoint", "Fetch or save it again."
    )
