"""Which axes of the sources survive in a coefficient, and with them where it is placed.

The kernel of the denominator keeps the input axis of the producer's kernel, a consumer's kernel keeps the output axes
of its source, and every leaf of a stack keeps the axis of the stack. The n features of the norm are gone, and so is the
order that a packed triangle had. Rows of D are not an axis that survives: it has a row or two more than the input has
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxfold._block._shape import Form, consumer_path

PRODUCER = "producer['kernel']"


def source_axes(path: Sequence[str], *, form: Form, stacked: bool, axes: int) -> tuple[str, tuple[int | None, ...]]:
    """Where the axes of a coefficient come from.

    Args:
        path: of the coefficient in ``Contraction.params``, such as ``("consumers", "query", "kernel")``.
        form: of the contraction.
        stacked: whether every leaf has an axis more, in front.
        axes: how many the coefficient has.

    Returns:
        The path of the source leaf that it follows, and for each of its own axes that of the source, or None.
    """
    lead: tuple[int | None, ...] = (0,) if stacked else ()
    first = len(lead)
    rest = axes - first
    if path[0] == "denominator":
        survives = path[-1] == "kernel" and form != "packed"
        return PRODUCER, lead + ((first,) if survives else (None,)) + (None,) * (rest - 1)
    name = f"{consumer_path(path[1] if path[0] == 'consumers' else None)}['kernel']"
    if path[-1] == "bias":
        return name, lead + tuple(range(first + 1, first + 1 + rest))
    return name, (*lead, None, *range(first + 1, first + rest))


def place(value: np.ndarray, source: Any, axes: tuple[int | None, ...]) -> jax.Array:
    """``value`` on the devices of the JAX array ``source``, sharded along the axes that survive.

    An array that JAX has put on its default device of its own accord is no choice of anyone's, and makes for another.
    """
    sharding = getattr(source, "sharding", None)  # leaves under jit have none to look at
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec) + (None,) * source.ndim
        same = (axis is not None and source.shape[axis] == size for axis, size in zip(axes, value.shape, strict=True))
        kept = PartitionSpec(*(spec[axis] if ok else None for axis, ok in zip(axes, same, strict=True)))
        return jax.device_put(value, NamedSharding(sharding.mesh, kept, memory_kind=sharding.memory_kind))
    if getattr(source, "committed", False) and len(source.devices()) == 1:
        return jax.device_put(value, next(iter(source.devices())))
    with jax.ensure_compile_time_eval():
        return jax.numpy.asarray(value)
