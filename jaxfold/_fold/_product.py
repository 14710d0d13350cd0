"""Terms of an affine array as one product ``x̄ T`` of a narrow runtime array and a known one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfold._fold import _known as known
from jaxfold._fold._affine import Affine, Source
from jaxfold._fold._known import Known
from jaxfold._fold._program import Value

Read = Callable[[Value], Any]


class Product:
    """Terms of an affine array whose sources vary along the same axes, as one array x̄ and one known T.

    Attributes:
        sources: of the terms, in the order of their rows.
        varies: V, in order.
        shape: of the affine array.
        table: T, ``(rows, *axes)``, the bias as its last row if there is one, each axis of its size or 1.
        constant: whether x̄ ends in a 1.
    """

    def __init__(self, shape: tuple[int, ...], terms: list[tuple[Source, Known]], bias: Known | None) -> None:
        self.shape, self.sources = shape, [source for source, _ in terms]
        self.varies = sorted(self.sources[0].varies()) if terms else []
        tables = []
        for source, node in terms:
            rows = math.prod(source.row_shape)
            tables.append(known.reshape(node, (rows, *node.shape[len(source.row_shape) :])))
        self.constant = bias is not None
        if bias is not None:
            tables.append(known.reshape(bias, (1, *bias.shape)))
        axes = np.broadcast_shapes(*(table.shape[1:] for table in tables))
        self.table = known.concatenate([known.broadcast(table, (table.shape[0], *axes)) for table in tables], 0)

    @property
    def rows(self) -> int:
        return self.table.shape[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.varies)

    def own_axes(self) -> list[int]:
        """The axes along which T varies and no source does: F."""
        return [axis for axis, size in enumerate(self.table.shape[1:]) if size != 1 and axis not in self.varies]

    def shared_axes(self) -> list[int]:
        """Those along which both vary."""
        return [axis for axis, size in enumerate(self.table.shape[1:]) if size != 1 and axis in self.varies]

    def narrow(self, read: Read, dtype: Any, *, with_constant: bool) -> Any:
        """x̄, ``(*V, rows)``."""
        parts = [self._narrow(source, read, dtype) for source in self.sources]
        parts = [jnp.broadcast_to(part, (*self.sizes, part.shape[-1])) for part in parts]
        if with_constant:
            parts.append(jnp.ones((*self.sizes, 1), dtype))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def _narrow(self, source: Source, read: Read, dtype: Any) -> Any:
        """The product of the views, each brought to the axes V, of size 1 where it does not vary, and its rows."""
        result = None
        for view in source.views:
            mapped = [view.axes[axis] for axis in self.varies]
            order = [axis for axis in mapped if axis is not None] + list(view.rows)
            array = arranged(view.source.array(jnp.asarray(read(view.source.value), dtype)), order, jnp)
            sizes = [1 if axis is None else size for axis, size in zip(mapped, self.sizes, strict=True)]
            array = array.reshape(*sizes, math.prod(view.row_shape))
            result = array if result is None else result * array
        return result


def arranged(array: Any, order: list[int], xp: Any) -> Any:
    """The axes of an array in this order; the others, of size 1, are dropped."""
    dropped = tuple(axis for axis in range(array.ndim) if axis not in order)
    ranks = {axis: rank for rank, axis in enumerate(sorted(order))}
    return xp.transpose(xp.squeeze(array, axis=dropped), [ranks[axis] for axis in order])


def products(array: Affine) -> list[Product]:
    """The terms by the axes along which their sources vary; the bias goes with the first."""
    groups: dict[tuple[int, ...], list[tuple[Source, Known]]] = {}
    for source, node in array.terms.items():
        groups.setdefault(tuple(sorted(source.varies())), []).append((source, node))
    result, bias = [], array.bias
    for terms in groups.values():
        result.append(Product(array.shape, terms, bias))
        bias = None
    return result


def united(array: Affine) -> Product:
    """All terms in one product, along the axes of any of them."""
    product = Product(array.shape, list(array.terms.items()), array.bias)
    product.varies = sorted(set().union(*(source.varies() for source in array.terms)))
    return product
