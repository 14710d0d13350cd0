"""Programs inside a program: the body of a scan, and what is computed again for derivatives.

Both are entered with their inputs known, where they depend on parameters alone, or opaque; nothing else that is known
of an array crosses the border. A scan over stacked layers gets the coefficients of all layers as one more array to scan
over. Everything else that holds a jaxpr (cond, while, custom derivatives) is left whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
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
    names: dict[Any, str]

    def contract(self, parameters: Sequence[Any], xp: Any, only: Container[str] | None = None) -> Any: ...

    def made_of(self, inputs: Container[int]) -> set[str]: ...

    def size(self, names: Container[str] | None = None) -> tuple[int, int]: ...

    def apply(self, kept: Sequence[Any], coefficients: Any, inputs: Sequence[Any]) -> list[Any]: ...


class Inner:
    """The program inside an equation, and which of its inputs are known."""

    def __init__(self, equation: Equation, is_known: Callable[[Value], bool]) -> None:
        self.equation, self.inputs = equation, equation.inputs
        jaxpr = equation.params["jaxpr"]
        self.program = Program(jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ()), equation)
        self.known = [is_known(value) for value in equation.inputs]
        self.repeat = 1
        self.scanned = range(0)  # of which inputs a scan takes one entry for each step
        self.centred: dict[int, int] = {}  # inputs whose mean is taken away on entering, and along which axis

    def enter(self, index: int, array: Any) -> Any:
        """An input as the program inside reads it."""
        return less_mean(jnp.asarray(array), self.centred[index]) if index in self.centred else array

    def contract(self, body: Runs, parameters: Sequence[Any], xp: Any) -> Any:
        """The coefficients; ``parameters`` are the known inputs."""
        return body.contract(parameters, xp)

    def size(self, body: Runs) -> tuple[int, int]:
        """Entries and bytes of the coefficients."""
        return body.size()

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

    def contract(self, body: Runs, parameters: Sequence[Any], xp: Any) -> Any:
        """Of each layer, stacked; of the constants alone, once."""
        stacked = body.made_of(self.scanned)
        layered = [index in self.scanned for index, known in enumerate(self.known) if known]

        def layer(index: int, only: set[str]) -> Any:
            arrays = [a[index] if own else a for a, own in zip(parameters, layered, strict=True)]
            return body.contract(arrays, xp, only)

        once = layer(0, set(body.names.values()) - stacked)
        if not stacked:
            return once
        if xp is not np:
            axes = [0 if own else None for own in layered]
            return once | jax.vmap(lambda *arrays: body.contract(arrays, xp, stacked), axes)(*parameters)
        layers = [layer(index, stacked) for index in range(self.repeat)]
        return once | jax.tree.map(lambda *arrays: np.stack(arrays), *layers)

    def size(self, body: Runs) -> tuple[int, int]:
        stacked = body.made_of(self.scanned)
        once, layer = body.size(set(body.names.values()) - stacked), body.size(stacked)
        return once[0] + self.repeat * layer[0], once[1] + self.repeat * layer[1]

    def apply(self, body: Runs, kept: Sequence[Any], coefficients: Any, inputs: Sequence[Any]) -> list[Any]:
        params = self.equation.params
        arrays = dict(zip(body.kept, kept, strict=True))
        runtime = [index for index, known in enumerate(self.known) if not known]
        arrays |= dict(zip(runtime, inputs, strict=True))
        over = {index: array for index, array in arrays.items() if index in self.scanned}
        stacked = body.made_of(self.scanned)
        layers = {name: own for name, own in coefficients.items() if name in stacked}
        once = {name: own for name, own in coefficients.items() if name not in stacked}

        def step(carry: Any, slices: Any) -> Any:
            own, layer = slices
            now = {**arrays, **dict(zip(self.carried, carry, strict=True)), **own}
            outputs = body.apply(
                [now[index] for index in body.kept],
                once | layer,
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
    if equation.name == "scan" and equation.params["length"]:
        return Scan(equation, is_known)
    if equation.name in REMAT and not equation.params.get("differentiated"):
        return Inner(equation, is_known)
    return None
