"""The abstract domain: what is known of an array while the inputs are not.

    known       it depends on parameters alone                                    :class:`jaxfold._fold._known.Known`
    affine      Σᵢ xᵢ Tᵢ + b over runtime sources xᵢ, with Tᵢ and b known          :class:`Affine`
    square      of an affine array, entry by entry                                 :class:`Square`
    quadratic   a ‖h‖² − b (Σ h)² + c over some axes of an affine h                :class:`Quadratic`
    opaque      anything else: a new source                                        None

An affine array of shape S is, entry by entry of its axes s and summed over rows r,

    value[s] = Σᵢ Σᵣ xᵢ[r, s] Tᵢ[r, s] + b[s]

where xᵢ and Tᵢ each vary along some of the axes and are constant along the rest (size 1, or not there). An axis along
which no source varies is an axis of features: what is summed over such axes can be summed over T beforehand. That is
all that the domain knows of layouts, so batches, stacks, heads and vmapped axes need no names.

A product with a runtime array that is constant along the axes of features scales the sources and leaves the T alone:
``s (x T + b) = (s x) T + s b``. So the output of a norm, and of the affine maps after it, is affine over sources s x
and s, where s is the reciprocal root of a quadratic; and the quadratic is ``‖R x̄‖²``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxfold._fold import _known as known
from jaxfold._fold._known import Known
from jaxfold._fold._numbers import Number, exactly
from jaxfold._fold._program import Value

Axes = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Raw:
    """A runtime array of the program, after operations that move its entries or invert them.

    Each operation is ``("reshape", shape)``, ``("slice", slices)`` or ``("inverse",)``.
    """

    value: Value
    operations: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()

    def then(self, operation: tuple[Any, ...], shape: tuple[int, ...]) -> Raw:
        return Raw(self.value, (*self.operations, operation), shape)

    def array(self, value: Any) -> Any:
        """What has become of the array."""
        for name, *details in self.operations:
            if name == "reshape":
                value = value.reshape(details[0])
            elif name == "slice":
                value = value[tuple(slice(*part) for part in details[0])]
            else:
                value = 1 / value
        return value


@dataclasses.dataclass(frozen=True)
class View:
    """A runtime array laid out along the axes of another: which of its own axes is which.

    Attributes:
        source: the array.
        rows: its axes that are summed with the rows of T, in order.
        axes: for each axis of the affine array, the axis of the source, or None if it is constant there.
    """

    source: Raw
    rows: tuple[int, ...]
    axes: Axes

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape[axis] for axis in self.rows)

    def varies(self) -> set[int]:
        return {axis for axis, own in enumerate(self.axes) if own is not None}

    def with_axes(self, axes: Axes) -> View:
        return dataclasses.replace(self, axes=axes)


@dataclasses.dataclass(frozen=True)
class Source:
    """A product of views along the same axes; at most one of them has rows."""

    views: tuple[View, ...]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return next((view.row_shape for view in self.views if view.rows), ())

    def varies(self) -> set[int]:
        return set().union(*(view.varies() for view in self.views))

    def map(self, function: Any) -> Source:
        return Source(tuple(view.with_axes(function(view.axes)) for view in self.views))

    def times(self, other: Source) -> Source:
        return Source(tuple(sorted((*self.views, *other.views), key=_order)))


def _order(view: View) -> Any:
    return bool(view.rows), id(view.source.value), str(view.source.operations), view.rows, str(view.axes)


@dataclasses.dataclass(eq=False)
class Affine:
    """An affine array; see the module.

    Attributes:
        shape: of the array.
        terms: T by source, ``(*row_shape, *axes)``, each axis of the array's size or 1.
        bias: b, of as many axes as the array, each of its size or 1; None for zero.
        sum_of: of what it is the sum, if it is one.
        centred: the sum whose mean was taken from it, if it is something less its own mean.
        narrows: whether it is narrower than its sources, and so the better source for all that reads it.
    """

    shape: tuple[int, ...]
    terms: dict[Source, Known]
    bias: Known | None = None
    sum_of: Sum | None = None
    centred: Sum | None = None
    narrows: bool = False

    def free(self) -> set[int]:
        """The axes along which no source varies."""
        varies = set().union(*(source.varies() for source in self.terms))
        return {axis for axis, size in enumerate(self.shape) if axis not in varies and size != 1}

    def rows(self) -> int:
        """How many numbers it is computed from, at each place along the axes of its sources."""
        return sum(math.prod(source.row_shape) for source in self.terms)

    def features(self) -> set[int]:
        """Those of them along which the array itself varies: T or b does."""
        parts = [node.shape[len(source.row_shape) :] for source, node in self.terms.items()]
        parts += [self.bias.shape] if self.bias is not None else []
        return {axis for axis in self.free() if any(part[axis] != 1 for part in parts)}


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """``factor · Σ base`` over some axes; ``axes`` are those of the sum in terms of the base's, or None for size 1."""

    base: Affine
    over: tuple[int, ...]
    factor: Number
    axes: Axes

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", exactly(self.factor))


@dataclasses.dataclass(eq=False)
class Square:
    """``base²``, entry by entry; of a base that is a sum over some axes of h also ``(Σ h)²``, a part of a quadratic."""

    base: Affine
    total: Quadratic | None = None


@dataclasses.dataclass(eq=False)
class Quadratic:
    """``squares · ‖h‖² − sums · (Σ h)² + offset`` over some axes of an affine array h.

    Attributes:
        base: h.
        over: the axes of h that are summed over.
        squares, sums: numbers, as far as they are known from constants of the program.
        offset: a number.
        shape: of the quadratic itself.
        axes: for each of its axes, that of h, or None where it is of size 1.
    """

    base: Affine
    over: tuple[int, ...]
    squares: Number
    sums: Number
    offset: float
    shape: tuple[int, ...]
    axes: Axes

    def __post_init__(self) -> None:
        self.squares, self.sums = exactly(self.squares), exactly(self.sums)

    @property
    def width(self) -> int:
        """How many entries are summed."""
        return known.size(known.ones(tuple(self.base.shape[axis] for axis in self.over)))

    def narrow(self) -> bool:
        """Whether no source varies along the axes that are summed over: R can be taken of T beforehand."""
        varies = set().union(*(source.varies() for source in self.base.terms))
        return not varies & set(self.over)

    def centring(self) -> float:
        """κ in ``squares (‖h‖² − κ n mean²)``: 1 for a variance, 0 for a mean square; a sum of squares in between."""
        if not self.squares.value > 0:
            return math.nan
        kappa = self.sums.times(self.width).times(self.squares.inverse())
        return 1.0 if kappa.may_be(1.0) else kappa.value


def trivial(value: Value, constant: frozenset[int] = frozenset()) -> Affine:
    """A runtime array as an affine one over itself; ``constant`` are the axes along which it only repeats itself."""
    shape = value.shape
    # What is of size 1 does not vary.
    axes = tuple(None if size == 1 or axis in constant else axis for axis, size in enumerate(shape))
    raw = Raw(value, (), shape)
    if constant:
        parts = tuple((0, 1 if axis in constant else size, 1) for axis, size in enumerate(shape))
        raw = raw.then(("slice", parts), tuple(stop for _, stop, _ in parts))
    return Affine(shape, {Source((View(raw, (), axes),)): known.ones((1,) * len(shape))})
