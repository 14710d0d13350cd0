"""Along which axes a known array only repeats itself.

The extent of an array is its shape, with size 1 along every axis along which all entries are the same because of how
the array was made. ``broadcast_to(token, (batch, 1, n))`` has the extent ``(1, 1, n)``: one token says all, whatever
the batch. So coefficients are stored once, and do not depend on the size of a batch that they were repeated for.

    before    t:f64[1,1,8]
              b:f64[4,1,8] = tile[reps=(4, 1, 1)] t
              c:f64[4,1,8] = add b p                      p:f64[1,8], another parameter, brought to f64[1,1,8]
    extents   t (1,1,8)   b (1,1,8)   c (1,1,8)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxfold._fold._program import Equation
from jaxfold._fold._rules_layout import axis_groups

Shape = tuple[int, ...]

ENTRY_BY_ENTRY = {
    *("add", "sub", "mul", "div", "max", "min", "pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "neg", "abs"),
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "sign", "convert_element_type", "copy"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite", "select_n", "clamp", "rem", "floor"),
    *("ceil", "round", "sin", "cos", "tan", "nextafter", "atan2", "reduce_precision"),
}


def extent_of(equation: Equation, operands: list[Shape]) -> Shape:
    """Return the extent of an equation's only result, from those of its operands."""
    shape = equation.outputs[0].shape
    rule = "entries" if equation.name in ENTRY_BY_ENTRY else equation.name
    if rule not in RULES or 0 in shape or any(0 in own for own in operands):
        return shape
    return RULES[rule](equation, operands)


def _entries(equation: Equation, operands: list[Shape]) -> Shape:
    rank = len(equation.outputs[0].shape)
    return np.broadcast_shapes((1,) * rank, *operands)


def _broadcast(equation: Equation, operands: list[Shape]) -> Shape:
    shape = equation.outputs[0].shape
    if len(operands) > 1:  # sizes that are not static
        return shape
    extent = [1] * len(shape)
    for own, axis in zip(operands[0], equation.params["broadcast_dimensions"], strict=True):
        extent[axis] = own
    return tuple(extent)


def _tile(equation: Equation, operands: list[Shape]) -> Shape:
    reps = equation.params["reps"]
    own, shape = operands[0], equation.outputs[0].shape
    return tuple(1 if o == 1 else size if r != 1 else o for o, r, size in zip(own, reps, shape, strict=True))


def _reshape(equation: Equation, operands: list[Shape]) -> Shape:
    before, shape, own = equation.inputs[0].shape, equation.outputs[0].shape, operands[0]
    if equation.name == "reshape" and equation.params.get("dimensions") is not None:
        return shape
    extent = [1] * len(shape)
    for old, new in axis_groups(before, shape):
        if any(own[axis] != 1 for axis in old):
            for axis in new:
                extent[axis] = shape[axis]
    return tuple(extent)


def _transpose(equation: Equation, operands: list[Shape]) -> Shape:
    return tuple(operands[0][axis] for axis in equation.params["permutation"])


def _slice(equation: Equation, operands: list[Shape]) -> Shape:
    shape = equation.outputs[0].shape
    return tuple(1 if own == 1 else size for own, size in zip(operands[0], shape, strict=True))


RULES: dict[str, Callable[[Equation, list[Shape]], Shape]] = {
    "entries": _entries,
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "slice": _slice,
}
