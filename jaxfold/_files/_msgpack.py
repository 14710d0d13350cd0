"""Flax's msgpack format: what ``flax.serialization.msgpack_serialize`` and ``to_bytes`` write."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import flax.serialization
import msgpack

from jaxfold._errors import StructureError
from jaxfold._files._checkpoint import Checkpoint, values
from jaxfold._files._copy import Advance, Writer, writing
from jaxfold._files._leaf import StoredLeaf, StoredValue
from jaxfold._files._msgpack_index import Encoded, Index


def read_msgpack(path: pathlib.Path) -> Checkpoint:
    """Reads the structure, the shapes and dtypes of the arrays, and everything else that is small.

    Raises:
        StructureError: if the file is not in the format, or not whole.
    """
    with path.open("rb") as file:
        tree = Index(path, file).read()
    if not isinstance(tree, (dict, list)):
        raise StructureError(str(path), "a single value", "a tree of parameters, as flax.serialization writes", "")
    return Checkpoint(path, "msgpack", tree)


def write_msgpack(tree: Any, path: pathlib.Path, source: Checkpoint, advance: Advance) -> None:
    """Writes a file, with the bytes of its leaves copied where they come from such a file."""
    with writing(path, advance) as file:
        _write(tree, file, msgpack.Packer())


def _write(node: Any, file: Writer, packer: Any) -> None:
    if isinstance(node, Mapping):
        file.write(packer.pack_map_header(len(node)))
        for key, value in node.items():
            file.write(packer.pack(key))
            _write(value, file, packer)
    elif isinstance(node, (list, tuple)):
        file.write(packer.pack_array_header(len(node)))
        for value in node:
            _write(value, file, packer)
    elif isinstance(node, (StoredLeaf, StoredValue)) and isinstance(node.origin, Encoded):
        file.copy(node.origin.span)
    else:
        file.write(flax.serialization.msgpack_serialize(values(node)))
