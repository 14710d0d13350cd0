"""Which casts an affine map goes on behind, and which end it.

A cast to a dtype that holds every number of the one before is exact. Any other cast rounds, and a rounded map is
affine no longer. Yet every operation rounds its result: a cast is left out of the map, as those roundings are, where
the arithmetic of the map itself is no finer than what the cast leaves:

    behind it     the map so far was computed with as few digits, and as small a range, somewhere: a product in
                  bfloat16, its statistics in float32, and bfloat16 once more
    before it     what reads the rounded array rounds its own result to the same dtype: a norm in float32 before a
                  product in bfloat16

Where a reader has more digits than the rounded array, it sees the rounding, so the cast ends the map: the array
before the cast is the last of it, and what was rounded is a new source. So it is where no product reads what was
rounded, since there is nothing to go on for. Nothing is ever affine in a dtype of 8 or fewer bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfold._fold._program import Equation, Program, Value

# Operations that compute nothing: their results are entries of their operands.
MOVES = {
    *("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "slice", "concatenate", "copy", "select_n"),
    *("dynamic_slice", "dynamic_update_slice", "gather", "split", "rev", "pad", "neg", "max", "sharding_constraint"),
    *("reduce_precision", "name"),
}
# Those whose result is affine in an operand, and has its dtype.
ENTRIES = {"add", "sub", "add_any", "mul", "div"}
PRODUCTS = {"dot_general", "conv_general_dilated"}


@dataclasses.dataclass(frozen=True)
class Digits:
    """Which numbers a dtype has: bits of the mantissa, the largest exponent and that of the smallest number."""

    mantissa: float
    largest: float
    smallest: float

    def hold(self, other: Digits) -> bool:
        """Whether every number with the other digits is one with these."""
        return self.mantissa >= other.mantissa and self.largest >= other.largest and self.smallest <= other.smallest


EXACT = Digits(math.inf, math.inf, -math.inf)


@functools.cache
def digits(dtype: np.dtype) -> Digits:
    """Those of a floating dtype."""
    info = jnp.finfo(dtype)
    return Digits(int(info.nmant), int(info.maxexp), int(info.minexp) - int(info.nmant))


def coarsest(each: Sequence[Digits]) -> Digits:
    return Digits(
        min((one.mantissa for one in each), default=math.inf),
        min((one.largest for one in each), default=math.inf),
        max((one.smallest for one in each), default=-math.inf),
    )


def is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_arithmetic(dtype: Any) -> bool:
    """Whether arrays of the dtype may be affine: floating, of 16 bits or more."""
    return is_floating(dtype) and np.dtype(dtype).itemsize > 1


def is_exact(before: Any, after: Any) -> bool:
    """Whether a cast from one floating dtype to another changes no number."""
    return is_floating(before) and is_floating(after) and digits(np.dtype(after)).hold(digits(np.dtype(before)))


def keeps_all(equation: Equation) -> bool:
    """Whether a reduce_precision leaves every number of its operand as it is."""
    dtype, params = equation.inputs[0].aval.dtype, equation.params
    if not is_floating(dtype):
        return False
    info = jnp.finfo(dtype)
    return params["mantissa_bits"] >= info.nmant and params["exponent_bits"] >= info.nexp


class Roundings:
    """What every value of a program is rounded to, and who sees it.

    Attributes:
        seen: the floating values of which a reader has more digits than the value itself, or whose entries such a
            reader sees through operations that only move them.
        go_on: those that a product with a known array reads in their own dtype, through moves and arithmetic in it.
        before: the digits of the arithmetic behind a value that is affine; what is a source has none.
    """

    def __init__(self, program: Program, known: set[Value]) -> None:
        self.seen: set[Value] = set()
        self.go_on: set[Value] = set()
        self.before: dict[Value, Digits] = {}
        needed = set(program.outputs)
        known = _known(program, known)
        for equation in reversed(program.equations):
            if equation.source.effects or needed & set(equation.outputs):
                needed |= set(equation.inputs)
                self._read(equation, known)

    def ends(self, equation: Equation, *, spread: bool = True) -> bool:
        """Whether a cast ends the map of its operand.

        Without ``spread``, what is behind counts alone: a cast that nobody reads any further ends nothing then.
        """
        (value,), (output,) = equation.inputs, equation.outputs
        before, after = value.aval.dtype, equation.params["new_dtype"]
        if not (is_arithmetic(before) and is_arithmetic(after)):
            return True
        if is_exact(before, after) or digits(np.dtype(after)).hold(self.before.get(value, EXACT)):
            return False
        return output in self.seen or (spread and output not in self.go_on)

    def note(self, equation: Equation, sources: Sequence[bool]) -> None:
        """Takes down the digits behind an affine result; ``sources`` says which operands are read as sources."""
        behind = [
            self.before.get(value, EXACT) for value, source in zip(equation.inputs, sources, strict=True) if not source
        ]
        self.before[equation.outputs[0]] = coarsest([*behind, _own(equation)])

    def _read(self, equation: Equation, known: set[Value]) -> None:
        """What this reader makes of its operands' roundings."""
        name, outputs = equation.name, [value for value in equation.outputs if is_floating(value.aval.dtype)]
        dtypes = {value.aval.dtype for value in (*equation.inputs, *outputs)}
        moves = name in MOVES or (name == "convert_element_type" and len(dtypes) == 1)
        for value in equation.inputs:
            if value.constant is not None or not is_floating(value.aval.dtype):
                continue
            own = digits(np.dtype(value.aval.dtype))
            finer = any(not own.hold(digits(np.dtype(output.aval.dtype))) for output in outputs)
            if finer or (moves and any(output in self.seen for output in outputs)):
                self.seen.add(value)
            product = name in PRODUCTS and any(other in known for other in equation.inputs if other is not value)
            passes = (moves or name in ENTRIES) and any(output in self.go_on for output in outputs)
            if product or passes:
                self.go_on.add(value)


def _known(program: Program, given: set[Value]) -> set[Value]:
    """The values that depend on parameters and constants alone."""
    known = set(given)
    for equation in program.equations:
        for value in equation.inputs:
            if value.constant is not None:
                known.add(value)
        if not equation.source.effects and all(value in known for value in equation.inputs):
            known |= set(equation.outputs)
    return known


def _own(equation: Equation) -> Digits:
    """Those that an operation rounds its result to; a product rounds to its operands' digits, as it reads these."""
    if equation.name in MOVES or equation.name == "convert_element_type":
        return EXACT
    result = digits(np.dtype(equation.outputs[0].aval.dtype))
    if equation.name not in PRODUCTS:
        return result
    operands = [digits(np.dtype(v.aval.dtype)) for v in equation.inputs if is_floating(v.aval.dtype)]
    finest = [own for own in operands if all(own.hold(other) for other in operands)]
    return coarsest([result, *finest[:1]])
