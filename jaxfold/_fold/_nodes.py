"""How each blind value could be computed without its mean, and how many means that takes.

For each there is a choice:

    through      its operation hands P on to its operands
    stored       a parameter: P is applied once, when contracting
    emitted      an affine array whose kernel can be centred, though not operand by operand (LayerScale)
    run          P is applied when the value is computed
    entered      the input of a program inside, without its mean as soon as what is passed in is
    left         an output of a program inside, if the value there is without its mean

Only ``run``, for the value or for one of its operands, costs anything: one mean. A parameter is stored only if nothing
else reads it. What a scan carries is centred before it enters, and has to be again when it comes around.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxfold._fold._affine import Affine
from jaxfold._fold._blind import Blindness
from jaxfold._fold._emission import EmittedAffine
from jaxfold._fold._inner import Scan
from jaxfold._fold._program import Equation, Value, inputs_behind
from jaxfold._fold._through import ZERO


@dataclasses.dataclass(eq=False)
class Node:
    """A value without its mean.

    Attributes:
        cost: how many numbers are averaged for it, with what it is made of.
        own: those for itself.
        operands: the nodes that it is made of.
        run: operands that are centred when they are read, with their axis; None for zero.
        how: what its equation becomes.
        outside: for what enters a program inside, how often that does.
    """

    scope: Blindness
    value: Value
    axis: int
    how: str
    own: float = 0.0
    outside: int = 0
    cost: float = 0.0
    operands: list[Node] = dataclasses.field(default_factory=list)
    run: dict[int, int | None] = dataclasses.field(default_factory=dict)

    @property
    def means(self) -> int:
        """How many means are taken for it."""
        return int(self.how == "run" or (self.how == "entered" and self.own > 0)) + sum(
            axis is not None for axis in self.run.values()
        )

    @property
    def averages_constants(self) -> bool:
        """Whether one of these means is that of an array that neither parameters nor inputs decide."""
        origin = self.value.origin
        averaged = [self.value] if self.how == "run" else []
        averaged += [
            origin.inputs[index] for index, axis in self.run.items() if axis is not None and origin is not None
        ]
        analysis = self.scope.analysis
        return any(analysis.is_known(value) and not analysis.depends.get(value) for value in averaged)


class Nodes:
    """A node for every blind value of a program and of the programs inside.

    Attributes:
        scopes: the blindness of each program, the outermost first.
        of: the nodes by their values.
    """

    def __init__(self, top: Blindness) -> None:
        self.scopes = list(_scopes(top))
        self.readers = self._readers()
        self.of: dict[Value, Node] = {}
        self._forward(top)

    def get(self, value: Value, axis: int) -> Node | None:
        """That of a value without its mean along this axis."""
        node = self.of.get(value)
        return node if node is not None and node.axis == axis else None

    def _readers(self) -> dict[int, set[tuple[Blindness, Value]]]:
        """For each parameter, as a bit, the programs that read it when they run, and by which of their values."""
        found: dict[int, set[tuple[Blindness, Value]]] = {}
        for scope in self.scopes:
            program, depends = scope.analysis.program, scope.analysis.depends
            read: set[Value] = set(program.outputs)
            for step in scope.steps:
                if isinstance(step, Equation) and step not in scope.plan.inner:
                    read |= set(step.inputs)
            for value in read:
                for leaf in inputs_behind(value) if depends.get(value) else ():
                    for bit in _bits(depends.get(leaf, 0)):
                        found.setdefault(bit, set()).add((scope, leaf))
        return found

    def _alone(self, scope: Blindness, value: Value) -> bool:
        """Whether nothing but a known value reads the parameters in it."""
        bits = scope.analysis.depends.get(value, 0)
        if not bits or any(len(self.readers.get(bit, ())) > 1 for bit in _bits(bits)):
            return False
        exclusive = scope.exclusive(value)
        return value.origin is None or all(scope.uses.get(leaf, set()) <= exclusive for leaf in inputs_behind(value))

    def _forward(self, scope: Blindness) -> None:
        """A node for every blind value, in the program's order."""
        for value in scope.analysis.program.inputs:
            self._node(scope, value)
        for step in scope.steps:
            if isinstance(step, Equation) and step in scope.inner:
                self._enter(scope, step)
            else:
                for value in [step] if isinstance(step, Value) else step.outputs:
                    self._node(scope, value)

    def _node(self, scope: Blindness, value: Value) -> None:
        axes = scope.of(value)
        if value in self.of or len(axes) != 1 or value.shape == ():
            return
        (axis,) = axes
        found = self._through(scope, value, axis)
        own = math.prod(value.shape) * scope.plan.repeat
        if found is None or found.cost > own or (found.cost == own and _widens(found)):
            whole = Node(scope, value, axis, "run", own=own, cost=own)
            if scope.analysis.is_known(value):
                whole = self._stored(scope, value, axis) or whole
            elif found is None:
                whole = self._emitted(scope, value, axis) or whole
            found = whole if found is None or whole.cost <= found.cost else found
        self.of[value] = found

    def _through(self, scope: Blindness, value: Value, axis: int) -> Node | None:
        origin = value.origin
        if origin is None or value in scope.emitted:
            return None
        asked = scope.requests(origin, axis)
        if asked is None:
            return None
        node = Node(scope, value, axis, "through")
        for index, request in enumerate(asked):
            operand = origin.inputs[index]
            if request == ZERO:
                node.run[index] = None
            elif isinstance(request, int):
                if (other := self.get(operand, request)) is not None:
                    node.operands.append(other)
                else:
                    node.run[index] = request
                    node.own += math.prod(operand.shape) * scope.plan.repeat
        node.cost = node.own + sum(other.cost for other in node.operands)
        return node

    def _stored(self, scope: Blindness, value: Value, axis: int) -> Node | None:
        return Node(scope, value, axis, "stored") if self._alone(scope, value) else None

    def _emitted(self, scope: Blindness, value: Value, axis: int) -> Node | None:
        """By a centred kernel, if the array is affine and its parameters are read for nothing else."""
        abstract = opened(scope, value)
        if abstract is None or axis not in abstract.free() or not abstract.terms:
            return None
        if value not in scope.emitted:
            way = EmittedAffine(abstract)
            bits = 0
            for leaf in way.leaves():
                bits |= scope.analysis.depends.get(leaf, 0)
            alone = all(len(self.readers.get(bit, ())) <= 1 for bit in _bits(bits))
            grows = way.size * scope.plan.repeat > scope.plan.entries(bits)[0]
            if not alone or grows or not scope.reading(bits) <= scope.exclusive(value):
                return None
        return Node(scope, value, axis, "emitted")

    def _enter(self, scope: Blindness, equation: Equation) -> None:
        """What goes into the program inside, what becomes of it there, and what comes out."""
        inner, _ = scope.plan.inner[equation]
        body = scope.inner[equation]
        carries = inner.carried if isinstance(inner, Scan) else None
        entered: dict[int, Node] = {}
        for index, value in enumerate(inner.program.inputs):
            axes = body.of(value)
            passed = carries is None or index in carries
            if inner.known[index] or not passed or len(axes) != 1 or value.shape == ():
                continue
            (axis,) = axes
            node = Node(body, value, axis, "entered", outside=scope.plan.repeat)
            if (outer := self.get(equation.inputs[index], axis)) is not None:
                node.operands.append(outer)
            else:
                node.own = math.prod(value.shape) * scope.plan.repeat
            node.cost = node.own + sum(other.cost for other in node.operands)
            self.of[value] = entered[index] = node
        self._forward(body)
        for index, node in entered.items():
            if carries is None:
                break
            around = self.get(inner.program.outputs[carries.index(index)], node.axis)
            if around is None:
                node.own = math.inf  # what comes around again would have its mean: no stream can do with that
            else:
                node.operands.append(around)
        for index, value in enumerate(equation.outputs):
            axes = scope.of(value)
            inside = self.of.get(inner.program.outputs[index])
            if len(axes) != 1 or inside is None or inside.axis not in axes:
                continue
            node = Node(scope, value, inside.axis, "left", operands=[inside], cost=inside.cost)
            if carries is not None:
                carried = entered.get(carries[index]) if index < len(carries) else None
                if carried is None or carried.axis != inside.axis:
                    continue
                node.operands.append(carried)
                node.cost += carried.cost
            self.of[value] = node


def opened(scope: Blindness, value: Value) -> Affine | None:
    """An array in terms of what its last products read, were they to make something narrower or not."""
    abstract = scope.analysis.of(value) if value in scope.emitted else scope.analysis.opened(value)
    return abstract if isinstance(abstract, Affine) else None


def _widens(node: Node) -> bool:
    """Whether it is a copy in more digits of what is centred at run time: better afterwards than before."""
    origin, dtypes = node.value.origin, {other.value.aval.dtype for other in node.operands if other.how == "run"}
    widens = origin is not None and origin.name == "convert_element_type"
    return widens and any(dtype.itemsize < node.value.aval.dtype.itemsize for dtype in dtypes)


def _scopes(top: Blindness) -> Iterator[Blindness]:
    yield top
    for inner in top.inner.values():
        yield from _scopes(inner)


def _bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest
