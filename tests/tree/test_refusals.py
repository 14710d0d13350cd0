"""What contract_tree refuses: the path is named, the tree is as it was, the block is left alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from flax.core import freeze
from flax.training.train_state import TrainState

import jaxfold
from jaxfold import BlockPaths, contract_tree
from tests.factories import make_case
from tests.reference import row_errors, two_pass

CASE = make_case(5, 16, 7)
PATHS = BlockPaths(producer="net/up", norm="net/norm", consumers="net/down", epsilon=1e-3)


def tree(**changes: Any) -> dict[str, Any]:
    """A block, with leaves exchanged: up_kernel=..., norm_scale=None to leave one out."""
    net = {"up": dict(CASE.producer), "norm": dict(CASE.norm), "down": dict(CASE.consumer)}
    for name, leaf in changes.items():
        group, key = name.split("_", 1)
        net[group][key] = leaf
        if leaf is None:
            del net[group][key]
    return {"net": net, "other": np.ones(3)}


def one(params: Any, blocks: Any = PATHS, **options: Any) -> jaxfold.FoldRow:
    """The row of the one block that there is, once strict mode has said the same and the tree has stayed as it was."""
    before = [(id(leaf), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(params)]
    new, report = contract_tree(params, blocks, **options)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True))
    assert report.parameters[0] == report.parameters[1]
    assert [(id(leaf), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(params)] == before
    (row,) = report.skipped
    with pytest.raises(jaxfold.JaxfoldError) as raised:
        contract_tree(params, blocks, strict=True, **options)
    assert str(raised.value) == row.reason
    assert [(id(leaf), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(params)] == before
    return row


LEAVES = {
    "integer": ({"up_kernel": np.ones((5, 16), np.int8)}, "net/up/kernel: got dtype int8"),
    "complex": ({"norm_scale": np.ones(16, np.complex64)}, "net/norm/scale: got dtype complex64"),
    "NaN": ({"down_bias": np.full(7, np.nan)}, "net/down/bias: got 7 non-finite of 7 entries"),
    "width": ({"down_kernel": np.ones((15, 7))}, "net/down/kernel: got shape (15, 7); expected shape (16, 7)"),
    "norm's width": ({"norm_scale": np.ones(15)}, "net/norm/scale: got shape (15,)"),
    "stack": ({"up_kernel": np.ones((3, 5, 16))}, "net/up/kernel: got shape (3, 5, 16)"),
    "LoRA": ({"up_lora_a": np.ones((5, 2))}, "net/up: got the unknown key 'lora_a'"),
    "no kernel": ({"up_kernel": None}, "net/up/kernel: got nothing"),
    "no array": ({"up_bias": "zeros"}, "net/up/bias: got a str"),
    "empty": ({"down_kernel": np.ones((16, 0)), "down_bias": np.ones(0)}, "net/down/kernel: got shape (16, 0)"),
    "overflow": (
        {"down_kernel": np.full((16, 7), 1e300), "norm_scale": np.full(16, 1e300)},
        "net/up/consumer/kernel: got",
    ),
}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves(name: str) -> None:
    changes, message = LEAVES[name]
    row = one(tree(**changes), rows=0)
    assert row.reason.startswith(message)
    assert (row.producer, row.norm, row.consumers, row.to) == ("net/up", "net/norm", "net/down", None)


def test_stacked_leaves_that_are_not() -> None:
    paths = BlockPaths(producer="net/up", norm="net/norm", consumers="net/down", epsilon=1e-3, stacked=True)
    assert "net/up/kernel: got shape" in one(tree(), paths).reason or "net/up/bias" in one(tree(), paths).reason


def test_growth_with_both_numbers() -> None:
    case = make_case(148, 128, 128)
    params = {"net": {"up": case.producer, "norm": case.norm, "down": case.consumer}}
    reason = one(params).reason
    assert "38,272" in reason
    assert "35,840" in reason
    assert contract_tree(params, PATHS, allow_growth=True)[1].rows[0].decision == "contracted"


def test_growth_counts_a_producer_that_stays() -> None:
    """Net of its producer this one grows, though it would shrink without."""
    case = make_case(5, 16, 7)
    params = {"net": {"up": make_case(12, 16, 7).producer, "norm": case.norm, "down": case.consumer}}
    kept = BlockPaths(producer="net/up", norm="net/norm", consumers="net/down", epsilon=1e-3, keep_producer=True)
    assert contract_tree(params, PATHS)[1].rows[0].decision == "contracted"
    reason = one(params, kept).reason
    assert ", its producer included" in reason
    plan = jaxfold.plan(params["net"]["up"], case.norm, case.consumer, keep_producer=True)
    assert f"{plan.direct.parameters:,}" in reason


PLACES = {
    "missing norm": ({"norm": "net/nrom"}, "norm: got the path 'net/nrom', which ends before 'nrom'"),
    "undeclared kind": ({"norm": None}, "norm_type of the block of net/up: got nothing; expected 'layernorm' or"),
    "missing consumer": (
        {"consumers": "net/down/x/y"},
        "consumers: got the path 'net/down/x/y', which ends before 'x'",
    ),
    "one of several": ({"consumers": {"a": "net/down", "b": "b"}}, "consumers['b']: got the path 'b'"),
    "a leaf": ({"consumers": "net/down/kernel"}, "consumers: got the path 'net/down/kernel', which leads to a leaf"),
    "a leaf of the norm": (
        {"norm": "net/norm/scale"},
        "norm: got the path 'net/norm/scale', which leads to a leaf; expected the path of a layer, which is a mapping "
        "of its leaves. Name the layer, 'net/norm'.",
    ),
    "a leaf of the producer": (
        {"producer": "net/up/kernel"},
        "producer: got the path 'net/up/kernel', which leads to a",
    ),
    "a wider group": ({"producer": "net"}, "net: got the unknown key"),
    "twice": ({"consumers": "net/up"}, "net/up: got one layer in two roles"),
    "occupied": ({"to": "other"}, "other: got something that stays"),
    "below a leaf": ({"to": "other/block"}, "other: got something that stays"),
    "above": ({"to": "net"}, "net: got something that stays"),
    "the producer's own": ({"keep_producer": True, "to": "net/up"}, "net/up: got something that stays"),
    "no place": (
        {"keep_producer": True, "norm": None, "norm_type": "layernorm"},
        "to, of the block of net/up: got nothing",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name: str) -> None:
    changes, message = PLACES[name]
    options = {"producer": "net/up", "norm": "net/norm", "consumers": "net/down", "epsilon": 1e-3, **changes}
    row = one(tree(), BlockPaths(**options), allow_growth=True)
    assert row.reason.startswith(message)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("others/2", "others/2: got no place in others, a list of 2; expected one that is there, or a key of a map"),
        ("others/2/block", "others/2: got no place in others, a list of 2;"),
        ("others/x", "others/x: got no place in others, a list of 2;"),
        (("others", -1), "others/-1: got no place in others, a list of 2;"),
        ("others/1/3", "others/1/3: got no place in others/1, a tuple of 1;"),
    ],
)
def test_places_that_a_list_does_not_have(to: Any, message: str) -> None:
    params: dict[str, Any] = tree() | {"others": [np.ones(2), (np.ones(2),)]}
    row = one(params, BlockPaths(producer="net/up", norm="net/norm", consumers="net/down", epsilon=1e-3, to=to))
    assert row.reason.startswith(message)
    assert row.reason.endswith("Say where the contracted block goes with BlockPaths(to=...).")
    layers = ([params["net"]["up"], params["net"]["norm"]], params["net"]["down"])
    out = BlockPaths(producer="0/0", norm="0/1", consumers="1", epsilon=1e-3, to="2")
    assert one(layers, out).reason.startswith("2: got no place in params, a tuple of 2")
    new, _ = contract_tree(layers, BlockPaths(producer="0/0", norm="0/1", consumers="1", epsilon=1e-3, to="0/1"))
    assert (new[0][0], sorted(new[0][1]), new[1]) == ({}, ["consumer", "denominator"], {})


def test_two_blocks_for_one_place() -> None:
    params = {"a": tree()["net"], "b": tree()["net"]}
    blocks = [
        BlockPaths(producer=f"{name}/up", norm=f"{name}/norm", consumers=f"{name}/down", epsilon=1e-3, to=to)
        for name, to in (("a", "c/block"), ("b", "c"))
    ]
    new, report = contract_tree(params, blocks)
    assert [row.decision for row in report.rows] == ["contracted", "skipped"]
    assert report.rows[1].reason.startswith("c: got the place of another block")
    assert sorted(new) == ["b", "c"]
    assert new["b"]["up"]["kernel"] is params["b"]["up"]["kernel"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"producer": ""}, "producer: got ''"),
        ({"producer": "a//b"}, "producer: got 'a//b'"),
        ({"producer": "a/b/"}, "Remove|remove"),
        ({"producer": 3}, "producer: got 3"),
        ({"producer": ()}, r"producer: got \(\)"),
        ({"norm": "layer_*/norm"}, "norm: got 'layer_\\*/norm' with 1; expected 0 of"),
        ({"producer": "*/*/up", "norm": "*/norm"}, "norm: got .* with 1; expected 2 of"),
        ({"consumers": {}}, "consumers: got an empty mapping"),
        ({"consumers": {1: "a"}}, "consumers: got the name 1"),
        ({"consumers": ["q", "k"]}, r"consumers: got \['q', 'k'\].* pass a mapping of their names to paths"),
        ({"consumers": {"q": 2}}, r"consumers\['q'\]: got 2"),
        ({"epsilon": 0.0}, "epsilon: got 0.0"),
        ({"epsilon": -1.0}, "epsilon: got -1.0"),
        ({"epsilon": None}, "epsilon: got None"),
        ({"norm_type": "batchnorm"}, "norm_type: got 'batchnorm'"),
        ({"unit_offset": 1}, "unit_offset: got 1"),
        ({"stacked": None}, "stacked: got None"),
        ({"keep_producer": "yes"}, "keep_producer: got 'yes'"),
        ({"to": ""}, "to: got ''"),
        ({"to": "x_*"}, "to: got 'x_\\*' with 1; expected 0"),
    ],
)
def test_malformed_blocks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(jaxfold.OptionError, match=message):
        BlockPaths(**{"producer": "up", "norm": "norm", "consumers": "down", "epsilon": 1e-3, **options})


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((np.ones(3), PATHS), {}, jaxfold.StructureError, "params: got an ndarray"),
        ((None, PATHS), {}, jaxfold.StructureError, "params: got a NoneType"),
        ((3, PATHS), {}, jaxfold.StructureError, "params: got an int"),
        ((jnp.ones(3), PATHS), {}, jaxfold.StructureError, "params: got an ArrayImpl"),
        ((tree(), {"producer": "up"}), {}, jaxfold.OptionError, "blocks: got a dict"),
        ((tree(), ["net/up"]), {}, jaxfold.OptionError, r"blocks\[0\]: got a str"),
        ((tree(), "net/up"), {}, jaxfold.OptionError, "blocks: got a str"),
        ((tree(), PATHS), {"inputs": CASE.x}, jaxfold.OptionError, "inputs: got an ndarray; expected a mapping"),
        ((tree(), PATHS), {"form": "narrow"}, jaxfold.OptionError, "form: got 'narrow'"),
        ((tree(), PATHS), {"dtype": "int8"}, jaxfold.OptionError, "dtype: got 'int8'"),
        ((tree(), PATHS), {"strict": 1}, jaxfold.OptionError, "strict: got 1"),
        ((tree(), PATHS), {"allow_growth": None}, jaxfold.OptionError, "allow_growth: got None"),
        ((tree(), PATHS), {"rows": -1}, jaxfold.OptionError, "rows: got -1"),
        ((tree(), PATHS), {"rows": 1.5}, jaxfold.OptionError, "rows: got 1.5"),
        ((tree(), PATHS), {"inputs": {"up": CASE.x}}, jaxfold.StructureError, "inputs: got the path 'up'"),
        (
            (tree(), PATHS),
            {"inputs": {"net/up": np.ones((3, 4))}},
            jaxfold.ShapeError,
            r"inputs\['net/up'\]: got shape",
        ),
        (
            (tree(), PATHS),
            {"inputs": {"net/up": np.ones(5, int)}},
            jaxfold.DtypeError,
            r"inputs\['net/up'\]: got dtype",
        ),
    ],
)
def test_arguments(arguments: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        contract_tree(*arguments, **options)


def test_tracers_and_shapes_are_the_callers_mistake() -> None:
    """Not a row of a report that nobody reads under jit."""
    with pytest.raises(jaxfold.ConcretenessError, match="net/up/kernel: got a tracer"):
        jax.jit(lambda params: contract_tree(params, PATHS)[0])(tree())
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree()))
    with pytest.raises(jaxfold.ConcretenessError, match="net/up/kernel: got a ShapeDtypeStruct"):
        contract_tree(shapes, PATHS)


def test_deleted_arrays() -> None:
    params = jax.tree.map(jnp.asarray, jax.tree.map(np.float32, tree()))
    params["net"]["norm"]["scale"].delete()
    with pytest.raises(jaxfold.ConcretenessError, match="net/norm/scale: got an array that was deleted"):
        contract_tree(params, PATHS)


def test_pattern_that_matches_nothing() -> None:
    paths = BlockPaths(producer="net/layer_*/up", norm=None, consumers="net/down", epsilon=1e-3)
    _, report = contract_tree(tree(), paths)
    assert report.unmatched == ("net/layer_*/up",)
    assert report.hints == ("net has the keys 'up', 'norm', 'down'.",)
    assert "net/layer_*/up: matched nothing. net has the keys 'up', 'norm', 'down'." in str(report)
    with pytest.raises(
        jaxfold.StructureError, match=r"blocks: got the pattern 'net/layer_\*/up', which matches nothing"
    ):
        contract_tree(tree(), paths, strict=True)
    flat = {"/".join(keys): leaf for keys, leaf in traverse_util.flatten_dict(tree()).items()}
    assert "The tree is flat: nest it first" in contract_tree(flat, PATHS)[1].hints[0]
    assert "Its root has the keys 'params'." in contract_tree({"params": tree()}, PATHS)[1].hints[0]
    assert contract_tree({"net": np.ones(2)}, PATHS)[1].hints == ("net has no keys.",)


def test_paths_a_level_off() -> None:
    """Variables in place of their parameters, or the reverse; a row of the report says so, and so does strict mode."""
    below = "Pass what is at 'params' in it, as in params['params'], or begin the paths with 'params/'."
    for root in ({"params": tree()}, {"params": tree(), "batch_stats": {}}, freeze({"params": tree()})):
        (hint,) = contract_tree(root, PATHS)[1].hints
        assert hint.endswith(below)
        with pytest.raises(jaxfold.StructureError, match="or begin the paths with 'params/'"):
            contract_tree(root, PATHS, strict=True)
    starred = BlockPaths(producer="n*/up", norm="n*/norm", consumers="n*/down", epsilon=1e-3)
    assert contract_tree({"params": tree()}, starred)[1].hints[0].endswith(below)
    rooted = BlockPaths(producer="params/net/up", norm="params/net/norm", consumers="params/net/down", epsilon=1e-3)
    assert contract_tree({"params": tree()}, rooted)[1].contracted
    assert contract_tree(tree(), rooted)[1].hints[0].endswith("Leave out 'params/', in the other paths too.")
    norm = BlockPaths(producer="params/net/up", norm="net/norm", consumers="params/net/down", epsilon=1e-3)
    assert one({"params": tree()}, norm).reason.endswith(below)
    state = TrainState.create(apply_fn=None, params=tree(), tx=optax.identity())
    with pytest.raises(jaxfold.StructureError, match=r"params: got a TrainState; .* state\.params of a TrainState"):
        contract_tree(state, PATHS)


def test_paths_with_dots() -> None:
    dotted = BlockPaths(producer="net.up", norm="net/norm", consumers="net/down", epsilon=1e-3)
    (hint,) = contract_tree(tree(), dotted)[1].hints
    assert hint == "Its root has the keys 'net', 'other'. Keys are separated by '/', not by dots."
    norm = BlockPaths(producer="net/up", norm="net.norm", consumers="net/down", epsilon=1e-3)
    assert one(tree(), norm).reason.endswith("Keys are separated by '/', not by dots.")


@pytest.mark.parametrize("norm_type", [None, "layernorm", "rmsnorm"])
def test_a_norm_without_a_bias_has_to_be_declared(norm_type: Any) -> None:
    """Leaves with a scale alone are LayerNorm's without a bias, or RMSNorm's; the wrong one is another function."""
    paths = BlockPaths(producer="net/up", norm="net/norm", consumers="net/down", epsilon=1e-3, norm_type=norm_type)
    params = tree(norm_bias=None)
    if norm_type is None:
        assert one(params, paths).reason.startswith("norm_type of the block of net/up: got nothing")
        return
    new, report = contract_tree(params, paths, strict=True)
    assert report.rows[0].norm_type == norm_type
    contraction = jaxfold.Contraction(new["net"]["up"], 16, 1e-3, norm_type, "direct")
    scale = {"scale": CASE.norm["scale"]}
    for kind in ("layernorm", "rmsnorm"):
        truth = two_pass(CASE.producer, scale, CASE.consumer, CASE.x, epsilon=1e-3, norm_type=kind)
        error = row_errors(truth, jaxfold.apply(contraction, CASE.x.astype(np.float32))).max()
        assert (error < 1e-5) == (kind == norm_type)


def test_errors_survive_pickling_and_renaming() -> None:
    import pickle

    with pytest.raises(jaxfold.GrowthError) as raised:
        jaxfold.contract(*make_case(20, 16, 7).layers, epsilon=1e-3)
    moved = pickle.loads(pickle.dumps(raised.value.at("net/down")))
    assert str(moved).startswith("net/down: got a block whose direct form has")
    assert moved.plan == raised.value.plan
    assert raised.value.argument == "consumers"
