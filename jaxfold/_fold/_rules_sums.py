"""Sums over axes, and products with kernels."""

from __future__ import annotations

import dataclasses
import math
import string
from typing import Any

from jaxfold._fold import _known as known
from jaxfold._fold._affine import Affine, Axes, Quadratic, Source, Square, Sum
from jaxfold._fold._known import Known
from jaxfold._fold._numbers import exactly
from jaxfold._fold._registry import Abstract, Operands, rule


@rule("reduce_sum")
def reduce_sum(operands: Operands) -> Abstract:
    a, over = operands[0], tuple(sorted(int(axis) for axis in operands.params["axes"]))
    if isinstance(a, Quadratic):
        return None
    if isinstance(a, Square):
        axes = _remaining(tuple(range(len(a.base.shape))), over)
        axes = tuple(axis if axis is not None and a.base.shape[axis] != 1 else None for axis in axes)
        return Quadratic(a.base, over, exactly(1.0), exactly(0.0), 0.0, operands.shape, axes)
    affine = operands.affine(0)
    axes = tuple(axis if affine.shape[axis] > 1 else None for axis in range(len(affine.shape)) if axis not in over)
    total = Sum(affine, over, exactly(1.0), axes)
    varies = set().union(*(source.varies() for source in affine.terms))
    if varies & set(over):
        return operands.opaque(sum_of=total)
    terms = {
        source.map(lambda axes: _remaining(axes, over)): _summed(node, len(source.row_shape), affine.shape, over)
        for source, node in affine.terms.items()
    }
    bias = None if affine.bias is None else _summed(affine.bias, 0, affine.shape, over)
    return Affine(operands.shape, terms, bias, total)


def _remaining(axes: Axes, over: tuple[int, ...]) -> Axes:
    return tuple(own for axis, own in enumerate(axes) if axis not in over)


def _summed(node: Known, rows: int, shape: tuple[int, ...], over: tuple[int, ...]) -> Known:
    repeated = 1
    for axis in over:
        repeated *= shape[axis] if node.shape[rows + axis] == 1 else 1
    return known.reduce_sum(node, tuple(rows + axis for axis in over), repeated)


@rule("dot_general")
def dot_general(operands: Operands) -> Abstract:
    """Of an affine array and a known one: over axes where a source varies, these become rows of T."""
    contract, batch = operands.params["dimension_numbers"]
    for index in (0, 1):
        kernel = operands[1 - index]
        if isinstance(kernel, Known) and not isinstance(operands[index], Known):
            own = (tuple(contract[index]), tuple(batch[index]))
            other = (tuple(contract[1 - index]), tuple(batch[1 - index]))
            kernel = known.broadcast(kernel, operands.value(1 - index).shape)
            return _project(operands.affine(index), kernel, own, other, operands.shape, kernel_first=index == 1)
    return None


Dims = tuple[tuple[int, ...], tuple[int, ...]]


def _project(
    affine: Affine, kernel: Known, own: Dims, other: Dims, shape: tuple[int, ...], *, kernel_first: bool
) -> Abstract:
    letters = iter(string.ascii_letters)
    axis_letter = [next(letters) for _ in affine.shape]
    kernel_letter: list[str] = [""] * len(kernel.shape)
    for ours, theirs in zip(own[0] + own[1], other[0] + other[1], strict=True):
        kernel_letter[theirs] = axis_letter[ours]
    kernel_letter = [letter or next(letters) for letter in kernel_letter]
    affine_free = [axis for axis in range(len(affine.shape)) if axis not in own[0] + own[1]]
    kernel_free = [axis for axis in range(len(kernel.shape)) if axis not in other[0] + other[1]]
    # The output's axes: for each its letter, and the axis of the affine array that it continues, if any.
    batch: list[tuple[str, int | None]] = [(axis_letter[axis], axis) for axis in own[1]]
    ours_free: list[tuple[str, int | None]] = [(axis_letter[axis], axis) for axis in affine_free]
    theirs_free: list[tuple[str, int | None]] = [(kernel_letter[axis], None) for axis in kernel_free]
    out = batch + (theirs_free + ours_free if kernel_first else ours_free + theirs_free)

    terms: dict[Source, Known] = {}
    for source, node in affine.terms.items():
        rows_before = len(source.row_shape)
        varying = [axis for axis in own[0] if axis in source.varies()]
        moved = _to_rows(source, varying)
        if moved is None:
            return None
        fresh = moved.map(lambda axes: tuple(None if axis is None else axes[axis] for _, axis in out))
        row_letters = [next(letters) for _ in range(rows_before)]
        product = _einsum(
            node, row_letters, axis_letter, kernel, kernel_letter, [axis_letter[a] for a in varying], out, affine.shape
        )
        terms[fresh] = known.add(terms[fresh], product) if fresh in terms else product
    bias = None
    if affine.bias is not None:
        bias = _einsum(affine.bias, [], axis_letter, kernel, kernel_letter, [], out, affine.shape)
    result = Affine(shape, terms, bias)
    result.narrows = math.prod(shape[axis] for axis in result.features()) < result.rows()
    return result


def _to_rows(source: Source, varying: list[int]) -> Source | None:
    """The contracted axes along which the source varies become rows, all of one view."""
    if not varying:
        return source
    holders = [view for view in source.views if view.varies() & set(varying)]
    if len(holders) != 1 or any(view.rows and view is not holders[0] for view in source.views):
        return None
    views = []
    for view in source.views:
        if view is holders[0]:
            rows = view.rows + tuple(axis for axis in (view.axes[a] for a in varying) if axis is not None)
            axes = tuple(None if axis in varying else own for axis, own in enumerate(view.axes))
            view = dataclasses.replace(view, rows=rows, axes=axes)
        views.append(view)
    return Source(tuple(views))


def _einsum(
    node: Known,
    row_letters: list[str],
    axis_letter: list[str],
    kernel: Known,
    kernel_letter: list[str],
    new_rows: list[str],
    out: list[Any],
    shape: tuple[int, ...],
) -> Known:
    """T times the kernel: axes of size 1 are left out of the product and put back afterwards."""
    rows = len(row_letters)
    own = node.shape[rows:]
    present = [letter for letter, size in zip(axis_letter, own, strict=True) if size != 1]
    squeezed = known.reshape(node, node.shape[:rows] + tuple(size for size in own if size != 1))
    sizes = dict(zip(kernel_letter, kernel.shape, strict=True))
    sizes |= {letter: size for letter, size in zip(axis_letter, own, strict=True) if size != 1}
    sizes |= dict(zip(row_letters, node.shape[:rows], strict=True))
    # A row that neither varies along is repeated: the kernel has its letter always, since it is contracted there.
    result = row_letters + new_rows + [letter for letter, _ in out if letter in sizes]
    formula = f"{''.join(row_letters + present)},{''.join(kernel_letter)}->{''.join(result)}"
    product = known.einsum(formula, (squeezed, kernel), tuple(sizes[letter] for letter in result))
    final = [sizes[letter] for letter in row_letters + new_rows] + [sizes.get(letter, 1) for letter, _ in out]
    return known.reshape(product, tuple(final))
