"""Operations that move entries: transposes, broadcasts, reshapes, slices, concatenations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxfold._fold import _known as known
from jaxfold._fold._affine import Affine, Axes, Quadratic, Source, Square, View
from jaxfold._fold._known import Known
from jaxfold._fold._registry import Abstract, Operands, rule


def rearranged(
    affine: Affine, shape: tuple[int, ...], move: Callable[[Axes], Axes], place: Callable[[Known, int], Known]
) -> Affine:
    """Every view by ``move``, and every T and b, whose axes follow so many of rows, by ``place``."""
    terms = {source.map(move): place(node, len(source.row_shape)) for source, node in affine.terms.items()}
    bias = None if affine.bias is None else place(affine.bias, 0)
    total = affine.sum_of and dataclasses.replace(affine.sum_of, axes=move(affine.sum_of.axes))
    return Affine(shape, terms, bias, total)


def _everywhere(operands: Operands, move: Callable[[Axes], Axes], place: Callable[[Known, int], Known]) -> Abstract:
    a, shape = operands[0], operands.shape
    if isinstance(a, Quadratic):
        return dataclasses.replace(a, shape=shape, axes=move(a.axes))
    if isinstance(a, Square):
        total = a.total and dataclasses.replace(a.total, shape=shape, axes=move(a.total.axes))
        return Square(rearranged(a.base, shape, move, place), total)
    return rearranged(operands.affine(0), shape, move, place)


@rule("transpose")
def transpose(operands: Operands) -> Abstract:
    order = tuple(operands.params["permutation"])

    def place(node: Known, rows: int) -> Known:
        return known.transpose(node, (*range(rows), *(rows + axis for axis in order)))

    return _everywhere(operands, lambda axes: tuple(axes[axis] for axis in order), place)


@rule("broadcast_in_dim")
def broadcast_in_dim(operands: Operands) -> Abstract:
    targets = tuple(operands.params["broadcast_dimensions"])
    rank = len(operands.shape)
    if len(operands) > 1:  # sizes that are not static
        return None

    def move(axes: Axes) -> Axes:
        return tuple(axes[targets.index(axis)] if axis in targets else None for axis in range(rank))

    def place(node: Known, rows: int) -> Known:
        own = node.shape[rows:]
        spread = tuple(own[targets.index(axis)] if axis in targets else 1 for axis in range(rank))
        return known.reshape(node, node.shape[:rows] + spread)

    return _everywhere(operands, move, place)


@rule("squeeze", "expand_dims")
def squeeze(operands: Operands) -> Abstract:
    return _reshape(operands)


@rule("reshape")
def reshape(operands: Operands) -> Abstract:
    return None if operands.params.get("dimensions") is not None else _reshape(operands)


def _reshape(operands: Operands) -> Abstract:
    before, after = operands.value(0).shape, operands.shape
    if 0 in before:
        return None
    groups = axis_groups(before, after)
    a = operands[0]
    if isinstance(a, (Quadratic, Square)) and any(len(old) > 1 or len(new) > 1 for old, new in groups):
        return None
    pairs = {new[0]: old[0] for old, new in groups if len(old) == len(new) == 1}

    def move(axes: Axes) -> Axes:
        return tuple(axes[pairs[axis]] if axis in pairs else None for axis in range(len(after)))

    def place(node: Known, rows: int) -> Known:
        own = node.shape[rows:]
        spread = [1] * len(after)
        for new, old in pairs.items():
            spread[new] = own[old]
        return known.reshape(node, node.shape[:rows] + tuple(spread))

    if all(len(old) == len(new) == 1 for old, new in groups):
        return _everywhere(operands, move, place)
    return _regroup(operands.affine(0), before, after, groups)


Group = tuple[tuple[int, ...], tuple[int, ...]]


def axis_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[Group]:
    """Smallest groups of axes, of a size other than 1, that hold the same entries before and after."""
    old = [axis for axis, size in enumerate(before) if size != 1]
    new = [axis for axis, size in enumerate(after) if size != 1]
    groups: list[Group] = []
    while old or new:
        left, right = [old.pop(0)], [new.pop(0)]
        sizes = [before[left[0]], after[right[0]]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                left.append(old.pop(0))
                sizes[0] *= before[left[-1]]
            else:
                right.append(new.pop(0))
                sizes[1] *= after[right[-1]]
        groups.append((tuple(left), tuple(right)))
    return groups


def _regroup(affine: Affine, before: tuple[int, ...], after: tuple[int, ...], groups: list[Group]) -> Abstract:
    """Axes merged or split: in T where no source varies, in the source where T does not."""
    terms = {}
    for source, node in affine.terms.items():
        rows = len(source.row_shape)
        views = [list(view.axes) for view in source.views]
        raws = [view.source for view in source.views]
        own = node.shape[rows:]
        moved: list[list[int | None]] = [[None] * len(after) for _ in views]
        for old, new in groups:
            constant = all(own[axis] == 1 for axis in old)
            for index, axes in enumerate(views):
                held = [axes[axis] for axis in old]
                if all(axis is None for axis in held):
                    continue
                if len(old) == len(new) == 1:
                    moved[index][new[0]] = held[0]
                    continue
                first = held[0]
                if not constant or first is None or held != list(range(first, first + len(old))):
                    return None
                shape = raws[index].shape
                split = tuple(after[axis] for axis in new)
                shape = shape[:first] + split + shape[first + len(old) :]
                raws[index] = raws[index].then(("reshape", shape), shape)
                shift = len(new) - len(old)

                def later(axis: int | None, first: int = first, shift: int = shift) -> int | None:
                    return axis + shift if axis is not None and axis > first else axis

                views[index] = [later(axis) for axis in axes]
                moved[index] = [later(axis) for axis in moved[index]]
                source = _with_rows(source, index, tuple(later(axis) or 0 for axis in source.views[index].rows))
                for offset, axis in enumerate(new):
                    moved[index][axis] = first + offset
                axes = views[index]
        fresh = Source(
            tuple(
                dataclasses.replace(view, source=raw, axes=tuple(axes))
                for view, raw, axes in zip(source.views, raws, moved, strict=True)
            )
        )
        terms[fresh] = _regroup_known(node, rows, before, after, groups)
    bias = None if affine.bias is None else _regroup_known(affine.bias, 0, before, after, groups)
    return Affine(after, terms, bias)


def _with_rows(source: Source, index: int, rows: tuple[int, ...]) -> Source:
    views = list(source.views)
    views[index] = dataclasses.replace(views[index], rows=rows)
    return Source(tuple(views))


def _regroup_known(
    node: Known, rows: int, before: tuple[int, ...], after: tuple[int, ...], groups: list[Group]
) -> Known:
    own, full, shape = node.shape[rows:], list(node.shape), [1] * len(after)
    for old, new in groups:
        if any(own[axis] != 1 for axis in old):
            for axis in old:
                full[rows + axis] = before[axis]
            for axis in new:
                shape[axis] = after[axis]
    return known.reshape(known.broadcast(node, tuple(full)), node.shape[:rows] + tuple(shape))


Slice = tuple[int, int, int]


@rule("slice")
def slice_(operands: Operands) -> Abstract:
    params, affine = operands.params, operands.affine(0)
    strides = params["strides"] or (1,) * len(operands.shape)
    slices = tuple(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    cut = {axis for axis, part in enumerate(slices) if part != (0, affine.shape[axis], 1)}
    terms = {}
    for source, node in affine.terms.items():
        rows = len(source.row_shape)
        terms[Source(tuple(_cut(view, slices, cut) for view in source.views))] = _cut_known(node, rows, slices, cut)
    bias = None if affine.bias is None else _cut_known(affine.bias, 0, slices, cut)
    return Affine(operands.shape, terms, bias)


def _cut(view: View, slices: tuple[Slice, ...], cut: set[int]) -> View:
    own = {view.axes[axis]: slices[axis] for axis in cut if view.axes[axis] is not None}
    if not own:
        return view
    shape = view.source.shape
    parts = tuple(own.get(axis, (0, size, 1)) for axis, size in enumerate(shape))
    sizes = tuple(len(range(*part)) for part in parts)
    axes = tuple(None if axis is None or sizes[axis] == 1 else axis for axis in view.axes)
    return dataclasses.replace(view, source=view.source.then(("slice", parts), sizes), axes=axes)


def _cut_known(node: Known, rows: int, slices: tuple[Slice, ...], cut: set[int]) -> Known:
    own = node.shape[rows:]
    parts = tuple(slices[axis] if axis in cut and own[axis] != 1 else (0, size, 1) for axis, size in enumerate(own))
    return known.index(node, (*((0, size, 1) for size in node.shape[:rows]), *parts))


@rule("concatenate")
def concatenate(operands: Operands) -> Abstract:
    """Along an axis of features: each T with zeros where the others are."""
    axis = operands.params["dimension"]
    total, start = operands.shape[axis], 0
    terms: dict[Source, list[Known]] = {}
    biases: list[Known] = []
    for index in range(len(operands)):
        part = operands[index]
        if not isinstance(part, Known) and not (isinstance(part, Affine) and axis in part.free() | _units(part)):
            return None
        size = operands.value(index).shape[axis]
        given = part.terms if isinstance(part, Affine) else {}
        bias = part.bias if isinstance(part, Affine) else part
        for source, node in given.items():
            rows = len(source.row_shape)
            terms.setdefault(source, []).append(_padded(node, rows + axis, start, size, total))
        if bias is not None:
            biases.append(_padded(bias, axis, start, size, total))
        start += size
    summed = {source: _sum(nodes) for source, nodes in terms.items()}
    result = Affine(operands.shape, summed, _sum(biases) if biases else None)
    return result if result.features() else None


def _units(affine: Affine) -> set[int]:
    return {axis for axis, size in enumerate(affine.shape) if size == 1}


def _padded(node: Known, axis: int, start: int, size: int, total: int) -> Known:
    shape = (*node.shape[:axis], size, *node.shape[axis + 1 :])
    pieces = [known.broadcast(node, shape)]
    for count, front in ((start, True), (total - start - size, False)):
        if count:
            filler = known.zeros((*shape[:axis], count, *shape[axis + 1 :]))
            pieces = [filler, *pieces] if front else [*pieces, filler]
    return known.concatenate(pieces, axis)


def _sum(nodes: list[Known]) -> Known:
    result = nodes[0]
    for node in nodes[1:]:
        result = known.add(result, node)
    return result
