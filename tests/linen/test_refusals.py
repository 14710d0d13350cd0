"""What is refused, by the name of the attribute or class, and that nothing was changed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfold
import jaxfold.linen
from jaxfold._layers._einsum import check_einsum
from tests.linen.structures import D, N, with_params

Attention = nn.MultiHeadDotProductAttention


def rounding(*args: Any, **kwargs: Any) -> Any:
    return lax.dot_general(*args, **kwargs)


class Scaled(nn.Dense):
    def __call__(self, inputs: Any) -> Any:
        return 2 * super().__call__(inputs)


class Int8Dense(nn.Dense):
    def __call__(self, inputs: Any) -> Any:
        return super().__call__(inputs)


class Noisy(nn.Dense):
    def param(self, *args: Any, **kwargs: Any) -> Any:
        return super().param(*args, **kwargs)


def attention_params(bias: bool = True) -> dict[str, Any]:
    group = {"kernel": jnp.ones((N, 2, 3))} | ({"bias": jnp.ones((2, 3))} if bias else {})
    return dict.fromkeys(("query", "key", "value"), group)


Layers = dict[str, Any]


def valid() -> Layers:
    names = ("producer", "norm", "consumers")
    return dict(zip(names, with_params((nn.Dense(N), nn.LayerNorm(), nn.Dense(3))), strict=True))


def replace(role: str, definition: Any) -> Callable[[Layers], Layers]:
    """The same leaves under another definition."""
    return lambda layers: layers | {role: (definition, layers[role][1])}


def give(role: str, value: Any) -> Callable[[Layers], Layers]:
    return lambda layers: layers | {role: value}


def consumers(**named: Any) -> Callable[[Layers], Layers]:
    leaves = {"kernel": jnp.ones((N, 3)), "bias": jnp.ones(3)}
    return give("consumers", {name: (definition, leaves) for name, definition in named.items()})


KERNEL3 = {"kernel": jnp.ones((D, 2, 12)), "bias": jnp.ones((2, 12))}
DENSE = nn.Dense(3)
REFUSED: dict[str, tuple[Callable[[Layers], Layers], str, str]] = {
    # Attributes
    "reduction axes": (replace("norm", nn.LayerNorm(reduction_axes=(-2, -1))), "norm.reduction_axes", "last axis"),
    "more axes": (replace("norm", nn.LayerNorm(reduction_axes=(-1, -2))), "norm.reduction_axes", "last axis"),
    "no axes": (replace("norm", nn.LayerNorm(reduction_axes=())), "norm.reduction_axes", "got ()"),
    "one other axis": (replace("norm", nn.LayerNorm(reduction_axes=1)), "norm.reduction_axes", "last axis"),
    "feature axes": (replace("norm", nn.LayerNorm(feature_axes=(-2, -1))), "norm.feature_axes", "last axis"),
    "axis name": (replace("norm", nn.LayerNorm(axis_name="batch")), "norm.axis_name", "'batch'"),
    "groups": (replace("norm", nn.LayerNorm(axis_index_groups=[[0], [1]])), "norm.axis_index_groups", "devices"),
    "epsilon": (replace("norm", nn.LayerNorm(epsilon=0.0)), "norm.epsilon", "got 0.0"),
    "negative epsilon": (replace("norm", nn.LayerNorm(epsilon=-1e-6)), "norm.epsilon", "above 0"),
    "norm dtype": (replace("norm", nn.LayerNorm(dtype=jnp.complex64)), "norm.dtype", "complex64"),
    "product": (replace("producer", nn.Dense(N, dot_general=rounding)), "producer.dot_general", "got rounding"),
    "product class": (
        replace("consumers", nn.Dense(3, dot_general_cls=nn.Fp8DotGeneralOp)),
        "consumers.dot_general_cls",
        "got Fp8DotGeneralOp",
    ),
    "promotion": (
        replace("producer", nn.Dense(N, promote_dtype=lambda *args, **kwargs: list(args))),
        "producer.promote_dtype",
        "Flax's own",
    ),
    "batch": (replace("producer", nn.DenseGeneral(N, batch_dims=(0,))), "producer.batch_dims", "(0,)"),
    "two axes": (replace("consumers", nn.DenseGeneral(3, axis=(-2, -1))), "consumers.axis", "(-2, -1)"),
    "another axis": (replace("consumers", nn.DenseGeneral(3, axis=1)), "consumers.axis", "got 1"),
    "two feature axes": (
        give("producer", (nn.DenseGeneral((2, 12)), KERNEL3)),
        "producer.features",
        "got (2, 12); expected one output axis",
    ),
    "equation": (
        replace("consumers", nn.Einsum((N, 3), "...n,nm->m...")),
        "consumers.einsum_str",
        "'...n,nm->m...'",
    ),
    "no equation": (replace("consumers", nn.Einsum((N, 3))), "consumers.einsum_str", "got None"),
    "attention's product": (
        give("consumers", (Attention(2, qkv_dot_general=rounding), attention_params())),
        "consumers['query'].qkv_dot_general",
        "got rounding",
    ),
    "attention's product class": (
        give("consumers", (Attention(2, qkv_dot_general_cls=nn.Fp8DotGeneralOp), attention_params())),
        "consumers['query'].qkv_dot_general_cls",
        "Fp8",
    ),
    "dtypes": (
        consumers(a=nn.Dense(3, dtype=jnp.bfloat16), b=DENSE),
        "consumers['b'].dtype",
        "outputs of dtype float32; expected outputs of dtype bfloat16",
    ),
    "precisions": (
        consumers(a=nn.Dense(3, precision="highest"), b=DENSE),
        "consumers['b'].precision",
        "got None; expected",
    ),
    # What the module says of its leaves
    "bias declared": (
        give("producer", (nn.Dense(N), {"kernel": jnp.ones((D, N))})),
        "producer.use_bias",
        "True, without a bias",
    ),
    "bias not declared": (
        replace("consumers", nn.Dense(3, use_bias=False)),
        "consumers.use_bias",
        "False, with a bias",
    ),
    "scale not declared": (replace("norm", nn.LayerNorm(use_scale=False)), "norm.use_scale", "False, with a scale"),
    "norm's bias": (replace("norm", nn.RMSNorm()), "norm.use_bias", "with a bias"),
    "attention's bias": (
        give("consumers", (Attention(2), attention_params(bias=False))),
        "consumers['query'].use_bias",
        "True, without a bias",
    ),
    "features": (replace("producer", nn.Dense(N + 1)), "producer['kernel']", f"shape (in, {N + 1})"),
    "kernel shape": (
        replace("producer", nn.Einsum((5, N), "...d,dn->...n")),
        "producer['kernel']",
        "shape (5, 24)",
    ),
    "head size": (
        give("consumers", (Attention(2, qkv_features=8), attention_params())),
        "consumers['query']['kernel']",
        "shape (in, 2, 4)",
    ),
    "stack of one layer": (
        lambda layers: (
            layers | {"producer": (layers["producer"][0], jax.tree.map(lambda a: a[None], layers["producer"][1]))}
        ),
        "consumers['kernel']",
        "a leading axis over layers",
    ),
    "stack axis elsewhere": (
        lambda layers: {
            role: (pair[0], jax.tree.map(lambda a: jnp.stack([a, a, a], axis=a.ndim - 1), pair[1]))
            for role, pair in layers.items()
        },
        "producer['bias']",
        "a leading axis of length 4",
    ),
    "lora leaves": (
        lambda layers: layers | {"producer": (nn.Dense(N), layers["producer"][1] | {"lora_a": jnp.ones((D, 1))})},
        "producer",
        "Merge the low-rank update",
    ),
    "quantised leaf": (
        give("producer", (nn.Dense(N, use_bias=False), {"kernel": jnp.ones((D, N), jnp.int8)})),
        "producer['kernel']",
        "Dequantise",
    ),
    # Classes
    "group norm": (replace("norm", nn.GroupNorm(2)), "norm", "a GroupNorm; expected a LayerNorm or RMSNorm"),
    "batch norm": (replace("norm", nn.BatchNorm()), "norm", "a BatchNorm; expected"),
    "instance norm": (replace("norm", nn.InstanceNorm()), "norm", "an InstanceNorm; expected"),
    "weight norm": (replace("producer", nn.WeightNorm(nn.Dense(N))), "producer", "a WeightNorm"),
    "dropout": (give("norm", nn.Dropout(0.5, deterministic=False)), "norm", "a Dropout; expected"),
    "convolution": (replace("producer", nn.Conv(N, (3,))), "producer", "a Conv"),
    "embedding": (replace("producer", nn.Embed(4, N)), "producer", "an Embed"),
    "sequence": (replace("consumers", nn.Sequential([DENSE])), "consumers", "Pass its layers one by one"),
    "class": (give("norm", nn.LayerNorm), "norm", "the class LayerNorm"),
    "function": (give("consumers", nn.relu), "consumers", "expected a Dense, DenseGeneral or Einsum"),
    "override": (replace("producer", Scaled(N)), "producer", "a Scaled, whose class overrides __call__ of Dense"),
    "quantised class": (replace("producer", Int8Dense(N)), "producer", "Dequantise"),
    "override of param": (replace("producer", Noisy(N)), "producer", "overrides param of Dense"),
    "lifted": (replace("producer", nn.remat(nn.Dense)(N)), "producer", "pass (the plain definition, its params)"),
    "attention among others": (
        give("consumers", {"a": (Attention(2), attention_params())}),
        "consumers['a']",
        "as the single consumer only",
    ),
    # Arguments
    "not bound": (give("producer", nn.Dense(N)), "producer", "a Dense that is not bound"),
    "norm not bound": (give("norm", nn.LayerNorm()), "norm", "a LayerNorm that is not bound"),
    "attention not bound": (give("consumers", Attention(2)), "consumers", "that is not bound"),
    "attention without a projection": (give("consumers", (Attention(2), {})), "consumers['query']", "got nothing"),
    "collections": (
        lambda layers: layers | {"producer": (nn.Dense(N), {"params": layers["producer"][1]})},
        "producer",
        "a dict of collections",
    ),
    "leaves that are none": (give("producer", (nn.Dense(N), jnp.ones(3))), "producer", "a mapping of leaves"),
    "no consumer": (give("consumers", {}), "consumers", "an empty mapping"),
    "name": (lambda layers: layers | {"consumers": {1: layers["consumers"]}}, "consumers", "names that are strings"),
}


def snapshot(layers: Layers) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(layers) if isinstance(leaf, jax.Array)]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, argument, words = REFUSED[name]
    layers = change(valid())
    before = snapshot(layers)
    for function in (jaxfold.linen.block, jaxfold.linen.contract, jaxfold.linen.ContractedDense.from_layers):
        with pytest.raises(jaxfold.JaxfoldError) as caught:
            function(**layers)
        assert caught.value.argument == argument
        assert words in str(caught.value)
    assert all(map(np.array_equal, before, snapshot(layers)))


def test_valid() -> None:
    """What the cases above are changes of."""
    assert jaxfold.linen.block(**valid()).epsilon == 1e-6


@pytest.mark.parametrize(
    "equation", ["...d,dn->...n", "btd,dhk->bthk", "bd , dn -> bn", "d,dn->n", "b...d,dn->b...n", "...bd,dn->...bn"]
)
def test_accepted_equations(equation: str) -> None:
    check_einsum("einsum_str", equation)


@pytest.mark.parametrize(
    "equation",
    [
        *("", "...d,dn", "...d,nd->...n", "...d,dn->n...", "bd,dn->nb", "btd,dhk->btkh", "bdt,dn->btn", "bd,bdn->bn"),
        *("bd,db->bb", "bd,dnn->bn", "dd,dn->dn", "......d,dn->......n", "bd,d->b", "bd,dn->b", "bd,d...->b..."),
    ],
)
def test_refused_equations(equation: str) -> None:
    with pytest.raises(jaxfold.OptionError) as caught:
        check_einsum("consumers.einsum_str", equation)
    assert caught.value.argument == "consumers.einsum_str"


@pytest.mark.parametrize("width", [0, -1, 2.0, True, "8"])
def test_initialiser_of_no_width(width: Any) -> None:
    with pytest.raises(jaxfold.OptionError, match=r"width: got .*; expected the original's width, an integer above 0"):
        jaxfold.linen.isometry(width)
