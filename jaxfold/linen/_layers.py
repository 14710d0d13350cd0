"""One Linen layer: its definition and its leaves, checked attribute by attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax.linen.dtypes import promote_dtype

from jaxfold._errors import OptionError, StructureError, kind_of
from jaxfold._layers._einsum import check_einsum
from jaxfold._layers._layer import Affine, Norm, canonical_dtype, canonical_epsilon, check_flags
from jaxfold._layers._refuse import (
    AFFINE_RULES,
    ATTENTION_RULES,
    NORM_RULES,
    check_attributes,
    match_class,
    promotion_rule,
    refuse_class,
)

AFFINE: dict[type, str] = {nn.Dense: "features", nn.DenseGeneral: "features", nn.Einsum: "shape"}
NORMS: dict[type, Any] = {nn.LayerNorm: "layernorm", nn.RMSNorm: "rmsnorm"}
ATTENTION: dict[type, str] = {nn.MultiHeadDotProductAttention: "", nn.MultiHeadAttention: "", nn.SelfAttention: ""}
PROJECTIONS = ("query", "key", "value")

_AFFINES, _NORMS = "a Dense, DenseGeneral or Einsum", "a LayerNorm or RMSNorm"
_GIVEN = ": bound, or a pair (definition, params)"
_LAYER, _NORM = _AFFINES + _GIVEN, _NORMS + _GIVEN
_OVERRIDDEN = "A layer that computes something else than its base cannot be read."
_LIFTED = "For a layer that nn.vmap, nn.scan or nn.remat made, pass (the plain definition, its params)."


def split(argument: str, layer: Any, expected: str) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Definition and leaves of a layer; None for the leaves of one that is neither bound nor given with them."""
    if isinstance(layer, tuple) and len(layer) == 2 and isinstance(layer[0], nn.Module):
        module, params = layer
        params = {} if params is None else params
        if not isinstance(params, Mapping):
            raise StructureError(argument, f"params that are {kind_of(params)}", "a mapping of leaves", "")
        if "params" in params:
            hint = "Pass variables['params'], down to the layer."
            raise StructureError(argument, "a dict of collections", "the leaves of the layer", hint)
        return module, params
    if not isinstance(layer, nn.Module):
        refuse_class(argument, layer, expected)
    return layer, None if layer.scope is None else layer.variables.get("params", {})


def _require_leaves(argument: str, leaves: Any, expected: str, kind: str) -> Mapping[str, Any]:
    if leaves is None:
        hint = "A definition has no parameters: pass (definition, params['its_name']), or a layer of model.bind(...)."
        raise StructureError(argument, f"a {kind} that is not bound", expected, hint)
    return leaves


def check_class(role: str, module: Any) -> None:
    """That a module in a model is of a class that can be read there.

    Raises:
        StructureError: naming the role.
    """
    if role == "norm":
        match_class(role, module, NORMS, _NORMS, _OVERRIDDEN)
    else:
        match_class(role, module, AFFINE, _AFFINES, _OVERRIDDEN)


def check_definition(role: str, module: Any) -> None:
    """What a module in a model says of itself: all that can be refused without its leaves or its calls.

    Raises:
        StructureError, OptionError: naming the role, or an attribute of it.
    """
    if role == "consumers" and is_attention(module):
        match_class(role, module, ATTENTION, _AFFINES, _OVERRIDDEN)
        check_attributes(role, module, ATTENTION_RULES)
        _check_heads(role, module)
    else:
        check_class(role, module)
        if role == "norm":
            check_attributes(role, module, NORM_RULES)
            canonical_epsilon(role, module.epsilon)
        else:
            _check_affine(role, module)
    canonical_dtype(role, module.dtype)


def _check_affine(argument: str, definition: Any) -> None:
    check_attributes(argument, definition, (*AFFINE_RULES, promotion_rule(promote_dtype)))
    if isinstance(definition, nn.Einsum):
        check_einsum(f"{argument}.einsum_str", definition.einsum_str)


def _check_heads(argument: str, definition: Any) -> None:
    features, heads = definition.qkv_features, definition.num_heads
    if features is not None and features % heads:
        raise OptionError(f"{argument}.qkv_features", f"{features}", f"a multiple of num_heads, {heads}", "")


def read_affine(argument: str, layer: Any) -> Affine:
    """A Dense, DenseGeneral or Einsum."""
    module, leaves = split(argument, layer, _LAYER)
    features_attribute = match_class(argument, module, AFFINE, _LAYER, _LIFTED)
    definition: Any = module
    _check_affine(argument, definition)
    leaves = _require_leaves(argument, leaves, _LAYER, type(module).__name__)
    check_flags(argument, leaves, bias=("use_bias", definition.use_bias))
    if isinstance(definition, nn.Einsum):
        declared = tuple(definition.shape)
    else:
        features = definition.features
        declared = (None, *features) if isinstance(features, (tuple, list)) else (None, features)
    return Affine(leaves, declared, features_attribute, definition.dtype, definition.precision)


def read_norm(argument: str, layer: Any) -> Norm:
    """A LayerNorm or RMSNorm; one without parameters may be its definition alone."""
    module, leaves = split(argument, layer, _NORM)
    norm_type = match_class(argument, module, NORMS, _NORM, _LIFTED)
    definition: Any = module
    check_attributes(argument, definition, NORM_RULES)
    use_bias = getattr(definition, "use_bias", False)
    if leaves is None and not (definition.use_scale or use_bias):
        leaves = {}
    leaves = _require_leaves(argument, leaves, _NORM, type(module).__name__)
    check_flags(argument, leaves, scale=("use_scale", definition.use_scale), bias=("use_bias", use_bias))
    return Norm(leaves, definition.epsilon, norm_type, definition.dtype)  # pyright: ignore[reportArgumentType]


def is_attention(module: Any) -> bool:
    return isinstance(module, tuple(ATTENTION))


def read_consumers(consumers: Any) -> dict[str | None, Affine]:
    """One layer, an attention module for its three projections, or a mapping of names to layers."""
    if isinstance(consumers, Mapping):
        for name in consumers:
            if not isinstance(name, str):
                raise StructureError("consumers", f"the name {name!r}", "names that are strings", "")
        if not consumers:
            raise StructureError("consumers", "an empty mapping", "at least one consumer", "")
        return {name: read_affine(f"consumers[{name!r}]", layer) for name, layer in consumers.items()}
    definition = consumers[0] if isinstance(consumers, tuple) and consumers else consumers
    if is_attention(definition):
        return _read_attention(*split("consumers", consumers, _LAYER))
    return {None: read_affine("consumers", consumers)}


def _read_attention(module: Any, leaves: Any) -> dict[str | None, Affine]:
    match_class("consumers", module, ATTENTION, _LAYER, _LIFTED)
    check_attributes("consumers['query']", module, ATTENTION_RULES)
    _check_heads("consumers", module)
    leaves = _require_leaves("consumers", leaves, _LAYER, type(module).__name__)
    qkv_features, heads = module.qkv_features, module.num_heads
    head_dim = None if qkv_features is None else qkv_features // heads
    read: dict[str | None, Affine] = {}
    for name in PROJECTIONS:
        group = leaves.get(name)
        if not isinstance(group, Mapping):
            raise StructureError(f"consumers[{name!r}]", "nothing", "the leaves of the projection", "")
        check_flags(f"consumers[{name!r}]", group, bias=("use_bias", module.use_bias))
        declared = (None, heads, head_dim)
        read[name] = Affine(group, declared, "num_heads", module.dtype, module.precision)
    return read
