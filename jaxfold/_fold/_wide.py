"""A function in float64: its jaxpr evaluated with float64 in place of its floats, the yardstick of a whole function.

Casts between floats and ``reduce_precision`` become nothing, since they are rounding. What cannot be widened, such as a
custom call, an 8-bit float or a function with derivatives of its own, is evaluated in its own dtypes, and named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfold._extend import ClosedJaxpr, Jaxpr, Literal, bind, is_library

ORDINARY = ("float16", "bfloat16", "float32", "float64")
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call"}
BITS = {"bitcast_convert_type", "nextafter", "rng_uniform"}  # what they do depends on how many bits there are


def is_ordinary(dtype: Any) -> bool:
    """Return whether the dtype is a real float that float64 stands in for."""
    return str(dtype) in ORDINARY


def widened(value: Any) -> Any:
    """Return the array in float64 if it is of an ordinary float dtype, else as it is."""
    return jnp.asarray(value, jnp.float64) if is_ordinary(jnp.result_type(value)) else value


class Wide:
    """Evaluates jaxprs in float64, inside ``enable_x64``.

    Attributes:
        left: names of the operations that were evaluated in their own dtypes.
    """

    def __init__(self) -> None:
        self.left: dict[str, None] = {}

    def evaluate(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        """Return the outputs of a jaxpr, with float64 in place of its floats."""
        jaxpr = getattr(closed, "jaxpr", closed)
        values = dict(zip(jaxpr.invars, map(widened, arguments), strict=True))
        values |= dict(zip(jaxpr.constvars, map(widened, getattr(closed, "consts", ())), strict=True))

        def read(atom: Any) -> Any:
            return (
                widened(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
                if isinstance(atom, Literal)
                else values[atom]
            )

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, map(widened, outputs), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, arguments: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if equation.effects or not all(_may_widen(atom.aval) for atom in (*equation.invars, *equation.outvars)):
            return self._as_it_is(equation, arguments)
        if name == "custom_jvp_call" and not _is_jaxs_own(params["call_jaxpr"]):
            return self._with_its_rule(equation, arguments)
        if name in CALLS:
            return self.evaluate(params.get("jaxpr") or params["call_jaxpr"], arguments)
        if name == "reduce_precision":
            return arguments
        if name == "scan":
            return self._scan(params, arguments)
        if name == "while":
            return self._while(params, arguments)
        if name == "cond":
            branches = [lambda *given, branch=branch: self.evaluate(branch, given) for branch in params["branches"]]
            return lax.switch(jnp.asarray(arguments[0], jnp.int32), branches, *arguments[1:])
        nested = any(isinstance(p, (Jaxpr, ClosedJaxpr)) for p in params.values()) and "scatter" not in name
        if nested or name in BITS or "call" in name:
            return self._as_it_is(equation, arguments)
        outputs = equation.primitive.bind(*arguments, **{key: _wide_param(key, p) for key, p in params.items()})
        return list(outputs) if equation.primitive.multiple_results else [outputs]

    def _as_it_is(self, equation: Any, arguments: list[Any]) -> list[Any]:
        self.left[equation.primitive.name] = None
        own = [
            argument.astype(atom.aval.dtype) if is_ordinary(getattr(atom.aval, "dtype", None)) else argument
            for atom, argument in zip(equation.invars, arguments, strict=True)
        ]
        return bind(equation, own)

    def _with_its_rule(self, equation: Any, arguments: list[Any]) -> list[Any]:
        """Return what a function with a derivative of its own computes, in float64, with that derivative.

        The rule may say something else than the function: a straight-through quantiser has the derivative of the
        identity. So the derivative is taken from the call in its own dtype, and the value from the body.
        """
        values = self.evaluate(equation.params["call_jaxpr"], arguments)
        own = [widened(output) for output in self._as_it_is(equation, arguments)]
        return [
            lax.stop_gradient(value - with_rule) + with_rule if is_ordinary(jnp.result_type(value)) else value
            for value, with_rule in zip(values, own, strict=True)
        ]

    def _scan(self, params: Any, arguments: list[Any]) -> list[Any]:
        consts, carried = params["num_consts"], params["num_carry"]
        fixed, carry, rows = arguments[:consts], arguments[consts : consts + carried], arguments[consts + carried :]

        def body(carry: Any, row: Any) -> Any:
            outputs = self.evaluate(params["jaxpr"], [*fixed, *carry, *row])
            return outputs[:carried], outputs[carried:]

        last, stacked = lax.scan(body, carry, rows, params["length"], params["reverse"])
        return [*last, *stacked]

    def _while(self, params: Any, arguments: list[Any]) -> list[Any]:
        tested, looped = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body, carry = arguments[:tested], arguments[tested : tested + looped], arguments[tested + looped :]
        return lax.while_loop(
            lambda carry: self.evaluate(params["cond_jaxpr"], [*of_test, *carry])[0],
            lambda carry: self.evaluate(params["body_jaxpr"], [*of_body, *carry]),
            carry,
        )


def _is_jaxs_own(body: Any) -> bool:
    """Return whether JAX itself wrote the function, as it did ``relu``: its rule is the derivative of its body."""
    source = getattr(getattr(getattr(body, "jaxpr", body), "debug_info", None), "func_src_info", None)
    return source is not None and is_library(re.sub(r"^.* at |:\d+$", "", str(source)))


def _may_widen(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended) or not jnp.issubdtype(dtype, jnp.inexact):
        return True
    return is_ordinary(dtype)


def _wide_param(key: str, value: Any) -> Any:
    if key in ("new_dtype", "dtype", "preferred_element_type", "accuracy") and is_ordinary(value):
        return np.dtype(np.float64)
    return None if key == "precision" and isinstance(value, lax.DotAlgorithmPreset) else value
