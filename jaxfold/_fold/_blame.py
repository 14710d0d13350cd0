"""What sees the mean of a value that would have to be blind."""

from __future__ import annotations

from jaxfold._fold._blind import Blindness
from jaxfold._fold._moments import Moment, moments
from jaxfold._fold._program import Equation, Value

RETURNED = "its input keeps its mean, since the function returns it"


def blame(scope: Blindness, value: Value, axis: int) -> str:
    """A sentence about the first operation that does, followed through all that hands the mean on; or nothing."""
    stack, seen = [(scope, value, axis)], set()
    while stack:
        scope, value, axis = stack.pop()
        if (value, axis) in seen or axis in scope.of(value):
            continue
        seen.add((value, axis))
        for step in sorted(scope.uses.get(value, ()), key=_place):
            if step is None:
                return RETURNED if scope.outermost else "its input keeps its mean, which a loop or a remat returns"
            if isinstance(step, Value):
                return _said(step.origin)
            if step in scope.inner:
                inner, _ = scope.plan.inner[step]
                body, entered = scope.inner[step], inner.program.inputs[step.inputs.index(value)]
                if axis not in body.of(entered):
                    stack.append((body, entered, axis))
                else:
                    stack += [(scope, output, axis) for output in step.outputs if output.shape == value.shape]
                continue
            handed_on = [
                (scope, output, own)
                for output in step.outputs
                for own in range(len(output.shape))
                if _asked(scope, step, own, value) == axis
            ]
            root = scope.analysis.root(value)
            if found := _moments(scope, step, root):
                said = [_inside(scope, each.value, root) for each in found if not each.invariant]
                if any(said):
                    return next(filter(None, said))
                continue
            if not handed_on:
                return _said(step)
            stack += handed_on
    return ""


def _moments(scope: Blindness, step: Equation, root: Value) -> list[Moment]:
    return [each for output in step.outputs for each in moments(scope.analysis, output) if each.of is root]


def _inside(scope: Blindness, value: Value, root: Value) -> str:
    """Who else reads a moment."""
    stack = [value]
    while stack:
        for step in sorted(scope.uses.get(stack.pop(), ()), key=_place):
            if not isinstance(step, Equation):
                return RETURNED if step is None else _said(step.origin)
            found = _moments(scope, step, root)
            if not found:
                return _said(step)
            stack += [each.value for each in found if not each.invariant]
    return ""


def _asked(scope: Blindness, step: Equation, axis: int, value: Value) -> int | str | None:
    asked = scope.requests(step, axis)
    return None if asked is None else asked[step.inputs.index(value)]


def _place(step: Equation | Value | None) -> int:
    origin = step.origin if isinstance(step, Value) else step
    return -1 if origin is None else origin.index


def _said(equation: Equation | None) -> str:
    if equation is None:
        return ""
    return f"its input keeps its mean, which {equation.described} reads"
