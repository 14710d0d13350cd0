"""What is refused, by the name of the attribute or class, and that nothing was changed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxfold
import jaxfold.nnx
from tests.nnx.structures import D, N, Rngs, equal, values


def rounding(*args: Any, **kwargs: Any) -> Any:
    return lax.dot_general(*args, **kwargs)


def promote(args: Any, **kwargs: Any) -> Any:
    return args


class Scaled(nnx.Linear):
    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(inputs, *args, **kwargs)


class QuantizedLinear(nnx.Linear):
    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(inputs, *args, **kwargs)


class Doubling(nnx.Param):
    """A variable whose value is not what is stored; ``get_value`` is the newer spelling."""

    @property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.get_value()

    def get_value(self, **options: Any) -> Any:
        return 2 * (self.get_raw_value() if hasattr(self, "get_raw_value") else self.raw_value)


ONES: dict[str, Any] = {"kernel_init": nnx.initializers.ones}  # drawing takes seconds


def linear(d: int = D, n: int = N, **options: Any) -> nnx.Linear:
    return nnx.Linear(d, n, rngs=Rngs(0), **(ONES | options))


def norm(**options: Any) -> nnx.LayerNorm:
    return nnx.LayerNorm(N, rngs=Rngs(0), **options)


def general(*args: Any, **options: Any) -> nnx.LinearGeneral:
    return nnx.LinearGeneral(*args, rngs=Rngs(0), **(ONES | options))


def einsum(*args: Any, **options: Any) -> nnx.Einsum:
    return nnx.Einsum(*args, rngs=Rngs(0), **(ONES | options))


def attention(**options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(2, N, 6, decode=False, rngs=Rngs(0), **(ONES | options))


def changed(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def stacked(module: Any, axis: int = 0) -> Any:
    nnx.update(module, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3, axis), nnx.state(module)))
    return module


# The roles that are not given are those of a valid block. In functions, since modules are mutable.
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    # Attributes
    "reduction axes": (lambda: {"norm": norm(reduction_axes=(-2, -1))}, "norm.reduction_axes", "last axis"),
    "feature axes": (lambda: {"norm": changed(norm(), feature_axes=(0, -1))}, "norm.feature_axes", "last axis"),
    "axis name": (lambda: {"norm": norm(axis_name="batch")}, "norm.axis_name", "'batch'"),
    "groups": (lambda: {"norm": norm(axis_index_groups=((0,), (1,)))}, "norm.axis_index_groups", "devices"),
    "epsilon": (lambda: {"norm": norm(epsilon=0.0)}, "norm.epsilon", "got 0.0"),
    "norm's promotion": (lambda: {"norm": changed(norm(), promote_dtype=promote)}, "norm.promote_dtype", "got promote"),
    "product": (lambda: {"producer": linear(dot_general=rounding)}, "producer.dot_general", "got rounding"),
    "product class": (
        lambda: {"producer": general(D, N, dot_general_cls=lambda: rounding)},
        "producer.dot_general_cls",
        "expected None",
    ),
    "einsum's product": (
        lambda: {"producer": einsum("...d,dn->...n", (D, N), einsum_op=rounding)},
        "producer.einsum_op",
        "got rounding",
    ),
    "promotion": (lambda: {"consumers": linear(N, 3, promote_dtype=promote)}, "consumers.promote_dtype", "Flax's own"),
    "element type": (
        lambda: {"consumers": changed(linear(N, 3), preferred_element_type=jnp.float32)},
        "consumers.preferred_element_type",
        "accumulates",
    ),
    "batch": (lambda: {"consumers": general(N, 3, batch_axis={0: 2})}, "consumers.batch_axis", "no block"),
    "two axes": (lambda: {"consumers": general((2, N), 3, axis=(-2, -1))}, "consumers.axis", "(-2, -1)"),
    "two feature axes": (lambda: {"producer": general(D, (2, 12))}, "producer.out_features", "(2, 12)"),
    "equation": (lambda: {"consumers": einsum("bn,nm->mb", (N, 3))}, "consumers.einsum_str", "'bn,nm->mb'"),
    "bias shape": (
        lambda: {"consumers": einsum("bn,nhk->bhk", (N, 2, 3), (3, 2))},
        "consumers.bias_shape",
        "got (3, 2); expected (2, 3)",
    ),
    "attention's product": (
        lambda: {"consumers": attention(qkv_dot_general=rounding)},
        "consumers['query'].qkv_dot_general",
        "got rounding",
    ),
    "a projection's product": (
        lambda: {"consumers": changed(attention(), key=general(N, (2, 3), dot_general=rounding))},
        "consumers['key'].dot_general",
        "got rounding",
    ),
    "dtypes": (
        lambda: {"consumers": {"a": linear(N, 3, dtype=jnp.bfloat16), "b": linear(N, 3)}},
        "consumers['b'].dtype",
        "outputs of dtype float32; expected outputs of dtype bfloat16",
    ),
    "precisions": (
        lambda: {"consumers": {"a": linear(N, 3), "b": linear(N, 3, precision="highest")}},
        "consumers['b'].precision",
        "HIGHEST",
    ),
    # What the module says of its leaves
    "bias declared": (
        lambda: {"producer": changed(linear(use_bias=False), use_bias=True)},
        "producer.use_bias",
        "without",
    ),
    "bias not declared": (
        lambda: {"consumers": changed(linear(N, 3), use_bias=False)},
        "consumers.use_bias",
        "with a bias",
    ),
    "scale not declared": (lambda: {"norm": changed(norm(), use_scale=False)}, "norm.use_scale", "with a scale"),
    "kernel of another shape": (
        lambda: {"producer": changed(linear(), kernel=nnx.Param(jnp.ones((D, N + 1))))},
        "producer['kernel']",
        f"shape ({D}, {N})",
    ),
    "width": (lambda: {"producer": linear(D, N + 1)}, "consumers['kernel']", "25 is the width"),
    "stack of one layer": (
        lambda: {"producer": stacked(linear())},
        "consumers['kernel']",
        "a leading axis over layers",
    ),
    "two stack axes": (
        lambda: {"producer": stacked(stacked(linear()))},
        "producer['kernel']",
        "contract each slice of the leaves along the others, or reshape",
    ),
    "stack axis elsewhere": (
        lambda: {"producer": stacked(linear(), -1)},
        "producer['kernel']",
        "The stack axis has to be axis 0",
    ),
    "quantised variable": (
        lambda: {"producer": changed(linear(use_bias=False), kernel=nnx.Param(jnp.ones((D, N), jnp.int8)))},
        "producer['kernel']",
        "Dequantise",
    ),
    "hook": (
        lambda: {"producer": changed(linear(), kernel=Doubling(jnp.ones((D, N))))},
        "producer.kernel",
        "a variable that computes its value",
    ),
    # Classes
    "lora": (lambda: {"producer": nnx.LoRALinear(D, N, lora_rank=1, rngs=Rngs(0))}, "producer", "Merge the low-rank"),
    "lora alone": (lambda: {"producer": nnx.LoRA(D, 1, N, rngs=Rngs(0))}, "producer", "Merge the low-rank"),
    "group norm": (
        lambda: {"norm": nnx.GroupNorm(N, 2, rngs=Rngs(0))},
        "norm",
        "a GroupNorm; expected an nnx.LayerNorm",
    ),
    "batch norm": (lambda: {"norm": nnx.BatchNorm(N, rngs=Rngs(0))}, "norm", "running averages"),
    "dropout": (lambda: {"norm": nnx.Dropout(0.5)}, "norm", "a Dropout; expected"),
    "convolution": (lambda: {"producer": nnx.Conv(D, N, (3,), rngs=Rngs(0))}, "producer", "a Conv"),
    "sequence": (lambda: {"consumers": nnx.Sequential(linear(N, 3))}, "consumers", "Pass its layers one by one"),
    "override": (
        lambda: {"producer": Scaled(D, N, rngs=Rngs(0))},
        "producer",
        "a Scaled, whose class overrides __call__",
    ),
    "quantised class": (lambda: {"producer": QuantizedLinear(D, N, rngs=Rngs(0))}, "producer", "Dequantise"),
    "attention among others": (
        lambda: {"consumers": {"a": attention()}},
        "consumers['a']",
        "as the single consumer only",
    ),
    "class": (lambda: {"norm": nnx.LayerNorm}, "norm", "the class LayerNorm"),
    "function": (lambda: {"consumers": rounding}, "consumers", "a function; expected an nnx.Linear"),
    "leaves": (lambda: {"producer": {"kernel": jnp.ones((D, N))}}, "producer", "a dict"),
    # Arguments
    "no consumer": (lambda: {"consumers": {}}, "consumers", "an empty mapping"),
    "name": (lambda: {"consumers": {1: linear(N, 3)}}, "consumers", "names that are strings"),
}


def snapshot(layers: dict[str, Any]) -> list[Any]:
    return [values(layer) for layer in layers.values() if isinstance(layer, nnx.Module)]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, argument, words = REFUSED[name]
    layers = {"producer": linear(), "norm": norm(), "consumers": linear(N, 3)} | change()
    before = jax.tree.map(np.array, snapshot(layers))
    for function in (jaxfold.nnx.block, jaxfold.nnx.contract, jaxfold.nnx.ContractedDense.from_layers):
        with pytest.raises(jaxfold.JaxfoldError) as caught:
            function(**layers)
        assert caught.value.argument == argument
        assert words in str(caught.value)
    assert equal(before, jax.tree.map(np.array, snapshot(layers)))


def test_valid() -> None:
    """What the cases above are changes of."""
    assert jaxfold.nnx.block(linear(), norm(), linear(N, 3)).epsilon == 1e-6
