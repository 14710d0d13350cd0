"""Every arrangement of leaves: consumers, absences, boxes, stacks, dtypes, forms; and what comes back of them."""

from __future__ import annotations

import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze

import jaxfold
from tests.factories import make_case
from tests.reference import row_errors, two_pass
from tests.x64 import set_x64

FORMS = ("direct", "packed", "standard")
EPS = {"epsilon": 1e-3}

# As in test_exactness: products of at most 100 terms, 100 · 2⁻⁵³, and the reference's own error.
FLOAT64 = 1e-13

CASE = make_case(5, 16, 7)
SEVERAL = {
    "query": make_case(5, 16, (4, 8), seed=1).consumer,
    "key": make_case(5, 16, (8,), seed=2, consumer_bias=False).consumer,
    "value": make_case(5, 16, (2, 2, 3), seed=3).consumer,
}


def contract(*layers: Any, **options: Any) -> jaxfold.Contraction:
    return jaxfold.contract(*layers, **{**EPS, "allow_growth": True, **options})


def agree(layers: Any, outputs: Any, x: Any = CASE.x, **options: Any) -> None:
    """All outputs of one block, in float64, against the two passes."""
    producer, norm, consumers = layers
    several = "kernel" not in consumers
    assert isinstance(outputs, dict) == several
    for name, group in consumers.items() if several else ((None, consumers),):
        truth = two_pass(producer, norm, group, x, **{**EPS, **options})
        result = outputs[name] if several else outputs
        assert result.shape == truth.shape
        assert row_errors(truth, result, group["kernel"].ndim - 1).max() < FLOAT64
    if several:
        assert set(outputs) == set(consumers)


def same_bits(a: Any, b: Any) -> None:
    """Equal trees: containers, keys, dtypes, shapes and every bit of every leaf; NumPy or JAX alike."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def close(a: Any, b: Any, tolerance: float) -> None:
    """Equal trees to ``tolerance`` of the largest entry of each leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() <= tolerance * np.abs(np.asarray(other)).max()


# Consumers and absences


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", FORMS)
def test_several_consumers_share_one_denominator(form: Any) -> None:
    layers = (CASE.producer, CASE.norm, SEVERAL)
    block = contract(*layers, form=form)
    assert set(block.params) == {"denominator", "consumers"}
    agree(layers, jaxfold.apply(block, CASE.x))
    for name, group in SEVERAL.items():
        alone = contract(CASE.producer, CASE.norm, group, form=form)
        same_bits(
            alone.params, {"denominator": block.params["denominator"], "consumer": block.params["consumers"][name]}
        )


@pytest.mark.usefixtures("x64")
def test_names_that_are_also_leaf_names() -> None:
    """What decides between one consumer and several is whether the values are mappings, not how they are called."""
    consumers = {"kernel": SEVERAL["query"], "bias": SEVERAL["key"]}
    outputs = jaxfold.apply(contract(CASE.producer, CASE.norm, consumers), CASE.x)
    for name, group in consumers.items():
        agree((CASE.producer, CASE.norm, group), outputs[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("absent", ["producer bias", "norm scale", "norm bias", "consumer bias", "all"])
def test_an_absent_leaf_is_the_neutral_one(absent: str, form: Any) -> None:
    """Zeros for a bias, ones for a scale; except that without a producer bias there is no constant column at all."""
    neutral = {"producer bias": np.zeros(16), "norm scale": np.ones(16), "norm bias": np.zeros(16)}
    neutral["consumer bias"] = np.zeros(7)
    given: dict[str, dict[str, Any]]
    missing: dict[str, dict[str, Any]]
    none: dict[str, dict[str, Any]]
    given, missing, none = ({key: dict(g) for key, g in zip("pnc", CASE.layers, strict=True)} for _ in range(3))
    for what in neutral if absent == "all" else (absent,):
        group, key = what[0], what.split()[1]
        given[group][key], none[group][key] = neutral[what], None
        del missing[group][key]
    block = contract(*missing.values(), form=form)
    same_bits(contract(*none.values(), form=form).params, block.params)
    with set_x64(True):
        expected = jaxfold.apply(contract(*given.values(), form=form), CASE.x)
        assert row_errors(np.asarray(expected), jaxfold.apply(block, CASE.x)).max() < FLOAT64
    has_bias = "bias" in missing["p"]
    assert block.has_bias == ("bias" in block.params["denominator"]) == has_bias
    assert block.R.shape == ((6, 6) if has_bias else (5, 5))


@pytest.mark.parametrize("form", FORMS)
def test_no_norm_parameters(form: Any) -> None:
    blocks = [
        contract(CASE.producer, norm, CASE.consumer, form=form) for norm in (None, {}, {"scale": None, "bias": None})
    ]
    same_bits(blocks[1].params, blocks[0].params)
    same_bits(blocks[2].params, blocks[0].params)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_unit_offset(norm_type: Any) -> None:
    """A stored 0 means a gain of 1 where that was declared, and a gain of 0 where it was not."""
    zero = {**CASE.norm, "scale": np.zeros(16)}
    options = {"norm_type": norm_type, "unit_offset": True}
    agree(CASE.layers, jaxfold.apply(contract(*CASE.layers, **options), CASE.x), **options)
    plain = contract(CASE.producer, {"bias": CASE.norm["bias"]}, CASE.consumer, norm_type=norm_type)
    same_bits(contract(CASE.producer, zero, CASE.consumer, **options).params, plain.params)
    nothing = contract(CASE.producer, zero, CASE.consumer, norm_type=norm_type)
    assert not nothing.D.any()
    close(nothing.c, plain.c, 1e-15)
    same_bits(contract(CASE.producer, {"bias": CASE.norm["bias"]}, CASE.consumer, **options).params, plain.params)


# Containers, kinds, dtypes


class Layer(nnx.Module):
    def __init__(self, leaves: dict[str, Any]) -> None:
        for key, leaf in leaves.items():
            setattr(self, key, nnx.Param(leaf))


WRAPPERS: dict[str, Any] = {
    "FrozenDict": freeze,
    "MappingProxyType": types.MappingProxyType,
    "nn.Partitioned": lambda group: {k: nn.Partitioned(v, names=(None,) * v.ndim) for k, v in group.items()},
    "nn.Partitioned in FrozenDict": lambda group: freeze(WRAPPERS["nn.Partitioned"](group)),
    "nn.LogicallyPartitioned": lambda group: {
        k: nn.LogicallyPartitioned(v, names=("a", "b")[: v.ndim]) for k, v in group.items()
    },
    "nnx.Param": lambda group: {key: nnx.Param(leaf) for key, leaf in group.items()},
    "nnx.State": lambda group: nnx.state(Layer(group)),
}


@pytest.mark.parametrize("several", [False, True], ids=["single", "several"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_containers_and_boxes(wrapper: str, several: bool) -> None:
    """Whatever the leaves come in, plain dicts of JAX arrays come back, and the same bits."""
    layers = jax.tree.map(jnp.asarray, (CASE.producer, CASE.norm, SEVERAL if several else CASE.consumer))
    wrap = WRAPPERS[wrapper]
    consumers = {name: wrap(group) for name, group in layers[2].items()} if several else wrap(layers[2])
    expected = contract(*layers)
    for outer in (lambda tree: tree, types.MappingProxyType if several else lambda tree: tree):
        block = contract(wrap(layers[0]), wrap(layers[1]), outer(consumers))
        same_bits(block.params, expected.params)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(block))
        assert jaxfold.plan(wrap(layers[0]), wrap(layers[1]), outer(consumers)) == jaxfold.plan(*layers)


@pytest.mark.parametrize("form", FORMS)
def test_numpy_or_jax(form: Any) -> None:
    """JAX only if all leaves are JAX arrays, and JAX can hold the dtype as it is configured now."""
    case = make_case(5, 16, 7).astype(np.float32)
    jax_layers = jax.tree.map(jnp.asarray, case.layers)
    kinds = {
        jax.Array: [contract(*jax_layers, form=form), contract(*jax_layers, form=form, dtype="bfloat16")],
        np.ndarray: [
            contract(*case.layers, form=form),
            contract(*jax_layers[:2], case.consumer, form=form),
            contract(*CASE.layers, form=form),
            contract(*jax_layers, form=form, dtype="float64"),
        ],
    }
    for kind, blocks in kinds.items():
        assert all(isinstance(leaf, kind) for block in blocks for leaf in jax.tree.leaves(block))
        for block in blocks:
            for other in FORMS:
                assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(jaxfold.convert(block, other)))
    assert {leaf.dtype for block in kinds[np.ndarray][2:] for leaf in jax.tree.leaves(block)} == {np.dtype(np.float64)}
    with set_x64(True):
        wide = contract(*jax.tree.map(jnp.asarray, CASE.layers), form=form)
        assert all(isinstance(leaf, jax.Array) and leaf.dtype == np.float64 for leaf in jax.tree.leaves(wide))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["NumPy", "JAX"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_inputs_are_never_changed_nor_kept(form: Any, kind: str, dtype: Any) -> None:
    case = CASE.astype(dtype)
    layers: Any = (case.producer, case.norm, {"q": case.consumer, "k": {"kernel": np.eye(16, dtype=dtype)}})
    if kind == "JAX":
        layers = jax.tree.map(jnp.asarray, layers)
    else:
        for leaf in jax.tree.leaves(layers):
            leaf.flags.writeable = False
    containers, leaves = [id(tree) for tree in (*layers, *layers[2].values())], jax.tree.leaves(layers)
    before = [np.asarray(leaf).tobytes() for leaf in leaves]
    block = contract(*layers, form=form)
    converted = [jaxfold.convert(block, other) for other in FORMS if other != form]
    jaxfold.apply(contract(*layers[:2], layers[2]["q"], form=form), case.x)
    jaxfold.verify(jaxfold.Block(*layers, **EPS), block, case.x)
    assert [id(tree) for tree in (*layers, *layers[2].values())] == containers
    assert all(now is then for now, then in zip(jax.tree.leaves(layers), leaves, strict=True))
    assert [np.asarray(leaf).tobytes() for leaf in leaves] == before
    groups = [leaves, *(jax.tree.leaves(one) for one in (block, *converted))]
    arrays = [np.asarray(leaf) for group in groups for leaf in group]  # no copies: views of JAX's buffers
    for i, one in enumerate(arrays):
        assert not any(np.shares_memory(one, other) for other in arrays[:i])


@pytest.mark.parametrize("form", FORMS)
def test_the_same_with_x64_on_and_off(form: Any) -> None:
    layers32 = jax.tree.map(jnp.asarray, CASE.astype(np.float32).layers)
    for layers in (layers32, CASE.astype(np.float32).layers, CASE.layers):
        results = []
        for flag in (False, True):
            with set_x64(flag):
                block = contract(*layers, form=form)
                results.append([block, *(jaxfold.convert(block, other) for other in FORMS)])
                with pytest.raises(jaxfold.JaxfoldError):
                    contract(*layers, form=form, epsilon=0)
                assert jax.config.read("jax_enable_x64") is flag
        same_bits(*results)


BF16, F16, F32 = (np.dtype(t) for t in (jnp.bfloat16, np.float16, np.float32))


@pytest.mark.parametrize(
    ("dtypes", "factor", "query", "key"),
    [
        ((F16, F16, F16, F16), F16, F16, F16),
        ((BF16, F32, F16, BF16), BF16, F32, F32),
        ((BF16, BF16, F16, BF16), BF16, F32, BF16),
        ((F32, BF16, BF16, BF16), F32, F32, F32),
        ((F16, F16, np.dtype(np.float64), F16), F16, np.dtype(np.float64), F16),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_each_coefficient_has_the_dtype_of_its_sources(
    form: Any, dtypes: Any, factor: Any, query: Any, key: Any
) -> None:
    groups = [CASE.producer, CASE.norm, SEVERAL["query"], SEVERAL["key"]]
    producer, norm, q, k = (jax.tree.map(lambda a, t=t: a.astype(t), g) for g, t in zip(groups, dtypes, strict=True))
    block = contract(producer, norm, {"query": q, "key": k}, form=form)
    expected = {"denominator": factor, "query": query, "key": key}
    found = {"denominator": block.params["denominator"], **block.params["consumers"]}
    assert {name: {leaf.dtype for leaf in jax.tree.leaves(found[name])} for name in expected} == {
        name: {dtype} for name, dtype in expected.items()
    }
    for dtype in ("float64", "float32", jnp.bfloat16, np.float16):
        chosen = contract(producer, norm, {"query": q, "key": k}, form=form, dtype=dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(chosen)} == {np.dtype(dtype)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_storage_is_the_float64_coefficient_rounded_once(form: Any, dtype: Any) -> None:
    exact = contract(*CASE.layers, form=form)
    same_bits(
        contract(*CASE.layers, form=form, dtype=dtype).params, jax.tree.map(lambda a: a.astype(dtype), exact.params)
    )


def test_order_of_several_outputs() -> None:
    """Sorted, as in any dict that has been through JAX, whatever order the consumers were given in."""
    case = make_case(4, 16, 3).astype(np.float32)
    for names in (("z", "a", "k"), ("k", "z", "a")):
        block = jaxfold.contract(case.producer, case.norm, dict.fromkeys(names, case.consumer), epsilon=1e-3)
        assert list(jaxfold.apply(block, case.x)) == ["a", "k", "z"]
        assert list(block.D) == list(block.c) == ["a", "k", "z"]
