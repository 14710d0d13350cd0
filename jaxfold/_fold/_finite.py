"""Known values that hold an infinity or NaN whatever the parameters are: masks of ``-inf``.

They are values like any other for the program, but not for coefficients: in a table of coefficients an infinite entry
meets the zeros beside it, and ``0 · ∞`` is NaN. What is computed with them stays an operation of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxfold._fold._program import Equation, Value, small_constant


class Infinite:
    """Which known values may hold such entries: all that is computed from constants that do."""

    def __init__(self) -> None:
        self._found: dict[Value, bool] = {}

    def __call__(self, value: Value) -> bool:
        """Whether a known value may hold infinities or NaN that no parameter is the cause of."""
        if value not in self._found:
            self._found[value] = not _is_finite(value)
        return self._found[value]

    def note(self, equation: Equation) -> None:
        """Takes down a known equation, after those before it."""
        inside = any(self(value) for value in equation.inputs)
        for output in equation.outputs:
            if output.constant is None and jnp.issubdtype(output.aval.dtype, jnp.floating):
                self._found[output] = inside

    def reaches(self, equation: Equation, is_known: Callable[[Value], bool]) -> bool:
        """Whether an operation on runtime arrays takes in such entries, or makes them: a division by zeros does."""
        divisor = small_constant(equation.inputs[1]) if equation.name == "div" else None
        if divisor is not None and not np.all(divisor):
            return True
        read = equation.inputs
        if equation.name == "select_n" and (predicate := small_constant(read[0])) is not None and predicate.size:
            # By one constant everywhere: ``jnp.var`` has a NaN for n = 0 beside its result, which nothing reads.
            first = int(predicate[(0,) * predicate.ndim])
            if np.all(predicate == first):
                read = read[1 + first : 2 + first]
        return any(is_known(value) and self(value) for value in read)


def _is_finite(value: Value) -> bool:
    """Whether an input, or a constant of any size, is finite; of an input nobody knows."""
    array = value.constant
    if array is None or isinstance(array, Tracer) or not jnp.issubdtype(value.aval.dtype, jnp.inexact):
        return True
    if isinstance(array, np.ndarray) and not any(array.strides):
        array = array[(slice(0, 1),) * array.ndim]
    addressable = not isinstance(array, jax.Array) or array.is_fully_addressable
    return not addressable or bool(np.isfinite(np.asarray(array).astype(np.complex128)).all())
