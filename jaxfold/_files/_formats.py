"""Which format a path has, and reading and writing in any of them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxfold._errors import DtypeError, OptionError, StructureError
from jaxfold._files._checkpoint import Checkpoint, leaves, nbytes
from jaxfold._files._leaf import StoredValue
from jaxfold._files._msgpack import read_msgpack, write_msgpack
from jaxfold._files._npz import read_npz, write_npz
from jaxfold._files._orbax import read_orbax, resident, write_orbax
from jaxfold._files._output import replacing
from jaxfold._files._progress import progress
from jaxfold._files._safetensors import read_safetensors, write_safetensors
from jaxfold._files._zip import Member

SUFFIXES = {
    ".npz": "npz",
    ".msgpack": "msgpack",
    ".flax": "msgpack",
    ".safetensors": "safetensors",
    ".orbax": "orbax",
}
READERS: dict[str, Callable[[pathlib.Path], Checkpoint]] = {
    "npz": read_npz,
    "msgpack": read_msgpack,
    "safetensors": read_safetensors,
    "orbax": read_orbax,
}
WRITERS: dict[str, Callable[[Any, pathlib.Path, Checkpoint, Callable[[int], None]], None]] = {
    "npz": write_npz,
    "msgpack": write_msgpack,
    "safetensors": write_safetensors,
    "orbax": write_orbax,
}
WRITABLE = ".npz, .msgpack, .flax, .safetensors, .orbax (a directory), or no suffix: the format that was read"
ACCEPTED = ".npz, .msgpack, .safetensors, or an Orbax directory"


def read_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Reads the structure of a checkpoint, with leaves that load on demand.

    Raises:
        OptionError: if there is nothing at the path.
        StructureError: if its format is unknown, or it is not whole.
    """
    if not path.exists():
        raise OptionError("checkpoint", f"{path}, which is not there", f"a checkpoint: {ACCEPTED}", "")
    if not (path.is_file() or path.is_dir()):
        raise OptionError("checkpoint", f"{path}, which is neither a file nor a directory", ACCEPTED, "")
    return READERS[format_of(path)](path)


def format_of(path: pathlib.Path) -> str:
    """The format of what is at a path, by its suffix or else its content.

    Raises:
        StructureError: if it is unknown.
    """
    if path.is_dir():
        return "orbax"
    known = SUFFIXES.get(path.suffix.lower())
    if known is not None and known != "orbax":
        return known
    with path.open("rb") as file:
        head = file.read(9)
    if head[:4] == b"PK\3\4":
        return "npz"
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "safetensors"
    if head and (0x80 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):  # a map, as Flax's checkpoint_0 is
        return "msgpack"
    raise StructureError(str(path), "a file of an unknown format", ACCEPTED, "")


def format_to_write(out: pathlib.Path, source: Checkpoint) -> str:
    """The format that the suffix of ``out`` names; that of the source if it has none.

    Raises:
        OptionError: if it has one that names no format.
    """
    suffix = out.suffix.lower()
    if suffix and suffix not in SUFFIXES:
        raise OptionError("out", f"{out}, whose suffix names no format", WRITABLE, "")
    return SUFFIXES.get(suffix, source.format)


def write_checkpoint(tree: Any, target: pathlib.Path, source: Checkpoint, format: str, *, overwrite: bool) -> None:
    """Writes a tree whose stored leaves are of ``source``: whole, or not at all.

    Args:
        tree: of nested dicts and lists.
        target: as :func:`jaxfold._files._output.check_output` returned it.
        source: the checkpoint that was read.
        format: as :func:`format_to_write` returned it.
        overwrite: whether what is at ``target`` may be replaced.

    Raises:
        StructureError, DtypeError: if the tree holds what the format has no place for.
        OptionError: if something has come to be at ``target`` in the meantime.
    """
    if source.format != format:
        _require_portable(tree, format)
        if format == "orbax":
            _require_like_keys(tree)
    with replacing(target, overwrite=overwrite) as beside, progress(f"writing {target.name}", nbytes(tree)) as advance:
        if source.format == "orbax" != format:
            tree = resident(tree, source)
        WRITERS[format](tree, beside, source, advance)


def _require_portable(tree: Any, format: str) -> None:
    """Check that another format has a place for every leaf; nothing is written before.

    Raises:
        StructureError: for a member of an .npz file whose values are never loaded, such as an array of objects.
        DtypeError: for strings, bytes, records, dates, and bytes of unknown meaning, such as bfloat16 in .npz.
    """
    for keys, leaf in leaves(tree):
        name = "/".join(map(str, keys))
        if isinstance(leaf, StoredValue) and isinstance(leaf.origin, Member):
            hint = "Remove it from the checkpoint, or write .npz, where it is copied as it lies."
            raise StructureError(name, "an array of Python objects, or no array at all", "an array of numbers", hint)
        dtype = getattr(leaf, "dtype", None)
        if isinstance(dtype, np.dtype) and (dtype.kind in "OSUmM" or dtype.type is np.void):
            hint = "Save it as an array of numbers first"
            hint += ": bfloat16 as msgpack or safetensors." if dtype == np.dtype("V2") else ", or remove it."
            raise DtypeError(name, f"dtype {dtype}", f"an array of numbers: {format} would not restore this one", hint)


def _require_like_keys(node: Any, path: tuple[str, ...] = ()) -> None:
    """Check that the keys of each mapping have one type, because JAX sorts the keys before Orbax writes them.

    Raises:
        StructureError: if a mapping has keys of several types.
    """
    if not isinstance(node, (Mapping, list, tuple)):
        return
    if isinstance(node, Mapping) and len({type(key) for key in node}) > 1:
        name = "/".join(path) or "the root"
        raise StructureError(
            name, "keys of several types", "keys of one type in each mapping", "Write msgpack instead."
        )
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        _require_like_keys(value, (*path, str(key)))
