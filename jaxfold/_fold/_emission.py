"""Evaluating an affine array, or a quadratic, from its narrow sources.

With V the axes along which a source varies and F those of the features, both products are

    affine       out[V, F] = Σ_r  x̄[V, r] · D[r, F]           x̄ the products of narrow sources, and 1 for the bias
    quadratic    q[V]      = a ‖R x̄[V]‖² + c                  R from the QR of T, centred as far as the quadratic says

where D, and R, have axes of V too if T varies along them. The sources are scaled before the product, on the narrow
side, and all terms whose sources vary along the same axes go into one product.

Derivation: docs/maths.md, Beyond one block.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfold._algebra._dtype import compute_dtype
from jaxfold._algebra._factor import factor
from jaxfold._algebra._gram import quadratic_form
from jaxfold._algebra._scale import add_bias, project, sum_of_squares
from jaxfold._algebra._scale import affine as affine_product
from jaxfold._algebra._witness import witness
from jaxfold._fold import _known as known
from jaxfold._fold._affine import Affine, Quadratic
from jaxfold._fold._known import Known
from jaxfold._fold._product import Product, Read, arranged, products, united
from jaxfold._fold._program import Value

# A narrow array is lengthened by a 1 for the bias, which is cheaper than to add it; a wide one would be copied for it.
NARROW = 64


class EmittedAffine:
    """How to compute an affine array, and with what."""

    def __init__(self, array: Affine) -> None:
        self.array, self.products = array, products(array)
        self.precision: Any = None  # of its product, as the equations that it stands for have it

    @property
    def size(self) -> int:
        return sum(known.size(product.table) for product in self.products)

    @property
    def flops(self) -> int:
        return sum(
            math.prod(product.sizes)
            * (2 * product.rows - product.constant)
            * math.prod(self.array.shape[a] for a in product.own_axes())
            for product in self.products
        )

    @property
    def wide(self) -> bool:
        """Whether it is made from an array of the model's own width: such a product is in the program's own dtype."""
        return all(_apart(product) or product.rows > NARROW for product in self.products)

    def values(self) -> set[Value]:
        return {view.source.value for product in self.products for source in product.sources for view in source.views}

    def leaves(self) -> set[Value]:
        """The known values that its coefficients are computed from."""
        return set().union(*(product.table.leaves() for product in self.products))

    def scales(self) -> set[Value]:
        """The runtime arrays that its sources are scaled with."""
        views = [view for product in self.products for source in product.sources for view in source.views]
        return {view.source.value for view in views if not view.rows}

    def coefficients(self, xp: Any, compute: Callable[[Known], Any]) -> dict[str, Any]:
        """D of each product, ``(rows, *shared axes, *features)``."""
        tables = {}
        for index, product in enumerate(self.products):
            order = [0, *(1 + a for a in product.shared_axes()), *(1 + a for a in product.own_axes())]
            table = arranged(compute(product.table), order, xp)
            if _apart(product):
                tables[_name(index, "bias")], table = table[-1], table[:-1]
            tables[_name(index)] = table
        return tables

    def evaluate(self, coefficients: Any, read: Read, dtype: Any) -> Any:
        parts = []
        for index, product in enumerate(self.products):
            kernel = jnp.asarray(coefficients[_name(index)], dtype)
            bias = jnp.asarray(coefficients[_name(index, "bias")], dtype) if _apart(product) else None
            parts.append(self._evaluate(product, kernel, bias, read, dtype))
        return jnp.broadcast_to(functools.reduce(jnp.add, parts), self.array.shape)

    def _evaluate(self, product: Product, kernel: Any, bias: Any, read: Read, dtype: Any) -> Any:
        shared, own = product.shared_axes(), product.own_axes()
        if bias is not None:
            x = product.narrow(read, compute_dtype(np.dtype(dtype)), with_constant=False).astype(dtype)
            out = lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=self.precision)
            out = add_bias(out, bias)
        elif not shared and product.constant:
            out = affine_product(product.narrow(read, dtype, with_constant=False), kernel, self.precision)
        else:
            x = product.narrow(read, dtype, with_constant=product.constant)
            letters = dict(zip(product.varies + own, string.ascii_letters[1:], strict=False))
            left = "".join(letters[axis] for axis in product.varies) + "a"
            right = "a" + "".join(letters[axis] for axis in shared + own)
            result = "".join(letters[axis] for axis in product.varies + own)
            out = jnp.einsum(f"{left},{right}->{result}", x, kernel, precision=self.precision)
        order = product.varies + own
        out = jnp.transpose(out, [order.index(axis) for axis in sorted(order)])
        return jnp.expand_dims(out, [axis for axis in range(len(self.array.shape)) if axis not in order])


class EmittedQuadratic:
    """How to compute a quadratic, and with what."""

    def __init__(self, quadratic: Quadratic) -> None:
        self.quadratic = quadratic
        groups = products(quadratic.base)
        self.product = groups[0] if len(groups) == 1 else united(quadratic.base)
        self.over = [axis for axis in quadratic.over if self.product.table.shape[1 + axis] != 1]
        self.repeated = math.prod(quadratic.base.shape[axis] for axis in quadratic.over if axis not in self.over)
        self.width = math.prod(quadratic.base.shape[axis] for axis in self.over)

    @property
    def rank(self) -> int:
        return min(self.width, self.product.rows)

    @property
    def _batch(self) -> list[int]:
        """The axes, none of those summed over, along which T varies: as many factors."""
        return [axis for axis, size in enumerate(self.product.table.shape[1:]) if size != 1 and axis not in self.over]

    @property
    def size(self) -> int:
        factors = math.prod(self.quadratic.base.shape[axis] for axis in self._batch)
        return factors * self.rank * self.product.rows

    @property
    def flops(self) -> int:
        axes = set(self.product.varies) | set(self._batch)
        rows = math.prod(self.quadratic.base.shape[axis] for axis in axes)
        return rows * 2 * (self.product.rows + 1) * self.rank

    def values(self) -> set[Value]:
        return {view.source.value for source in self.product.sources for view in source.views}

    def leaves(self) -> set[Value]:
        return self.product.table.leaves()

    def _rows(self, xp: Any, compute: Callable[[Known], Any]) -> Any:
        """T, ``(*batch, rows, width)``, centred as far as the quadratic says, and scaled: q = ‖x̄ T‖² + offset."""
        order = [1 + axis for axis in self._batch] + [0] + [1 + axis for axis in self.over]
        table = arranged(compute(self.product.table), order, xp)
        table = table.reshape(*table.shape[: len(self._batch)], self.product.rows, self.width)
        kappa = self.quadratic.centring()
        if kappa:
            table = table - (1 - math.sqrt(1 - kappa)) * xp.mean(table, axis=-1, keepdims=True)
            if kappa == 1.0:
                table = table - xp.mean(table, axis=-1, keepdims=True)  # the first mean's own rounding
        return table * math.sqrt(self.quadratic.squares.value * self.repeated)

    def coefficients(self, xp: Any, compute: Callable[[Known], Any]) -> dict[str, Any]:
        """Rᵀ ``(*batch, rows, rank)``; traced, T as well, to which the derivative goes."""
        rows = self._rows(xp, compute)
        if xp is np:
            return {"kernel": np.swapaxes(factor(rows, with_basis=False).upper, -1, -2)}
        return {"kernel": jnp.swapaxes(witness(rows), -1, -2), "rows": rows}

    def evaluate(self, coefficients: Any, read: Read, dtype: Any) -> Any:
        kernel = jnp.asarray(coefficients["kernel"], dtype)
        x = self.product.narrow(read, dtype, with_constant=self.product.constant)
        batch, varies = self._batch, self.product.varies
        axes = sorted({*batch, *varies})
        x = x.reshape(*(self.quadratic.base.shape[a] if a in varies else 1 for a in axes), x.shape[-1])
        if "rows" in coefficients:
            rows = jnp.asarray(coefficients["rows"], dtype)
            q = self._traced(x, rows, kernel, axes)
        elif not batch:
            q = sum_of_squares(project(x, kernel, None))[..., 0]
        else:
            q = jnp.sum(jnp.square(self._along(x, kernel, axes)), axis=-1)
        q = q + self.quadratic.offset
        own = self.quadratic.axes
        order = [axis for axis in own if axis is not None and axis in axes]
        q = jnp.transpose(q, [axes.index(axis) for axis in order])
        return jnp.broadcast_to(
            q.reshape([q.shape[order.index(axis)] if axis in order else 1 for axis in own]), self.quadratic.shape
        )

    def _along(self, x: Any, kernel: Any, axes: list[int]) -> Any:
        spread = kernel.reshape(
            *(self.quadratic.base.shape[a] if a in self._batch else 1 for a in axes), *kernel.shape[-2:]
        )
        return jnp.matmul(x[..., None, :], spread, precision=lax.Precision.HIGHEST)[..., 0, :]

    def _traced(self, x: Any, rows: Any, kernel: Any, axes: list[int]) -> Any:
        factors = jnp.swapaxes(kernel, -1, -2)
        if not self._batch:
            return quadratic_form(x, rows, factors)
        shape = [self.quadratic.base.shape[a] if a in self._batch else 1 for a in axes]
        rows, factors = rows.reshape(*shape, *rows.shape[-2:]), factors.reshape(*shape, *factors.shape[-2:])
        return jnp.vectorize(quadratic_form, signature="(p),(p,n),(k,p)->()")(x, rows, factors)


def _apart(product: Product) -> bool:
    """Whether the bias is a coefficient of its own."""
    return product.constant and product.rows > NARROW and not product.shared_axes()


def _name(index: int, name: str = "kernel") -> str:
    return f"{name}_{index}" if index else name
