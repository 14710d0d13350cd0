"""Whether coefficients mean the same in two traces of one function.

A function may be traced again for inputs of other shapes. The coefficients that were made for the first trace serve the
second if they are the same expressions of the same parameters, which is what a fingerprint is of. Axes of size 1 are
left out of it: a batch of more axes makes more of them.
"""

from __future__ import annotations

import hashlib
from typing import Any

from jaxfold._fold._centred import Recentred, Stored, Way
from jaxfold._fold._components import Emitted
from jaxfold._fold._emission import EmittedAffine
from jaxfold._fold._known import Known
from jaxfold._fold._product import Product
from jaxfold._fold._program import Equation, Program, Value, small_constant

# Operations that leave the entries in their order, unless they permute the axes.
LAYOUT = ("reshape", "squeeze")


class Fingerprints:
    """Digests of the expressions of one program."""

    def __init__(self, program: Program) -> None:
        self.inputs = {value: index for index, value in enumerate(program.inputs)}
        # With the node itself, which must outlive its id.
        self.memo: dict[int, tuple[Known | Value, bytes]] = {}

    def emitted(self, way: Emitted | Way) -> Any:
        """Of how an array is computed, as far as its coefficients go."""
        if isinstance(way, Stored):
            return "stored", self._digest(way.table)
        if isinstance(way, Recentred) and way.way is not None:
            return self.emitted(way.way)
        if isinstance(way, Way):
            return type(way).__name__
        if isinstance(way, EmittedAffine):
            return tuple((self._product(p), _sizes(p, p.shared_axes()), _sizes(p, p.own_axes())) for p in way.products)
        q, product = way.quadratic, way.product
        return self._product(product), _sizes(product, way.over), q.squares, q.centring(), q.offset, way.repeated

    def _product(self, product: Product) -> bytes:
        return self._digest(product.table)

    def _digest(self, root: Known | Value) -> bytes:
        stack: list[Known | Value] = [root]
        while stack:
            top = stack[-1]
            if id(top) in self.memo:
                stack.pop()
            elif missing := [below for below in _below(top) if id(below) not in self.memo]:
                stack += missing
            else:
                below = [self.memo[id(node)][1] for node in _below(top)]
                parts = [self._own(top).encode(), *below]
                self.memo[id(top)] = top, below[0] if _moves_nothing(top) else hashlib.sha256(b"|".join(parts)).digest()
        return self.memo[id(root)][1]

    def _own(self, node: Known | Value) -> str:
        if isinstance(node, Known):
            return f"known {_key(node)} {_wide(node.shape)}"
        if node in self.inputs:
            return f"input {self.inputs[node]}"
        if node.origin is None:
            array = small_constant(node)
            return f"constant {node.aval} {id(node.constant) if array is None else array.tobytes()}"
        if node.origin.name in LAYOUT and not _permutes(node.origin):
            return f"reshape {_wide(node.shape)}"
        return f"{node.origin.name} {node.origin.params} {node.origin.outputs.index(node)}"


def _moves_nothing(node: Known | Value) -> bool:
    """Whether it only adds or drops axes of size 1."""
    if isinstance(node, Value):
        kept = node.origin is not None and node.origin.name in LAYOUT and not _permutes(node.origin)
        return kept and _wide(node.shape) == _wide(_below(node)[0].shape)
    return node.key in ("reshape", "broadcast") and _wide(node.shape) == _wide(node.arguments[0].shape)


def _permutes(equation: Equation) -> bool:
    """Whether it is a reshape that reads its axes in another order."""
    return equation.name == "reshape" and equation.params.get("dimensions") is not None


def _below(node: Known | Value) -> list[Known | Value]:
    if isinstance(node, Value):
        return [] if node.origin is None else list(node.origin.inputs)
    return list(node.arguments) if node.value is None else [node.value]


def _sizes(product: Product, axes: list[int]) -> tuple[int, ...]:
    return tuple(product.table.shape[1 + axis] for axis in axes)


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _key(node: Known) -> Any:
    """What the node computes, with axes counted among those of a size other than 1."""
    name, *details = node.key if isinstance(node.key, tuple) else (node.key,)
    if not node.arguments:
        return node.key
    shape = node.arguments[0].shape
    ranks = {axis: rank for rank, axis in enumerate(axis for axis, size in enumerate(shape) if size != 1)}
    if name == "transpose":
        return name, [ranks[axis] for axis in details[0] if axis in ranks]
    if name == "sum":
        return name, [ranks[axis] for axis in details[0] if axis in ranks], details[1]
    if name == "centre":
        return name, ranks.get(details[0])
    if name == "concatenate":
        return name, sum(size != 1 for size in node.shape[: details[0]])
    if name == "slice":
        return name, [part for axis, part in enumerate(details[0]) if axis in ranks]
    if name == "einsum":
        letters = dict.fromkeys(letter for letter in details[0] if letter.isalpha())
        order = {letter: index for index, letter in enumerate(letters)}
        return name, [order.get(letter, letter) for letter in details[0]]
    return node.key
