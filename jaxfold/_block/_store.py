"""From float64 coefficients to stored leaves: rounding, checking and placing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfold._algebra._storage import round_to
from jaxfold._block._axes import place, source_axes
from jaxfold._block._shape import Form


class Coefficient(NamedTuple):
    """A float64 array ``(*lead, ...)`` and, for each member of the stack, the size of the rounding error in it."""

    value: np.ndarray
    resolution: np.ndarray


def store(
    coefficients: Any,
    dtype_of: Callable[[Any], np.dtype],
    sources: Mapping[str, Any],
    *,
    form: Form,
    stacked: bool,
) -> Any:
    """A tree of :class:`Coefficient` as a tree of arrays of the same structure.

    Args:
        coefficients: the tree, in the layout of ``Contraction.params``.
        dtype_of: from the path of a coefficient to its storage dtype.
        sources: the leaves that they come from, by path. If all are JAX arrays, so is every coefficient whose dtype
            JAX can hold now, placed as the leaf that its axes come from; else it is a NumPy array.
        form: of the contraction.
        stacked: whether every leaf has an axis more, in front.

    Raises:
        CoefficientError: naming the path ``params[...]`` of a coefficient that does not fit its dtype.
    """
    as_jax = all(isinstance(leaf, jax.Array) for leaf in sources.values())

    def finish(path: Any, coefficient: Coefficient) -> Any:
        name = "params" + jax.tree_util.keystr(path)
        stored = round_to(name, coefficient.value, dtype_of(path), np.asarray(coefficient.resolution))
        if not as_jax or jax.dtypes.canonicalize_dtype(stored.dtype) != stored.dtype:
            return stored
        source, axes = source_axes([key.key for key in path], form=form, stacked=stacked, axes=stored.ndim)
        return place(stored, sources[source], axes)

    return jax.tree_util.tree_map_with_path(finish, coefficients, is_leaf=lambda leaf: isinstance(leaf, Coefficient))
