"""Sharding names: what a box around a source leaf says about the axes that survive in a coefficient.

Flax keeps the logical names of axes in a box around the leaf: ``nn.Partitioned`` and its kin in Linen, an
``nnx.Variable`` with such metadata in NNX. A coefficient gets a box of the same type, with the names of the axes that
it has kept and None for the others; those in turn are said, because whoever laid them out has to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax.core.meta import AxisMetadata

from jaxfold._block._axes import source_axes
from jaxfold._block._leaves import unbox
from jaxfold._tree._resolve import Found

# How nnx spells it, newest first.
METADATA = ("out_sharding", "sharding_names", "sharding")


def sources(found: Found) -> Iterator[tuple[str, Any, tuple[int | None, ...]]]:
    """For each leaf of the contraction: its path, the leaf that its axes come from, and which of that one's axes."""
    if found.contraction is None:
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(found.contraction.params)[0]:
        keys = [key.key for key in path]
        name, axes = source_axes(keys, form=found.contraction.form, stacked=found.spec.stacked, axes=leaf.ndim)
        yield "/".join(keys), found.groups[name.removesuffix("['kernel']")]["kernel"], axes


def boxed(found: Found) -> Any:
    """``Contraction.params`` with each leaf in a box like that of its source."""
    leaves, structure = jax.tree.flatten(found.contraction and found.contraction.params)
    pairs = zip(leaves, sources(found), strict=True)
    return structure.unflatten([rebox(source, leaf, axes) for leaf, (_, source, axes) in pairs])


def bare(leaf: Any) -> Any:
    """The array in a box; also in ``{"value": array}``, which is what checkpoints make of an nnx.Variable."""
    return unbox(leaf["value"] if _is_saved_variable(leaf) else leaf)


def _is_saved_variable(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) and set(leaf) == {"value"} and not isinstance(leaf["value"], Mapping)


def axis_names(leaf: Any) -> tuple[Any, ...] | None:
    """The names in the box of a leaf, one for each axis; ``None`` if it has no box or the box no names."""
    names = getattr(leaf, "names", None) if isinstance(leaf, AxisMetadata) else _metadata(leaf)[1]
    if names is None:
        return None
    return (*tuple(names), *[None] * (len(unbox(leaf).shape) - len(tuple(names))))


def _metadata(leaf: Any) -> tuple[str, Any]:
    if isinstance(leaf, AxisMetadata) or not hasattr(leaf, "get_metadata"):
        return "", None
    metadata = leaf.get_metadata()
    return next(((key, metadata[key]) for key in METADATA if metadata.get(key) is not None), ("", None))


def rebox(leaf: Any, value: Any, axes: tuple[int | None, ...]) -> Any:
    """``value`` in a box like that of the source ``leaf``, which gave it the ``axes``; bare if that has none."""
    if _is_saved_variable(leaf):
        return {"value": rebox(leaf["value"], value, axes)}
    if unbox(leaf) is leaf:
        return value
    names = axis_names(leaf)
    kept = None if names is None else tuple(None if axis is None else names[axis] for axis in axes)
    if isinstance(leaf, AxisMetadata):
        boxed = leaf.replace_boxed(value)
        return boxed if kept is None else boxed.replace(names=kept)  # type: ignore[attr-defined]
    if kept is None:
        return leaf.replace(value)
    key = _metadata(leaf)[0]
    if hasattr(leaf, "set_metadata"):
        # The names first: some versions look whether they fit the value.
        named = leaf.copy()
        named.set_metadata(**{key: kept})
        return named.replace(value)
    boxed = leaf.replace(value)
    setattr(boxed, key, kept)
    return boxed


def lost_names(path: str, leaf: Any, kept: set[int]) -> Iterator[str]:
    """A sentence for each named axis of a source leaf that no coefficient keeps."""
    for axis, name in enumerate(axis_names(leaf) or ()):
        if name is not None and axis not in kept:
            yield f"axis {axis} of {path}, named {name!r}, has no counterpart in the contracted block"
