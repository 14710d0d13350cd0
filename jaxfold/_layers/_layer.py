"""What a reader learns of one layer from its module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from jaxfold._block._block import check_epsilon
from jaxfold._block._leaves import STORAGE_DTYPES, unbox
from jaxfold._block._shape import NormType
from jaxfold._errors import OptionError, ShapeError, StructureError

STACK_AXIS = 'The stack axis has to be axis 0, as variable_axes={"params": 0} and nnx.vmap make it: move it there.'


@dataclasses.dataclass(frozen=True)
class Affine:
    """An affine layer: its leaves, and what its module says of them.

    ``declared`` are the axes of the kernel, ``(in, *features)``, with None where the module does not say.
    """

    leaves: Mapping[str, Any]
    declared: tuple[int | None, ...]
    features_attribute: str
    dtype: Any
    precision: Any


@dataclasses.dataclass(frozen=True)
class Norm:
    """A LayerNorm or RMSNorm: its leaves, and what its module says of them."""

    leaves: Mapping[str, Any]
    epsilon: Any
    norm_type: NormType
    dtype: Any


def check_flags(argument: str, leaves: Mapping[str, Any], **flags: tuple[str, bool]) -> None:
    """That a module has the optional leaves that it says it has: ``bias=("use_bias", True)``.

    Raises:
        StructureError: naming the attribute that says otherwise.
    """
    for key, (attribute, declared) in flags.items():
        present = leaves.get(key) is not None
        if present != bool(declared):
            got = f"{declared}, {'with' if present else 'without'} a {key} among its leaves"
            raise StructureError(
                f"{argument}.{attribute}", got, "what the leaves have", "Pass each layer with its own leaves."
            )


def is_stacked(argument: str, layer: Affine) -> bool:
    """Whether the kernel has one leading axis more than its module declares, as nn.scan and nn.vmap make.

    Raises:
        ShapeError: if the shape is neither the declared one nor that with a leading axis.
    """
    kernel = unbox(layer.leaves.get("kernel"))
    shape = getattr(kernel, "shape", None)
    if shape is None:  # said in the block's own words, when the leaves are read
        return False
    extra = len(shape) - len(layer.declared)
    own = tuple(shape)[max(extra, 0) :]
    if extra not in (0, 1) or any(size not in (None, got) for size, got in zip(layer.declared, own, strict=True)):
        names = ", ".join("in" if size is None else str(size) for size in layer.declared)
        hint = STACK_AXIS if extra == 1 else ""
        if extra > 1:
            hint = (
                "One stack axis is supported: contract each slice of the leaves along the others, or reshape the "
                "stack axes into one."
            )
        raise ShapeError(
            f"{argument}['kernel']",
            f"shape {tuple(shape)}",
            f"shape ({names}), as the module declares, or one leading axis more for a stack of layers",
            hint,
        )
    return extra == 1


def canonical_epsilon(argument: str, epsilon: Any) -> float:
    """The ``epsilon`` attribute of a norm, as a finite number above 0."""
    try:
        return check_epsilon(epsilon)
    except OptionError as error:
        raise error.at(f"{argument}.epsilon") from None


def canonical_dtype(argument: str, dtype: Any) -> np.dtype | None:
    """The ``dtype`` attribute of a module: None, or a real floating dtype."""
    if dtype is None:
        return None
    try:
        chosen = np.dtype(dtype)
    except TypeError:
        chosen = np.dtype(object)
    if chosen not in STORAGE_DTYPES:
        raise OptionError(f"{argument}.dtype", repr(dtype), "None, float64, float32, bfloat16 or float16", "")
    return chosen


def canonical_precision(precision: Any) -> Any:
    """``"highest"`` and ``Precision.HIGHEST`` are the same precision; None is the default one."""
    if isinstance(precision, str):
        try:
            return lax.Precision(precision)
        except ValueError:
            return precision  # an algorithm by name
    if isinstance(precision, (tuple, list)):
        return tuple(canonical_precision(each) for each in precision)
    return precision
