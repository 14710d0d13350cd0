"""One NNX layer, checked attribute by attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxfold._errors import OptionError, StructureError
from jaxfold._layers._einsum import check_einsum
from jaxfold._layers._layer import Affine, Norm, check_flags
from jaxfold._layers._refuse import (
    AFFINE_RULES,
    ATTENTION_RULES,
    NORM_RULES,
    check_attributes,
    match_class,
    promotion_rule,
    refuse_class,
)

AFFINE: dict[type, str] = {
    nnx.Linear: "out_features",
    nnx.LinearGeneral: "out_features",
    nnx.Einsum: "kernel_shape",
}
NORMS: dict[type, Any] = {nnx.LayerNorm: "layernorm", nnx.RMSNorm: "rmsnorm"}
PROJECTIONS = ("query", "key", "value")

_LAYER = "an nnx.Linear, nnx.LinearGeneral or nnx.Einsum"
_NORM = "an nnx.LayerNorm or nnx.RMSNorm"
_OVERRIDDEN = "A layer that computes something else than its base cannot be read."
_PROMOTION = promotion_rule(promote_dtype)


def read_affine(argument: str, layer: Any) -> Affine:
    """A Linear, LinearGeneral or Einsum."""
    if not isinstance(layer, nnx.Module):
        refuse_class(argument, layer, _LAYER)
    features_attribute = match_class(argument, layer, AFFINE, _LAYER, _OVERRIDDEN)
    module: Any = layer
    check_attributes(argument, module, (*AFFINE_RULES, _PROMOTION))
    leaves = _leaves(argument, module, ("kernel", "bias"))
    if isinstance(module, nnx.Einsum):
        check_einsum(f"{argument}.einsum_str", module.einsum_str)
        declared = tuple(module.kernel_shape)
        check_flags(argument, leaves, bias=("bias_shape", module.bias_shape is not None))
        if module.bias_shape is not None and tuple(module.bias_shape) != declared[1:]:
            expected = f"{declared[1:]}, the output axes of kernel_shape"
            raise OptionError(f"{argument}.bias_shape", repr(tuple(module.bias_shape)), expected, "")
    else:
        declared = (*_axes(module.in_features), *_axes(module.out_features))
        check_flags(argument, leaves, bias=("use_bias", module.use_bias))
    return Affine(leaves, declared, features_attribute, module.dtype, module.precision)


def read_norm(argument: str, layer: Any) -> Norm:
    """A LayerNorm or RMSNorm."""
    if not isinstance(layer, nnx.Module):
        refuse_class(argument, layer, _NORM)
    norm_type = match_class(argument, layer, NORMS, _NORM, _OVERRIDDEN)
    module: Any = layer
    check_attributes(argument, module, (*NORM_RULES, _PROMOTION))
    leaves = _leaves(argument, module, ("scale", "bias"))
    use_bias = getattr(module, "use_bias", False)
    check_flags(argument, leaves, scale=("use_scale", module.use_scale), bias=("use_bias", use_bias))
    return Norm(leaves, module.epsilon, norm_type, module.dtype)  # pyright: ignore[reportArgumentType]


def is_attention(module: Any) -> bool:
    return isinstance(module, nnx.MultiHeadAttention)


def read_consumers(consumers: Any) -> dict[str | None, Affine]:
    """One layer, an attention module for its three projections, or a mapping of names to layers."""
    if is_attention(consumers):
        match_class("consumers", consumers, {nnx.MultiHeadAttention: ""}, _LAYER, _OVERRIDDEN)
        rules = (*ATTENTION_RULES, promotion_rule(promote_dtype, "qkv_promote_dtype"))
        check_attributes("consumers['query']", consumers, rules)
        consumers = {name: getattr(consumers, name) for name in PROJECTIONS}
    if not isinstance(consumers, Mapping):
        return {None: read_affine("consumers", consumers)}
    for name in consumers:
        if not isinstance(name, str):
            raise StructureError("consumers", f"the name {name!r}", "names that are strings", "")
    if not consumers:
        raise StructureError("consumers", "an empty mapping", "at least one consumer", "")
    return {name: read_affine(f"consumers[{name!r}]", layer) for name, layer in consumers.items()}


def _axes(features: Any) -> tuple[int, ...]:
    return tuple(features) if isinstance(features, (tuple, list)) else (features,)


def _leaves(argument: str, module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The variables of a layer by name; a missing one is None."""
    leaves = {name: getattr(module, name, None) for name in names}
    for name, leaf in leaves.items():
        if isinstance(leaf, nnx.Variable) and _computes_its_value(leaf):
            hint = "Reading it may give another value than is stored: store that value in a plain nnx.Param."
            raise StructureError(f"{argument}.{name}", "a variable that computes its value", "a plain one", hint)
    return leaves


def _computes_its_value(variable: Any) -> bool:
    """Whether a hook or a class of its own stands between the stored value and who reads it."""
    accessors = ("get_value", "value", "__getitem__", "__jax_array__")
    own = any(getattr(type(variable), name, None) is not getattr(nnx.Variable, name, None) for name in accessors)
    return own or bool(getattr(variable, "on_get_value", None))
