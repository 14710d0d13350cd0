"""What was read of a checkpoint."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxfold._errors import StructureError, kind_of
from jaxfold._files._leaf import StoredLeaf, StoredValue


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A tree of :class:`StoredLeaf` and :class:`StoredValue`, and what else its file says.

    Attributes:
        path: the file, or the directory of the tree itself.
        format: ``"npz"``, ``"msgpack"``, ``"safetensors"`` or ``"orbax"``.
        tree: nested dicts and lists.
        separator: what joins keys to names, in the formats that are flat.
        names: the names in the order of the file, in the formats that are flat.
        metadata: strings beside the tensors of a safetensors file.
    """

    path: pathlib.Path
    format: str
    tree: Any
    separator: str = "/"
    names: tuple[str, ...] = ()
    metadata: Mapping[str, Any] | None = None


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf with its keys."""
    if isinstance(tree, (Mapping, list, tuple)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def values(leaf: Any) -> Any:
    """A leaf in memory: arrays as NumPy, all else in Python's terms."""
    if isinstance(leaf, StoredValue):
        return leaf.content
    return np.asarray(leaf) if isinstance(leaf, StoredLeaf) or hasattr(leaf, "__array__") else leaf


def array_of(name: str, leaf: Any, format: str) -> np.ndarray:
    """A leaf as an array, for formats that hold nothing else; a number becomes one without axes.

    Raises:
        StructureError: if it is neither an array nor a number.
    """
    value = values(leaf)
    if isinstance(value, (bool, int, float, complex, np.ndarray, np.generic)):
        return np.asarray(value)
    kind = "nothing (None)" if value is None else kind_of(value)
    hint = "Remove it, or write msgpack or Orbax."
    raise StructureError(name, kind, f"an array or a number: {format} has nothing else", hint)


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(getattr(leaf, "nbytes", 0) for _, leaf in leaves(tree))
