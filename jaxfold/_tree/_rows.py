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
from jaxfold._tree._boxes import axis_names, lost_names, sources
from jaxfold._tree._containers import leaves
from jaxfold._tree._fold_report import FoldRow
from jaxfold._tree._paths import Keys, join
from jaxfold._tree._resolve import Found

Places = dict[int, list[Keys]]


def make_row(found: Found, form: Form, dtype: np.dtype | None, *, keep_producer: bool, places: Places) -> FoldRow:
    """The row of one block.

    Args:
        found: the block.
        form, dtype: as for ``contract``.
        keep_producer: whether its producer stays.
        places: of every array of the tree, by its identity.
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
    costs = plan_shape(shape, spec.norm_type, dtype, keep_producer=keep_producer)
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
        notes=(*_about_names(found), *_about_ties(found, places)),
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


def _about_ties(found: Found, places: Places) -> Iterator[str]:
    for role, keys in found.roles.items():
        for key, leaf in found.groups[role].items():
            others = [join(other) for other in places.get(id(unbox(leaf)), []) if other[: len(keys)] != keys]
            if others:
                yield f"{join((*keys, key))} is also at {', '.join(others)}, where it stays"


def places_of(tree: Any) -> Places:
    """The paths of every array, by its identity."""
    places: Places = {}
    for keys, leaf in leaves(tree):
        places.setdefault(id(unbox(leaf)), []).append(keys)
    return places


def size_of(tree: Any) -> tuple[int, int]:
    """Entries and bytes of all different arrays."""
    bare = [unbox(leaf) for _, leaf in leaves(tree)]
    arrays = {id(leaf): leaf for leaf in bare if hasattr(leaf, "dtype") and hasattr(leaf, "shape")}.values()
    entries = [int(np.prod(leaf.shape)) for leaf in arrays]
    return sum(entries), sum(size * _itemsize(leaf.dtype) for size, leaf in zip(entries, arrays, strict=True))


def _itemsize(dtype: Any) -> int:
    return dtype.itemsize if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize
