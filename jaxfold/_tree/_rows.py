"""From what was found and done to the rows and totals of a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._block._leaves import unbox
from jaxfold._block._plan import plan_shape
from jaxfold._block._shape import Form
from jaxfold._tree._boxes import axis_names, bare, lost_names, sources
from jaxfold._tree._containers import leaves
from jaxfold._tree._fold_report import FoldRow
from jaxfold._tree._paths import Keys, join
from jaxfold._tree._resolve import Found

Places = dict[int, list[Keys]]
Copies = dict[Keys, set[Keys]]


def make_row(
    found: Found,
    form: Form,
    dtype: np.dtype | None,
    *,
    keep_producer: bool,
    places: Places,
    copies: Copies,
    removed: set[Keys],
) -> FoldRow:
    """The row of one block.

    Args:
        found: the block.
        form, dtype: as for ``contract``.
        keep_producer: whether its producer stays.
        places: of every array of the tree, by its identity.
        copies: the layers of the tree by the end of their path.
        removed: the paths of all layers that go.
    """
    spec = found.spec
    consumers = {name: join(keys) for name, keys in found.consumers.items()}
    common: dict[str, Any] = {
        "producer": join(found.producer),
        "norm": None if found.norm is None else join(found.norm),
        "consumers": consumers.get(None, consumers),
        "epsilon": spec.epsilon,
        "norm_type": spec.norm_type,
        "form": form,
    }
    if found.error or found.block is None:
        return FoldRow(**common, decision="skipped", reason=str(found.error))
    shape = found.block.shape
    common["norm_type"] = found.block.norm_type
    costs = plan_shape(shape, found.block.norm_type, dtype, keep_producer=keep_producer)
    return FoldRow(
        **common,
        decision="contracted",
        reason="",
        to=join(found.to or ()),
        features=shape.features,
        width=shape.width,
        outputs=tuple(shape.outputs.values()),
        stack=shape.stack,
        use_bias=shape.producer_bias,
        keep_producer=keep_producer,
        original=costs.original,
        contracted=costs.cost(form),
        certificate=found.certificate,
        notes=(*_about_names(found), *_about_ties(found, places, removed), *_about_copies(found, copies)),
    )


def _about_names(found: Found) -> Iterator[str]:
    kept: dict[int, set[int]] = {}
    for path, source, axes in sources(found):
        kept.setdefault(id(source), set()).update(axis for axis in axes if axis is not None)
        if (names := axis_names(source)) is not None:
            yield f"{path} has the sharding names {tuple(None if axis is None else names[axis] for axis in axes)}"
    for role, keys in found.roles.items():
        kernel = found.groups[role].get("kernel")
        if kernel is not None:
            yield from lost_names(join((*keys, "kernel")), kernel, kept.get(id(kernel), set()))


def _about_ties(found: Found, places: Places, removed: set[Keys]) -> Iterator[str]:
    for role, keys in found.roles.items():
        for key, leaf in ((key, leaf) for key, leaf in found.groups[role].items() if bare(leaf) is not None):
            others = [
                join(other)
                for other in places.get(id(bare(leaf)), [])
                if not any(other[:end] in removed for end in range(1, len(other)))
            ]
            if others and keys in removed:
                yield f"{join((*keys, key))} is also at {', '.join(others)}, where it stays"


def _about_copies(found: Found, copies: Copies) -> Iterator[str]:
    """Other subtrees with the same paths, such as the moments of an optimiser: they fit the old tree only."""
    keys = found.producer[1:] if found.producer[0] == "params" else found.producer
    own = copies.get(keys, set()) - {found.producer}
    if len(keys) > 0 and own:
        yield f"{', '.join(sorted(map(join, own)))} has the same path and no longer fits: initialise it anew"


def places_of(tree: Any) -> Places:
    """The paths of every array, by its identity."""
    places: Places = {}
    for keys, leaf in leaves(tree):
        places.setdefault(id(bare(leaf)), []).append(keys)
    return places


def copies_in(places: Places) -> Copies:
    """Return the paths of all layers that end in some keys, by these keys."""
    found: Copies = {}
    for layer in {path[:-1] for paths in places.values() for path in paths}:
        for start in range(len(layer)):
            found.setdefault(layer[start:], set()).add(layer)
    return found


def size_of(tree: Any) -> tuple[int, int]:
    """Entries and bytes of all different arrays."""
    unboxed = [unbox(leaf) for _, leaf in leaves(tree)]
    arrays = {id(leaf): leaf for leaf in unboxed if hasattr(leaf, "dtype") and hasattr(leaf, "shape")}.values()
    entries = [int(np.prod(leaf.shape)) for leaf in arrays]
    return sum(entries), sum(size * _itemsize(leaf.dtype) for size, leaf in zip(entries, arrays, strict=True))


def _itemsize(dtype: Any) -> int:
    return dtype.itemsize if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize
