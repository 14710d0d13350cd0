"""Running a planned program: coefficients from parameters, and outputs from inputs."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._algebra._dtype import compute_dtype
from jaxfold._errors import StructureError, kind_of
from jaxfold._fold import _known as known
from jaxfold._fold._centred import Stored
from jaxfold._fold._inner import Inner
from jaxfold._fold._known import Known
from jaxfold._fold._plan import Plan
from jaxfold._fold._program import Equation, Value, inputs_behind
from jaxfold._fold._schedule import Step, schedule
from jaxfold._fold._storage import computed_dtype, natural_dtype

RETURNED = "Pass what contract returned."


def require_keys(where: str, tree: Any, expected: set[str], *, exactly: bool = True) -> None:
    """Raises :class:`StructureError` for anything but a mapping with these keys, naming those that differ."""
    if not isinstance(tree, Mapping):
        raise StructureError(where, kind_of(tree), f"a mapping with {_listed(expected)}", RETURNED)
    missing, unknown = expected - set(tree), set(tree) - expected if exactly else set()
    if missing or unknown:
        got = [f"no {_listed(missing)}"] if missing else []
        got += [f"the unknown {_listed(unknown)}"] if unknown else []
        raise StructureError(where, " and ".join(got), _listed(expected), RETURNED)


def _listed(keys: Iterable[Any]) -> str:
    names = sorted(map(repr, keys))
    if not names:
        return "no keys"
    return ("keys " if names[1:] else "key ") + ", ".join(names[:8]) + (", …" if names[8:] else "")


class Runner:
    """What is left of a program after planning.

    Attributes:
        kept: indices of the inputs among the parameters that the original equations still read.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program = plan, plan.analysis.program
        self.is_known = [bits is not None for bits in plan.analysis.given]
        self.emitted = plan.emitted
        inside = {equation: (inner, Runner(body)) for equation, (inner, body) in plan.inner.items()}
        self.inner = {
            equation: (inner, body)
            for equation, (inner, body) in inside.items()
            if body.plan.contracts or inner.centred or len(body.kept) < sum(inner.known)
        }
        self.steps, needed = schedule(
            self.program, self.emitted, lambda value: self.emitted[value].values(), self._reads
        )
        self.kept = [
            index for index, value in enumerate(self.program.inputs) if self.is_known[index] and value in needed
        ]
        # In the program's order, whatever order they were found in.
        places = {value: index for index, value in enumerate(self.program.inputs)}
        places |= {v: len(places) + e.index for e in self.program.equations for v in e.outputs}
        with_any = [value for value, way in self.emitted.items() if way.size]
        self.stored = {value: self.emitted[value] for value in sorted(with_any, key=places.__getitem__)}
        self.names: dict[Any, str] = {place: str(index) for index, place in enumerate((*self.stored, *self.inner))}

    def _reads(self, equation: Equation) -> set[Value]:
        if equation not in self.inner:
            return set(equation.inputs)
        inner, body = self.inner[equation]
        return {v for i, v in enumerate(equation.inputs) if not inner.known[i] or i in body.kept}

    def contract(self, parameters: Sequence[Any], xp: Any, only: Container[str] | None = None) -> dict[str, Any]:
        """The coefficients of all that is emitted, or of some, by name; NumPy float64 or traced JAX arrays."""
        given = [value for value, is_known in zip(self.program.inputs, self.is_known, strict=True) if is_known]
        environment = dict(zip(given, parameters, strict=True))
        memo: dict[int, Any] = {}

        def read(value: Value) -> Any:
            self._evaluate(value, environment)
            return environment.get(value, value.constant)

        def leaf(value: Value) -> Any:
            array = read(value)
            if xp is np:
                return np.asarray(array).astype(np.float64)
            array = jnp.asarray(array)  # half precision is widened first: there is no factor in it
            return array.astype(compute_dtype(array.dtype)) if jnp.issubdtype(array.dtype, jnp.floating) else array

        def compute(node: Known) -> Any:
            return known.evaluate(node, xp, leaf, memo)

        def asked(place: Value | Equation) -> bool:
            return only is None or self.names[place] in only

        stored = {value: way for value, way in self.stored.items() if asked(value)}
        found = {self.names[value]: way.coefficients(xp, compute) for value, way in stored.items()}
        for equation, (inner, body) in self.inner.items():
            if not asked(equation):
                continue
            arrays = [read(value) for value, is_known in zip(inner.inputs, inner.known, strict=True) if is_known]
            found[self.names[equation]] = inner.contract(body, arrays, xp)
        return found

    @functools.cached_property
    def _readers(self) -> dict[Value, list[Step | None]]:
        """Return which steps read each value; None for the caller, and for a program inside."""
        found: dict[Value, list[Step | None]] = {}
        for step in self.steps:
            plain = isinstance(step, Equation) and step not in self.inner
            for value in self.emitted[step].values() if isinstance(step, Value) else step.inputs:
                found.setdefault(value, []).append(step if plain or isinstance(step, Value) else None)
        for value in self.program.outputs:
            found.setdefault(value, []).append(None)
        return found

    def _natural(self, value: Value) -> np.dtype:
        return natural_dtype(value, self.emitted[value], lambda own: self._readers.get(own, ()))

    def _dtype(self, value: Value) -> np.dtype:
        """Return the dtype that a value is computed with."""
        return computed_dtype(self._natural(value), self.plan.storage, self.emitted[value])

    def _storage(self, value: Value) -> np.dtype:
        """Return the dtype that its coefficients are stored in."""
        return self.plan.storage or self._natural(value)

    def dtypes(self, coefficients: Any) -> Any:
        """The dtype that each coefficient is stored in: that which it is computed with, or that was asked for."""
        found: dict[str, Any] = {}
        for place, name in self.names.items():
            tree = coefficients[name]
            if isinstance(place, Value):
                dtype = self._storage(place)
                found[name] = jax.tree.map(lambda _, dtype=dtype: dtype, tree)
            else:
                found[name] = self.inner[place][1].dtypes(tree)
        return found

    def size(self, names: Container[str] | None = None) -> tuple[int, int]:
        """Entries and bytes of all coefficients, or of those of these names."""
        entries = [
            (way.size, self._storage(value).itemsize)
            for value, way in self.stored.items()
            if names is None or self.names[value] in names
        ]
        total = [sum(n for n, _ in entries), sum(n * size for n, size in entries)]
        for equation, (inner, body) in self.inner.items():
            if names is None or self.names[equation] in names:
                total = [own + more for own, more in zip(total, inner.size(body), strict=True)]
        return total[0], total[1]

    def made_from(self) -> set[int]:
        """Return the indices of the program's inputs that any coefficient is made of."""
        places = {value: index for index, value in enumerate(self.program.inputs)}
        known = set().union(*(way.leaves() for way in self.stored.values()))
        for inner, body in self.inner.values():
            known |= {inner.inputs[index] for index in body.made_from() if inner.known[index]}
        return {places[leaf] for value in known for leaf in inputs_behind(value) if leaf in places}

    def made_of(self, inputs: Container[int]) -> set[str]:
        """The names of the coefficients that depend on any of these inputs of the program."""
        places = {value: index for index, value in enumerate(self.program.inputs)}

        def reached(values: Iterable[Value]) -> bool:
            return any(places[leaf] in inputs for v in values for leaf in inputs_behind(v) if leaf in places)

        found = {self.names[value] for value, way in self.stored.items() if reached(way.leaves())}
        for equation, (inner, _) in self.inner.items():
            known_ones = [value for value, is_known in zip(inner.inputs, inner.known, strict=True) if is_known]
            found |= {self.names[equation]} if reached(known_ones) else set()
        return found

    @functools.cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """What is emitted from what: the same for other inputs if the coefficients mean the same."""
        own = [(type(way).__name__, self.plan.fingerprints.emitted(way)) for way in self.stored.values()]
        inside = ((self._entering(inner, body), body.fingerprint) for inner, body in self.inner.values())
        return (*own, *inside)

    def _entering(self, inner: Inner, body: Runner) -> Any:
        """What the coefficients of a program inside are made of, and which of them there is one of for each layer."""
        entered = []
        for index, value in enumerate(inner.inputs):
            if inner.known[index] and body.made_of({index}):
                digest, extent = self.plan.fingerprints.digest(value), self.plan.analysis.extent(value)
                entered.append((index, digest, extent, value.shape))
        return entered, sorted(body.made_of(inner.scanned)), inner.repeat if inner.scanned else 1

    def emissions(self) -> set[Any]:
        """The fingerprints of all that is emitted, before its mean is taken away and after, here and inside."""
        contracted = [value for component in self.plan.components for value in component.emitted]
        own = {self.plan.identities[value] for value in contracted}
        own |= {self.plan.fingerprints.emitted(way) for way in self.stored.values()}
        return own.union(*(body.emissions() for _, body in self.inner.values()))

    def lines(self) -> list[tuple[Any, str]]:
        """The fingerprint and the user's line of everything that has coefficients, here and inside."""
        prints = self.plan.fingerprints
        own = [(prints.emitted(way), value.origin.line if value.origin else "") for value, way in self.stored.items()]
        for equation, (inner, body) in self.inner.items():
            entering = repr(self._entering(inner, body))
            own.append((entering, equation.line))
            own += [((entering, fingerprint), line) for fingerprint, line in body.lines()]
        return own

    def check(self, blocks: Any, where: str = "contracted['blocks']") -> None:
        """Raises :class:`StructureError` for coefficients of another function."""
        require_keys(where, blocks, set(self.names.values()))
        for place, name in self.names.items():
            if isinstance(place, Equation):
                self.inner[place][1].check(blocks[name], f"{where}[{name!r}]")
            elif not isinstance(blocks[name], Mapping) or "kernel" not in blocks[name]:
                raise StructureError(f"{where}[{name!r}]", "no kernel", "coefficients", RETURNED)

    def _evaluate(self, value: Value, environment: dict[Value, Any]) -> None:
        """Adds a known value to the environment, by the program's own equations."""
        stack = [value]
        while stack:
            top = stack[-1]
            if top in environment or top.constant is not None:
                stack.pop()
                continue
            equation = top.origin
            if equation is None:
                raise KeyError(top)
            missing = [
                operand for operand in equation.inputs if operand not in environment and operand.constant is None
            ]
            if missing:
                stack += missing
                continue
            arguments = [environment.get(operand, operand.constant) for operand in equation.inputs]
            environment |= dict(zip(equation.outputs, equation.evaluate(arguments), strict=True))

    def apply(self, kept: Sequence[Any], coefficients: Any, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the program."""
        environment = {self.program.inputs[index]: array for index, array in zip(self.kept, kept, strict=True)}
        runtime = [value for value, is_known in zip(self.program.inputs, self.is_known, strict=True) if not is_known]
        environment |= dict(zip(runtime, inputs, strict=True))

        def read(value: Value) -> Any:
            return environment.get(value, value.constant)

        for step in self.steps:
            if isinstance(step, Value):
                own = coefficients[self.names[step]] if step in self.names else {}
                way, dtype = self.emitted[step], self._dtype(step)
                result = way.evaluate(own, read, dtype)
                environment[step] = result.astype(dtype if isinstance(way, Stored) else step.aval.dtype)
            elif step in self.inner:
                inner, body = self.inner[step]
                outputs = inner.apply(
                    body,
                    [read(step.inputs[index]) for index in body.kept],
                    coefficients[self.names[step]],
                    [inner.enter(index, read(step.inputs[index])) for index, k in enumerate(inner.known) if not k],
                )
                environment |= dict(zip(step.outputs, outputs, strict=True))
            else:
                outputs = step.evaluate([read(value) for value in step.inputs])
                environment |= dict(zip(step.outputs, outputs, strict=True))
        return [read(value) for value in self.program.outputs]
