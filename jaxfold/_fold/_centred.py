"""Evaluating what is left of a stream without its mean.

Where the operation that makes a value hands the mean on to its operands, it is evaluated as it stands, and needs
nothing here. What does:

    Stored          a parameter whose mean is taken away when contracting
    Recentred       an operation whose result, or some of whose operands, lose their mean when it is evaluated
    Uncentred       in place of ``h − mean(h)``: h
    MeanSquare      in place of the variance of h: ``Σ h² / n``, with its factor and offset
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxfold._algebra._dtype import compute_dtype
from jaxfold._fold import _known as known
from jaxfold._fold._affine import Affine, Quadratic
from jaxfold._fold._known import Known
from jaxfold._fold._product import Read
from jaxfold._fold._program import Equation, Value


def less_mean(array: Any, axis: int) -> Any:
    """``P array``, rounded once."""
    fine = array.astype(compute_dtype(np.dtype(array.dtype)))
    return (fine - jnp.mean(fine, axis=axis, keepdims=True)).astype(array.dtype)


def centred(affine: Affine, axis: int) -> Affine:
    """``P (x T + b) = x (P T) + P b``, along an axis along which no source varies."""
    terms = {source: known.centre(node, len(source.row_shape) + axis) for source, node in affine.terms.items()}
    bias = None if affine.bias is None else known.centre(affine.bias, axis)
    return Affine(affine.shape, terms, bias)


def nothing(array: Any, axis: int | None) -> Any:
    """``P array`` of an array that is constant along the axis: zero, and NaN where the array is not finite."""
    if array.ndim and axis is not None:
        narrow = lax.slice_in_dim(array, 0, 1, axis=axis)
        return jnp.broadcast_to(narrow - narrow, array.shape)
    return array - array


class Way:
    """How to compute a value otherwise than the program says, without coefficients."""

    size: int = 0

    def values(self) -> set[Value]:
        raise NotImplementedError

    def leaves(self) -> set[Value]:
        return set()

    def coefficients(self, xp: Any, compute: Callable[[Known], Any]) -> dict[str, Any]:
        return {}

    def evaluate(self, coefficients: Any, read: Read, dtype: Any) -> Any:
        raise NotImplementedError


class Stored(Way):
    """A known array, without its mean."""

    def __init__(self, array: Known, shape: tuple[int, ...], axis: int) -> None:
        self.shape, self.table = shape, known.centre(array, axis)
        self.size = known.size(self.table)

    def values(self) -> set[Value]:
        return set()

    def leaves(self) -> set[Value]:
        return self.table.leaves()

    def coefficients(self, xp: Any, compute: Callable[[Known], Any]) -> dict[str, Any]:
        return {"kernel": compute(self.table)}

    def evaluate(self, coefficients: Any, read: Read, dtype: Any) -> Any:
        return jnp.broadcast_to(jnp.asarray(coefficients["kernel"], dtype), self.shape)


class Recentred(Way):
    """The result of an equation, or an input of the program, with means taken away where it is computed.

    Attributes:
        axis: of the result, or None if its operands leave it without a mean.
        operands: for operands that are not read as they are, the axis to centre along, or None where they are constant.
        constant: the axis along which those are constant.
        way: how the result is computed, if not as the program says.
    """

    def __init__(
        self,
        value: Value,
        axis: int | None,
        operands: Mapping[int, int | None],
        way: Any = None,
        constant: int | None = None,
    ) -> None:
        self.value, self.axis, self.operands, self.way, self.constant = value, axis, operands, way, constant
        self.size = 0 if way is None else way.size
        inputs = [] if value.origin is None else value.origin.inputs
        self.zero = {index for index, own in operands.items() if own is None and _is_finite(inputs[index].constant)}

    def values(self) -> set[Value]:
        if self.way is not None:
            return self.way.values()
        return {self.value} if self.value.origin is None else set(self.value.origin.inputs)

    def leaves(self) -> set[Value]:
        return set() if self.way is None else self.way.leaves()

    def coefficients(self, xp: Any, compute: Callable[[Known], Any]) -> dict[str, Any]:
        return {} if self.way is None else self.way.coefficients(xp, compute)

    def evaluate(self, coefficients: Any, read: Read, dtype: Any) -> Any:
        origin = self.value.origin
        if self.way is not None:
            result = self.way.evaluate(coefficients, read, dtype)
        elif origin is None:
            result = jnp.asarray(read(self.value))
        else:
            result = origin.evaluate(self._arguments(origin, read))[origin.outputs.index(self.value)]
        return result if self.axis is None else less_mean(result, self.axis)

    def _arguments(self, origin: Equation, read: Read) -> list[Any]:
        arguments = [read(value) for value in origin.inputs]
        for index, axis in self.operands.items():
            array = jnp.asarray(arguments[index])
            if axis is not None:
                arguments[index] = less_mean(array, axis)
            elif index in self.zero:
                arguments[index] = jnp.zeros_like(array)
            else:
                arguments[index] = nothing(array, self.constant)
        return arguments


def _is_finite(constant: Any) -> bool:
    """Whether it is a constant of the program, and finite, as far as that is known before anything runs."""
    if constant is None or isinstance(constant, Tracer):
        return False
    array = np.asarray(constant)
    first = array if any(array.strides) else array[(0,) * array.ndim]  # one number, repeated
    return bool(np.isfinite(first.astype(np.float64)).all())


class Uncentred(Way):
    """``h − mean(h)`` of an h without a mean."""

    def __init__(self, stream: Value) -> None:
        self.stream = stream

    def values(self) -> set[Value]:
        return {self.stream}

    def evaluate(self, coefficients: Any, read: Read, dtype: Any) -> Any:
        return jnp.asarray(read(self.stream))


class MeanSquare(Way):
    """``a ‖h‖² − b (Σ h)² + c`` of an h without a mean."""

    def __init__(self, stream: Value, quadratic: Quadratic) -> None:
        self.stream, self.quadratic = stream, quadratic

    def values(self) -> set[Value]:
        return {self.stream}

    def evaluate(self, coefficients: Any, read: Read, dtype: Any) -> Any:
        (over,), q = self.quadratic.over, self.quadratic
        stream = jnp.asarray(read(self.stream), dtype)
        squares = jnp.sum(jnp.square(stream), axis=over)
        left = [axis for axis in range(stream.ndim) if axis != over]
        order = [axis for axis in q.axes if axis is not None]
        dropped = tuple(left.index(axis) for axis in left if axis not in order)
        squares = jnp.squeeze(squares, dropped)
        rest = [axis for axis in left if axis in order]
        squares = jnp.transpose(squares, [rest.index(axis) for axis in order]) * q.squares.value + q.offset
        shape = [1 if axis is None else stream.shape[axis] for axis in q.axes]
        return jnp.broadcast_to(squares.reshape(shape), q.shape)
