"""Which equations of a program are live, and which of them hang together."""

from __future__ import annotations

import dataclasses

from jaxfold._block._plan import Cost
from jaxfold._fold._analysis import Analysis, runtime
from jaxfold._fold._emission import EmittedAffine, EmittedQuadratic
from jaxfold._fold._program import Equation, Value

Emitted = EmittedAffine | EmittedQuadratic


NOTHING = Cost(0, 0, 0)
LEFT_OUT = "the predicate left it out"


@dataclasses.dataclass(eq=False)
class Component:
    """Connected affine equations.

    Attributes:
        equations: in order.
        demanded: values that are read from outside.
        emitted: those computed from their sources, once the decision is made.
        before, after: what it takes as it is, and at best; parameters that something else reads too are left out.
        pays: whether it is contracted.
        refused: why it is left alone although it would pay.
    """

    equations: list[Equation]
    demanded: list[Value]
    emitted: dict[Value, Emitted] = dataclasses.field(default_factory=dict)
    before: Cost = NOTHING
    after: Cost = NOTHING
    pays: bool = False
    refused: str = ""

    def refuse(self, reason: str) -> None:
        """Leaves it as it is."""
        self.emitted, self.pays, self.refused = {}, False, reason


def live_equations(analysis: Analysis) -> list[Equation]:
    """The equations that an output or an effect needs."""
    needed = set(analysis.program.outputs)
    live = []
    for equation in reversed(analysis.program.equations):
        if equation.source.effects or needed & set(equation.outputs):
            live.append(equation)
            needed |= set(equation.inputs)
    return live[::-1]


def components(analysis: Analysis, live: list[Equation]) -> list[Component]:
    parent: dict[Equation, Equation] = {}

    def root(equation: Equation) -> Equation:
        while parent[equation] is not equation:
            parent[equation] = parent[parent[equation]]
            equation = parent[equation]
        return equation

    for equation in live:
        if runtime(analysis.of(equation.outputs[0])) if len(equation.outputs) == 1 else False:
            parent[equation] = equation
            for value in equation.inputs:
                if value.origin in parent and not analysis.is_source(value):
                    parent[root(value.origin)] = equation
    members: dict[Equation, list[Equation]] = {}
    for equation in parent:
        members.setdefault(root(equation), []).append(equation)
    demanded: set[Value] = {value for value in analysis.program.outputs if value.origin in parent}
    for equation in live:
        read = {value for value in equation.inputs if value.origin in parent}
        demanded |= {value for value in read if equation not in parent or analysis.is_source(value)}
    return [
        Component(
            equations,
            [
                value
                for equation in sorted(equations, key=lambda e: e.index)
                for value in equation.outputs
                if value in demanded
            ],
        )
        for equations in members.values()
    ]
