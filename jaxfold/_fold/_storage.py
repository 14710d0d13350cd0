"""The dtypes that coefficients are computed with, and stored in.

A coefficient has the digits of the arithmetic that reads it. Casts say which that is:

    a parameter that all readers cast to more digits   is centred and stored in those: its own would be rounded again
    an array that ends in a cast to fewer digits       is computed before the cast, which is the last step

What is narrow is computed in float32 at least, which costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._algebra._dtype import compute_dtype, promote
from jaxfold._fold._centred import Stored
from jaxfold._fold._emission import EmittedAffine
from jaxfold._fold._program import Equation, Value
from jaxfold._fold._schedule import Step

# Operations that move the entries of their first operand and compute nothing: in any dtype they do the same.
MOVES = {
    *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "rev", "copy"),
    *("gather", "sharding_constraint"),
}
Readers = Callable[[Value], Iterable[Step | None]]


def arithmetic_dtype(value: Value) -> np.dtype:
    """Return the widest dtype that an array has between its last arithmetic and itself: casts and moves are none."""
    dtype = np.dtype(value.aval.dtype)
    while (origin := value.origin) is not None and origin.name in {*MOVES, "convert_element_type"}:
        value = origin.inputs[0]
        if not jnp.issubdtype(value.aval.dtype, jnp.floating):
            break
        dtype = promote(dtype, value.aval.dtype)
    return dtype


def read_dtype(value: Value, readers: Readers) -> np.dtype:
    """Return the dtype that all readers of a stored value cast it to without loss; its own if any of them does not."""
    own, found = np.dtype(value.aval.dtype), []
    for step in readers(value):
        if not isinstance(step, Equation) or step.inputs[0] is not value or step.inputs.count(value) > 1:
            return own
        if step.name == "convert_element_type":
            found.append(np.dtype(step.params["new_dtype"]))
        elif step.name in MOVES:
            found.append(read_dtype(step.outputs[0], readers))
        else:
            return own
        if not jnp.issubdtype(found[-1], jnp.floating) or promote(own, found[-1]) != found[-1]:
            return own
    return promote(*found) if found else own


def natural_dtype(value: Value, way: Any, readers: Readers | None = None) -> np.dtype:
    """Return the dtype that a value is computed with if the caller asks for none."""
    if isinstance(way, Stored):
        return np.dtype(value.aval.dtype) if readers is None else read_dtype(value, readers)
    dtype = arithmetic_dtype(value)
    return dtype if isinstance(way, EmittedAffine) and way.wide else compute_dtype(dtype)


def computed_dtype(natural: np.dtype, asked: np.dtype | None, way: Any) -> np.dtype:
    """Return the dtype that coefficients are computed with: a wider one that the caller asks for is used.

    What is stored in place of a parameter is read by the program's own equations, in the dtype that these have.
    """
    if asked is None or isinstance(way, Stored):
        return natural
    return np.dtype(jax.dtypes.canonicalize_dtype(promote(natural, asked)))
