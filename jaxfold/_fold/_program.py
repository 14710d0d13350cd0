"""A jaxpr as a flat list of equations.

Calls of jitted functions are inlined. Their jaxprs are shared between calls, variables included, so every call gets
values of its own; a :class:`Value` stands for one array of the whole program, an :class:`Equation` for one operation on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxfold._extend import Literal, bind, line_of
from jaxfold._tree._fold_report import shown

INLINED = {"jit", "pjit", "closed_call", "core_call"}


class Value:
    """One array of a program: an input, a constant, or an output of an equation."""

    __slots__ = ("aval", "constant", "origin")

    def __init__(self, aval: Any, constant: Any = None, origin: Equation | None = None) -> None:
        self.aval, self.constant, self.origin = aval, constant, origin

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)


# Constants up to this size are looked at: counts, divisors, masks, switches.
LARGEST_CONSTANT = 4096


def small_constant(value: Value) -> np.ndarray | None:
    """A constant as a NumPy array, if it is small, or one number repeated, and of an ordinary dtype."""
    array = value.constant
    if isinstance(array, np.ndarray):
        return array if array.size <= LARGEST_CONSTANT or not any(array.strides) else None
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.size > LARGEST_CONSTANT:
        return None
    return None if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended) else np.asarray(array)


class Equation:
    """One operation: the jaxpr's own equation, those of the calls around it, and the values it reads and writes."""

    __slots__ = ("calls", "index", "inputs", "outputs", "source")

    def __init__(self, source: Any, inputs: list[Value], index: int, calls: tuple[Any, ...] = ()) -> None:
        self.source, self.inputs, self.index, self.calls = source, inputs, index, calls
        self.outputs = [Value(variable.aval, origin=self) for variable in source.outvars]

    @property
    def name(self) -> str:
        return self.source.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.source.params

    @property
    def line(self) -> str:
        """The user's line that it comes from."""
        return line_of(self.source, self.calls)

    @property
    def described(self) -> str:
        """What it is called, and where it comes from, for a sentence."""
        body = getattr(self.params.get("call_jaxpr"), "eqns", [])
        (only,) = body if len(body) == 1 else (self.source,)  # relu, say, is a custom derivative of a jitted relu
        name, line = only.params.get("name"), self.line
        return (name if isinstance(name, str) and name else self.name) + (f" in {shown(line)}" if line else "")

    def evaluate(self, arguments: Sequence[Any]) -> list[Any]:
        """What the equation makes of the arguments, as it was written."""
        return bind(self.source, arguments)


class Program:
    """Inputs, equations in their order, and outputs; of what is inside an equation, with that one given."""

    def __init__(self, closed: Any, around: Equation | None = None) -> None:
        self.equations: list[Equation] = []
        self.inputs = [Value(variable.aval) for variable in closed.jaxpr.invars]
        calls = () if around is None else (*around.calls, around.source)
        self.outputs = self._inline(closed.jaxpr, closed.consts, self.inputs, calls)

    def _inline(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], calls: tuple[Any, ...]
    ) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {
            variable: Value(variable.aval, const) for variable, const in zip(jaxpr.constvars, consts, strict=True)
        }

        def read(atom: Any) -> Value:
            return Value(atom.aval, np.asarray(atom.val)) if isinstance(atom, Literal) else values[atom]

        for source in jaxpr.eqns:
            arguments = [read(atom) for atom in source.invars]
            if _is_plain_call(source):
                inner = source.params.get("jaxpr") or source.params["call_jaxpr"]
                body, its_own = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                outputs = self._inline(body, its_own, arguments, (*calls, source))
            else:
                equation = Equation(source, arguments, len(self.equations), calls)
                self.equations.append(equation)
                outputs = equation.outputs
            values |= dict(zip(source.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _is_plain_call(source: Any) -> bool:
    """Whether it is a call that may be inlined: of no effect on where its arrays lie."""
    if source.primitive.name not in INLINED:
        return False
    placed = (*source.params.get("in_shardings", ()), *source.params.get("out_shardings", ()))
    return not any(isinstance(sharding, jax.sharding.Sharding) for sharding in placed)


def inputs_behind(value: Value) -> set[Value]:
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
