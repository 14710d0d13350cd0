"""Expressions over parameters: what is known before any input is.

An analysis builds them, ``contract`` evaluates them, with NumPy in float64 or, traced, with JAX. Leaves are values of
the program that depend on parameters alone, computed by the program's own equations, and constants. An expression is an
operation of :data:`OPERATIONS` with its static arguments spelled out as plain values. Nothing is hidden in a closure,
so that two expressions can be compared (``_fingerprint.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfold._fold._program import Value


class Known:
    """An array that depends on parameters alone: its shape, and how to compute it.

    A leaf has the program's :class:`Value`. Its shape has size 1 along the axes along which the value only repeats
    itself. Everything else has an operation, static arguments and the expressions that it is computed from.
    """

    __slots__ = ("arguments", "operation", "shape", "static", "value")

    def __init__(
        self,
        shape: tuple[int, ...],
        operation: str = "leaf",
        arguments: tuple[Known, ...] = (),
        static: Any = (),
        value: Value | None = None,
    ) -> None:
        self.shape, self.operation, self.arguments, self.static, self.value = shape, operation, arguments, static, value

    def leaves(self) -> set[Value]:
        """The values of the program that it is computed from."""
        seen: set[int] = set()
        found: set[Value] = set()
        stack: list[Known] = [self]
        while stack:
            node = stack.pop()
            if id(node) not in seen:
                seen.add(id(node))
                stack += node.arguments
                if node.value is not None:
                    found.add(node.value)
        return found


def _einsum(xp: Any, node: Known, *arrays: Any) -> Any:
    extra = {"optimize": True} if xp is np else {"precision": "highest"}
    return xp.einsum(node.static, *arrays, **extra)


def _centre(xp: Any, node: Known, array: Any) -> Any:
    return array - xp.mean(array, axis=node.static, keepdims=True)


# What each operation computes: of NumPy or JAX, the node, and the arrays of its arguments.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "constant": lambda xp, node: xp.asarray(node.static),
    "ones": lambda xp, node: xp.ones(node.shape),
    "zeros": lambda xp, node: xp.zeros(node.shape),
    "reshape": lambda xp, node, a: xp.reshape(a, node.shape),
    "broadcast": lambda xp, node, a: xp.broadcast_to(a, node.shape),
    "transpose": lambda xp, node, a: xp.transpose(a, node.static),
    "sum": lambda xp, node, a: xp.sum(a, axis=node.static[0]) * node.static[1],
    "scale": lambda xp, node, a: a * node.static,
    "slice": lambda xp, node, a: a[tuple(slice(*part) for part in node.static)],
    "centre": _centre,
    "add": lambda xp, node, a, b: a + b,
    "subtract": lambda xp, node, a, b: a - b,
    "multiply": lambda xp, node, a, b: a * b,
    "divide": lambda xp, node, a, b: a / b,
    "concatenate": lambda xp, node, *arrays: xp.concatenate(arrays, axis=node.static),
    "einsum": _einsum,
}


def evaluate(node: Known, xp: Any, read: Callable[[Value], Any], memo: dict[int, Any]) -> Any:
    """The array of an expression; ``read`` gives the leaves, ``memo`` keeps what was computed, by ``id``."""
    stack = [node]
    while stack:
        top = stack[-1]
        if id(top) in memo:
            stack.pop()
        elif top.value is not None:
            memo[id(top)] = _once(read(top.value), top.shape)
        elif missing := [argument for argument in top.arguments if id(argument) not in memo]:
            stack += missing
        else:
            memo[id(top)] = OPERATIONS[top.operation](xp, top, *(memo[id(argument)] for argument in top.arguments))
    return memo[id(node)]


def _once(array: Any, shape: tuple[int, ...]) -> Any:
    """Return the first entry along the axes along which the array only repeats itself."""
    if np.shape(array) == shape:
        return array
    return array[
        tuple(slice(None) if own == size else slice(1) for own, size in zip(shape, np.shape(array), strict=True))
    ]


def leaf(value: Value, shape: tuple[int, ...] | None = None) -> Known:
    """A value of the program; ``shape`` has size 1 along the axes along which the value only repeats itself."""
    return Known(value.shape if shape is None else shape, value=value)


def constant(array: Any) -> Known:
    array = np.asarray(array)
    return Known(array.shape, "constant", static=array)


def ones(shape: tuple[int, ...]) -> Known:
    return Known(shape, "ones")


def zeros(shape: tuple[int, ...]) -> Known:
    return Known(shape, "zeros")


def reshape(node: Known, shape: tuple[int, ...]) -> Known:
    return node if node.shape == shape else Known(shape, "reshape", (node,))


def transpose(node: Known, axes: tuple[int, ...]) -> Known:
    if axes == tuple(range(len(axes))):
        return node
    return Known(tuple(node.shape[axis] for axis in axes), "transpose", (node,), axes)


def broadcast(node: Known, shape: tuple[int, ...]) -> Known:
    return node if node.shape == shape else Known(shape, "broadcast", (node,))


def reduce_sum(node: Known, axes: tuple[int, ...], factor: int = 1) -> Known:
    """The sum, times how often axes that are not there would have repeated it."""
    shape = tuple(size for axis, size in enumerate(node.shape) if axis not in axes)
    return Known(shape, "sum", (node,), (axes, factor))


def add(a: Known, b: Known) -> Known:
    return _binary("add", a, b)


def subtract(a: Known, b: Known) -> Known:
    return _binary("subtract", a, b)


def multiply(a: Known, b: Known) -> Known:
    return _binary("multiply", a, b)


def divide(a: Known, b: Known) -> Known:
    return _binary("divide", a, b)


def _binary(operation: str, a: Known, b: Known) -> Known:
    return Known(np.broadcast_shapes(a.shape, b.shape), operation, (a, b))


def scale(node: Known, factor: float) -> Known:
    return node if factor == 1 else Known(node.shape, "scale", (node,), float(factor))


def index(node: Known, slices: tuple[tuple[int, int, int], ...]) -> Known:
    return Known(tuple(len(range(*part)) for part in slices), "slice", (node,), slices)


def centre(node: Known, axis: int) -> Known:
    """Less its mean along an axis; one of size 1 stands for the same number everywhere."""
    return Known(node.shape, "centre", (node,), axis)


def concatenate(nodes: list[Known], axis: int) -> Known:
    if len(nodes) == 1:
        return nodes[0]
    shape = list(nodes[0].shape)
    shape[axis] = sum(node.shape[axis] for node in nodes)
    return Known(tuple(shape), "concatenate", tuple(nodes), axis)


def einsum(formula: str, nodes: tuple[Known, ...], shape: tuple[int, ...]) -> Known:
    return Known(shape, "einsum", nodes, formula)


def size(node: Known) -> int:
    return math.prod(node.shape)
