"""Reading NNX layers: what is read is what they compute, and the layers are not changed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfold
import jaxfold.nnx
from jaxfold.nnx import ContractedDense
from tests.nnx.structures import (
    STRUCTURES,
    D,
    N,
    Rngs,
    as_flax_needs,
    attention,
    equal,
    error,
    inputs,
    layer_norm,
    linear,
    make,
    original,
    randomise,
    values,
    without_mesh,
)

# In float64 both sides round sums of some tens of terms of order one: some tens of 1.1e-16 times the few digits that
# E[h²] − E[h]² loses. A term left out, an axis or an epsilon mistaken, changes the second or third digit.
TOLERANCE = 1e-12
NOTICED = 1e-4


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "direct") for name in STRUCTURES]
    + [(name, form) for name in ("linear", "several") for form in ("packed", "standard")],
)
def test_values(name: str, form: Any) -> None:
    layers, x = make(name), inputs()
    before = [values(layer) for layer in layers if isinstance(layer, nnx.Module)]
    truth = original(layers, x)
    contraction = jaxfold.nnx.contract(*layers, form=form)
    assert error(truth, jaxfold.apply(contraction, x)) < TOLERANCE
    assert error(truth, ContractedDense.from_layers(*layers, form=form)(x)) < TOLERANCE
    assert error(truth, jaxfold.nnx.block(*layers)(x)) < TOLERANCE
    assert equal(before, [values(layer) for layer in layers if isinstance(layer, nnx.Module)])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("change", ["epsilon", "norm", "leaf"])
def test_values_notice(change: str) -> None:
    """The comparison above would notice another epsilon, another norm or another leaf."""
    producer, norm, consumer = make("linear")
    truth = original((producer, norm, consumer), inputs())
    if change == "epsilon":
        norm.epsilon = 2e-3
    elif change == "norm":
        other = nnx.RMSNorm(N, epsilon=1e-3, rngs=Rngs(0))
        norm, _ = other, nnx.update(other, {"scale": values(norm)["scale"]})
    else:
        nnx.update(norm, {"bias": jnp.zeros(N)})
    assert error(truth, jaxfold.apply(jaxfold.nnx.contract(producer, norm, consumer), inputs())) > NOTICED


@pytest.mark.usefixtures("x64")
def test_attention_stands_for_its_projections() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, D)))
    up, norm, attend = linear(D, N), layer_norm(), attention()
    randomise(up, norm, attend)
    contraction = jaxfold.nnx.contract(up, norm, attend)
    projected = jaxfold.apply(contraction, x)
    assert sorted(projected) == ["key", "query", "value"]
    with as_flax_needs():
        truth = attend(norm(up(x)))
        result = attend.out(nnx.dot_product_attention(projected["query"], projected["key"], projected["value"]))
        swapped = attend.out(nnx.dot_product_attention(projected["query"], projected["value"], projected["key"]))
    assert error(truth, result) < TOLERANCE
    assert error(truth, swapped) > NOTICED


class Layer(nnx.Module):
    """A block from D features to D features."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.norm, self.down = linear(D, N, rngs=rngs), layer_norm(rngs=rngs), linear(N, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.norm(self.up(x)))


@nnx.split_rngs(splits=3)
@nnx.vmap
def create(rngs: nnx.Rngs) -> Layer:
    return Layer(rngs)


def scanned(stack: Any, x: Any) -> Any:
    def step(carry: Any, layer: Any) -> Any:
        return layer(carry)

    return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)


def mapped(stack: Any, x: Any) -> Any:
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
def test_stack(form: Any) -> None:
    """The leading axis is inferred, and the contracted stack runs where the original's did."""
    x, stack = jnp.asarray(inputs()), create(Rngs(0))
    randomise(stack)
    assert jaxfold.nnx.block(stack.up, stack.norm, stack.down).shape.stack == 3
    contracted = ContractedDense.from_layers(stack.up, stack.norm, stack.down, form=form)
    with as_flax_needs():
        expected = scanned(stack, x), mapped(stack, x)
    assert error(expected[0], scanned(contracted, x)) < TOLERANCE
    assert error(expected[1], mapped(contracted, x)) < TOLERANCE
    nnx.update(contracted, jax.tree.map(lambda leaf: leaf[::-1], nnx.state(contracted)))
    assert error(expected[0], scanned(contracted, x)) > NOTICED
    with pytest.raises(jaxfold.ShapeError, match="stack of 3 blocks"):
        contracted(x)


def test_partitioned_variables() -> None:
    """Variables with sharding metadata are read; what comes out is bare."""
    boxed = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
    options: dict[str, Any] = {"param_dtype": jnp.float32}
    with without_mesh():
        sharded = linear(D, N, kernel_init=boxed, **options), layer_norm(**options), linear(N, 3, **options)
    plain = linear(D, N, kernel_init=nnx.initializers.lecun_normal(), **options), *sharded[1:]
    contraction = jaxfold.nnx.contract(*sharded)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(contraction.params))
    assert equal(contraction.params, jaxfold.nnx.contract(*plain).params)


BF16, F16, F32 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))


@pytest.mark.parametrize(
    ("attributes", "param_dtypes", "x_dtype"),
    [
        ({}, (BF16, BF16, BF16), BF16),
        ({"consumer": BF16}, (F32, F32, F32), F32),
        ({"norm": BF16}, (F32, F32, BF16), F32),
        ({"producer": F32, "norm": BF16}, (BF16, BF16, F16), BF16),
    ],
)
def test_output_dtype(attributes: dict[str, Any], param_dtypes: tuple[Any, ...], x_dtype: Any) -> None:
    """The module returns the dtype that the original's layers return, whichever of them decides it."""
    producer, norm, consumer = (
        {"dtype": attributes.get(role), "param_dtype": dtype}
        for role, dtype in zip(("producer", "norm", "consumer"), param_dtypes, strict=True)
    )
    layers = linear(D, N, **producer), layer_norm(**norm), linear(N, 3, **consumer)
    x = jnp.asarray(inputs(), x_dtype)
    assert ContractedDense.from_layers(*layers)(x).dtype == original(layers, x).dtype


def test_precision_storage_and_growth() -> None:
    options: dict[str, Any] = {"param_dtype": jnp.float32}
    up, norm = linear(D, N, precision="high", **options), layer_norm(**options)
    highest = linear(N, 3, precision="highest", **options)
    assert ContractedDense.from_layers(up, norm, highest).precision == jax.lax.Precision.HIGHEST
    assert ContractedDense.from_layers(up, norm, linear(N, 3, **options)).precision == jax.lax.Precision.HIGH
    stored = ContractedDense.from_layers(up, norm, highest, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(values(stored))} == {BF16}
    wide = linear(30, N, **options), norm, linear(N, 40, **options)
    with pytest.raises(jaxfold.GrowthError):
        ContractedDense.from_layers(*wide)
    ContractedDense.from_layers(*wide, allow_growth=True)
