"""Directories of Orbax: those of PyTreeCheckpointer and StandardCheckpointer, and steps of a CheckpointManager.

Orbax packs and compresses arrays in its own way, so that they cannot be copied as they lie: the whole tree is read into
memory, once, and written. It is written without compression, which keeps Orbax from making a second copy.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfold._errors import StructureError
from jaxfold._files._checkpoint import Checkpoint, leaves, values
from jaxfold._files._copy import Advance
from jaxfold._files._leaf import StoredLeaf, StoredValue

TREE, STEP = "_METADATA", "_CHECKPOINT_METADATA"  # files of a directory with a tree, and of one with items
WHOLE = "a whole checkpoint of Orbax"
ITEMS = ("default", "params", "state", "model")


class Place(NamedTuple):
    """A leaf by its number in the tree of the directory."""

    item: pathlib.Path
    number: int


def read_orbax(path: pathlib.Path) -> Checkpoint:
    """Reads the metadata.

    Raises:
        StructureError: if the directory is none of Orbax, or cannot be read.
    """
    item = _find_item(path)
    metadata = _metadata(item)
    nodes, structure = jax.tree.flatten(metadata)
    return Checkpoint(item, "orbax", structure.unflatten([_leaf(item, i, node) for i, node in enumerate(nodes)]))


def _find_item(path: pathlib.Path) -> pathlib.Path:
    if (path / TREE).is_file():
        return path
    found = sorted(entry.name for entry in path.iterdir() if (entry / TREE).is_file())
    chosen = found[:1] if len(found) == 1 else [name for name in ITEMS if name in found][:1]
    if chosen:
        return path / chosen[0]
    inside = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    steps = [name for name in inside if name.isdigit()]
    if found:
        hint = f"Name one of its trees: {', '.join(str(path / name) for name in found)}."
    elif steps:
        hint = f"Name one of its steps: {path / max(steps, key=int)} is the last."
    else:
        hint = ""
    expected = f"an Orbax directory with a tree (a file {TREE}) or a step with one of {', '.join(ITEMS)}"
    raise StructureError(str(path), "a directory without one tree to read", expected, hint)


def _metadata(item: pathlib.Path) -> Any:
    import orbax.checkpoint as ocp  # only here: it takes a while

    with _reading(item):
        metadata: Any = ocp.PyTreeCheckpointer().metadata(item.absolute())
    metadata = getattr(metadata, "item_metadata", metadata)
    metadata = getattr(metadata, "tree", metadata)
    if metadata is None:  # how Orbax says that it could not read it
        raise StructureError(str(item), "a directory that Orbax cannot read", WHOLE, "")
    return metadata


def _leaf(item: pathlib.Path, index: int, node: Any) -> StoredLeaf | StoredValue:
    place = Place(item, index)
    if not hasattr(node, "shape") or _is_scalar(node):
        return _OrbaxValue(place)
    return StoredLeaf(tuple(node.shape), np.dtype(node.dtype), lambda: _restore(item, index)[index], place)


class _OrbaxValue(StoredValue):
    """A number or a string, which Orbax keeps apart from its metadata."""

    def __init__(self, place: Place) -> None:
        self.origin = place

    @property
    def content(self) -> Any:  # type: ignore[override]
        return _restore(*self.origin)[self.origin.number]


def _is_scalar(node: Any) -> bool:
    from orbax.checkpoint import metadata

    return isinstance(node, metadata.value.ScalarMetadata)


def _restore(item: pathlib.Path, only: int | None = None) -> list[Any]:
    """The leaves of a directory by their numbers, arrays as NumPy; all of them or one."""
    import orbax.checkpoint as ocp

    nodes, structure = jax.tree.flatten(_metadata(item))
    wanted = [only is None or index == only for index in range(len(nodes))]

    def arguments(node: Any) -> Any:
        is_array = hasattr(node, "shape") and not _is_scalar(node)
        return ocp.RestoreArgs(restore_type=np.ndarray) if is_array else ocp.RestoreArgs()

    options: Any = ocp.args.PyTreeRestore(
        item=structure.unflatten([node if want else ocp.PLACEHOLDER for node, want in zip(nodes, wanted, strict=True)]),
        restore_args=structure.unflatten([arguments(node) for node in nodes]),
    )
    with _reading(item):
        restored = structure.flatten_up_to(ocp.PyTreeCheckpointer().restore(item.absolute(), args=options))
    return [_typed(node, value) if want else None for node, value, want in zip(nodes, restored, wanted, strict=True)]


def _typed(node: Any, value: Any) -> Any:
    """A number in the dtype that it was saved in, where that is not Python's own."""
    dtype = np.dtype(node.dtype) if _is_scalar(node) else None
    return value if dtype is None or dtype in (np.int64, np.float64) else dtype.type(value)


def write_orbax(tree: Any, path: pathlib.Path, source: Checkpoint, advance: Advance) -> None:
    """Writes a directory that PyTreeCheckpointer and StandardCheckpointer restore.

    Raises:
        StructureError: if the tree holds what Orbax has no place for.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers as handlers

    loaded = resident(tree, source)
    scalar = handlers.ScalarHandler()
    registry = handlers.create_type_handler_registry(
        *((kind, scalar) for kind in (int, float, bytes, np.number)),
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, handlers.ArrayHandler()),
        (str, handlers.StringHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    save = functools.partial(ocp.Checkpointer(handler).save, path.absolute(), args=ocp.args.PyTreeSave(loaded))
    try:
        # Orbax writes from threads that go on when it is interrupted. In a thread of its own it is not, and leaving
        # this context waits for it, so that nothing is written any more when what is there is removed.
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            executor.submit(save).result()
    except (ValueError, TypeError) as error:
        got = f"a tree that Orbax does not save ({error})"
        raise StructureError("out", got, "arrays, numbers and strings", "Write msgpack instead.") from error


def resident(tree: Any, source: Checkpoint) -> Any:
    """The tree in memory; what lies in a directory of Orbax is read in one go, much faster than leaf by leaf."""
    restored = _restore(source.path) if any(_stored(leaf) for _, leaf in leaves(tree)) else []
    return jax.tree.map(lambda leaf: restored[leaf.origin.number] if _stored(leaf) else values(leaf), tree)


def _stored(leaf: Any) -> bool:
    return isinstance(leaf, (StoredLeaf, StoredValue)) and isinstance(leaf.origin, Place)


@contextlib.contextmanager
def _reading(item: pathlib.Path) -> Iterator[None]:
    """Errors of Orbax as ours, and without its remarks on standard error."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError) as error:
        first = (str(error).splitlines() or [""])[0][:200]
        raise StructureError(str(item), f"a directory that Orbax cannot read ({first})", WHOLE, "") from error
    finally:
        logger.setLevel(level)
