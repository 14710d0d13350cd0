"""What the domain knows of every array of a program."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.core import Tracer

from jaxfold._fold import _rules_arithmetic, _rules_layout, _rules_sums
from jaxfold._fold._affine import Affine, Quadratic, Square, trivial
from jaxfold._fold._extent import ENTRY_BY_ENTRY, extent_of
from jaxfold._fold._finite import Infinite
from jaxfold._fold._known import Known, leaf
from jaxfold._fold._program import LARGEST_CONSTANT, Equation, Program, Value, small_constant
from jaxfold._fold._registry import RULES, Abstract, Operands
from jaxfold._fold._roundings import Roundings, is_arithmetic

LIBRARY = (_rules_arithmetic, _rules_layout, _rules_sums)  # imported for the rules that they register

# What says that an array varies over a mesh, from within, and leaves it as it is.
MARKS = {"pvary", "pcast", "pbroadcast"}


class Analysis:
    """The abstract array of every value, and the parameters that a known one depends on.

    Attributes:
        program: what was analysed.
        constant: for opaque values, the axes along which they only repeat themselves.
        first: for each affine array, the value that it was found for: others with the same array are copies of it.
        cut: values that are taken for sources, whatever they are made of.
        given: for each input, the parameters that it depends on, or None if it is none but a runtime input.
        abstract: for each value that was reached, its :data:`Abstract`.
        depends: for each known value, the indices of the parameters that it depends on, as the bits of an integer.
    """

    def __init__(self, program: Program, depends: list[int | None], cut: frozenset[Value] = frozenset()) -> None:
        self.program, self.given, self.cut = program, depends, cut
        self.abstract: dict[Value, Abstract] = {}
        self.depends: dict[Value, int] = {}
        self.constant: dict[Value, frozenset[int]] = {}
        self.first: dict[Affine, Value] = {}
        self._own: dict[Value, Affine] = {}
        self.infinite = Infinite()
        for value, bits in zip(program.inputs, depends, strict=True):
            self.abstract[value] = None if bits is None else leaf(value)
            self.depends[value] = bits or 0
        given = {value for value, bits in zip(program.inputs, depends, strict=True) if bits is not None}
        self.roundings = Roundings(program, given)
        for equation in program.equations:
            self._step(equation)

    def of(self, value: Value) -> Abstract:
        if value in self.abstract:
            return self.abstract[value]
        return leaf(value)  # a constant

    def own(self, value: Value) -> Affine:
        """A runtime value as an affine array over itself: one and the same at every call."""
        if value not in self._own:
            self._own[value] = trivial(value, self.constant_along(value))
            self.first[self._own[value]] = value
        return self._own[value]

    def root(self, value: Value) -> Value:
        """The value that it is a copy of, if it is one, in whatever dtype."""
        abstract = self.of(value)
        return self.first.get(abstract, value) if isinstance(abstract, Affine) else value

    def is_source(self, value: Value) -> bool:
        """Whether it is affine, but narrower than what it is computed from: opaque to whatever reads it."""
        abstract = self.abstract.get(value)
        return isinstance(abstract, Affine) and abstract.narrows

    def is_known(self, value: Value) -> bool:
        return value.constant is not None or isinstance(self.abstract.get(value), Known)

    def _step(self, equation: Equation) -> None:
        effects = bool(equation.source.effects) or _says_where(equation)
        if not effects and all(self.is_known(value) for value in equation.inputs):
            depends = 0
            for value in equation.inputs:
                depends |= self.depends.get(value, 0)
            if not depends:
                _compute(equation)
            self.infinite.note(equation)
            for output in equation.outputs:
                self.abstract[output] = self._known(equation, output)
                self.depends[output] = depends
            return
        result: Abstract = None
        rule = RULES.get(equation.name)
        apart = effects or self.infinite.reaches(equation, self.is_known)
        if rule is not None and not apart and _is_arithmetic(equation.outputs):
            operands = [None if self.is_source(value) else self.of(value) for value in equation.inputs]
            result = None if self.rounds(equation, operands) else rule(Operands(equation, operands, self.own))
            if runtime(result):
                self.roundings.note(equation, [operand is None for operand in operands])
        if len(equation.outputs) == 1:
            self.abstract[equation.outputs[0]] = result
            if isinstance(result, Affine):
                result.narrows |= equation.outputs[0] in self.cut
                self.first.setdefault(result, equation.outputs[0])
            if result is None and equation.name in ENTRY_BY_ENTRY:
                self._repeats(equation)
            elif result is None and equation.name == "broadcast_in_dim":
                self._spreads(equation)
        else:
            self.abstract |= dict.fromkeys(equation.outputs)

    def rounds(self, equation: Equation, operands: Sequence[Abstract]) -> bool:
        """Whether it is a cast that ends the map of its operand."""
        if equation.name != "convert_element_type" or not runtime(a := operands[0]):
            return False
        moment = not isinstance(a, Affine) or a.sum_of is not None or a.centred is not None
        return self.roundings.ends(equation, spread=not moment)

    def opened(self, value: Value, depth: int = 8) -> Abstract:
        """The same, with the last products before it as parts of it, even of what is narrower than its sources."""
        abstract, equation = self.of(value), value.origin
        rule = None if equation is None else RULES.get(equation.name)
        if not isinstance(abstract, Affine) or abstract.narrows or equation is None or rule is None or not depth:
            return abstract
        if self.infinite.reaches(equation, self.is_known):
            return abstract
        operands = [self.opened(operand, depth - 1) for operand in equation.inputs]
        if self.rounds(equation, operands):
            return abstract
        return rule(Operands(equation, operands, self.own)) or abstract

    def _repeats(self, equation: Equation) -> None:
        """Notes the axes along which an opaque result only repeats itself, since all its operands do."""
        output = equation.outputs[0]
        axes = {axis for axis, size in enumerate(output.shape) if size != 1}
        for value in equation.inputs:
            if value.shape:
                axes &= self.constant_along(value) | {axis for axis, size in enumerate(value.shape) if size == 1}
        if axes:
            self.constant[output] = frozenset(axes)

    def _spreads(self, equation: Equation) -> None:
        """The same where an opaque array is repeated: along new axes, and those along which it was constant."""
        operand, output = equation.inputs[0], equation.outputs[0]
        axes = {axis for axis, size in enumerate(output.shape) if size != 1}
        constant = self.constant_along(operand)
        for own, axis in enumerate(equation.params["broadcast_dimensions"]):
            if operand.shape[own] != 1 and own not in constant:
                axes.discard(axis)
        if axes:
            self.constant[output] = frozenset(axes)

    def constant_along(self, value: Value) -> frozenset[int]:
        """The axes, of a size other than 1, along which an array only repeats itself."""
        abstract, shape = self.of(value), value.shape
        if isinstance(abstract, Known):
            varies = {axis for axis, size in enumerate(abstract.shape) if size != 1}
            varies = set() if small_constant(value) is not None and not any(value.constant.strides) else varies
        elif isinstance(abstract, Quadratic):
            varies = {axis for axis, own in enumerate(abstract.axes) if own is not None}
        elif isinstance(abstract, (Affine, Square)):
            affine = abstract.base if isinstance(abstract, Square) else abstract
            varies = set(range(len(shape))) - affine.free() | affine.features()
        else:
            return self.constant.get(value, frozenset())
        return frozenset(axis for axis, size in enumerate(shape) if size != 1 and axis not in varies)

    def _known(self, equation: Equation, output: Value) -> Known:
        """Return a known result as a leaf, of size 1 along the axes along which it only repeats itself."""
        if len(equation.outputs) > 1:
            return leaf(output)
        if equation.name in MARKS:
            return leaf(output, self.extent(equation.inputs[0]))
        return leaf(output, extent_of(equation, [self.extent(value) for value in equation.inputs]))

    def extent(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a known value, with size 1 along the axes along which it only repeats itself."""
        abstract = self.of(value)
        return abstract.shape if isinstance(abstract, Known) else value.shape


def _is_arithmetic(outputs: list[Value]) -> bool:
    return len(outputs) == 1 and is_arithmetic(outputs[0].aval.dtype)


def _says_where(equation: Equation) -> bool:
    """Whether the result differs between the devices of a mesh: an operation along one of its axes, but a mere mark."""
    if equation.name in MARKS:
        return False
    axes = equation.params.get("axes", ())
    named = "axis_name" in equation.params or not all(isinstance(axis, int) for axis in np.atleast_1d(axes).tolist())
    return named and equation.params.get("axis_name", ()) is not None


def _compute(equation: Equation) -> None:
    """The value of a small constant expression, so that rules can read the number."""
    arrays = [small_constant(value) for value in equation.inputs]
    constants = [array for array in arrays if array is not None]
    if len(constants) < len(arrays):
        return
    if equation.name in MARKS:
        equation.outputs[0].constant = constants[0]
        return
    if equation.name == "broadcast_in_dim" and len(constants) == 1 and constants[0].size == 1:
        output = equation.outputs[0]
        output.constant = np.broadcast_to(constants[0].reshape(()), output.shape)
        return
    if sum(int(np.prod(value.shape)) for value in (*equation.inputs, *equation.outputs)) > LARGEST_CONSTANT:
        return
    with jax.ensure_compile_time_eval():
        outputs = equation.evaluate(constants)
    for value, output in zip(equation.outputs, outputs, strict=True):
        # Traced, though its operands are numbers, where that is how the context marks what varies over a mesh.
        if not isinstance(output, Tracer) and not jax.numpy.issubdtype(output.dtype, jax.dtypes.extended):
            value.constant = np.asarray(output)


def runtime(abstract: Abstract) -> bool:
    """Whether it is an array of the domain that the inputs decide."""
    return isinstance(abstract, (Affine, Square, Quadratic))
