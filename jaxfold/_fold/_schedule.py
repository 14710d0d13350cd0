"""What is left to do of a program once it is decided what is computed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from jaxfold._fold._program import Equation, Program, Value

Step = Equation | Value


def schedule(
    program: Program,
    replaced: Container[Value],
    reads_of: Callable[[Value], Iterable[Value]],
    reads: Callable[[Equation], Iterable[Value]],
) -> tuple[list[Step], set[Value]]:
    """The steps in order, each an equation to evaluate or a value to compute in another way, and what they read.

    ``reads_of`` says what a replaced value is computed from, ``reads`` what an equation reads. An equation of several
    outputs of which some are replaced is evaluated for the others.
    """
    needed = set(program.outputs)
    steps: list[Step] = []
    for equation in reversed(program.equations):
        wanted = [output for output in equation.outputs if output in needed]
        ours = [output for output in wanted if output in replaced]
        for output in ours:
            steps.append(output)
            needed |= set(reads_of(output))
        if len(ours) < len(wanted) or equation.source.effects:
            steps.append(equation)
            needed |= set(reads(equation))
    inputs = [value for value in program.inputs if value in replaced and value in needed]
    needed = needed.difference(inputs).union(*(reads_of(value) for value in inputs))
    return inputs + steps[::-1], needed
