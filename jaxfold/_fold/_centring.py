"""Taking the mean out of streams: LayerNorm becomes RMSNorm, and the writers of its input are centred beforehand.

A LayerNorm needs the mean of its input only to take it away. If nothing else sees that mean (``_blind.py``), it may be
gone from the start: ``P h = h − mean(h)`` in place of h. For each value there is a choice:

    through      the operation hands P on to its operands
    stored       a parameter: P is applied once, when contracting
    emitted      an affine array whose kernel can be centred, though not operand by operand (LayerScale)
    run          P is applied when the value is computed

Only the last costs anything, one mean; each norm over the stream saves one. What hangs together by the first is one
stream, and is centred if that takes fewer means. A parameter is stored only if nothing else reads it: a tied table
stays as it is, and its rows are centred where they enter the stream. What a scan carries is centred before it enters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxfold._fold._affine import Affine, Quadratic
from jaxfold._fold._blame import blame
from jaxfold._fold._blind import NONE, Blindness
from jaxfold._fold._centred import MeanSquare, Recentred, Stored, Uncentred, centred
from jaxfold._fold._emission import EmittedAffine
from jaxfold._fold._inner import Scan
from jaxfold._fold._known import Known
from jaxfold._fold._moments import moments
from jaxfold._fold._plan import Plan
from jaxfold._fold._program import Equation, Value
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
    stream: Stream | None = None

    @property
    def means(self) -> int:
        """How many means are taken for it."""
        return int(self.how == "run" or (self.how == "entered" and self.own > 0)) + sum(
            axis is not None for axis in self.run.values()
        )


@dataclasses.dataclass(eq=False)
class Stream:
    """Nodes that are centred together or not at all.

    Attributes:
        cost, saved: numbers averaged for it, and by the norms over it, which need not.
        means, norms: in how many operations, in one layer.
        refused: why it is left as it is.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    cost: float = 0.0
    saved: float = 0.0
    means: int = 0
    norms: int = 0
    refused: str = ""


class Centring:
    """What becomes of every stream of a program and of the programs inside.

    Attributes:
        scopes: the blindness of each program.
        nodes: for each value that a norm needs without its mean, how it is made.
    """

    def __init__(self, plan: Plan, unwanted: Iterable[Value] = (), wanted: set[Any] | None = None) -> None:
        self.plan, self.wanted = plan, wanted
        self.unwanted = set(unwanted)
        self.top = Blindness(plan, [NONE] * len(plan.analysis.program.outputs), outermost=True)
        self.scopes = list(_scopes(self.top))
        self.readers = self._readers()
        self.nodes: dict[Value, Node] = {}
        self._forward(self.top)
        self.exits = [found for scope in self.scopes for found in _exits(scope) if found[1] not in self.unwanted]
        self.streams = self._streams()
        for stream in self.streams:
            self._judge(stream)
        self._build()

    def accepted(self, value: Value) -> bool:
        """Whether the value is without its mean."""
        node = self.nodes.get(value)
        return node is not None and node.stream is not None and not node.stream.refused

    def takes_from(self, value: Value) -> bool:
        """Whether norms of a value find it without its mean, and rely on it."""
        return self.accepted(value) and value not in self.unwanted

    @property
    def means(self) -> int:
        """How many means are taken for all streams that are centred."""
        found = 0
        for node in (node for stream in self.streams if not stream.refused for node in stream.nodes):
            found += node.means * (node.outside or node.scope.plan.repeat)
        return found

    def writers(self, value: Value) -> int:
        """The parameters that lose their mean for it, as bits."""
        bits, stream = 0, self.nodes[value].stream
        for node in [] if stream is None else stream.nodes:
            way = node.scope.plan.centred.get(node.value)
            for leaf in () if way is None else way.leaves():
                bits |= node.scope.analysis.depends.get(leaf, 0)
        return bits

    def why_not(self, value: Value, axis: int) -> str:
        """Why a norm's input keeps its mean."""
        if value in self.unwanted:
            return "the predicate left it out"
        node = self.nodes.get(value)
        if node is not None and node.stream is not None:
            return node.stream.refused
        for scope in self.scopes:
            if value in scope.uses:
                return blame(scope, value, axis)
        return ""

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
                for leaf in _inputs_behind(value) if depends.get(value) else ():
                    for bit in _bits(depends.get(leaf, 0)):
                        found.setdefault(bit, set()).add((scope, leaf))
        return found

    def _alone(self, scope: Blindness, value: Value) -> bool:
        """Whether nothing but this program reads the parameters in a known value, and by one value of its own each."""
        bits = scope.analysis.depends.get(value, 0)
        return bits != 0 and all(len(self.readers.get(bit, ())) <= 1 for bit in _bits(bits))

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
        if value in self.nodes or len(axes) != 1 or value.shape == ():
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
        self.nodes[value] = found

    def _through(self, scope: Blindness, value: Value, axis: int) -> Node | None:
        origin = value.origin
        if origin is None or value in scope.plan.emitted:
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
                other = self.nodes.get(operand)
                if other is not None and other.axis == request:
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
        abstract = self._affine(scope, value)
        if abstract is None or axis not in abstract.free() or not abstract.terms:
            return None
        if value not in scope.plan.emitted:
            way = EmittedAffine(abstract)
            bits = 0
            for leaf in way.leaves():
                bits |= scope.analysis.depends.get(leaf, 0)
            alone = all(len(self.readers.get(bit, ())) <= 1 for bit in _bits(bits))
            grows = way.size * scope.plan.repeat > scope.plan.entries(bits)[0]
            if not alone or grows or not scope.reading(bits) <= scope.exclusive(value):
                return None
        return Node(scope, value, axis, "emitted")

    def _affine(self, scope: Blindness, value: Value) -> Affine | None:
        """The array in terms of what its last products read, were they to make something narrower or not."""
        abstract = scope.analysis.of(value) if value in scope.plan.emitted else scope.analysis.opened(value)
        return abstract if isinstance(abstract, Affine) else None

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
            node, outer = (
                Node(body, value, axis, "entered", outside=scope.plan.repeat),
                self.nodes.get(equation.inputs[index]),
            )
            if outer is not None and outer.axis == axis:
                node.operands.append(outer)
            else:
                node.own = math.prod(value.shape) * scope.plan.repeat
            node.cost = node.own + sum(other.cost for other in node.operands)
            self.nodes[value] = entered[index] = node
        self._forward(body)
        for index, node in entered.items():
            if carries is None:
                break
            around = self.nodes.get(inner.program.outputs[carries.index(index)])
            if around is None or around.axis != node.axis:
                node.own = math.inf  # what comes around again would have its mean: no stream can do with that
            else:
                node.operands.append(around)
        for index, value in enumerate(equation.outputs):
            axes = scope.of(value)
            inside = self.nodes.get(inner.program.outputs[index])
            if len(axes) != 1 or inside is None or inside.axis not in axes:
                continue
            node = Node(scope, value, inside.axis, "left", operands=[inside], cost=inside.cost)
            if carries is not None:
                carried = entered.get(carries[index]) if index < len(carries) else None
                if carried is None or carried.axis != inside.axis:
                    continue
                node.operands.append(carried)
                node.cost += carried.cost
            self.nodes[value] = node

    def _streams(self) -> list[Stream]:
        """The nodes that the norms need, by what hangs together."""
        found: list[Stream] = []
        for _, stream_value, axis in self.exits:
            node = self.nodes.get(stream_value)
            if node is None or node.axis != axis:
                continue
            stack, stream = [node], node.stream or Stream()
            if node.stream is None:
                found.append(stream)
            while stack:
                top = stack.pop()
                if top.stream is stream:
                    continue
                if top.stream is not None:  # two streams that turn out to be one
                    other = top.stream
                    for member in other.nodes:
                        member.stream = stream
                    stream.nodes += other.nodes
                    found.remove(other)
                    continue
                top.stream = stream
                stream.nodes.append(top)
                stack += top.operands
        for stream in found:
            stream.cost = sum(node.own for node in stream.nodes)
            stream.means = sum(node.means for node in stream.nodes)
        seen: set[Value] = set()
        for _, value, axis in self.exits:
            node = self.nodes.get(value)
            if node is not None and node.stream is not None and node.axis == axis and value not in seen:
                seen.add(value)
                node.stream.saved += math.prod(value.shape) * node.scope.plan.repeat
                node.stream.norms += 1
        return found

    def _judge(self, stream: Stream) -> None:
        if self.wanted is not None and stream.cost < math.inf:
            ways = [(node.scope.plan.fingerprints, self._way(node)) for node in stream.nodes]
            asked = [prints.emitted(way) in self.wanted for prints, way in ways if way is not None and way.size]
            if asked:
                stream.refused = "" if all(asked) else "it was not centred when the function was folded"
                return
        if stream.cost >= stream.saved or stream.means > stream.norms:
            times = stream.cost / max(stream.saved, 1)
            numbers = "" if times == 1 else f", over {times:.2g} times the numbers"
            stream.refused = (
                f"without its mean, its input would take {stream.means} at run time where {stream.norms} would be saved"
                f"{numbers}: a part of it is no product with parameters that only it reads"
            )

    def _way(self, node: Node) -> Any:
        """How the node's value is computed, where its equation does not do as it stands."""
        value = node.value
        emitted = node.scope.plan.emitted.get(value)
        if node.how == "stored":
            array = node.scope.analysis.of(value)
            return Stored(array, value.shape, node.axis) if isinstance(array, Known) else None
        if node.how == "emitted":
            abstract = self._affine(node.scope, value)
            if abstract is None:
                raise TypeError(value)
            way = EmittedAffine(centred(abstract, node.axis))
            way.precision = (
                emitted.precision if isinstance(emitted, EmittedAffine) else node.scope.plan.precision(value)
            )
            return way
        if node.how == "run":
            return Recentred(value, node.axis, {}, emitted)
        if node.how == "through" and node.run:
            return Recentred(value, None, node.run)
        return None

    def _build(self) -> None:
        for stream in self.streams:
            if stream.refused:
                continue
            for node in stream.nodes:
                if (way := self._way(node)) is not None:
                    node.scope.plan.centred[node.value] = way
        for scope in self.scopes:
            for equation in scope.inner:
                inner, _ = scope.plan.inner[equation]
                for index, value in enumerate(inner.program.inputs):
                    node = self.nodes.get(value)
                    if node is not None and self.accepted(value) and node.own:
                        inner.centred[index] = node.axis
        for value, stream_value, axis in self.exits:
            if not self.accepted(stream_value) or self.nodes[stream_value].axis != axis:
                continue
            scope = self.nodes[stream_value].scope
            abstract = scope.analysis.of(value)
            if value not in scope.plan.emitted:
                way = MeanSquare(stream_value, abstract) if isinstance(abstract, Quadratic) else Uncentred(stream_value)
                scope.plan.centred[value] = way


def _widens(node: Node) -> bool:
    """Whether it is a copy in more digits of what is centred at run time: better afterwards than before."""
    origin, dtypes = node.value.origin, {other.value.aval.dtype for other in node.operands if other.how == "run"}
    widens = origin is not None and origin.name == "convert_element_type"
    return widens and any(dtype.itemsize < node.value.aval.dtype.itemsize for dtype in dtypes)


def _scopes(top: Blindness) -> Iterator[Blindness]:
    yield top
    for inner in top.inner.values():
        yield from _scopes(inner)


def _exits(scope: Blindness) -> Iterator[tuple[Value, Value, int]]:
    """What a norm makes of a stream whatever its mean, the stream, and the axis."""
    for step in scope.steps:
        for value in [] if isinstance(step, Value) else step.outputs:
            for found in moments(scope.analysis, value):
                if found.invariant and found.axis is not None and found.axis in scope.of(found.of):
                    yield value, found.of, found.axis


def _inputs_behind(value: Value) -> set[Value]:
    """The inputs of the program that a value is computed from."""
    seen: set[Value] = set()
    found: set[Value] = set()
    stack = [value]
    while stack:
        top = stack.pop()
        if top in seen:
            continue
        seen.add(top)
        if top.origin is None:
            found.add(top)
        else:
            stack += top.origin.inputs
    return found


def _bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest
