"""Reading Linen layers: what is read is what they compute."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
import jaxfold.linen
from jaxfold.linen import ContractedDense
from tests.linen.structures import (
    STRUCTURES,
    D,
    N,
    dense,
    error,
    init,
    inputs,
    layer_norm,
    original,
    randomise,
    run,
    with_params,
)

# In float64 both sides round sums of some tens of terms of order one: some tens of 1.1e-16 times the few digits that
# E[h²] − E[h]² loses. A term left out, an axis or an epsilon mistaken, changes the second or third digit.
TOLERANCE = 1e-12
NOTICED = 1e-4


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "direct") for name in STRUCTURES]
    + [(name, form) for name in ("dense", "no biases", "several") for form in ("packed", "standard")],
)
def test_values(name: str, form: Any) -> None:
    layers, x = with_params(STRUCTURES[name]()), inputs()
    truth = original(layers, x)
    contraction = jaxfold.linen.contract(*layers, form=form)
    assert error(truth, jaxfold.apply(contraction, x)) < TOLERANCE
    definition, params = ContractedDense.from_layers(*layers, form=form)
    assert error(truth, definition.apply({"params": params}, x)) < TOLERANCE
    assert error(truth, jaxfold.linen.block(*layers)(x)) < TOLERANCE


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("change", ["epsilon", "norm", "leaf"])
def test_values_notice(change: str) -> None:
    """The comparison above would notice another epsilon, another norm or another leaf."""
    producer, norm, consumer = with_params(STRUCTURES["dense"]())
    truth = original((producer, norm, consumer), inputs())
    if change == "epsilon":
        norm = (layer_norm(epsilon=2e-3), norm[1])
    elif change == "norm":
        norm = (nn.RMSNorm(epsilon=1e-3), {"scale": norm[1]["scale"]})
    else:
        norm = (norm[0], {**norm[1], "bias": jnp.zeros_like(norm[1]["bias"])})
    assert error(truth, jaxfold.apply(jaxfold.linen.contract(producer, norm, consumer), inputs())) > NOTICED


class Attend(nn.Module):
    """A projection, a norm, and self-attention over it."""

    kind: Any
    norm: Any = None

    def setup(self) -> None:
        self.up, self.pre = dense(N), self.norm or layer_norm()
        self.attention = self.kind(2, qkv_features=6, out_features=5, param_dtype=jnp.float64)

    def __call__(self, x: Any) -> Any:
        return self.attention(self.pre(self.up(x)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [nn.MultiHeadDotProductAttention, nn.MultiHeadAttention, nn.SelfAttention])
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
def test_attention_stands_for_its_projections(kind: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 7, D))
    model = Attend(kind)
    params = randomise(init(model, x))
    bound = model.bind({"params": params})
    contraction = jaxfold.linen.contract(bound.up, bound.pre, bound.attention)
    assert list(contraction.consumers) == ["key", "query", "value"]  # JAX sorts the keys of dicts
    projected = jaxfold.apply(contraction, x)
    heads = nn.dot_product_attention(projected["query"], projected["key"], projected["value"])
    out = params["attention"]["out"]
    result = jnp.einsum("bthk,hkm->btm", heads, out["kernel"]) + out["bias"][None, None]
    truth = run(model, params, x)
    assert error(truth, result) < TOLERANCE
    swapped = nn.dot_product_attention(projected["query"], projected["value"], projected["key"])
    assert error(truth, jnp.einsum("bthk,hkm->btm", swapped, out["kernel"]) + out["bias"][None, None]) > NOTICED
    attention = kind(2, qkv_features=6, param_dtype=jnp.float64)
    pairs = (bound.up, params["up"]), (bound.pre, params["pre"]), (attention, params["attention"])
    again = jaxfold.linen.contract(*pairs)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, contraction.params))


class Layer(nn.Module):
    """A block from D features to D features."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return dense(D, name="down")(layer_norm(name="norm")(dense(N, name="up")(x))), None


class Contracted(nn.Module):
    """The same, contracted."""

    contraction: Any

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return ContractedDense.from_contraction(self.contraction, name="layer")(x), None


def stack_of(kind: str, layer: Any, *args: Any) -> Any:
    lift: Any = nn.scan if kind == "scan" else nn.vmap
    options = {"length": 3} if kind == "scan" else {"in_axes": (None, None), "axis_size": 3}
    return lift(layer, variable_axes={"params": 0}, split_rngs={"params": True}, **options)(*args)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["scan", "vmap"])
@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
def test_stack(kind: str, form: Any) -> None:
    """The leading axis is inferred, and the contracted stack loads where the original's was."""
    x, model = inputs(), stack_of(kind, Layer)
    params = randomise(init(model, x, None))
    layers = [(dense(N), params["up"]), (layer_norm(), params["norm"]), (dense(D), params["down"])]
    contraction = jaxfold.linen.contract(*layers, form=form)
    assert jaxfold.linen.block(*layers).shape.stack == 3
    stack = stack_of(kind, Contracted, contraction)
    loaded = {"params": {"layer": contraction.params}}
    fresh = {"params": init(stack, x, None)}
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, loaded)
    truth = run(model, params, x, None)[0]
    assert error(truth, stack.apply(loaded, x, None)[0]) < TOLERANCE
    reversed_ = jax.tree.map(lambda leaf: leaf[::-1], loaded)
    assert error(truth, stack.apply(reversed_, x, None)[0]) > NOTICED
    with pytest.raises(jaxfold.ShapeError, match="stack of 3 blocks"):
        ContractedDense.from_contraction(contraction).apply({"params": contraction.params}, x)


def test_boxes() -> None:
    """Partitioned leaves are read; what comes out is bare."""
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    up, norm, down = nn.Dense(N, kernel_init=boxed), nn.LayerNorm(), nn.Dense(3, kernel_init=boxed)
    layers = [(layer, randomise(init(layer, jnp.zeros((1, d))))) for layer, d in ((up, D), (down, N))]
    assert isinstance(layers[0][1]["kernel"], nn.Partitioned)
    scale = randomise(init(norm, jnp.zeros((1, N))))
    contraction = jaxfold.linen.contract(layers[0], (norm, scale), layers[1])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(contraction.params))
    bare = [(layer, nn.unbox(params)) for layer, params in layers]
    again = jaxfold.linen.contract(bare[0], (norm, scale), bare[1])
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, contraction.params))


BF16, F16, F32 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))


@pytest.mark.parametrize(
    ("attributes", "param_dtypes", "x_dtype"),
    [
        ({}, (F32, F32, F32), F32),
        ({}, (BF16, BF16, BF16), BF16),
        ({}, (F32, F32, F32), BF16),
        ({}, (BF16, BF16, BF16), F32),
        ({}, (BF16, F32, BF16), BF16),
        ({"consumer": BF16}, (F32, F32, F32), F32),
        ({"norm": BF16}, (F32, F32, F32), F32),
        ({"norm": BF16}, (F32, F32, BF16), F32),
        ({"producer": BF16}, (F32, F32, F32), F32),
        ({"producer": BF16}, (F32, BF16, BF16), F32),
        ({"producer": BF16}, (F32, F32, BF16), F32),
        ({"producer": F32, "norm": BF16}, (BF16, BF16, F16), BF16),
    ],
)
def test_output_dtype(attributes: dict[str, Any], param_dtypes: tuple[Any, ...], x_dtype: Any) -> None:
    """The module returns the dtype that the original's layers return, whichever of them decides it."""
    producer, norm, consumer = (
        {"dtype": attributes.get(role), "param_dtype": dtype}
        for role, dtype in zip(("producer", "norm", "consumer"), param_dtypes, strict=True)
    )
    x = jnp.asarray(inputs(), x_dtype)
    layers = with_params((nn.Dense(N, **producer), nn.LayerNorm(**norm), nn.Dense(3, **consumer)))
    truth = original(layers, x)
    definition, params = ContractedDense.from_layers(*layers)
    result: Any = definition.apply({"params": params}, x)
    assert result.dtype == truth.dtype
    fresh = init(definition, x)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), fresh) == jax.tree.map(lambda a: (a.shape, a.dtype), params)


def test_precision_is_the_consumers() -> None:
    for given, read in (
        ("highest", jax.lax.Precision.HIGHEST),
        (None, None),
        (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH),
    ):
        layers = with_params((nn.Dense(N), nn.LayerNorm(), nn.Dense(3, precision=given)))
        assert ContractedDense.from_layers(*layers)[0].precision == read
    layers = with_params((nn.Dense(N, precision="highest"), nn.LayerNorm(), nn.Dense(3)))
    assert ContractedDense.from_layers(*layers)[0].precision == jax.lax.Precision.HIGHEST


def test_storage_dtype_and_growth() -> None:
    layers = with_params((nn.Dense(N), nn.LayerNorm(), nn.Dense(3)))
    _, params = ContractedDense.from_layers(*layers, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {BF16}
    wide = with_params((nn.Dense(3), nn.LayerNorm(), nn.Dense(40)))
    wide = (
        wide[0],
        (wide[1][0], {key: jnp.ones(3) for key in ("scale", "bias")}),
        (wide[2][0], {"kernel": jnp.ones((3, 40)), "bias": jnp.ones(40)}),
    )
    with pytest.raises(jaxfold.GrowthError):
        ContractedDense.from_layers(*wide)
    ContractedDense.from_layers(*wide, allow_growth=True)
