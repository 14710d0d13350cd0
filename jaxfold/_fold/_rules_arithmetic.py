"""Sums, products, squares and roots."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxfold._fold import _known as known
from jaxfold._fold._affine import Affine, Quadratic, Source, Square, Sum
from jaxfold._fold._known import Known
from jaxfold._fold._numbers import Number, exactly
from jaxfold._fold._registry import Abstract, Operands, rule
from jaxfold._fold._roundings import is_exact, keeps_all

# Sums of more sources than this are taken for sources themselves, so that the work stays linear in the program.
MOST_TERMS = 12


@rule("add", "sub")
def add(operands: Operands) -> Abstract:
    a, b = _quadratic(operands[0]), _quadratic(operands[1])
    sign = 1.0 if operands.equation.name == "add" else -1.0
    if isinstance(a, Quadratic) and (number := operands.number(1)) is not None:
        return dataclasses.replace(a, offset=a.offset + sign * number)
    if isinstance(b, Quadratic) and sign > 0 and (number := operands.number(0)) is not None:
        return dataclasses.replace(b, offset=b.offset + number)
    if isinstance(a, Quadratic) and isinstance(b, Quadratic):
        return _combine(a, b, sign)
    for index, known_one in ((0, b), (1, a)):
        if isinstance(known_one, Known):
            affine = scaled(operands.spread(index), 1.0 if index == 0 else sign)
            if operands.number(1 - index) == 0:
                return affine if affine.shape == operands.shape else None
            return _shifted(affine, operands.known(1 - index), sign if index == 0 else 1.0, operands.shape)
    left, right = operands.spread(0), operands.spread(1)
    terms = dict(left.terms)
    for source, node in right.terms.items():
        other = known.scale(node, sign)
        terms[source] = known.add(terms[source], other) if source in terms else other
    bias = left.bias
    if right.bias is not None:
        other = known.scale(right.bias, sign)
        bias = other if bias is None else known.add(bias, other)
    centred = _less_mean(left, right, sign)
    if centred is None and sign > 0:
        centred = _less_mean(right, left, 1.0)
    result = Affine(operands.shape, terms, bias, centred=centred)
    if centred is not None and not result.features():
        return operands.opaque(centred=centred)
    if len(terms) > max(len(left.terms), len(right.terms)):
        # More sources: as long as they are narrower than the sum. A wider sum is a better source itself.
        width = math.prod(operands.shape[axis] for axis in result.features())
        if result.rows() >= width or len(terms) > MOST_TERMS:
            return None
    return result if result.features() else None


def _less_mean(array: Affine, mean: Affine, sign: float) -> Sum | None:
    """The sum in ``mean``, if ``array + sign · mean`` is the array less its own mean."""
    total = mean.sum_of
    if total is None or total.base is not array:
        return None
    if any(own not in (None, axis) for axis, own in enumerate(total.axes)):
        return None  # the mean over one axis of a square array, taken from another
    width = math.prod(array.shape[axis] for axis in total.over)
    return total if total.factor.times(-sign * width).may_be(1.0) else None


def _shifted(affine: Affine, node: Known, sign: float, shape: tuple[int, ...]) -> Affine:
    node = known.scale(node, sign)
    return Affine(shape, affine.terms, node if affine.bias is None else known.add(affine.bias, node))


def _combine(a: Quadratic, b: Quadratic, sign: float) -> Abstract:
    if (a.base, a.over, a.axes, a.shape) != (b.base, b.over, b.axes, b.shape):
        return None
    return dataclasses.replace(
        a,
        squares=a.squares.plus(b.squares, sign),
        sums=a.sums.plus(b.sums, sign),
        offset=a.offset + sign * b.offset,
    )


def _multiplied(a: Quadratic, factor: Number) -> Quadratic:
    squares, sums = a.squares.times(factor), a.sums.times(factor)
    return dataclasses.replace(a, squares=squares, sums=sums, offset=a.offset * factor.value)


def scaled(affine: Affine, factor: Number | float) -> Affine:
    """The affine array times a number."""
    number = float(factor)
    if number == 1:
        return affine
    terms = {source: known.scale(node, number) for source, node in affine.terms.items()}
    bias = None if affine.bias is None else known.scale(affine.bias, number)
    total = affine.sum_of and dataclasses.replace(affine.sum_of, factor=affine.sum_of.factor.times(factor))
    return Affine(affine.shape, terms, bias, total)


@rule("neg")
def neg(operands: Operands) -> Abstract:
    a = _quadratic(operands[0])
    if isinstance(a, Quadratic):
        return _multiplied(a, exactly(-1.0))
    return scaled(a, -1.0) if isinstance(a, Affine) else None


@rule("mul")
def mul(operands: Operands) -> Abstract:
    if operands.value(0) is operands.value(1):
        return square_of(operands, 0)
    for index in (0, 1):
        a, number = _quadratic(operands[index]), operands.factor(1 - index)
        if isinstance(a, Quadratic) and number is not None:
            return _multiplied(a, number)
        if isinstance(a, Affine) and number is not None:
            return scaled(a, number)
    for index in (0, 1):
        if isinstance(operands[1 - index], Known):
            return _each(operands, index, operands.known(1 - index), known.multiply)
    return _product(operands)


@rule("div")
def div(operands: Operands) -> Abstract:
    a, b, number = _quadratic(operands[0]), operands[1], operands.factor(1)
    if number is not None and number.value:
        if isinstance(a, Quadratic):
            return _multiplied(a, number.inverse())
        if isinstance(a, Affine):
            return scaled(a, number.inverse())
    if isinstance(a, Known):
        return None
    if isinstance(b, Known):
        return _each(operands, 0, operands.known(1), known.divide)
    divisor = operands.spread_source(1)
    inverse = {
        Source(tuple(
            dataclasses.replace(view, source=view.source.then(("inverse",), view.source.shape)) for view in source.views
        )): node
        for source, node in divisor.terms.items()
    }  # fmt: skip
    return _times(operands.spread(0), Affine(divisor.shape, inverse), operands.shape)


def _each(operands: Operands, index: int, node: Known, operation: Callable[[Known, Known], Known]) -> Affine:
    """The affine array times or over a known one, entry by entry."""
    affine = operands.spread(index)
    terms = {}
    for source, own in affine.terms.items():
        rows = len(source.row_shape)
        terms[source] = operation(own, known.reshape(node, (1,) * rows + node.shape))
    bias = None if affine.bias is None else operation(affine.bias, node)
    return Affine(operands.shape, terms, bias)


def _product(operands: Operands) -> Abstract:
    """Of two runtime arrays: affine if one of them is constant along the features of the other."""
    for index in (0, 1):
        wide, narrow = operands[index], operands.spread(1 - index)
        if isinstance(wide, Affine) and (result := _times(wide, narrow, operands.shape)) is not None:
            return result
    return None


def _times(wide: Affine, narrow: Affine, shape: tuple[int, ...]) -> Abstract:
    """``wide · (s t)`` for one source s without rows, which scales the sources, and its T."""
    if len(narrow.terms) != 1 or narrow.bias is not None:
        return None
    ((scale, node),) = narrow.terms.items()
    if scale.row_shape or not (wide.features() - scale.varies() or _absorbs(wide, scale, node)):
        return None
    terms = {}
    for source, own in wide.terms.items():
        rows = len(source.row_shape)
        terms[source.times(scale)] = known.multiply(own, known.reshape(node, (1,) * rows + node.shape))
    if wide.bias is not None:
        bias = known.multiply(wide.bias, node)
        terms[scale] = known.add(terms[scale], bias) if scale in terms else bias
    return Affine(shape, terms)


def _absorbs(wide: Affine, scale: Source, node: Known) -> bool:
    """Whether T becomes more than ones: the scale of a norm that multiplies the root before the root multiplies x."""
    if any(source.row_shape for source in wide.terms):
        return False
    varies = set().union(*(source.varies() for source in wide.terms))
    own = {axis for axis, size in enumerate(node.shape) if size != 1}
    return bool(varies & own - scale.varies())


@rule("square")
def square(operands: Operands) -> Abstract:
    return square_of(operands, 0)


@rule("integer_pow")
def integer_pow(operands: Operands) -> Abstract:
    return square_of(operands, 0) if operands.params["y"] == 2 else None


@rule("pow")
def power(operands: Operands) -> Abstract:
    return square_of(operands, 0) if operands.number(1) == 2 and not isinstance(operands[0], Known) else None


def square_of(operands: Operands, index: int) -> Abstract:
    affine = operands.spread(index)
    total = affine.sum_of
    if total is None:
        return Square(affine)
    sums = total.factor.times(total.factor).times(-1.0)
    part = Quadratic(total.base, total.over, exactly(0.0), sums, 0.0, affine.shape, total.axes)
    return Square(affine, part)


def _quadratic(a: Abstract) -> Abstract:
    """The square of a sum as a part of a quadratic; anything else as it is."""
    return a.total if isinstance(a, Square) and a.total is not None else a


@rule("max")
def maximum(operands: Operands) -> Abstract:
    """Of zero and a sum of squares: that sum."""
    for index in (0, 1):
        a = operands[index]
        if isinstance(a, Quadratic) and operands.number(1 - index) == 0 and is_sum_of_squares(a):
            return a
    return None


def is_sum_of_squares(a: Quadratic) -> bool:
    """Whether it is nowhere negative: a variance, a mean square, or between the two."""
    return a.squares.value > 0 and a.offset >= 0 and 0 <= a.centring() <= 1


@rule("select_n")
def select(operands: Operands) -> Abstract:
    """By a constant: one of the cases. By a runtime value: opaque, however linear the cases are."""
    number = operands.number(0)
    if number is None:
        return None
    chosen = 1 + int(number)
    return operands[chosen] if not isinstance(operands[chosen], Known) else None


@rule("convert_element_type")
def convert(operands: Operands) -> Abstract:
    """To another floating dtype: the same, unless it is a bare source and is rounded, and so is one of its own.

    Whether a cast ends a map that is more than a source, the analysis knows, which knows who reads it.
    """
    a, before, after = operands[0], operands.value(0).aval.dtype, operands.params["new_dtype"]
    if isinstance(a, (Affine, Square, Quadratic)):
        return a
    return operands.source(0) if is_exact(before, after) else None


@rule("reduce_precision")
def reduce_precision(operands: Operands) -> Abstract:
    """To the digits of its own dtype, or more: the same array."""
    return operands[0] if keeps_all(operands.equation) else None


@rule("copy", "pvary", "pcast", "pbroadcast")
def copy(operands: Operands) -> Abstract:
    return operands[0]
