"""The three forms and what they are made for: stacks, conversion, stock Flax modules, checkpoints, counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import jaxfold
from tests.block.test_structures import EPS, FLOAT64, FORMS, SEVERAL, agree, close, contract, same_bits
from tests.factories import make_case
from tests.reference import row_errors, two_pass

CASE = make_case(5, 16, 7)
LOW_RANK = np.random.default_rng(1).normal(size=(6, 2)) @ np.random.default_rng(2).normal(size=(2, 16))


def _stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


MEMBERS = [make_case(5, 16, 7, seed=seed) for seed in (4, 5, 6)]
BLOCKS: dict[str, tuple[Any, bool]] = {
    "all biases": (CASE.layers, False),
    "nothing but kernels": (
        make_case(5, 16, 7, producer_bias=False, scale=False, offset=False, consumer_bias=False).layers,
        False,
    ),
    "several output axes": (make_case(5, 16, (4, 8)).layers, False),
    "several consumers": ((CASE.producer, CASE.norm, SEVERAL), False),
    "wide": (make_case(20, 8, 3).layers, False),
    "wide without bias": (make_case(20, 8, 3, producer_bias=False).layers, False),
    "n = d + 1": (make_case(6, 7, 5).layers, False),
    "rank 2, zero bias": (
        ({"kernel": LOW_RANK, "bias": np.zeros(16)}, make_case(6, 16, 4).norm, make_case(6, 16, 4).consumer),
        False,
    ),
    "zero producer": (({"kernel": np.zeros((5, 16)), "bias": np.zeros(16)}, CASE.norm, CASE.consumer), False),
    "stack": (_stack(*(case.layers for case in MEMBERS)), True),
    "stack of several": (_stack(*[(CASE.producer, CASE.norm, SEVERAL)] * 2), True),
    "stack, wide, no bias": (
        _stack(*(make_case(20, 8, (3, 2), seed=seed, producer_bias=False).layers for seed in (1, 2))),
        True,
    ),
}


def _inputs(layers: Any, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(33, layers[0]["kernel"].shape[-2]))


def _member(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_form_of_every_block_is_the_block(name: str, form: Any) -> None:
    layers, stacked = BLOCKS[name]
    block, x = contract(*layers, form=form, stacked=stacked), _inputs(layers)
    outputs = (jax.vmap(jaxfold.apply, in_axes=(0, None)) if stacked else jaxfold.apply)(block, x)
    for i in range(len(layers[0]["kernel"]) if stacked else 1):
        one, outputs_of_one = (_member(tree, i) if stacked else tree for tree in (layers, outputs))
        agree(one, outputs_of_one, x)
        if stacked:
            close(_member(block.params, i), contract(*one, form=form).params, 1e-14)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BLOCKS)
def test_factor_numerator_and_offset_of_every_form(name: str, form: Any) -> None:
    """R, D and c by their definition, f(x) = x̄ D / sqrt(‖R x̄‖²/n + ε) + c, in NumPy."""
    layers, stacked = BLOCKS[name]
    block, x = contract(*layers, form=form, stacked=stacked), _inputs(layers)
    inputs = np.concatenate([x, np.ones((33, 1))], axis=1) if block.has_bias else x
    d, n = layers[0]["kernel"].shape[-2:]
    assert (block.features, block.width, block.rank) == (d, n, min(n, inputs.shape[1]))
    for i in range(len(layers[0]["kernel"]) if stacked else 1):
        factor, numerator, offset, one = (
            _member(tree, i) if stacked else tree for tree in (block.R, block.D, block.c, layers)
        )
        assert factor.shape == (block.rank, inputs.shape[1])
        assert not np.tril(factor, -1).any()
        assert (np.diagonal(factor) >= 0).all()
        s = 1 / np.sqrt(np.sum((inputs @ factor.T) ** 2, axis=1) / n + EPS["epsilon"])
        scaled = inputs * s[:, None]
        agree(one, jax.tree.map(lambda D, c, scaled=scaled: np.tensordot(scaled, D, 1) + c, numerator, offset), x)


@pytest.mark.parametrize("name", BLOCKS)
def test_conversions(name: str) -> None:
    """packed holds the same numbers as direct; standard is computed back and forth in float64.

    From standard, D is a product of k ≤ 8 terms: 8 · 2⁻⁵³ of the norms. To it, V solves Rᵀ V = D, which amplifies by
    the condition of R, here 50 at most; that of what is left of R where the rank is lower.
    """
    layers, stacked = BLOCKS[name]
    direct, packed, standard = (contract(*layers, form=form, stacked=stacked) for form in FORMS)
    for block in (direct, packed, standard):
        assert jaxfold.convert(block, block.form) is block
    same_bits(jaxfold.convert(direct, "packed"), packed)
    same_bits(jaxfold.convert(packed, "direct"), direct)
    same_bits(jaxfold.convert(packed, "standard"), jaxfold.convert(direct, "standard"))
    same_bits(jaxfold.convert(standard, "packed"), jaxfold.convert(jaxfold.convert(standard, "direct"), "packed"))
    close(jaxfold.convert(standard, "direct"), direct, 1e-13)
    there = jaxfold.convert(direct, "standard")
    assert jax.tree.map(np.shape, there.params) == jax.tree.map(np.shape, standard.params)
    close(jaxfold.convert(there, "direct"), direct, 1e-12)
    if np.min(np.linalg.matrix_rank(direct.R)) == direct.rank:  # only then is V unique
        close(there, standard, 1e-12)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("name", ["all biases", "rank 2, zero bias", "stack", "several consumers"])
def test_conversions_of_rounded_coefficients(name: str, dtype: Any) -> None:
    """There and back loses a few units in the last place, whatever the condition of R.

    V solves Rᵀ V = D, and D is multiplied back from it: the amplification of the one undoes that of the other. What is
    left is the rounding of V, eps/2 times ‖R‖ ‖V‖ over the largest entry of D, at most 4 here; that of D, eps/2; and,
    where the rank is lower, the part of D's first rounding that is outside the range of Rᵀ, √p · eps/2 at most.
    """
    layers, stacked = BLOCKS[name]
    direct = contract(*layers, stacked=stacked, dtype=dtype)
    there = jaxfold.convert(direct, "standard")
    back = jaxfold.convert(there, "direct")
    assert {leaf.dtype for leaf in jax.tree.leaves([there, back])} == {np.dtype(dtype)}
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), (back, direct))
    close(wide[0], wide[1], 4 * float(jnp.finfo(dtype).eps))


def test_counts_on_record() -> None:
    def size(layers: Any, form: Any = "direct") -> int:
        block = jaxfold.contract(*layers, epsilon=1e-5, form=form)
        return sum(leaf.size for leaf in jax.tree.leaves(block))

    large, edges = make_case(82, 512, 512, rows=1), make_case(16, 128, 128, rows=1, producer_bias=False)
    assert sum(leaf.size for leaf in jax.tree.leaves(large.layers)) == 306_176
    assert (size(large.layers), size(large.layers, "packed")) == (49_897, 46_494)
    assert sum(leaf.size for leaf in jax.tree.leaves(edges.layers)) == 18_816
    assert size(edges.layers) == 2_432


# Flax modules


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("converted", [False, True], ids=["contracted", "converted"])
@pytest.mark.parametrize("name", ["all biases", "no producer bias", "several output axes", "wide", "rmsnorm"])
def test_the_standard_form_is_stock_flax(name: str, converted: bool) -> None:
    """Dense(k), RMSNorm without scale, Dense: what a user of the contracted model needs besides Flax is nothing."""
    case = {
        "all biases": CASE,
        "no producer bias": make_case(producer_bias=False),
        "several output axes": make_case(5, 16, (4, 8)),
        "wide": make_case(20, 8, 3),
        "rmsnorm": make_case(norm_type="rmsnorm"),
    }[name]
    options = {**case.options, "allow_growth": True}
    if converted:
        block = jaxfold.convert(jaxfold.contract(*case.layers, **options), "standard")
    else:
        block = jaxfold.contract(*case.layers, **options, form="standard")
    features = case.consumer["kernel"].shape[1:]
    model = nn.Sequential(
        [
            nn.Dense(block.rank, use_bias=block.has_bias, param_dtype=np.float64),
            nn.RMSNorm(epsilon=block.rms_epsilon, use_scale=False),
            nn.Dense(*features, param_dtype=np.float64)
            if len(features) == 1
            else nn.DenseGeneral(features, param_dtype=np.float64),
        ]
    )
    params = {"layers_0": block.params["denominator"], "layers_2": block.params["consumer"]}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        initial = jax.eval_shape(model.init, jax.random.key(0), case.x)["params"]
        result = model.apply({"params": params}, case.x)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, initial)
    truth = two_pass(*case.layers, case.x, **case.options)
    assert row_errors(truth, result, len(features)).max() < FLOAT64


class Original(nn.Module):
    """Dense, LayerNorm, Dense back to the width of the input, as a layer of nn.scan."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> tuple[Any, None]:
        h = nn.Dense(16, param_dtype=np.float64, name="wide")(x)
        y = nn.LayerNorm(epsilon=1e-3, use_fast_variance=False, param_dtype=np.float64, name="norm")(h)
        return nn.Dense(5, param_dtype=np.float64, name="narrow")(y), None


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lift", ["scan", "vmap"])
def test_stacks_that_flax_makes(lift: str, form: Any) -> None:
    """nn.scan: three layers one after the other. nn.vmap: three members of an ensemble on the same inputs."""
    axes: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    if lift == "scan":
        model = nn.scan(Original, length=3, **axes)()
    else:
        model = nn.vmap(Original, in_axes=None, axis_size=3, **axes)()  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        shapes = jax.eval_shape(model.init, jax.random.key(0), CASE.x, None)["params"]
        params = jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape)), shapes)
        expected, _ = model.apply({"params": params}, CASE.x, None)
    layers = params["wide"], params["norm"], params["narrow"]
    assert layers[0]["kernel"].shape == (3, 5, 16)
    block = contract(*layers, stacked=True, form=form)
    if lift == "vmap":
        result = jax.vmap(jaxfold.apply, in_axes=(0, None))(block, CASE.x)
        agree(_member(layers, 1), result[1])
    else:
        result, _ = jax.lax.scan(lambda x, one: (jaxfold.apply(one, x), None), jnp.asarray(CASE.x), block)
    # Three layers in turn, each of which passes its input's error on, no more than twofold with these gains.
    assert row_errors(np.asarray(expected), result).max() < 8 * FLOAT64


# The pytree


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_contraction_is_a_pytree(name: str, form: Any) -> None:
    layers, stacked = BLOCKS[name]
    block = contract(*layers, form=form, stacked=stacked)
    leaves, treedef = jax.tree.flatten(block)
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
    assert leaves == jax.tree.leaves(block.params) or all(map(np.array_equal, leaves, jax.tree.leaves(block.params)))
    again = jax.tree.unflatten(treedef, leaves)
    static = {key: getattr(block, key) for key in ("width", "epsilon", "norm_type", "form")}
    assert {key: getattr(again, key) for key in static} == static
    assert {field.name for field in dataclasses.fields(block)} == {"params", *static}
    assert treedef != jax.tree.structure(dataclasses.replace(block, epsilon=2e-3))
    assert treedef == jax.tree.structure(
        contract(*jax.tree.map(lambda leaf: 2 * leaf, layers), form=form, stacked=stacked)
    )
    path, _ = jax.tree_util.tree_flatten_with_path(block)[0][0]
    assert jax.tree_util.keystr(path).startswith(".params['consumer")
    for field in static:
        assert f"{field}={static[field]!r}" in repr(block)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["all biases", "several consumers", "wide without bias"])
def test_restored_from_its_parameters(name: str, form: Any) -> None:
    """Saved as a Flax tree and put together again with the static fields: the same function, offset included."""
    layers, _ = BLOCKS[name]
    layers = jax.tree.map(lambda leaf: leaf.astype(np.float32), layers)
    block, x = contract(*layers, form=form), _inputs(layers).astype(np.float32)
    saved = flax.serialization.msgpack_serialize(jax.tree.map(np.asarray, block.params))
    params: Any = flax.serialization.msgpack_restore(saved)
    for tree in (params, freeze(params), jax.tree.map(jnp.asarray, params)):
        restored = jaxfold.Contraction(tree, block.width, block.epsilon, block.norm_type, form)
        same_bits(jaxfold.apply(restored, x), jaxfold.apply(block, x))
