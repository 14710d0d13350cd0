"""Leaves as they arrive: boxed or bare, NumPy or JAX, concrete or only a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.meta import AxisMetadata
from jax.core import Tracer

from jaxfold._algebra._storage import require_finite
from jaxfold._errors import ConcretenessError, DtypeError, OptionError, StructureError, kind_of

STORAGE_DTYPES = tuple(np.dtype(t) for t in (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16))
_ACCEPTED = "float64, float32, bfloat16 or float16"


def unbox(leaf: Any) -> Any:
    """The array inside a Flax box: ``nn.Partitioned`` and its kin, or an ``nnx.Variable``; any other leaf as it is.

    An nnx.Variable is known by its protocol, so that nnx is not imported for its sake.
    """
    if isinstance(leaf, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    if isinstance(leaf, AxisMetadata):
        return unbox(getattr(leaf, "value", None))  # unbox() would add a sharding constraint under a mesh
    for accessor in ("get_raw_value", "raw_value", "value"):  # nnx.Variable, newest spelling first
        if hasattr(type(leaf), accessor) or accessor in getattr(leaf, "__dict__", ()):
            value = getattr(leaf, accessor)
            return unbox(value() if callable(value) else value)
    return leaf


def read_group(
    name: str,
    group: Any,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    read_leaf: Callable[[Any], Any] = unbox,
) -> dict[str, Any]:
    """The leaves of one layer as a new dict, each through ``read_leaf``; a leaf that is ``None`` counts as absent.

    Raises:
        StructureError: if ``group`` is no mapping, lacks a required leaf, or has one that the layer has no place for.
        DtypeError: if a leaf is not an array, or not of a supported floating dtype.
    """
    keys = "keys " + ", ".join([*map(repr, required), *(f"{k!r} (optional)" for k in optional)])
    if not isinstance(group, Mapping):
        hint = "Pass the layer's leaves: params['Dense_0'] of Linen variables, nnx.state(layer) of an NNX layer."
        raise StructureError(name, kind_of(group), f"a mapping with the {keys}", hint)
    present = {key: leaf for key, leaf in group.items() if unbox(leaf) is not None}
    unknown = [key for key in present if key not in required + optional]
    if unknown:
        raise StructureError(name, f"the unknown key {unknown[0]!r}", keys, _hint_for(unknown))
    for key in required:
        if key not in present:
            raise StructureError(f"{name}[{key!r}]", "nothing", f"an array: {name} has the {keys}", "")
    # In the order of the layer's own keys, so that of several faults the same one is reported whatever the mapping.
    keys_present = [key for key in required + optional if key in present]
    return {key: _check_dtype(f"{name}[{key!r}]", read_leaf(present[key])) for key in keys_present}


def _hint_for(unknown: list[Any]) -> str:
    names = " ".join(map(str, unknown)).lower()
    if "lora" in names:
        return "Merge the low-rank update into the kernel first: folding the base kernel alone would drop it."
    if "weight" in names:
        return "Leaves have Flax names and layout: a weight of shape (out, in) is passed as the kernel weight.T."
    return "Pass only the leaves of this layer."


def _check_dtype(name: str, leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape") or isinstance(leaf, np.ma.MaskedArray):
        hint = "Convert it with numpy.asarray first."
        raise DtypeError(name, kind_of(leaf), f"an array of dtype {_ACCEPTED}", hint)
    if dtype not in STORAGE_DTYPES:
        raise DtypeError(name, f"dtype {dtype}", _ACCEPTED, _dtype_hint(dtype))
    return leaf


def _dtype_hint(dtype: Any) -> str:
    if dtype == np.dtype("V2"):
        return "NumPy keeps bfloat16 as bytes of unknown meaning: restore it with leaf.view('bfloat16')."
    whole = dtype == np.dtype(bool) or jnp.issubdtype(dtype, jnp.integer)
    if dtype.itemsize == 1 and dtype != np.dtype(bool):
        return "Dequantise the leaf first: its scales are not part of the block."
    return "Convert it to a floating dtype first, as in leaf.astype('float32')." if whole else "Cast it first."


def read_dtype(dtype: Any) -> np.dtype | None:
    """A storage dtype given by the caller, or ``None`` for each coefficient's own."""
    if dtype is None:
        return None
    try:
        chosen = np.dtype(dtype)
    except TypeError:
        chosen = np.dtype(object)
    if chosen not in STORAGE_DTYPES:
        raise OptionError("dtype", repr(dtype), _ACCEPTED, "")
    return chosen


def require_floating(name: str, x: Any) -> None:
    """Raises :class:`DtypeError` for inputs of the block that are no array of a real floating dtype."""
    if not hasattr(x, "shape"):
        raise DtypeError(name, kind_of(x), "an array", "Convert it with jax.numpy.asarray.")
    if x.dtype not in STORAGE_DTYPES:
        raise DtypeError(
            name, f"dtype {x.dtype}", f"a real floating dtype, {_ACCEPTED}", f"Cast it, as in {name}.astype('float32')."
        )


def require_concrete(name: str, leaf: Any, traced: str = "") -> None:
    """Raises :class:`ConcretenessError` for a tracer or a leaf without values; ``traced`` is what takes tracers."""
    if isinstance(leaf, Tracer):
        got, hint = f"a tracer ({leaf.aval})", "Call it outside jit, grad and vmap: it runs on the host in float64."
        hint += f" Inside them use {traced}." if traced else ""
    elif isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "__array__"):
        got, hint = f"{kind_of(leaf)} without values", "jaxfold.plan works from shapes alone."
    elif isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        got, hint = "an array of which other processes hold parts", "Gather it first, or contract before sharding."
    elif isinstance(leaf, jax.Array) and leaf.is_deleted():
        got, hint = "an array that was deleted, or donated to a jitted function", "Contract before that."
    else:
        return
    raise ConcretenessError(name, got, "a concrete NumPy or JAX array", hint)


def to_host(name: str, leaf: Any, traced: str = "") -> np.ndarray:
    """A finite float64 NumPy copy of a concrete leaf, whatever ``jax_enable_x64`` says."""
    require_concrete(name, leaf, traced)
    value = np.asarray(leaf).astype(np.float64)
    require_finite(name, value)
    return value
