"""Sums, squares and what else a norm makes of its input, as functions of that input.

    mean, Σ h, h², Σ h²             change when a multiple of ones is added to h, in a way that the next may undo
    h − mean(h), ‖h‖²/n − mean(h)²  do not change

The first are harmless where only others of the same h read them; the second are, whoever reads them.
"""

from __future__ import annotations

import dataclasses

from jaxfold._fold._affine import Affine, Quadratic, Square
from jaxfold._fold._analysis import Analysis
from jaxfold._fold._program import Value


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a value is as a function of another.

    Attributes:
        value: what it is.
        of: h.
        axis: that which is summed over; None for the entries of h themselves.
        invariant: whether it stays the same when a multiple of ones along the axis is added to h.
    """

    value: Value
    of: Value
    axis: int | None
    invariant: bool


def moments(analysis: Analysis, value: Value) -> list[Moment]:
    """All that the value is as a moment of another, along one axis."""
    abstract = analysis.abstract.get(value)
    if isinstance(abstract, Affine):
        total = abstract.centred or abstract.sum_of
        invariant = abstract.centred is not None
        return [] if total is None else _along(analysis, value, total.base, total.over, invariant=invariant)
    if isinstance(abstract, Square):
        own = analysis.first.get(abstract.base)
        found = [] if own is None else [Moment(value, own, None, False)]
        part = abstract.total
        return found if part is None else found + _along(analysis, value, part.base, part.over, invariant=False)
    if isinstance(abstract, Quadratic):
        invariant = abstract.squares.value > 0 and abstract.centring() == 1.0
        return _along(analysis, value, abstract.base, abstract.over, invariant=invariant)
    return []


def _along(analysis: Analysis, value: Value, base: Affine, over: tuple[int, ...], *, invariant: bool) -> list[Moment]:
    own = analysis.first.get(base)
    return [Moment(value, own, over[0], invariant)] if own is not None and len(over) == 1 else []
