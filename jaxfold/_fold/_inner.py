"""Programs inside a program: the body of a scan, and what is computed again for derivatives.

Both are entered with their inputs known, where they depend on parameters alone, or opaque; nothing else that is known
of an array crosses the border. A scan over stacked layers gets the coefficients of all layers as one more array to scan
over. Everything else that holds a jaxpr (cond, while, custom derivatives) is left whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._extend import ClosedJaxpr
from jaxfold._fold._centred import less_mean
from jaxfold._fold._program import Equation, Program, Value

REMAT = ("remat2", "checkpoint", "remat")


class Runs(Protocol):
    """What an inner program needs of the runner of its body."""

    kept: list[int]

    def contract(self, parameters: Sequence[Any], xp: Any) -> Any: ...

    def apply(self, kept: Sequence[Any], coefficients: Any, inputs: Sequence[Any]) -> list[Any]: ...


class Inner:
    """The program inside an equation, and which of its inputs are known."""

    def __init__(self, equation: Equation, is_known: Callable[[Value], bool]) -> None:
        self.equation, self.inputs = equation, equation.inputs
        jaxpr = equation.params["jaxpr"]
        self.program = Program(jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ()))
        self.known = [is_known(value) for value in equation.inputs]
        self.repeat, self.stacks = 1, False
        self.centred: dict[int, int] = {}  # inputs whose mean is taken away on entering, and along which axis

    def enter(self, index: int, array: Any) -> Any:
        """An input as the program inside reads it."""
        return less_mean(jnp.asarray(array), self.centred[index]) if index in self.centred else array

    def contract(self, body: Runs, parameters: Sequence[Any], xp: Any) -> Any:
        """The coefficients; ``parameters`` are the known inputs."""
        return body.contract(parameters, xp)

    def apply(self, body: Runs, kept: Sequence[Any], coefficients: Any, inputs: Sequence[Any]) -> list[Any]:
        params = self.equation.params
        run = jax.checkpoint(body.apply, prevent_cse=params["prevent_cse"], policy=params["policy"])
        return run(list(kept), coefficients, list(inputs))


class Scan(Inner):
    """A scan: constants, what is carried, and what is scanned over."""

    def __init__(self, equation: Equation, is_known: Callable[[Value], bool]) -> None:
        super().__init__(equation, is_known)
        params = equation.params
        self.repeat = params["length"]
        self.carried = range(params["num_consts"], params["num_consts"] + params["num_carry"])
        self.scanned = range(self.carried.stop, len(equation.inputs))
        self.known = [known and index not in self.carried for index, known in enumerate(self.known)]
        self.stacks = any(self.known[index] for index in self.scanned)

    def contract(self, body: Runs, parameters: Sequence[Any], xp: Any) -> Any:
        """Of each layer, stacked; of the constants alone, once."""
        if not self.stacks:
            return body.contract(parameters, xp)
        layered = [index in self.scanned for index, known in enumerate(self.known) if known]
        if xp is not np:
            axes = [0 if layer else None for layer in layered]
            return jax.vmap(lambda *arrays: body.contract(arrays, xp), axes)(*parameters)
        layers = [
            body.contract([a[index] if layer else a for a, layer in zip(parameters, layered, strict=True)], xp)
            for index in range(self.repeat)
        ]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *layers)

    def apply(self, body: Runs, kept: Sequence[Any], coefficients: Any, inputs: Sequence[Any]) -> list[Any]:
        params = self.equation.params
        arrays = dict(zip(body.kept, kept, strict=True))
        runtime = [index for index, known in enumerate(self.known) if not known]
        arrays |= dict(zip(runtime, inputs, strict=True))
        over = {index: array for index, array in arrays.items() if index in self.scanned}
        layers = coefficients if self.stacks else {}

        def step(carry: Any, slices: Any) -> Any:
            own, layer = slices
            now = {**arrays, **dict(zip(self.carried, carry, strict=True)), **own}
            outputs = body.apply(
                [now[index] for index in body.kept],
                layer if self.stacks else coefficients,
                [now[index] for index in runtime],
            )
            return tuple(outputs[: len(self.carried)]), tuple(outputs[len(self.carried) :])

        carry, stacks = jax.lax.scan(
            step,
            tuple(jnp.asarray(arrays[index]) for index in self.carried),
            (over, layers),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacks]


def inner_of(equation: Equation, is_known: Callable[[Value], bool]) -> Inner | None:
    """The program inside, if it is one that may be entered."""
    if equation.source.effects:
        return None
    if equation.name == "scan":
        return Scan(equation, is_known)
    if equation.name in REMAT and not equation.params.get("differentiated"):
        return Inner(equation, is_known)
    return None
