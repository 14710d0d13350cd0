"""From float64 coefficients to stored leaves: rounding, checking and placing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfold._algebra._storage import round_to
from jaxfold._block._leaves import place_like


class Coefficient(NamedTuple):
    """A float64 array ``(*lead, ...)`` and, for each member of the stack, the size of the rounding error in it."""

    value: np.ndarray
    resolution: np.ndarray


def store(coefficients: Any, dtype_of: Callable[[Any], np.dtype], sources: list[Any]) -> Any:
    """A tree of :class:`Coefficient` as a tree of arrays of the same structure.

    Args:
        coefficients: the tree.
        dtype_of: from the path of a coefficient to its storage dtype.
        sources: the leaves that they come from, which decide between NumPy and JAX.

    Raises:
        CoefficientError: naming the path ``params[...]`` of a coefficient that does not fit its dtype.
    """

    def place(path: Any, coefficient: Coefficient) -> Any:
        name = "params" + jax.tree_util.keystr(path)
        stored = round_to(name, coefficient.value, dtype_of(path), np.asarray(coefficient.resolution))
        return place_like(stored, sources)

    return jax.tree_util.tree_map_with_path(place, coefficients, is_leaf=lambda leaf: isinstance(leaf, Coefficient))
