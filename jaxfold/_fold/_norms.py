"""The norms of a program: roots of sums of squares, and what was decided about each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxfold._extend import ClosedJaxpr, Jaxpr, line_of
from jaxfold._fold._affine import Affine, Quadratic
from jaxfold._fold._analysis import Analysis
from jaxfold._fold._components import Component
from jaxfold._fold._emission import EmittedAffine
from jaxfold._fold._groups import norms_behind
from jaxfold._fold._plan import Plan
from jaxfold._fold._program import Equation, Program, Value
from jaxfold._fold._rules_arithmetic import is_sum_of_squares

ROOTS = {"sqrt", "rsqrt", "pow", "integer_pow"}
SQUARES = {"square", "integer_pow", "mul"}


@dataclasses.dataclass(eq=False)
class Norm:
    """One norm of a program.

    Attributes:
        root: the equation that takes the root.
        width: how many entries are summed.
        contracted: whether it is.
        reason: why not; empty if it is.
        component: the equations that it belongs to, if its input is affine.
        quadratic: what is known of its sum of squares, if anything.
        before, behind: the parameters that make its input, and those of what reads its output, as bits.
        repeat: how many layers of a scan it stands for.
    """

    root: Equation
    width: int
    contracted: bool
    reason: str
    component: Component | None = None
    quadratic: Quadratic | None = None
    before: int = 0
    behind: int = 0
    repeat: int = 1

    @property
    def line(self) -> str:
        return line_of(self.root.source)


def norms(plan: Plan, repeat: int = 1) -> list[Norm]:
    """Every norm of a program and of the programs inside it, in their order."""
    analysis = plan.analysis
    where = {equation: component for component in plan.components for equation in component.equations}
    seen: set[Any] = set()
    result: list[Norm] = []
    for equation in plan.live:
        if equation in plan.inner:
            inner, body = plan.inner[equation]
            result += norms(body, repeat * inner.repeat)
        elif not analysis.is_known(equation.outputs[0]) if equation.outputs else False:
            result += _left_whole(equation, repeat)
        if equation.name not in ROOTS or analysis.is_known(equation.outputs[0]):
            continue
        behind = [value for value in norms_behind(analysis, equation.outputs[0]) if _is_norm(analysis, value)]
        for value in sorted(behind, key=lambda value: value.origin.index if value.origin else 0):
            quadratic = analysis.of(value)
            if not isinstance(quadratic, Quadratic):
                continue
            key = (_identity(quadratic.base), quadratic.over)
            if key not in seen:
                seen.add(key)
                component = where.get(value.origin) if value.origin else None
                result.append(_describe(plan, equation, value, quadratic, component, repeat))
        if not behind and (width := _masked_width(analysis, equation)):
            reason = "its sum of squares is over a part of its input only, or has a mask or weights"
            result.append(Norm(equation, width, False, reason, repeat=repeat))
    return result


def _is_norm(analysis: Analysis, value: Value) -> bool:
    """Whether it is a sum of the squares of something larger."""
    quadratic = analysis.of(value)
    return isinstance(quadratic, Quadratic) and quadratic.squares > 0 and quadratic.width > 1


def _identity(base: Affine) -> Any:
    """The array itself, or, where it is one of the program's own, which: that is wrapped anew for each reader."""
    if len(base.terms) == 1 and base.bias is None:
        (source,) = base.terms
        if len(source.views) == 1 and not source.row_shape:
            return source.views[0].source.value
    return base


def _describe(
    plan: Plan, root: Equation, value: Value, quadratic: Quadratic, component: Component | None, repeat: int
) -> Norm:
    contracted, behind = _readers(plan, component, value)
    before = _depends(plan, quadratic.base)
    reason = "" if contracted else _reason(quadratic, component)
    return Norm(root, quadratic.width, contracted, reason, component, quadratic, before, behind & ~before, repeat)


def _reason(quadratic: Quadratic, component: Component | None) -> str:
    if not quadratic.narrow():
        return f"its input, {_input(quadratic)}, is no affine map of anything narrower"
    if not is_sum_of_squares(quadratic):
        return "it is neither a mean square nor a variance of its input"
    if component is None:
        return "nothing reads it that could be contracted"
    if component.refused:
        return component.refused
    before, after = component.before, component.after
    if component.pays:
        return "what reads it is contracted as far as that pays; the wide array is needed all the same"
    if after == before:
        return (
            f"contracting it would save nothing: {quadratic.base.rows()} numbers make its {quadratic.width} features, "
            f"and with all that has to stay, it takes {before.parameters:,} parameters and {before.flops:,} FLOPs"
        )
    return (
        f"contracted it would take {after.parameters:,} parameters and {after.flops:,} FLOPs, where it takes "
        f"{before.parameters:,} and {before.flops:,}"
    )


def _input(quadratic: Quadratic) -> str:
    """Which operation makes the input that is squared."""
    varying = [
        view.source.value
        for source in quadratic.base.terms
        for view in source.views
        if view.varies() & set(quadratic.over)
    ]
    if not varying or varying[0].origin is None:
        return "an input of the function"
    origin = varying[0].origin
    line = line_of(origin.source)
    return f"the result of {origin.name}" + (f" in {line}" if line else "")


def _readers(plan: Plan, component: Component | None, value: Value) -> tuple[bool, int]:
    """Whether anything is computed from narrow sources with this norm's scale, and the parameters in all that has."""
    if component is None:
        return False, 0
    contracted, behind = value in component.emitted, 0
    for output in component.demanded:
        abstract = plan.analysis.of(output)
        if isinstance(abstract, Affine):
            scales = {view.source.value for source in abstract.terms for view in source.views if not view.rows}
            if any(value in norms_behind(plan.analysis, scale) for scale in scales):
                behind |= _depends(plan, abstract)
                contracted |= isinstance(component.emitted.get(output), EmittedAffine)
    return contracted, behind


def _depends(plan: Plan, array: Affine) -> int:
    bits = 0
    for node in (*array.terms.values(), *([array.bias] if array.bias is not None else [])):
        for leaf in node.leaves():
            bits |= plan.analysis.depends.get(leaf, 0)
    return bits


def _masked_width(analysis: Analysis, root: Equation) -> int:
    """How many entries are summed, if it is the root of a sum of squares that the domain cannot read; else 0."""
    stack = [(root.inputs[0], 0)]
    while stack:
        value, depth = stack.pop()
        origin = value.origin
        if origin is None or depth > 12 or analysis.is_known(value):
            continue
        if origin.name == "reduce_sum" and _has_square(origin.inputs[0]):
            return math.prod(origin.inputs[0].shape) // max(math.prod(value.shape), 1)
        stack += [(v, depth + 1) for v in origin.inputs if math.prod(v.shape) == math.prod(value.shape)]
    return 0


def _has_square(value: Value) -> bool:
    stack = [(value, 0)]
    while stack:
        value, depth = stack.pop()
        origin = value.origin
        if origin is None or depth > 4:
            continue
        if origin.name in SQUARES and len(set(origin.inputs)) == 1:
            return True
        stack += [(v, depth + 1) for v in origin.inputs if v.shape == value.shape]
    return False


def _left_whole(equation: Equation, repeat: int) -> Iterator[Norm]:
    """Norms inside an equation that is not entered."""
    for jaxpr in _jaxprs(equation.params):
        program = Program(jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ()))
        plan = Plan(Analysis(program, [None] * len(program.inputs)), [])
        for norm in norms(plan, repeat):
            norm.reason = f"it is inside a {equation.name}, which is left whole"
            yield norm


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, ClosedJaxpr) or (isinstance(item, Jaxpr) and not item.constvars):
                yield item
