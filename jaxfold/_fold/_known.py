"""Expressions over parameters: what is known before any input is.

An analysis builds them, ``contract`` evaluates them, with NumPy in float64 or, traced, with JAX. Leaves are values of
the program that depend on parameters alone, computed by the program's own equations, and constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfold._fold._program import Value


class Known:
    """An array that depends on parameters alone: its shape, and how to compute it.

    ``function(xp, *arguments)`` computes it from the values of ``arguments`` with the functions of ``xp``, ``numpy`` or
    ``jax.numpy``; a leaf has the program's :class:`Value` instead. ``key`` says which function it is.
    """

    __slots__ = ("arguments", "function", "key", "shape", "value")

    def __init__(
        self,
        shape: tuple[int, ...],
        function: Callable[..., Any] | None = None,
        arguments: tuple[Known, ...] = (),
        value: Value | None = None,
        key: Any = None,
    ) -> None:
        self.shape, self.function, self.arguments, self.value, self.key = shape, function, arguments, value, key

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


def evaluate(node: Known, xp: Any, read: Callable[[Value], Any], memo: dict[int, Any]) -> Any:
    """The array of an expression; ``read`` gives the leaves, ``memo`` keeps what was computed, by ``id``."""
    stack = [node]
    while stack:
        top = stack[-1]
        if id(top) in memo:
            stack.pop()
        elif top.value is not None:
            memo[id(top)] = read(top.value)
        elif missing := [argument for argument in top.arguments if id(argument) not in memo]:
            stack += missing
        elif top.function is not None:
            memo[id(top)] = top.function(xp, *(memo[id(argument)] for argument in top.arguments))
    return memo[id(node)]


def constant(array: Any) -> Known:
    array = np.asarray(array)
    return Known(array.shape, lambda xp: xp.asarray(array), key=("constant", array.tobytes()))


def ones(shape: tuple[int, ...]) -> Known:
    return Known(shape, lambda xp: xp.ones(shape), key="ones")


def reshape(node: Known, shape: tuple[int, ...]) -> Known:
    if node.shape == shape:
        return node
    return Known(shape, lambda xp, array: xp.reshape(array, shape), (node,), key="reshape")


def transpose(node: Known, axes: tuple[int, ...]) -> Known:
    if axes == tuple(range(len(axes))):
        return node
    return Known(
        tuple(node.shape[axis] for axis in axes),
        lambda xp, array: xp.transpose(array, axes),
        (node,),
        key=("transpose", axes),
    )


def broadcast(node: Known, shape: tuple[int, ...]) -> Known:
    if node.shape == shape:
        return node
    return Known(shape, lambda xp, array: xp.broadcast_to(array, shape), (node,), key="broadcast")


def reduce_sum(node: Known, axes: tuple[int, ...], factor: int = 1) -> Known:
    """The sum, times how often axes that are not there would have repeated it."""
    shape = tuple(size for axis, size in enumerate(node.shape) if axis not in axes)
    return Known(shape, lambda xp, array: xp.sum(array, axis=axes) * factor, (node,), key=("sum", axes, factor))


def add(a: Known, b: Known) -> Known:
    return Known(np.broadcast_shapes(a.shape, b.shape), lambda xp, x, y: x + y, (a, b), key="add")


def subtract(a: Known, b: Known) -> Known:
    return Known(np.broadcast_shapes(a.shape, b.shape), lambda xp, x, y: x - y, (a, b), key="subtract")


def multiply(a: Known, b: Known) -> Known:
    return Known(np.broadcast_shapes(a.shape, b.shape), lambda xp, x, y: x * y, (a, b), key="multiply")


def divide(a: Known, b: Known) -> Known:
    return Known(np.broadcast_shapes(a.shape, b.shape), lambda xp, x, y: x / y, (a, b), key="divide")


def scale(node: Known, factor: float) -> Known:
    return node if factor == 1 else Known(node.shape, lambda xp, array: array * factor, (node,), key=("scale", factor))


def index(node: Known, slices: tuple[tuple[int, int, int], ...]) -> Known:
    shape = tuple(len(range(*part)) for part in slices)
    return Known(shape, lambda xp, array: array[tuple(slice(*part) for part in slices)], (node,), key=("slice", slices))


def centre(node: Known, axis: int) -> Known:
    """Less its mean along an axis; one of size 1 stands for the same number everywhere."""
    return Known(
        node.shape,
        lambda xp, array: array - xp.mean(array, axis=axis, keepdims=True),
        (node,),
        key=("centre", axis),
    )


def concatenate(nodes: list[Known], axis: int) -> Known:
    if len(nodes) == 1:
        return nodes[0]
    shape = list(nodes[0].shape)
    shape[axis] = sum(node.shape[axis] for node in nodes)
    return Known(
        tuple(shape), lambda xp, *arrays: xp.concatenate(arrays, axis=axis), tuple(nodes), key=("concatenate", axis)
    )


def zeros(shape: tuple[int, ...]) -> Known:
    return Known(shape, lambda xp: xp.zeros(shape), key="zeros")


def einsum(formula: str, nodes: tuple[Known, ...], shape: tuple[int, ...]) -> Known:
    def compute(xp: Any, *arrays: Any) -> Any:
        extra = {"optimize": True} if xp is np else {"precision": "highest"}
        return xp.einsum(formula, *arrays, **extra)

    return Known(shape, compute, nodes, key=("einsum", formula))


def size(node: Known) -> int:
    return math.prod(node.shape)
