"""NumPy's .npz: a zip archive of .npy files, one for each array."""

from __future__ import annotations

import io
import pathlib
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np

from jaxfold._errors import DtypeError, StructureError
from jaxfold._files._checkpoint import Checkpoint, array_of
from jaxfold._files._copy import Advance, writing
from jaxfold._files._leaf import Span, StoredLeaf, StoredValue, to_buffer
from jaxfold._files._nest import flatten, in_order, nest, separator_of
from jaxfold._files._zip import LOCAL, Archive, Member

SUFFIX = ".npy"
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, struct.error)


def read_npz(path: pathlib.Path) -> Checkpoint:
    """Reads the directory and the header of every array.

    Raises:
        StructureError: if the file is not in the format, or not whole.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = [_read_member(path, archive, file, info) for info in archive.infolist()]
    except DAMAGED as error:
        raise StructureError(str(path), f"a file that cannot be read ({error})", "an .npz file of NumPy", "") from error
    flat = dict(members)
    if len(flat) < len(members):
        raise StructureError(str(path), "two arrays of one name", "an .npz file of NumPy", "")
    separator = separator_of(flat)
    return Checkpoint(path, "npz", nest(flat, separator), separator, tuple(flat))


def _read_member(
    path: pathlib.Path, archive: zipfile.ZipFile, file: BinaryIO, info: zipfile.ZipInfo
) -> tuple[str, StoredLeaf | StoredValue]:
    file.seek(info.header_offset)
    head = file.read(30)
    if head[:4] != LOCAL:
        raise zipfile.BadZipFile(f"no member at {info.header_offset:,}")
    lengths = struct.unpack("<2H", head[26:])
    span = Span(path, info.header_offset + 30 + sum(lengths), info.compress_size)
    if span.offset + span.length > path.stat().st_size:
        raise zipfile.BadZipFile(f"{info.filename!r} ends after the file")
    origin = Member(info, span)
    if not info.filename.endswith(SUFFIX):
        return info.filename, StoredValue(None, origin)
    with archive.open(info) as data:
        shape, dtype, length = _read_header(data)
    if dtype.hasobject:
        return info.filename.removesuffix(SUFFIX), StoredValue(None, origin)  # pickled: passed on, never loaded
    if info.file_size != length + int(np.prod(shape)) * dtype.itemsize:
        raise zipfile.BadZipFile(f"{info.filename!r} has {info.file_size:,} bytes for {dtype} of shape {shape}")
    native = dtype.newbyteorder("=")

    def load() -> np.ndarray:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(info) as data:
                array = np.lib.format.read_array(data, allow_pickle=False)
                data.read()  # to the end, where the checksum is compared
        except DAMAGED as error:
            hint = "It is damaged: fetch or save it again."
            raise StructureError(str(path), f"{info.filename!r} unreadable ({error})", "an array", hint) from error
        return array.astype(native, copy=False)

    return info.filename.removesuffix(SUFFIX), StoredLeaf(shape, native, load, origin)


def _read_header(data: Any) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype, and the length of the header."""
    version = np.lib.format.read_magic(data)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(data)
    return shape, dtype, data.tell()


def write_npz(tree: Any, path: pathlib.Path, source: Checkpoint, advance: Advance) -> None:
    """Writes a file, with members copied as they lie where they come from such a file.

    New ones are compressed if any of those is.

    Raises:
        StructureError, DtypeError: if the tree holds what the format has no place for.
    """
    same = source.format == "npz"
    flat = in_order(flatten(tree, source.separator if same else "/"), source.names if same else ())
    compress = any(_stored(leaf) and leaf.origin.info.compress_type != zipfile.ZIP_STORED for leaf in flat.values())
    for name, leaf in flat.items():
        if not _stored(leaf):
            _require_numpy(name, leaf if isinstance(leaf, StoredLeaf) else array_of(name, leaf, ".npz"))
    with writing(path, advance) as file:
        archive = Archive(file)
        for name, leaf in flat.items():
            if _stored(leaf):
                archive.copy(leaf.origin)
            else:
                array = np.ascontiguousarray(array_of(name, leaf, ".npz")).reshape(leaf_shape(leaf))
                archive.add(name + SUFFIX, (_header(array), to_buffer(array)), compress=compress)
        archive.finish()


def leaf_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf; of a number, none."""
    return tuple(getattr(leaf, "shape", ()))


def _stored(leaf: Any) -> bool:
    return isinstance(leaf, (StoredLeaf, StoredValue)) and isinstance(leaf.origin, Member)


def _header(array: np.ndarray) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return header.getvalue()


def _require_numpy(name: str, leaf: Any) -> None:
    if leaf.dtype.kind == "V":  # what NumPy knows of bfloat16: two bytes of unknown meaning
        hint = "Choose another dtype, or write msgpack or safetensors."
        raise DtypeError(name, f"dtype {leaf.dtype}", "a dtype of NumPy itself: .npz has no other", hint)
