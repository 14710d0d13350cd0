"""Linear operations that leave an axis alone: the mean along it may be taken from their operands instead.

With P the projection that takes the mean along an axis away, ``P f(x, …) = f(P x, …)`` for a sum of arrays, a choice by
position, a product with what is constant along the axis, and for whatever acts along other axes only. A rule says, for
one axis of the result, what that asks of each operand:

    an axis     P along that axis of the operand
    KEEP        nothing: it stays as it is
    ZERO        it is constant along the same axis, and added: P makes it zero, or NaN where it is not finite

and None where the operation is not of this kind. A kernel with an axis that goes on into the result is an operand like
any other, which is how the mean gets from the output of a Dense layer into the columns of its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from jaxfold._fold._program import Equation
from jaxfold._fold._roundings import is_arithmetic, keeps_all
from jaxfold._fold._rules_layout import axis_groups

Request = int | Literal["keep", "zero"]
KEEP: Literal["keep"] = "keep"
ZERO: Literal["zero"] = "zero"
IsConstant = Callable[[int, int], bool]
ThroughRule = Callable[[Equation, int, IsConstant], list[Request] | None]
THROUGH: dict[str, ThroughRule] = {}


def through(*names: str) -> Callable[[ThroughRule], ThroughRule]:
    """Registers a rule for the primitives of these names."""

    def register(function: ThroughRule) -> ThroughRule:
        THROUGH.update(dict.fromkeys(names, function))
        return function

    return register


def requests(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    """What P along this axis of the result asks of the operands; ``is_constant(operand, axis)`` says what it says."""
    rule = THROUGH.get(equation.name)
    if rule is None or equation.source.effects:
        return None
    found = rule(equation, axis, is_constant)
    if found is None:
        return None
    plain: list[Request] = [request if isinstance(request, str) else int(request) for request in found]
    return plain if any(isinstance(request, int) for request in plain) else None


@through("add", "sub", "add_any")
def _add(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request]:
    return [ZERO if is_constant(index, axis) else axis for index in range(len(equation.inputs))]


@through("mul")
def _mul(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    for index in (0, 1):
        if is_constant(1 - index, axis) and not is_constant(index, axis):
            return [axis, KEEP] if index == 0 else [KEEP, axis]
    return None


@through("div")
def _div(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return [axis, KEEP] if is_constant(1, axis) and not is_constant(0, axis) else None


@through("neg", "copy", "sharding_constraint")
def _same(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request]:
    return [axis]


@through("convert_element_type")
def _convert(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    """Between dtypes that are computed in; whether anything would notice, ``Blindness`` knows."""
    return [axis] if all(map(is_arithmetic, (equation.inputs[0].aval.dtype, equation.params["new_dtype"]))) else None


@through("reduce_precision")
def _reduce_precision(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return [axis] if keeps_all(equation) else None


@through("select_n")
def _select(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    if not is_constant(0, axis):
        return None
    return [KEEP, *(ZERO if is_constant(index, axis) else axis for index in range(1, len(equation.inputs)))]


@through("transpose")
def _transpose(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request]:
    return [equation.params["permutation"][axis]]


@through("broadcast_in_dim")
def _broadcast(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    targets = equation.params["broadcast_dimensions"]
    if axis not in targets or is_constant(0, targets.index(axis)):
        return None
    return [targets.index(axis), *(KEEP for _ in equation.inputs[1:])]


@through("reshape", "squeeze", "expand_dims")
def _reshape(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    before, after = equation.inputs[0].shape, equation.outputs[0].shape
    if 0 in before or (equation.params.get("dimensions") is not None and equation.name == "reshape"):
        return None
    for old, new in axis_groups(before, after):
        if new == (axis,) and len(old) == 1:
            return [old[0]]
    return None


@through("slice")
def _slice(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return _whole(equation, axis)


@through("dynamic_slice")
def _dynamic_slice(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return _whole(equation, axis)


def _whole(equation: Equation, axis: int) -> list[Request] | None:
    """The first operand, if the result has all that it has along the axis, in the same order."""
    strides = equation.params.get("strides")
    if equation.inputs[0].shape[axis] != equation.outputs[0].shape[axis] or (strides and strides[axis] != 1):
        return None
    return [axis, *(KEEP for _ in equation.inputs[1:])]


@through("dynamic_update_slice")
def _update(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    if equation.inputs[1].shape[axis] != equation.outputs[0].shape[axis]:
        return None
    changed: list[Request] = [ZERO if is_constant(index, axis) else axis for index in (0, 1)]
    return [*changed, *(KEEP for _ in equation.inputs[2:])]


@through("concatenate")
def _concatenate(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    if equation.params["dimension"] == axis:
        return None
    return [ZERO if is_constant(index, axis) else axis for index in range(len(equation.inputs))]


@through("split")
def _split(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return None if equation.params["axis"] == axis else [axis]


@through("pad")
def _pad(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return [axis, ZERO] if tuple(equation.params["padding_config"][axis]) == (0, 0, 0) else None


@through("rev")
def _rev(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return None if axis in equation.params["dimensions"] else [axis]


@through("gather")
def _gather(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    """Rows of a table, each whole along the axis."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    table, fill = equation.inputs[0].shape, equation.params.get("fill_value")
    plain = fill is None or fill == 0 or math.isnan(fill)  # what stands for a row that is not there
    if axis not in numbers.offset_dims or not plain:
        return None
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    own = [dim for dim in range(len(table)) if dim not in gone][numbers.offset_dims.index(axis)]
    return [own, KEEP] if sizes[own] == table[own] else None  # wherever it starts: a whole row, or what stands for it


@through("reduce_sum")
def _reduce_sum(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request]:
    return [[own for own in range(len(equation.inputs[0].shape)) if own not in equation.params["axes"]][axis]]


@through("cumsum")
def _cumsum(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    return None if equation.params["axis"] == axis else [axis]


@through("reduce_window_sum")
def _window(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    """Average pooling."""
    params = equation.params
    sizes = (params[name][axis] for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation"))
    return [axis] if all(size == 1 for size in sizes) and tuple(params["padding"][axis]) == (0, 0) else None


@through("dot_general")
def _dot_general(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    """The axis goes on from one operand, or is one that both share."""
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    if axis < len(left_batch):
        own = left_batch[axis], right_batch[axis]
        for index in (0, 1):
            if is_constant(1 - index, own[1 - index]) and not is_constant(index, own[index]):
                return [own[0], KEEP] if index == 0 else [KEEP, own[1]]
        return None
    free = [
        [(index, own) for own in range(len(equation.inputs[index].shape)) if own not in (*contracted, *batch)]
        for index, contracted, batch in ((0, left, left_batch), (1, right, right_batch))
    ]
    index, own = (free[0] + free[1])[axis - len(left_batch)]
    return [own, KEEP] if index == 0 else [KEEP, own]


@through("conv_general_dilated")
def _conv(equation: Equation, axis: int, is_constant: IsConstant) -> list[Request] | None:
    """The output features of a convolution all of whose features see the same input; not of a depthwise one."""
    params: dict[str, Any] = equation.params
    numbers = params["dimension_numbers"]
    one_group = params["feature_group_count"] == 1 and params["batch_group_count"] == 1
    return [KEEP, numbers.rhs_spec[0]] if axis == numbers.out_spec[1] and one_group else None
