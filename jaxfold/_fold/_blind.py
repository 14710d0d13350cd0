"""Whose mean nothing sees.

A value is blind along an axis if what the program returns stays the same when a multiple of ones along that axis is
added to it: all that reads it is blind. That is so of a norm that takes the mean away, and of a linear operation that
leaves the axis alone (``_through.py``) and whose result is blind. One pass from the outputs to the inputs finds out.
For what a scan carries, which it reads itself, passes are repeated from the assumption that all carries are blind,
until none is left of which that turns out wrong: the greatest fixed point.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxfold._fold._inner import Scan
from jaxfold._fold._moments import Moment, moments
from jaxfold._fold._plan import Plan
from jaxfold._fold._program import Equation, Value
from jaxfold._fold._schedule import Step, schedule
from jaxfold._fold._through import requests

Axes = frozenset[int]
NONE: Axes = frozenset()


class Blindness:
    """The axes along which each value of one program is blind.

    Attributes:
        emitted: what was contracted.
        steps: what remains of the program after what was contracted.
        inner: the same of the programs inside.
        outermost: whether it is the whole function.
    """

    def __init__(self, plan: Plan, outputs: Sequence[Axes], *, outermost: bool = False) -> None:
        self.plan, self.analysis, self.outermost = plan, plan.analysis, outermost
        self.inner: dict[Equation, Blindness] = {}
        self._axes: dict[Value, Axes] = {}
        self._inside: dict[tuple[Value, Value], Axes] = {}  # of a moment: the axes of that of which it is one
        self.emitted = emitted = plan.emitted
        self.steps: list[Step] = schedule(
            self.analysis.program, emitted, lambda value: emitted[value].values(), lambda equation: equation.inputs
        )[0]
        for value, axes in zip(self.analysis.program.outputs, outputs, strict=True):
            self._see(value, axes)
        for step in reversed(self.steps):
            if isinstance(step, Value):
                for value in emitted[step].values():
                    self._see(value, NONE)
            elif step in plan.inner:
                self._enter(step)
            else:
                self._read(step)

    def of(self, value: Value) -> Axes:
        """Along which axes; all of them for what nothing reads."""
        return self._axes.get(value, frozenset(range(len(value.shape))))

    def is_constant(self, equation: Equation, index: int, axis: int) -> bool:
        """Whether an operand is the same along the axis."""
        value = equation.inputs[index]
        if not value.shape or value.shape[axis] == 1:
            return True
        return axis in self.analysis.constant_along(value)

    def requests(self, equation: Equation, axis: int) -> list[int | str] | None:
        """Return the operation's requests, or None for a cast whose rounding a reader sees."""
        if equation.name == "convert_element_type" and self.analysis.roundings.ends(equation, spread=False):
            return None
        found = requests(equation, axis, lambda index, own: self.is_constant(equation, index, own))
        return None if found is None else list(found)

    def _use(self, value: Value, axes: Axes) -> None:
        self._axes[value] = self._axes.get(value, axes) & axes

    def _see(self, value: Value, axes: Axes) -> None:
        """A use that is no norm's: if the value is a moment of another, it sees the mean of that."""
        self._use(value, axes)
        self._inside |= {(value, own.of): NONE for own in moments(self.analysis, value)}

    def _read(self, equation: Equation) -> None:
        """Two ways to be blind: as what a norm takes moments of, and as what is handed on."""
        output = equation.outputs[0] if len(equation.outputs) == 1 else None
        results = {} if output is None else {found.of: found for found in moments(self.analysis, output)}
        each = [self.of(value) for value in equation.outputs]
        blind = NONE.union(*each).intersection(*each)
        through = [found for axis in blind if (found := self.requests(equation, axis)) is not None]
        for index, value in enumerate(equation.inputs):
            axes = frozenset(request for found in through if isinstance(request := found[index], int))
            result = results.get(self.analysis.root(value))
            self._use(value, axes if result is None else axes | self._summed(result))
            for own in moments(self.analysis, value):
                result = results.get(own.of)
                axes = NONE if result is None else self._summed(result)
                self._inside[value, own.of] = self._inside.get((value, own.of), axes) & axes

    def _summed(self, result: Moment) -> Axes:
        """The axes along which a moment, or all that reads it, does not see the mean of what it is a moment of."""
        own = None if result.axis is None else frozenset({result.axis})
        if result.invariant:
            return own or NONE
        inside = self._inside.get((result.value, result.of), NONE)
        return inside if own is None else inside & own

    @functools.cached_property
    def uses(self) -> dict[Value, set[Step | None]]:
        """What reads each value; None is the caller."""
        found: dict[Value, set[Step | None]] = {}
        for step in self.steps:
            for value in self.emitted[step].values() if isinstance(step, Value) else step.inputs:
                found.setdefault(value, set()).add(step)
        for value in self.analysis.program.outputs:
            found.setdefault(value, set()).add(None)
        return found

    def exclusive(self, value: Value) -> set[Step | None]:
        """The equations that nothing but this value needs."""
        found: set[Step | None] = set()
        stack = [] if value.origin is None else [value.origin]
        while stack:
            equation = stack.pop()
            found.add(equation)
            for operand in equation.inputs:
                origin = operand.origin
                if origin is not None and all(self.uses.get(output, set()) <= found for output in origin.outputs):
                    stack.append(origin)
        return found

    def reading(self, bits: int) -> set[Step | None]:
        """The equations that read these parameters, or what is computed from them alone."""
        depends = self.analysis.depends
        return {step for value, steps in self.uses.items() if depends.get(value, 0) & bits for step in steps}

    def _enter(self, equation: Equation) -> None:
        inner, body = self.plan.inner[equation]
        outputs = [self.of(value) for value in equation.outputs]
        carried = inner.carried if isinstance(inner, Scan) else range(0)
        if isinstance(inner, Scan):  # what it stacks has one more axis, and is left alone
            outputs[len(carried) :] = [NONE] * (len(outputs) - len(carried))
        while True:
            found = Blindness(body, outputs)
            inside = [found.of(value) for value in inner.program.inputs]
            now = [axes & inside[carried[index]] for index, axes in enumerate(outputs[: len(carried)])]
            if now == outputs[: len(carried)]:
                break
            outputs[: len(carried)] = now
        self.inner[equation] = found
        for index, value in enumerate(equation.inputs):
            if inner.known[index] and inner.program.inputs[index] not in found.uses:
                continue
            if inner.known[index] or (isinstance(inner, Scan) and index not in carried):
                axes = NONE  # the parameters of a body are its own matter
            else:
                axes = inside[index] if not carried else outputs[carried.index(index)]
            self._see(value, axes)
