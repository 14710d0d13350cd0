"""The safetensors format: an 8-byte length, little-endian; a JSON header of that length; the data.

The header maps names to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counting from the end of the
header, and ``__metadata__`` to strings. The tensors fill the data without a gap.
"""

from __future__ import annotations

import json
import math
import pathlib
import struct
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfold._errors import DtypeError, StructureError
from jaxfold._files._checkpoint import Checkpoint, array_of
from jaxfold._files._copy import Advance, writing
from jaxfold._files._leaf import Span, StoredLeaf, from_buffer, to_buffer, truncated
from jaxfold._files._nest import flatten, in_order, nest, separator_of

DTYPES = {
    **{"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16)},
    **{"BF16": np.dtype(jnp.bfloat16), "F8_E4M3": np.dtype(jnp.float8_e4m3fn), "F8_E5M2": np.dtype(jnp.float8_e5m2)},
    **{"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8)},
    **{"U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8)},
    **{"BOOL": np.dtype(np.bool_), "C64": np.dtype(np.complex64)},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes: what other readers accept
METADATA = "__metadata__"


class Tensor(NamedTuple):
    """The bytes of a tensor, and its dtype in the words of the format, which may know more of them than NumPy."""

    span: Span
    dtype: str


def read_safetensors(path: pathlib.Path) -> Checkpoint:
    """Reads the header.

    Raises:
        StructureError: if the file is not in the format, or not whole.
    """
    size = path.stat().st_size
    if size < 8:
        raise truncated(path, 8)
    (length,) = struct.unpack("<Q", Span(path, 0, 8).read())
    if length > LONGEST_HEADER:
        raise _malformed(path, f"a header of {length:,} bytes")
    if size < 8 + length:
        raise truncated(path, 8 + length)
    try:
        header = json.loads(Span(path, 8, length).read().decode())
        json.dumps(header, ensure_ascii=False).encode()  # half a surrogate pair is no character, and cannot be written
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _malformed(path, "a header that is no JSON object")
    metadata = header.pop(METADATA, None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    flat = dict(sorted(tensors.items(), key=lambda item: _place(item[1])))
    end = 8 + length
    for name, leaf in flat.items():
        if leaf.origin.span.offset != end:
            raise _malformed(path, f"a gap or an overlap before {name!r}")
        end += leaf.origin.span.length
    if size < end:
        raise truncated(path, end)
    if size > end:
        raise _malformed(path, f"{size - end:,} bytes after the last tensor")
    separator = separator_of(flat)
    return Checkpoint(path, "safetensors", nest(flat, separator), separator, tuple(flat), metadata)


def _place(leaf: StoredLeaf) -> tuple[int, int]:
    """Return the place of a tensor among the others. A tensor without bytes comes before the one at its offset."""
    return leaf.origin.span.offset, leaf.origin.span.length


def _tensor(path: pathlib.Path, name: str, entry: Any, start: int) -> StoredLeaf:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _malformed(path, f"the entry {name!r} without a dtype, a shape and two offsets") from None
    numbers = (*shape, begin, end)
    if not (isinstance(dtype, str) and all(type(number) is int and number >= 0 for number in numbers)):
        raise _malformed(path, f"the entry {name!r} with {entry}")
    known = DTYPES.get(dtype)
    if end < begin or (known is not None and end - begin != math.prod(shape) * known.itemsize):
        raise _malformed(path, f"{end - begin:,} bytes for {name!r}, {dtype} of shape {shape}")
    span = Span(path, start + begin, end - begin)

    def load() -> np.ndarray:
        if known is None:
            raise DtypeError(name, f"dtype {dtype}", "one that NumPy can hold", "It can only be copied as it is.")
        return from_buffer(span.read(), known, shape)

    # An unknown dtype stands as raw bytes, which no block can be made of.
    return StoredLeaf(shape, known or np.dtype("V1"), load, Tensor(span, dtype))


def write_safetensors(tree: Any, path: pathlib.Path, source: Checkpoint, advance: Advance) -> None:
    """Writes a file, with the spans of its tensors copied where they come from such a file.

    Raises:
        StructureError, DtypeError: if the tree holds what the format has no place for.
    """
    same = source.format == "safetensors"
    flat = in_order(flatten(tree, source.separator if same else "/"), source.names if same else ())
    if METADATA in flat:
        raise StructureError(METADATA, "a leaf of this name", "another: the format keeps it for itself", "")
    header: dict[str, Any] = {} if source.metadata is None else {METADATA: source.metadata}
    described = {name: _describe(name, leaf) for name, leaf in flat.items()}
    order = _aligned([name for name in flat if _stored(flat[name])], described)
    order = _aligned(order, described, [name for name in flat if not _stored(flat[name])])
    position = 0
    for name in order:
        dtype, shape, length = described[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + length]}
        position += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with writing(path, advance) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            leaf = flat[name]
            if _stored(leaf):
                file.copy(leaf.origin.span)
            else:
                file.write(to_buffer(array_of(name, leaf, "safetensors")))


def _stored(leaf: Any) -> bool:
    return isinstance(leaf, StoredLeaf) and isinstance(leaf.origin, Tensor)


def _describe(name: str, leaf: Any) -> tuple[str, tuple[int, ...], int]:
    """Dtype, shape and length in bytes."""
    if _stored(leaf):
        return leaf.origin.dtype, leaf.shape, leaf.origin.span.length
    array = leaf if isinstance(leaf, StoredLeaf) else array_of(name, leaf, "safetensors")
    if array.dtype not in NAMES:
        raise DtypeError(name, f"dtype {array.dtype}", f"one of {', '.join(NAMES.values())}, as safetensors has", "")
    return NAMES[array.dtype], array.shape, array.nbytes


def _aligned(order: list[str], described: dict[str, Any], new: list[str] | None = None) -> list[str]:
    """The order with each new tensor before the first old one of smaller entries, so that no tensor is misaligned."""
    order = list(order)
    for name in new or ():
        size = _entry_size(described[name])
        index = next((i for i, other in enumerate(order) if _entry_size(described[other]) < size), len(order))
        order.insert(index, name)
    return order


def _entry_size(description: tuple[str, tuple[int, ...], int]) -> int:
    dtype = DTYPES.get(description[0])
    return 1 if dtype is None else dtype.itemsize


def _malformed(path: pathlib.Path, got: str) -> StructureError:
    return StructureError(str(path), got, "a safetensors file", "It is damaged, or of another format.")
