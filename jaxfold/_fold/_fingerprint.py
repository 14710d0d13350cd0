"""Whether coefficients mean the same in two traces of one function.

A function may be traced again for inputs of other shapes. The coefficients that were made for the first trace serve the
second if they are the same expressions of the same parameters. A fingerprint is a digest of such an expression. It is
exact: two expressions have one fingerprint only if they compute the same array from the same parameters.

Two batches of other sizes or ranks differ in axes along which parameters only repeat themselves, and in axes of size 1.
So the digest is of the array without these axes. Let the extent of an array be its shape with size 1 wherever it only
repeats itself (``_extent.py``), and let its wide axes be those of an extent other than 1. An array is then given by two
things: the digest, which says what stands along the wide axes in their order, and the extent, which says where these
axes are. Every operation is spelled out in terms of wide axes: where each wide axis of an operand stands among those of
the result, which of them are summed, and their sizes. Nothing is left to guess, and nothing is forgotten:

    g:f64[8]                                digest G, extent (8,)
    c:f64[8,1] = reshape g                  digest G, extent (8, 1)
    d:f64[8,8] = mul W c                    ("mul", sizes (8, 8), W at (0, 1), G at (0,))
    e:f64[1,8] = reshape g                  digest G, extent (1, 8)
    f:f64[8,8] = mul W e                    ("mul", sizes (8, 8), W at (0, 1), G at (1,))

An operation that has no spelling here is known by its name, all its parameters, and the whole extents of its operands.
That is exact as well, but an axis more or less makes another digest. No digest holds an address. A custom derivative is
known by what it computes and by the line of the function, because coefficients are contracted once, by the first trace.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxfold._extend import ClosedJaxpr, Jaxpr, Literal
from jaxfold._fold._analysis import MARKS, Analysis
from jaxfold._fold._centred import Recentred, Stored, Way
from jaxfold._fold._components import Emitted
from jaxfold._fold._emission import EmittedAffine, EmittedQuadratic
from jaxfold._fold._extent import ENTRY_BY_ENTRY
from jaxfold._fold._known import Known
from jaxfold._fold._product import Product
from jaxfold._fold._program import INLINED, Equation, Value
from jaxfold._fold._rules_layout import axis_groups

Shape = tuple[int, ...]
_unknown = itertools.count()  # each is like nothing else: what cannot be compared is never the same


class Fingerprints:
    """Digests of the expressions of one program."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.inputs = {value: index for index, value in enumerate(analysis.program.inputs)}
        # With the node itself, which must outlive its id.
        self.memo: dict[int, tuple[Known | Value, bytes]] = {}

    def emitted(self, way: Emitted | Way) -> Any:
        """Of how an array is computed, as far as its coefficients go."""
        if isinstance(way, Stored):
            return "stored", self.digest(way.table), way.table.shape
        if isinstance(way, Recentred) and way.way is not None:
            return "recentred", self.emitted(way.way)  # that it is computed does not say that it loses its mean
        if isinstance(way, EmittedAffine):
            own = ((self._product(p), _places(p, p.shared_axes()), _places(p, p.own_axes())) for p in way.products)
            return "affine", *own
        if isinstance(way, EmittedQuadratic):
            q, p = way.quadratic, way.product
            kept = [axis for axis in range(len(p.table.shape) - 1) if axis not in way.over]
            sums = q.squares.value, q.centring(), q.offset, way.repeated, way.width
            return "quadratic", self._product(p), _places(p, way.over), _places(p, kept), *sums
        return type(way).__name__

    def _product(self, product: Product) -> Any:
        return self.digest(product.table), product.rows, product.constant

    def digest(self, root: Known | Value) -> bytes:
        """Return what stands along the wide axes of an expression, or of a known value of the program."""
        stack: list[Known | Value] = [root]
        while stack:
            top = stack[-1]
            if id(top) in self.memo:
                stack.pop()
            elif missing := [below for below in _below(top) if id(below) not in self.memo]:
                stack += missing
            else:
                below = [self.memo[id(node)][1] for node in _below(top)]
                own = self._expression(top) if isinstance(top, Known) else self._value(top)
                self.memo[id(top)] = top, below[0] if own is None else _hashed(own, *below)
        return self.memo[id(root)][1]

    def _expression(self, node: Known) -> Any:
        """Return what an expression does to its arguments; None if it leaves the wide axes of the only one alone."""
        if node.value is not None:
            return None
        spell = EXPRESSIONS.get(node.operation)
        return (node.operation, *node.static) if spell is None else spell(node)

    def _value(self, value: Value) -> Any:
        """Return how the program makes a value; None if that leaves the wide axes of its only operand alone."""
        if value in self.inputs:
            return "input", self.inputs[value]
        equation = value.origin
        if equation is None:
            return "constant", canonical(value.constant)
        if equation.name in MARKS and len(equation.inputs) == 1:
            return None
        extents = [self.analysis.extent(operand) for operand in equation.inputs]
        extent = self.analysis.extent(value)
        spell = None if 0 in value.shape else VALUES.get(equation.name)
        if spell is not None and (spelled := spell(equation, extents, extent)) != "otherwise":
            return spelled
        entries = equation.name in ENTRY_BY_ENTRY
        if entries and 0 not in value.shape:
            own = [(str(v.aval.dtype), _among(e, extent)) for v, e in zip(equation.inputs, extents, strict=True)]
            return equation.name, str(value.aval.dtype), _sizes(extent), own, canonical(equation.params)
        operands = [(v.shape, str(v.aval.dtype), e) for v, e in zip(equation.inputs, extents, strict=True)]
        result = equation.outputs.index(value), value.shape, str(value.aval.dtype), extent
        return equation.name, result, operands, canonical(_values_only(equation))


def _below(node: Known | Value) -> list[Known | Value]:
    if isinstance(node, Value):
        return [] if node.origin is None else list(node.origin.inputs)
    return list(node.arguments) if node.value is None else [node.value]


def _hashed(own: Any, *below: bytes) -> bytes:
    found = hashlib.sha256(repr(own).encode())
    for digest in below:
        found.update(digest)
    return found.digest()


def _wide(extent: Shape) -> list[int]:
    return [axis for axis, size in enumerate(extent) if size != 1]


def _sizes(extent: Shape) -> Shape:
    return tuple(size for size in extent if size != 1)


def _ranks(extent: Shape) -> dict[int, int]:
    """Return the place of each wide axis among all wide axes."""
    return {axis: rank for rank, axis in enumerate(_wide(extent))}


def _among(operand: Shape, result: Shape) -> list[int]:
    """Return the place of each wide axis of an operand of arithmetic among the wide axes of the result."""
    ranks, missing = _ranks(result), len(result) - len(operand)
    return [ranks[axis + missing] for axis in _wide(operand)]


def _places(product: Product, axes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return size and place among the wide axes of T's own axes; an axis of size 1 has no place."""
    extent = product.table.shape[1:]
    ranks = _ranks(extent)
    return tuple((extent[axis], ranks[axis]) for axis in axes if axis in ranks)


def _reshaped(before: Shape, extent: Shape, after: Shape) -> Any:
    """Return a reshape as groups of axes that hold the same entries; None if every wide axis stays one axis."""
    if 0 in before:
        return "reshape", before, extent, after
    groups = [group for group in axis_groups(before, after) if any(extent[axis] != 1 for axis in group[0])]
    if all(len(old) == len(new) == 1 for old, new in groups):
        return None
    sizes = [
        ([(before[axis], extent[axis]) for axis in old], [after[axis] for axis in new]) for old, new in groups
    ]  # fmt: skip
    return "reshape", sizes


def _permuted(extent: Shape, order: Sequence[int]) -> Any:
    ranks = _ranks(extent)
    places = [ranks[axis] for axis in order if axis in ranks]
    return None if places == sorted(places) else ("transpose", places)


def _binary(node: Known) -> Any:
    return node.operation, _sizes(node.shape), [_among(argument.shape, node.shape) for argument in node.arguments]


def _constant(node: Known) -> Any:
    return "constant", str(node.static.dtype), _sizes(node.shape), node.static.tobytes()


def _broadcast(node: Known) -> Any:
    (argument,) = node.arguments
    if _sizes(argument.shape) == _sizes(node.shape):
        return None
    return "broadcast", _sizes(node.shape), _among(argument.shape, node.shape)


def _sum(node: Known) -> Any:
    axes, factor = node.static
    ranks = _ranks(node.arguments[0].shape)
    return "sum", [ranks[axis] for axis in axes if axis in ranks], factor


def _slice(node: Known) -> Any:
    extent = node.arguments[0].shape
    if 0 in node.shape:
        return "slice", extent, node.static
    cut = [(size, part) for size, part in zip(extent, node.static, strict=True) if size != 1]
    return None if all(part == (0, size, 1) for size, part in cut) else ("slice", cut)


def _concatenate(node: Known) -> Any:
    axis = node.static
    place, pieces = len(_wide(node.shape[:axis])), [argument.shape[axis] for argument in node.arguments]
    return "concatenate", _sizes(node.shape), place, pieces


def _einsum(node: Known) -> Any:
    """Spell out a product by letters in the order in which they occur, those of wide axes alone."""
    operands, result = node.static.split("->")
    extents = [argument.shape for argument in node.arguments]
    letters = [
        [letter for letter, size in zip(part, extent, strict=True) if size != 1]
        for part, extent in zip((*operands.split(","), result), (*extents, node.shape), strict=True)
    ]
    order = {letter: rank for rank, letter in enumerate(dict.fromkeys(itertools.chain(*letters)))}
    return "einsum", [[order[letter] for letter in part] for part in letters]


EXPRESSIONS: dict[str, Callable[[Known], Any]] = {
    "constant": _constant,
    "ones": lambda node: ("ones", _sizes(node.shape)),
    "zeros": lambda node: ("zeros", _sizes(node.shape)),
    "reshape": lambda node: _reshaped(node.arguments[0].shape, node.arguments[0].shape, node.shape),
    "broadcast": _broadcast,
    "transpose": lambda node: _permuted(node.arguments[0].shape, node.static),
    "sum": _sum,
    "scale": lambda node: ("scale", node.static),
    "slice": _slice,
    "centre": lambda node: ("centre", _ranks(node.shape).get(node.static)),
    **dict.fromkeys(("add", "subtract", "multiply", "divide"), _binary),
    "concatenate": _concatenate,
    "einsum": _einsum,
}


def _value_broadcast(equation: Equation, extents: list[Shape], extent: Shape) -> Any:
    return None if len(extents) == 1 else "otherwise"


def _value_reshape(equation: Equation, extents: list[Shape], extent: Shape) -> Any:
    if equation.name == "reshape" and equation.params.get("dimensions") is not None:
        return "otherwise"
    return _reshaped(equation.inputs[0].shape, extents[0], equation.outputs[0].shape)


def _value_transpose(equation: Equation, extents: list[Shape], extent: Shape) -> Any:
    return _permuted(extents[0], equation.params["permutation"])


def _value_tile(equation: Equation, extents: list[Shape], extent: Shape) -> Any:
    repeats = [(own, r) for own, r in zip(extents[0], equation.params["reps"], strict=True) if own != 1]
    return None if all(r == 1 for _, r in repeats) else ("tile", repeats)


def _value_slice(equation: Equation, extents: list[Shape], extent: Shape) -> Any:
    params = equation.params
    strides = params["strides"] or (1,) * len(extents[0])
    parts = zip(extents[0], params["start_indices"], params["limit_indices"], strides, strict=True)
    return "slice", [part for part in parts if part[0] != 1]


# For operations that only move what is there: what they do to the wide axes, None for nothing.
VALUES: dict[str, Callable[[Equation, list[Shape], Shape], Any]] = {
    "broadcast_in_dim": _value_broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _value_reshape),
    "transpose": _value_transpose,
    "tile": _value_tile,
    "slice": _value_slice,
}

# Parameters of an equation that say how it is differentiated or scheduled, not what it computes.
DERIVATIVES = {"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees", "jvp", "fwd"}


def _values_only(equation: Equation) -> dict[str, Any]:
    if not equation.name.startswith("custom_"):
        return equation.params
    return {name: value for name, value in equation.params.items() if name not in DERIVATIVES}


def canonical(value: Any) -> Any:
    """Return plain values that are equal for equal static parameters, in this trace or another.

    A value of an unknown kind is equal to nothing, so that the coefficients count as different.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.dtype, enum.Enum)):
        return type(value).__name__, repr(value)
    if isinstance(value, Tracer):
        return "unknown", next(_unknown)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _array(value)
    if isinstance(value, type):
        return value.__module__, value.__qualname__
    if isinstance(value, ClosedJaxpr):
        return _jaxpr(value.jaxpr), [canonical(const) for const in value.consts]
    if isinstance(value, Jaxpr):
        return _jaxpr(value)
    if isinstance(value, Mapping):
        return "mapping", sorted(((canonical(key), canonical(item)) for key, item in value.items()), key=repr)
    if isinstance(value, (set, frozenset)):
        return "set", sorted((canonical(item) for item in value), key=repr)
    if isinstance(value, tuple) and isinstance(tag := getattr(value, "tag", None), str):
        return type(value).__name__, tag  # how random bits are made: functions of JAX's own, by their registered name
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [canonical(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = [(field.name, canonical(getattr(value, field.name))) for field in dataclasses.fields(value)]
        return type(value).__qualname__, fields
    if type(value).__module__.startswith("jax") and not callable(value) and " at 0x" not in repr(value):
        return type(value).__qualname__, repr(value)  # meshes, shardings, and words such as "unspecified"
    return "unknown", next(_unknown)


def _array(array: Any) -> Any:
    """Return dtype, shape and a digest of the entries."""
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return str(array.dtype), _array(jax.random.key_data(array))
    entries = np.ascontiguousarray(np.asarray(array))
    return str(entries.dtype), np.shape(array), hashlib.sha256(entries.tobytes()).hexdigest()


def _jaxpr(jaxpr: Jaxpr) -> Any:
    """Return all that a jaxpr computes, its variables numbered in their order."""
    numbers: dict[Any, int] = {}

    def atom(each: Any) -> Any:
        if isinstance(each, Literal):
            return str(each.aval), canonical(each.val)
        return numbers.setdefault(each, len(numbers)), str(each.aval)

    inputs = [atom(each) for each in (*jaxpr.constvars, *jaxpr.invars)]
    equations = []
    for each in jaxpr.eqns:
        read = [atom(operand) for operand in each.invars]
        plain = each.params if each.primitive.name not in INLINED else {"jaxpr": each.params.get("jaxpr")}
        static = {key: own for key, own in plain.items() if key not in DERIVATIVES}
        written = [(numbers.setdefault(out, len(numbers)), str(out.aval)) for out in each.outvars]
        equations.append((each.primitive.name, read, canonical(static), written))
    source = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None)
    return inputs, equations, [atom(each) for each in jaxpr.outvars], str(source)
