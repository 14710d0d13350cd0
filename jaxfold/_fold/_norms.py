"""The norms of a program: roots of sums of squares, and what was decided about each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxfold._extend import ClosedJaxpr, Jaxpr
from jaxfold._fold._affine import Affine, Quadratic
from jaxfold._fold._analysis import Analysis
from jaxfold._fold._centred import MeanSquare
from jaxfold._fold._centring import Centring
from jaxfold._fold._components import Component
from jaxfold._fold._emission import EmittedQuadratic
from jaxfold._fold._groups import norms_behind, norms_read
from jaxfold._fold._plan import Plan
from jaxfold._fold._program import Equation, Program, Value
from jaxfold._fold._rules_arithmetic import is_sum_of_squares
from jaxfold._fold._schedule import schedule
from jaxfold._tree._fold_report import Decision

ROOTS = {"sqrt", "rsqrt", "pow", "integer_pow"}
SQUARES = {"square", "integer_pow", "mul"}
NEITHER = "it is neither a mean square nor a variance of its input"
PARTIAL = "its sum of squares is over a part of its input only, or has a mask or weights"


@dataclasses.dataclass(eq=False)
class Norm:
    """One norm of a program.

    Attributes:
        root: the equation that takes the root.
        width: how many entries are summed.
        decision: what was done about it.
        reason: why nothing was, if so.
        component: the equations that it belongs to, if its input is affine.
        absorbing: those of what its root scales.
        quadratic: what is known of its sum of squares, if anything.
        before, behind: the parameters that make its input, and those of what reads its output, as bits.
        repeat: how many layers of a scan it stands for.
        weightless: whether its scale and bias are in its readers.
        stream: the value that it takes the mean from, if it does.
        reductions: how many sums over its features the program has for it, before and after.
    """

    root: Equation
    width: int
    decision: Decision
    reason: str
    component: Component | None = None
    absorbing: tuple[Component, ...] = ()
    quadratic: Quadratic | None = None
    before: int = 0
    behind: int = 0
    repeat: int = 1
    weightless: bool = False
    stream: Value | None = None
    reductions: tuple[int, int] | None = None

    @property
    def line(self) -> str:
        return self.root.line


def norms(plan: Plan, centring: Centring | None = None, repeat: int = 1) -> list[Norm]:
    """Every norm of a program and of the programs inside it, in their order."""
    found = _Norms(plan, centring)
    seen: set[Any] = set()
    result: list[Norm] = []
    for equation in plan.live:
        if equation in plan.inner:
            inner, body = plan.inner[equation]
            result += norms(body, centring, repeat * inner.repeat)
        elif not plan.analysis.is_known(equation.outputs[0]) if equation.outputs else False:
            result += _left_whole(equation, repeat)
        if equation.name not in ROOTS or plan.analysis.is_known(equation.outputs[0]):
            continue
        behind = [v for v in norms_behind(plan.analysis, equation.outputs[0]) if _is_norm(plan.analysis, v)]
        for value in sorted(behind, key=lambda value: value.origin.index if value.origin else 0):
            quadratic = plan.analysis.of(value)
            if not isinstance(quadratic, Quadratic):
                continue
            key = (_identity(quadratic.base), quadratic.over)
            if key not in seen:
                seen.add(key)
                norm = found.describe(equation, value, quadratic, repeat)
                # A length or a distance is not a norm that a reader of the report would look for.
                if norm.decision != "skipped" or _is_mean(quadratic):
                    result.append(norm)
        if not behind and (other := _other_root(plan.analysis, equation)):
            width, reason = other
            result.append(Norm(equation, width, "skipped", reason, repeat=repeat))
    return result


def _is_norm(analysis: Analysis, value: Value) -> bool:
    """Whether it is a sum of the squares of something larger."""
    quadratic = analysis.of(value)
    return isinstance(quadratic, Quadratic) and quadratic.squares.value > 0 and quadratic.width > 1


def _is_mean(quadratic: Quadratic) -> bool:
    """Return whether the squares are averaged, over n or n − 1, rather than summed as in a length or a distance."""
    n = quadratic.width
    return 2 * quadratic.squares.value * n >= 1 and quadratic.squares.value * (n - 1) <= 1.001


def _identity(base: Affine) -> Any:
    """The array itself, or, where it is one of the program's own, which: that is wrapped anew for each reader."""
    if len(base.terms) == 1 and base.bias is None:
        (source,) = base.terms
        if len(source.views) == 1 and not source.row_shape:
            return source.views[0].source.value
    return base


class _Norms:
    """What there is to say about the norms of one program."""

    def __init__(self, plan: Plan, centring: Centring | None) -> None:
        self.plan, self.analysis, self.centring = plan, plan.analysis, centring
        self.where = {equation: component for component in plan.components for equation in component.equations}
        self.readers: dict[Value, list[tuple[Component, Value]]] = {}
        for component in plan.components:
            for output in component.demanded:
                for value in norms_read(plan.analysis, output):
                    self.readers.setdefault(value, []).append((component, output))
        emitted = plan.emitted
        self.steps = schedule(
            plan.analysis.program, emitted, lambda value: emitted[value].values(), lambda equation: equation.inputs
        )[0]

    def describe(self, root: Equation, value: Value, quadratic: Quadratic, repeat: int) -> Norm:
        component = self.where.get(value.origin) if value.origin else None
        readers = self.readers.get(value, [])
        computed = [output for absorbing, output in readers if output in absorbing.emitted]
        stream = self._stream(quadratic)
        decision, reason = self._decision(value, quadratic, component, stream, bool(computed))
        plan, whole = self._whole(value, quadratic)
        before, behind = self._writers(plan, whole, stream, decision), 0
        for _, output in readers:
            abstract = self.analysis.of(output)
            behind |= _depends(self.plan, abstract) if isinstance(abstract, Affine) else 0
        return Norm(
            root,
            quadratic.width,
            decision,
            reason,
            component if whole is quadratic or decision != "skipped" else _component(plan, value),
            tuple(absorbing for absorbing, output in readers if output in absorbing.emitted),
            whole,
            before,
            behind & ~before,
            repeat,
            bool(computed) and len(computed) == len(readers),
            stream,
            self._reductions(quadratic, stream),
        )

    def _whole(self, value: Value, quadratic: Quadratic) -> tuple[Plan, Quadratic]:
        """The sum of squares as it was known before its input was taken for a source, and the plan of then."""
        uncut = self.plan.uncut
        earlier = None if uncut is None or quadratic.narrow() else uncut.analysis.of(value)
        if uncut is None or not isinstance(earlier, Quadratic) or not earlier.narrow():
            return self.plan, quadratic
        return uncut, earlier

    def _writers(self, plan: Plan, quadratic: Quadratic, stream: Value | None, decision: Decision) -> int:
        """The parameters that make the norm's input."""
        if decision == "centred" and self.centring is not None and stream is not None:
            return self.centring.writers(stream)
        return _depends(plan, quadratic.base.centred.base if quadratic.base.centred else quadratic.base)

    def _decision(
        self, value: Value, quadratic: Quadratic, component: Component | None, stream: Value | None, computed: bool
    ) -> tuple[Decision, str]:
        if quadratic.narrow() and (computed or (component is not None and value in component.emitted)):
            return "contracted", ""
        if stream is not None and self.centring is not None and self.centring.takes_from(stream):
            return "centred", ""
        if computed:
            return "absorbed", self._why_not(stream, quadratic)
        plan, whole = self._whole(value, quadratic)
        own = component if whole is quadratic else _component(plan, value)
        off = "contracting is switched off" if whole.narrow() and "contract" not in self.plan.kinds else ""
        reasons = (off or _reason(whole, own), self._why_not(stream, quadratic))
        return "skipped", "; ".join(dict.fromkeys(filter(None, reasons)))  # both may be one and the same

    def _stream(self, quadratic: Quadratic) -> Value | None:
        """The value that a norm takes the mean from."""
        base = quadratic.base.centred.base if quadratic.base.centred else quadratic.base
        centred = quadratic.base.centred is not None or quadratic.centring() == 1.0
        return self.analysis.first.get(base) if centred else None

    def _why_not(self, stream: Value | None, quadratic: Quadratic) -> str:
        if stream is None:
            return "" if quadratic.centring() else "it takes no mean away"
        return "" if self.centring is None else self.centring.why_not(stream, self._axis(quadratic))

    def _axis(self, quadratic: Quadratic) -> int:
        """The one along which the mean is taken."""
        return (quadratic.base.centred or quadratic).over[0]

    def _reductions(self, quadratic: Quadratic, stream: Value | None) -> tuple[int, int]:
        """Sums over the features of the norm's input: in the program, and in what is left of it."""
        own = {value for value in (stream, self.analysis.first.get(quadratic.base)) if value is not None}

        def sums(steps: Iterable[Any]) -> int:
            return sum(
                isinstance(step, Equation) and step.name == "reduce_sum" and self._over(step.outputs[0]) in own
                for step in steps
            )

        ways = self.plan.emitted
        ours = sum(isinstance(step, Value) and self._squares(ways[step]) in own for step in self.steps)
        return sums(self.plan.live), sums(self.steps) + ours

    def _over(self, output: Value) -> Value | None:
        abstract = self.analysis.of(output)
        if isinstance(abstract, Quadratic):
            return self.analysis.first.get(abstract.base)
        total = abstract.sum_of if isinstance(abstract, Affine) else None
        return None if total is None else self.analysis.first.get(total.base)

    def _squares(self, way: Any) -> Value | None:
        """Whose squares are summed, if it is a way of computing a sum of squares."""
        return self.analysis.first.get(way.quadratic.base) if isinstance(way, (EmittedQuadratic, MeanSquare)) else None


def _component(plan: Plan, value: Value) -> Component | None:
    """The component of a plan that computes a value."""
    return next((component for component in plan.components if value.origin in component.equations), None)


def _reason(quadratic: Quadratic, component: Component | None) -> str:
    if not quadratic.narrow():
        return f"its input, {_input(quadratic)}, is no affine map of anything narrower"
    if not is_sum_of_squares(quadratic):
        return NEITHER
    if component is None:
        return "nothing reads it that could be contracted"
    if component.refused:
        return component.refused
    before, after = component.before, component.after
    if component.pays:
        return "what reads it is contracted as far as that pays; the wide array is needed all the same"
    if after == before:
        return (
            f"contracting it would save nothing: {_made_of(quadratic)}, "
            f"and with all that has to stay, it takes {before.parameters:,} parameters and {before.flops:,} FLOPs"
        )
    return (
        f"contracted it would take {after.parameters:,} parameters and {after.flops:,} FLOPs, where it takes "
        f"{before.parameters:,} and {before.flops:,}"
    )


def _made_of(quadratic: Quadratic) -> str:
    """Return from how many numbers the features are computed: where these are more, that is the reason."""
    rows, width = quadratic.base.rows(), quadratic.width
    made = f"{rows} numbers make its {width} features"
    return made if rows < width else f"its {width} features are computed from {rows} numbers, which are not fewer"


def _input(quadratic: Quadratic) -> str:
    """Which operation makes the input that is squared."""
    base = quadratic.base.centred.base if quadratic.base.centred else quadratic.base
    varying = [
        view.source.value for source in base.terms for view in source.views if view.varies() & set(quadratic.over)
    ]
    if not varying or varying[0].origin is None:
        return "an input of the function"
    origin = varying[0].origin
    return f"the result of {origin.described}"


def _depends(plan: Plan, array: Affine) -> int:
    bits = 0
    for node in (*array.terms.values(), *([array.bias] if array.bias is not None else [])):
        for leaf in node.leaves():
            bits |= plan.analysis.depends.get(leaf, 0)
    return bits


def _other_root(analysis: Analysis, root: Equation) -> tuple[int, str] | None:
    """Of a root of sums of squares that is no norm: how many entries are summed, and why it is none."""
    sums: dict[str, int] = {}
    stack = [(root.inputs[0], 0, False)]
    while stack:
        value, depth, averaged = stack.pop()
        origin = value.origin
        if origin is None or depth > 12 or analysis.is_known(value):
            continue
        if origin.name == "reduce_sum" and _has_square(origin.inputs[0]):
            read = isinstance(analysis.of(value), Quadratic)
            if read and not averaged:
                continue  # a length or a distance
            width = math.prod(origin.inputs[0].shape) // max(math.prod(value.shape), 1)
            sums.setdefault(NEITHER if read else PARTIAL, width)
            continue
        averaged = averaged or origin.name in ("mul", "div")  # by n, or by how many entries a mask has
        same = (v for v in origin.inputs if math.prod(v.shape) == math.prod(value.shape))
        stack += [(v, depth + 1, averaged) for v in same]
    return next(((sums[reason], reason) for reason in (PARTIAL, NEITHER) if reason in sums), None)


def _has_square(value: Value) -> bool:
    stack = [(value, 0)]
    while stack:
        value, depth = stack.pop()
        origin = value.origin
        if origin is None or depth > 4:
            continue
        if origin.name in SQUARES and len(set(origin.inputs)) == 1 and origin.params.get("y", 2) == 2:
            return True
        stack += [(v, depth + 1) for v in origin.inputs if v.shape == value.shape]
    return False


def _left_whole(equation: Equation, repeat: int) -> Iterator[Norm]:
    """Norms inside an equation that is not entered."""
    for jaxpr in _jaxprs(equation.params):
        program = Program(jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ()), equation)
        plan = Plan(Analysis(program, [None] * len(program.inputs)), [])
        for norm in norms(plan, None, repeat):
            norm.reason = f"it is inside a {equation.name}, which is left whole"
            yield norm


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, ClosedJaxpr) or (isinstance(item, Jaxpr) and not item.constvars):
                yield item
