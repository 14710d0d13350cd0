"""Leaves that are None, keys that read alike, producers of several blocks, and containers that cannot be copied."""

from __future__ import annotations

import collections
import pathlib
import shelve
from typing import Any

import numpy as np
import pytest
from flax import nnx
from flax.core import freeze, meta

import jaxfold
from jaxfold import BlockPaths, contract_tree
from tests.factories import make_case
from tests.reference import row_errors, two_pass

pytestmark = pytest.mark.usefixtures("x64")

# As in tests/block/test_exactness.py: products of at most 100 terms, 100 · 2⁻⁵³, and the reference's own error.
FLOAT64 = 1e-13
EPS = 1e-3
CASES = [make_case(5, 16, 7, seed=seed) for seed in range(2)]
CASE = CASES[0]


def error_of(params: Any, truth: np.ndarray, *, norm_type: Any = "layernorm", x: Any = CASE.x) -> float:
    contraction = jaxfold.Contraction(params, 16, EPS, norm_type, "direct")
    return float(row_errors(truth, jaxfold.apply(contraction, x)).max())


def layer(case: Any = CASE) -> dict[str, Any]:
    return {"up": case.producer, "norm": case.norm, "down": case.consumer}


NONE = {
    "bare": lambda: {"scale": CASE.norm["scale"], "bias": None},
    "frozen": lambda: freeze({"scale": CASE.norm["scale"], "bias": None}),
    "boxed": lambda: {"scale": CASE.norm["scale"], "bias": meta.Partitioned(None, names=())},
    "variable": lambda: {"scale": nnx.Param(CASE.norm["scale"]), "bias": nnx.Param(None)},
}


@pytest.mark.parametrize("name", NONE)
def test_a_leaf_that_is_none_is_absent(name: str) -> None:
    """A norm without a bias may be a LayerNorm or an RMSNorm, and None is no bias."""
    tree = {**layer(), "norm": NONE[name]()}
    options: dict[str, Any] = {"producer": "up", "norm": "norm", "consumers": "down", "epsilon": EPS}
    _, report = contract_tree(tree, BlockPaths(**options))
    assert report.rows[0].reason.startswith("norm_type of the block of up: got nothing; expected 'layernorm' or")
    kinds: tuple[Any, ...] = (("layernorm", "rmsnorm"), ("rmsnorm", "layernorm"))
    for norm_type, other in kinds:
        new, report = contract_tree(tree, BlockPaths(**options, norm_type=norm_type))
        assert report.contracted
        norm = {"scale": CASE.norm["scale"]}
        truth = two_pass(CASE.producer, norm, CASE.consumer, CASE.x, epsilon=EPS, norm_type=norm_type)
        wrong = two_pass(CASE.producer, norm, CASE.consumer, CASE.x, epsilon=EPS, norm_type=other)
        assert error_of(new["up"], truth, norm_type=norm_type) < FLOAT64
        assert error_of(new["up"], wrong, norm_type=norm_type) > 1e-3


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_bias_that_is_none_is_absent_in_dense_layers(role: str) -> None:
    absent = {name: ({"kernel": g["kernel"]} if name == role else g) for name, g in _roles().items()}
    nothing = {name: ({**g, "bias": None} if name == role else g) for name, g in _roles().items()}
    truth = two_pass(absent["producer"], CASE.norm, absent["consumer"], CASE.x, epsilon=EPS)
    for groups in (absent, nothing):
        block = jaxfold.contract(groups["producer"], CASE.norm, groups["consumer"], epsilon=EPS)
        assert float(row_errors(truth, jaxfold.apply(block, CASE.x)).max()) < FLOAT64


def _roles() -> dict[str, Any]:
    return {"producer": CASE.producer, "consumer": CASE.consumer}


def test_keys_that_read_alike_are_layers_of_their_own() -> None:
    """``1`` and ``"1"`` in one mapping."""
    tree = {"layers": {1: layer(CASES[0]), "1": layer(CASES[1])}}
    paths = BlockPaths(producer="layers/*/up", norm="layers/*/norm", consumers="layers/*/down", epsilon=EPS)
    new, report = contract_tree(tree, paths)
    assert len(report.contracted) == 2
    truths = [two_pass(*case.layers, case.x, epsilon=EPS) for case in CASES]
    for key, case, truth, other in ((1, CASES[0], truths[0], truths[1]), ("1", CASES[1], truths[1], truths[0])):
        assert error_of(new["layers"][key]["up"], truth, x=case.x) < FLOAT64
        assert error_of(new["layers"][key]["up"], other, x=case.x) > 1e-3


@pytest.mark.parametrize("path", ["layers/0/up", ("layers", 0, "up"), ("layers", "0", "up")])
def test_inputs_by_a_path_with_an_integer_key(path: Any) -> None:
    tree = {"layers": {0: layer(CASES[0]), 1: layer(CASES[1])}}
    paths = BlockPaths(producer="layers/*/up", norm="layers/*/norm", consumers="layers/*/down", epsilon=EPS)
    _, report = contract_tree(tree, paths, inputs={path: CASE.x}, rows=0)
    assert [row.certificate is not None for row in report.rows] == [True, False]


def test_every_block_of_a_producer_is_measured() -> None:
    tree = {"up": CASE.producer, **{f"{name}_{i}": layer()[name] for name in ("norm", "down") for i in (0, 1)}}
    blocks = [BlockPaths(producer="up", norm=f"norm_{i}", consumers=f"down_{i}", epsilon=EPS) for i in (0, 1)]
    _, report = contract_tree(tree, blocks, inputs={"up": CASE.x}, rows=0)
    assert [row.decision for row in report.rows] == ["contracted", "contracted"]
    assert all(row.certificate is not None for row in report.rows)


PATHS = BlockPaths(producer="up", norm="norm", consumers="down", epsilon=EPS)


def test_a_mapping_whose_copy_shares_its_storage_is_left_as_it_is(tmp_path: pathlib.Path) -> None:
    with shelve.open(str(tmp_path / "weights")) as weights:
        weights.update(layer())
        before = sorted(weights)
        with pytest.raises(
            jaxfold.StructureError, match=r"params: got .*Shelf; expected dict, .* as in dict\(params\)"
        ):
            contract_tree(weights, PATHS)
        assert sorted(weights) == before
        new, _ = contract_tree(dict(weights), PATHS)
        assert sorted(new) == ["up"]


class Configured(dict[str, Any]):
    """A dict whose constructor wants something else."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Sized(list[Any]):
    """A list whose constructor wants something else."""

    def __init__(self, size: int) -> None:
        super().__init__([None] * size)


def test_mappings_that_know_how_to_copy_keep_what_else_they_hold() -> None:
    configured = Configured("encoder")
    configured.update(layer())
    new, _ = contract_tree(configured, PATHS)
    assert (type(new), new.name, list(new)) == (Configured, "encoder", ["up"])
    assert sorted(configured) == ["down", "norm", "up"]
    user = collections.UserDict(layer())
    new, _ = contract_tree(user, PATHS)
    assert (type(new), list(new), sorted(user)) == (collections.UserDict, ["up"], ["down", "norm", "up"])


def test_a_list_with_a_constructor_of_its_own_is_refused() -> None:
    with pytest.raises(jaxfold.StructureError, match=r"more: got a Sized; expected dict, .* Convert it to a list"):
        contract_tree({**layer(), "more": Sized(2)}, PATHS)
