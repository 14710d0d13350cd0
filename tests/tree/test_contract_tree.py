"""contract_tree: the right layers go, the rest is the same objects, and the report says what happened."""

from __future__ import annotations

import collections
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze

import jaxfold
from jaxfold import BlockPaths, contract_tree
from tests.factories import Case, make_case
from tests.reference import row_errors, two_pass

# As in tests/block/test_exactness.py: products of at most 100 terms, 100 · 2⁻⁵³, and the reference's own error.
FLOAT64 = 1e-13
EPS = 1e-3


def layer(case: Case) -> dict[str, Any]:
    return {"up": case.producer, "norm": case.norm, "down": case.consumer}


CASES = [make_case(5, 16, 7, seed=seed) for seed in range(3)]
PATHS = BlockPaths(producer="layer_*/up", norm="layer_*/norm", consumers="layer_*/down", epsilon=EPS)


def encoder() -> dict[str, Any]:
    """Three layers to contract, and leaves of all kinds around them."""
    tree: dict[str, Any] = {f"layer_{index}": layer(case) for index, case in enumerate(CASES)}
    return {"embed": {"embedding": np.ones((9, 5))}, **tree, "step": np.int32(3), "head": [jnp.ones(3), None, "text"]}


def evaluate(params: Any, case: Case = CASES[0], *, epsilon: float = EPS) -> Any:
    """A contracted block out of a tree, as its module evaluates it."""
    return jaxfold.apply(jaxfold.Contraction(params, 16, epsilon, "layernorm", "direct"), case.x)


def right(params: Any, case: Case, *, epsilon: float = EPS) -> bool:
    truth = two_pass(*case.layers, case.x, epsilon=EPS)
    return bool(row_errors(truth, evaluate(params, case, epsilon=epsilon)).max() < FLOAT64)


def snapshot(tree: Any) -> list[tuple[str, int, bytes]]:
    """Every leaf: its path, which object it is, and its bytes."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), id(leaf), np.asarray(leaf).tobytes()) for path, leaf in found]


@pytest.mark.usefixtures("x64")
def test_every_layer_of_a_pattern() -> None:
    tree = encoder()
    before = snapshot(tree)
    new, report = contract_tree(tree, PATHS)
    assert snapshot(tree) == before
    assert list(new) == list(tree)
    for index, case in enumerate(CASES):
        assert list(new[f"layer_{index}"]) == ["up"]
        assert right(new[f"layer_{index}"]["up"], case)
        assert not right(new[f"layer_{index}"]["up"], CASES[index - 1])  # the neighbour's layer is another function
        assert not right(new[f"layer_{index}"]["up"], case, epsilon=1e-6)
    assert [row.producer for row in report.rows] == ["layer_0/up", "layer_1/up", "layer_2/up"]
    assert report.unmatched == ()
    assert report.skipped == ()


def test_the_rest_is_the_same_objects_in_new_containers() -> None:
    tree = encoder()
    new, _ = contract_tree(tree, PATHS)
    assert new["embed"] is not tree["embed"]
    assert new["embed"]["embedding"] is tree["embed"]["embedding"]
    assert new["step"] is tree["step"]
    assert new["head"] is not tree["head"]
    assert [a is b for a, b in zip(new["head"], tree["head"], strict=True)] == [True] * 3
    new["embed"]["more"] = 1
    assert "more" not in tree["embed"]


def test_counts() -> None:
    """Parameters, bytes and FLOPs by hand: d 5, n 16, m 7, with every bias, in float64."""
    before, after = 5 * 16 + 16 + 32 + 16 * 7 + 7, 5 * 6 + 6 + 7 * 7
    rest = 9 * 5 + 1 + 3  # embedding, step, head
    _, report = contract_tree(encoder(), PATHS)
    assert report.parameters == (3 * before + rest, 3 * after + rest)
    assert report.bytes[0] - report.bytes[1] == 8 * 3 * (before - after)
    row = report.rows[0]
    assert (row.original and row.original.parameters, row.contracted and row.contracted.parameters) == (before, after)
    assert (row.features, row.width, row.outputs, row.stack) == (5, 16, ((7,),), None)
    plan = jaxfold.plan(*CASES[0].layers)
    assert report.flops == (3 * plan.original.flops, 3 * plan.direct.flops)


def test_report_prints_and_converts() -> None:
    blocks = [PATHS, BlockPaths(producer="decoder/*", norm=None, consumers="x", epsilon=EPS)]
    tree = encoder()
    tree["layer_1"]["norm"] = {"scale": np.full(16, np.nan), "bias": np.ones(16)}
    _, report = contract_tree(tree, blocks)
    text = str(report)
    for expected in ("layer_0/up → layer_0/up", "5/16/7", "247 → 85", "decoder/*: matched nothing", "2 of 3 blocks"):
        assert expected in text
    assert "layer_1/up: left alone. layer_1/norm/scale: got 16 non-finite" in text
    assert "\n" not in str(report.rows[1].reason)
    plain = json.loads(report.to_json())
    assert plain == report.to_dict() | {"rows": plain["rows"]}
    assert [row["decision"] for row in plain["rows"]] == ["contracted", "skipped", "contracted"]
    assert plain["totals"]["parameters"] == {"before": report.parameters[0], "after": report.parameters[1]}
    assert plain["rows"][0]["certificate"]["outputs"]["contracted_max"] < 1e-5
    assert plain["unmatched"] == ["decoder/*"]


def test_infinite_condition_is_json_none() -> None:
    case = make_case(5, 16, 7)
    case.producer["kernel"][:, 0] = case.producer["kernel"][:, 1]
    case.producer["kernel"][0] = 0
    _, report = contract_tree(layer(case), BlockPaths(producer="up", norm="norm", consumers="down", epsilon=EPS))
    condition = json.loads(report.to_json())["rows"][0]["certificate"]["condition"]
    assert condition is None or condition > 1e12


def test_certificate_is_measured_on_the_inputs_that_are_given() -> None:
    tree = {"layer_0": layer(CASES[0].astype(np.float32)), "layer_1": layer(CASES[1].astype(np.float32))}
    inputs = {"layer_0/up": CASES[0].x.astype(np.float32)[:5]}
    _, report = contract_tree(tree, PATHS, inputs=inputs, rows=0)
    certificate = report.rows[0].certificate
    assert certificate is not None
    assert certificate.rows == 5
    assert report.rows[1].certificate is None
    expected = jaxfold.verify(
        jaxfold.Block(*(tree["layer_0"][key] for key in ("up", "norm", "down")), epsilon=EPS),
        jaxfold.contract(*(tree["layer_0"][key] for key in ("up", "norm", "down")), epsilon=EPS),
        inputs["layer_0/up"],
    )
    assert certificate == expected


class Pair(NamedTuple):
    first: Any
    second: Any


def frozen_state(tree: Any) -> Any:
    return nnx.State(jax.tree.map(nnx.Param, tree))


CONTAINERS = {
    "dict": lambda tree: tree,
    "FrozenDict": freeze,
    "OrderedDict": collections.OrderedDict,
    "dict in FrozenDict's place": lambda tree: {"a": freeze(tree)}["a"],
    "nnx.State": frozen_state,
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_container_types_are_kept(kind: str) -> None:
    tree = CONTAINERS[kind]({"layer_0": layer(CASES[0]), "rest": {"deep": {"w": np.ones(3)}}})
    new, _ = contract_tree(tree, PATHS, strict=True)
    assert type(new) is type(tree)
    assert type(new["layer_0"]) is type(tree["layer_0"])
    assert type(new["layer_0"]["up"]) is type(tree["layer_0"])
    assert type(new["rest"]["deep"]) is type(tree["rest"]["deep"])
    assert new["rest"]["deep"]["w"] is tree["rest"]["deep"]["w"]
    plain = jax.tree.map(lambda leaf: leaf, new["layer_0"]["up"])
    leaves = jax.tree.leaves(plain)
    assert len(leaves) == 3
    if kind == "nnx.State":
        assert type(new["layer_0"]["up"]["denominator"]["kernel"]) is type(tree["layer_0"]["up"]["kernel"])
        assert right({"denominator": _bare(plain["denominator"]), "consumer": _bare(plain["consumer"])}, CASES[0])
    else:
        assert right(plain, CASES[0])


def _bare(group: Any) -> dict[str, Any]:
    return {key: jax.tree.leaves(leaf)[0] for key, leaf in group.items()}


def test_default_factory_is_kept() -> None:
    tree = collections.defaultdict(list, {"layer_0": layer(CASES[0])})
    new, _ = contract_tree(tree, PATHS, strict=True)
    assert isinstance(new, collections.defaultdict)
    assert new.default_factory is list
    assert list(tree["layer_0"]) == ["up", "norm", "down"]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [list, tuple, lambda items: Pair(*items[:2])], ids=["list", "tuple", "namedtuple"])
def test_sequences_hold_their_places(make: Any) -> None:
    """A list's places are its names: what goes leaves an empty dict behind."""
    parts = make([layer(CASES[0]), layer(CASES[1]), {"w": np.ones(2)}])
    new, report = contract_tree(
        {"layers": parts},
        BlockPaths(producer="layers/*/up", norm="layers/*/norm", consumers="layers/*/down", epsilon=EPS),
    )
    assert len(report.contracted) == 2
    assert type(new["layers"]) is type(parts)
    assert right(new["layers"][1]["up"], CASES[1])
    flat = make([CASES[0].producer, CASES[0].norm, CASES[0].consumer])
    if len(flat) == 3:
        new, _ = contract_tree(flat, BlockPaths(producer="0", norm="1", consumers="2", epsilon=EPS))
        assert type(new) is type(flat)
        assert right(new[0], CASES[0])
        assert tuple(new[1:]) == ({}, {})


@pytest.mark.usefixtures("x64")
def test_integer_keys_and_tuples_of_keys() -> None:
    tree = {"layers": {0: layer(CASES[0]), 10: layer(CASES[1])}, "a/b": {"x": layer(CASES[2])}}
    blocks = [
        BlockPaths(
            producer="layers/*/up", norm="layers/*/norm", consumers="layers/*/down", epsilon=EPS, to="layers/*/new"
        ),
        BlockPaths(producer=("a/b", "x", "up"), norm=("a/b", "x", "norm"), consumers=("a/b", "x", "down"), epsilon=EPS),
    ]
    new, report = contract_tree(tree, blocks, strict=True)
    assert list(new["layers"]) == [0, 10]
    assert right(new["layers"][10]["new"], CASES[1])
    assert right(new["a/b"]["x"]["up"], CASES[2])
    assert [row.to for row in report.rows] == ["layers/0/new", "layers/10/new", "a/b/x/up"]


@pytest.mark.usefixtures("x64")
def test_several_consumers_and_what_is_beside_them() -> None:
    heads = {name: make_case(5, 16, (2, 3), seed=seed).consumer for seed, name in enumerate(("query", "key"))}
    attention = {**heads, "out": {"kernel": np.ones((2, 3, 5))}}
    tree = {"up": CASES[0].producer, "norm": CASES[0].norm, "attn": attention}
    names = {"query": "attn/query", "key": "attn/key"}
    new, report = contract_tree(tree, BlockPaths(producer="up", norm="norm", consumers=names, epsilon=EPS))
    assert list(new) == ["up", "attn"]
    assert list(new["attn"]) == ["out"]
    assert report.rows[0].consumers == names
    outputs = evaluate(new["up"])
    for name, group in heads.items():
        truth = two_pass(CASES[0].producer, CASES[0].norm, group, CASES[0].x, epsilon=EPS)
        assert row_errors(truth, outputs[name], 2).max() < FLOAT64


@pytest.mark.usefixtures("x64")
def test_stacks() -> None:
    """nn.scan and nn.vmap put an axis in front of every leaf."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(layer(case) for case in CASES))
    new, report = contract_tree({"layers": stacked}, BlockPaths(
        producer="layers/up", norm="layers/norm", consumers="layers/down", epsilon=EPS, stacked=True
    ), strict=True)  # fmt: skip
    assert report.rows[0].stack == 3
    assert new["layers"]["up"]["denominator"]["kernel"].shape == (3, 5, 6)
    for index, case in enumerate(CASES):
        assert right(jax.tree.map(lambda leaf, i=index: leaf[i], new["layers"]["up"]), case)


@pytest.mark.usefixtures("x64")
def test_producer_that_stays_is_counted() -> None:
    """Another reader, a residual say, keeps it: the saving is net of its n(d+1) parameters."""
    case = make_case(5, 64, 40)
    tree = layer(case)
    new, report = contract_tree(
        tree, BlockPaths(producer="up", norm="norm", consumers="down", epsilon=EPS, keep_producer=True), strict=True
    )
    assert list(new) == ["up", "norm"]
    assert new["up"]["kernel"] is tree["up"]["kernel"]
    contraction = jaxfold.Contraction(new["norm"], 64, EPS, "layernorm", "direct")
    assert row_errors(two_pass(*case.layers, case.x, epsilon=EPS), jaxfold.apply(contraction, case.x)).max() < FLOAT64
    row = report.rows[0]
    assert row.keep_producer
    assert row.contracted is not None
    assert row.contracted.parameters == (5 * 6 + 6 + 40 * 7) + 64 * 6
    assert report.parameters[1] == row.contracted.parameters
    assert "up: it stays, and is counted" in str(report)


@pytest.mark.usefixtures("x64")
def test_two_norms_over_one_producer() -> None:
    """Both contract; the producer goes once neither needs it."""
    other = make_case(5, 16, 4, seed=7)
    tree = {"up": CASES[0].producer, "a": CASES[0].norm, "b": other.norm, "f": CASES[0].consumer, "g": other.consumer}
    blocks = [
        BlockPaths(producer="up", norm="a", consumers="f", epsilon=EPS),
        BlockPaths(producer="up", norm="b", consumers="g", epsilon=EPS),
    ]
    new, _ = contract_tree(tree, blocks, strict=True, allow_growth=True)
    assert sorted(new) == ["a", "b"]
    assert right(new["a"], CASES[0])
    truth = two_pass(CASES[0].producer, other.norm, other.consumer, other.x, epsilon=EPS)
    assert row_errors(truth, evaluate(new["b"], other)).max() < FLOAT64

    tree["b"] = {"scale": np.full(16, np.inf)}
    new, report = contract_tree(tree, blocks, allow_growth=True)
    assert sorted(new) == ["a", "b", "g", "up"]  # what the block that was skipped needs
    assert report.rows[0].keep_producer
    assert [row.decision for row in report.rows] == ["contracted", "skipped"]


def test_chain() -> None:
    """The Dense between two norms belongs to one block only."""
    tree = {**layer(CASES[0]), "norm2": {"scale": np.ones(7)}, "last": {"kernel": np.ones((7, 2))}}
    blocks = [
        BlockPaths(producer="up", norm="norm", consumers="down", epsilon=EPS),
        BlockPaths(producer="down", norm="norm2", consumers="last", epsilon=EPS),
    ]
    new, report = contract_tree(tree, blocks)
    assert list(new) == ["up", "norm2", "last"]
    assert report.rows[1].decision == "skipped"
    assert report.rows[1].reason.startswith("down: got a producer that is the consumer of the block of up too")
    assert new["last"]["kernel"] is tree["last"]["kernel"]


def test_leaves_in_two_places_stay_in_the_other() -> None:
    tied = CASES[0].consumer
    tree = {**layer(CASES[0]), "head": tied}
    new, report = contract_tree(tree, BlockPaths(producer="up", norm="norm", consumers="down", epsilon=EPS))
    assert new["head"]["kernel"] is tied["kernel"]
    assert "down/kernel is also at head/kernel, where it stays" in report.rows[0].notes
    before = sum(leaf.size for leaf in jax.tree.leaves(layer(CASES[0])))
    assert report.parameters == (before, 5 * 6 + 6 + 7 * 7 + 16 * 7 + 7)


def test_nothing_is_traced_again() -> None:
    """A second contraction of the same shapes finds the user's function compiled."""
    traces = []

    @jax.jit
    def model(params: Any, x: Any) -> Any:
        traces.append(1)
        return evaluate(params["layer_0"]["up"], CASES[0]) + x

    for case in CASES:
        tree, _ = contract_tree({"layer_0": layer(case.astype(np.float32))}, PATHS)
        model(tree, jnp.zeros(()))
        contraction = jaxfold.contract(*case.astype(np.float32).layers, epsilon=EPS)
        jax.jit(lambda block: traces.append(2) or block.c)(contraction)
    assert traces.count(1) == 1


def test_options_reach_the_contraction() -> None:
    tree = {"layer_0": layer(CASES[0])}
    new, report = contract_tree(tree, PATHS, form="packed", dtype="float32")
    assert new["layer_0"]["up"]["denominator"]["kernel"].shape == (5 * 6 // 2,)
    assert new["layer_0"]["up"]["consumer"]["kernel"].dtype == np.float32
    assert report.rows[0].form == "packed"
    assert report.rows[0].contracted is not None
    assert report.rows[0].contracted.bytes == 4 * (5 * 6 // 2 + 6 + 49)


@pytest.mark.usefixtures("x64")
def test_rmsnorm_and_unit_offset() -> None:
    case = make_case(5, 16, 7, norm_type="rmsnorm", offset=False)
    paths = BlockPaths(producer="up", norm="norm", consumers="down", epsilon=EPS, norm_type="rmsnorm", unit_offset=True)
    new, _ = contract_tree(layer(case), paths)
    truth = two_pass(*case.layers, case.x, epsilon=EPS, norm_type="rmsnorm", unit_offset=True)
    assert row_errors(truth, evaluate(new["up"], case)).max() < FLOAT64


def test_tree_without_a_match_comes_back_in_new_containers() -> None:
    tree = {"a": {"b": jnp.ones(2)}}
    new, report = contract_tree(tree, PATHS)
    assert new == tree
    assert new["a"] is not tree["a"]
    assert report.rows == ()
    assert report.unmatched == ("layer_*/up",)


def test_frozen_inside() -> None:
    tree = {"layer_0": freeze(layer(CASES[0])), "other": FrozenDict({"w": np.ones(2)})}
    new, _ = contract_tree(tree, PATHS, strict=True)
    assert type(new) is dict
    assert isinstance(new["layer_0"], FrozenDict)
    assert isinstance(new["other"], FrozenDict)


@pytest.mark.usefixtures("x64")
def test_a_block_that_is_named_twice() -> None:
    new, report = contract_tree({"layer_0": layer(CASES[0])}, [PATHS, PATHS])
    assert list(new["layer_0"]) == ["up"]
    assert right(new["layer_0"]["up"], CASES[0])
    assert [row.decision for row in report.rows] == ["contracted", "skipped"]
    assert "layer_0/up: got a block that is named twice" in report.rows[1].reason


def test_two_blocks_with_one_consumer() -> None:
    """The second is left alone, and what it reads stays."""
    tree = {"layer_0": layer(CASES[0]), "layer_1": {"up": CASES[1].producer, "norm": CASES[1].norm}}
    blocks = [
        BlockPaths(producer="layer_0/up", norm="layer_0/norm", consumers="layer_0/down", epsilon=EPS),
        BlockPaths(producer="layer_1/up", norm="layer_1/norm", consumers="layer_0/down", epsilon=EPS),
    ]
    new, report = contract_tree(tree, blocks)
    assert [row.decision for row in report.rows] == ["contracted", "skipped"]
    assert sorted(new["layer_0"]) == ["down", "up"]
    assert new["layer_0"]["down"]["kernel"] is tree["layer_0"]["down"]["kernel"]
    assert sorted(new["layer_1"]) == ["norm", "up"]


def test_blocks_may_come_from_a_generator() -> None:
    _, report = contract_tree(encoder(), (block for block in [PATHS]))
    assert len(report.contracted) == 3


@pytest.mark.usefixtures("x64")
def test_attention_stands_for_its_projections() -> None:
    heads = {name: make_case(5, 16, (2, 3), seed=seed).consumer for seed, name in enumerate(("query", "key", "value"))}
    tree = {"up": CASES[0].producer, "norm": CASES[0].norm, "attn": {**heads, "out": {"kernel": np.ones((2, 3, 5))}}}
    new, report = contract_tree(
        tree, BlockPaths(producer="up", norm="norm", consumers="attn", epsilon=EPS), strict=True
    )
    assert report.rows[0].consumers == {name: f"attn/{name}" for name in heads}
    assert list(new["attn"]) == ["out"]
    outputs = evaluate(new["up"])
    for name, group in heads.items():
        truth = two_pass(CASES[0].producer, CASES[0].norm, group, CASES[0].x, epsilon=EPS)
        assert row_errors(truth, outputs[name], 2).max() < FLOAT64


@pytest.mark.usefixtures("x64")
def test_variables_as_checkpoints_hold_them() -> None:
    """Orbax makes {"value": array} of an nnx.Variable."""
    tree = jax.tree.map(lambda leaf: {"value": leaf}, {"layer_0": layer(CASES[0]), "head": {"w": np.ones(3)}})
    new, report = contract_tree(tree, PATHS, strict=True)
    up = new["layer_0"]["up"]
    assert set(up["denominator"]["kernel"]) == {"value"}
    assert right(
        {group: {key: leaf["value"] for key, leaf in leaves.items()} for group, leaves in up.items()}, CASES[0]
    )
    assert report.parameters[1] == 5 * 6 + 6 + 7 * 7 + 3


def test_moments_of_an_optimiser_are_named() -> None:
    params = {"net": layer(CASES[0])}
    state = {"params": params, "opt_state": {"0": {"mu": params, "nu": jax.tree.map(np.zeros_like, params)}}}
    paths = BlockPaths(producer="params/net/up", norm="params/net/norm", consumers="params/net/down", epsilon=EPS)
    _, report = contract_tree(state, paths)
    note = "opt_state/0/mu/net/up, opt_state/0/nu/net/up has the same path and no longer fits: initialise it anew"
    assert note in report.rows[0].notes
    assert contract_tree(encoder(), PATHS)[1].rows[0].notes == ()


def test_shared_leaves_that_all_go_are_no_note() -> None:
    shared = layer(CASES[0])
    _, report = contract_tree({"layer_0": shared, "layer_1": dict(shared)}, PATHS)
    assert [row.notes for row in report.rows] == [(), ()]


def test_arguments_of_the_module() -> None:
    _, report = contract_tree(encoder(), PATHS, form="packed")
    expected = {
        "features": 7,
        "width": 16,
        "epsilon": EPS,
        "use_bias": True,
        "norm_type": "layernorm",
        "form": "packed",
    }
    assert report.rows[0].module_kwargs == expected
