"""Refusing a module, by the name of its class or of the attribute that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfold._errors import OptionError, StructureError, article

# Parts of class names, in lower case, and what to do about such a layer; the first that occurs is taken.
_HINTS = (
    ("lora", "Merge the low-rank update into the kernel first: contracting the base kernel alone would drop it."),
    ("quant", "Dequantise it into a plain layer first."),
    ("int8", "Dequantise it into a plain layer first."),
    ("fp8", "Dequantise it into a plain layer first."),
    ("batchnorm", "With running averages it is an affine map without a denominator: fold it into the layer before."),
    ("groupnorm", "It normalises each group by itself, where the contraction has one denominator."),
    ("instancenorm", "It normalises over other axes than the features."),
    ("weightnorm", "Evaluate the kernel that it makes, and pass a plain layer with that."),
    ("spectralnorm", "Evaluate the kernel that it makes, and pass a plain layer with that."),
    ("dropout", "In training mode it changes what the norm sees; contract the model as it is used for inference."),
    ("attention", "An attention module is taken as the single consumer only, for its three projections."),
    ("sequential", "Pass its layers one by one."),
    ("conv", "A convolution reads more than one position."),
)


def refuse_class(argument: str, value: Any, expected: str) -> NoReturn:
    """Raises :class:`StructureError` for what is no layer that can be read there."""
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    got = f"the class {kind}" if isinstance(value, type) else article(kind)
    hint = next((hint for part, hint in _HINTS if part in kind.lower()), "")
    raise StructureError(argument, got, expected, hint)


def match_class(argument: str, module: Any, accepted: dict[type, str], expected: str, hint: str = "") -> str:
    """What ``accepted`` has for the class of ``module``, or for the class that it derives from.

    Raises:
        StructureError: for any other class, and for one that replaces what its base computes.
    """
    lineage = type(module).__mro__
    base = next((cls for cls in lineage if cls in accepted), None)
    if base is None:
        refuse_class(argument, module, expected)
    for cls in lineage[: lineage.index(base)]:
        for name in ("__call__", "param", "kernel", "bias", "scale"):
            if name in vars(cls):
                kind = type(module).__name__
                named = next((text for part, text in _HINTS if part in kind.lower()), hint)
                got = f"{article(kind)}, whose class overrides {name} of {base.__name__}"
                raise StructureError(argument, got, expected, named)
    return accepted[base]


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is accepted for accepted in values)


def _is_last(value: Any) -> bool:
    axes = value if isinstance(value, (tuple, list)) else (value,)
    return len(axes) == 1 and isinstance(axes[0], (int, np.integer)) and axes[0] == -1


_CUSTOM = "A custom product need not be linear in the input: contract the block without it, or leave it as it is."
_LAST = "Only a norm over the last axis can be contracted."
_PARALLEL = "Statistics over several devices or groups of them cannot be contracted."

# Attribute, whether a value is accepted, what is accepted, what to do. An attribute that a module lacks is fine.
Rule = tuple[str, Callable[[Any], bool], str, str]
AFFINE_RULES: tuple[Rule, ...] = (
    ("dot_general", _is(None, lax.dot_general), "jax.lax.dot_general", _CUSTOM),
    ("dot_general_cls", _is(None), "None", _CUSTOM),
    ("einsum_op", _is(jnp.einsum), "jax.numpy.einsum", _CUSTOM),
    ("preferred_element_type", _is(None), "None", "The contracted block accumulates in float32 or float64 itself."),
    ("axis", _is_last, "-1", "Only a layer that maps the last axis can be contracted."),
    ("batch_dims", lambda value: not value, "()", "A layer with weights of its own for each batch index is no block."),
    ("batch_axis", lambda value: not value, "{}", "A layer with weights of its own for each batch index is no block."),
)
NORM_RULES: tuple[Rule, ...] = (
    ("reduction_axes", _is_last, "-1", _LAST),
    ("feature_axes", _is_last, "-1", _LAST),
    ("axis_name", _is(None), "None", _PARALLEL),
    ("axis_index_groups", _is(None), "None", _PARALLEL),
)
ATTENTION_RULES: tuple[Rule, ...] = (
    ("qkv_dot_general", _is(None, lax.dot_general), "jax.lax.dot_general", _CUSTOM),
    ("qkv_dot_general_cls", _is(None), "None", _CUSTOM),
)


def promotion_rule(default: Any, name: str = "promote_dtype") -> Rule:
    """That the dtype promotion is the library's own."""
    return name, _is(default), "Flax's own", "A custom promotion may round or scale what it is given."


def check_attributes(argument: str, module: Any, rules: tuple[Rule, ...]) -> None:
    """Raises :class:`OptionError`, as about ``norm.reduction_axes``, for the first attribute that breaks its rule."""
    missing = object()
    for name, accepts, expected, hint in rules:
        value = getattr(module, name, missing)
        if value is not missing and not accepts(value):
            shown = getattr(value, "__name__", None) or repr(value)
            raise OptionError(f"{argument}.{name}", shown, expected, hint)
