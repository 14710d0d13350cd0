"""From a file to a file: the block contracted as in memory, everything else bit for bit, in every format."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._files._contract_checkpoint import contract_checkpoint
from jaxfold._files._formats import read_checkpoint
from jaxfold._files._leaf import StoredLeaf
from tests.files.formats import (
    BLOCK,
    EPSILON,
    FORMATS,
    GONE,
    NEW,
    SIZES,
    flatten,
    identical,
    load,
    make_tree,
    path_of,
    save,
)
from tests.reference import row_errors, two_pass


@pytest.fixture(params=FORMATS)
def source(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> tuple[pathlib.Path, str]:
    path = path_of(tmp_path, request.param)
    save(path, make_tree(request.param), request.param)
    return path, request.param


def test_all_else_keeps_its_bits_and_its_order(source: tuple[pathlib.Path, str]) -> None:
    path, format = source
    out = path_of(path.parent, format, "out")
    report = contract_checkpoint(path, [BLOCK], out, rows=0)
    assert [row.decision for row in report.rows] == ["contracted"]
    before, after = load(path, format), load(out, format)
    kept = [name for name in before if name not in GONE]
    assert len(kept) > 5
    assert [name for name in after if name not in NEW] == kept
    assert set(after) - set(kept) == set(NEW)
    assert [name for name in kept if not identical(before[name], after[name])] == []
    assert not identical(before["half"], after["count"])  # the comparison can fail
    assert sorted(path.parent.iterdir()) == sorted([path, out])


@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
def test_evaluates_as_in_memory(source: tuple[pathlib.Path, str], form: Any) -> None:
    path, format = source
    out = path_of(path.parent, format, "out")
    contract_checkpoint(path, [BLOCK], out, form=form, rows=0)
    net = make_tree(format)["net"]
    expected = jaxfold.contract(net["up"], net["norm"], net["down"], epsilon=EPSILON, form=form)
    leaves = {
        name.removeprefix("net/up/"): leaf for name, leaf in load(out, format).items() if name.startswith("net/up/")
    }
    params: dict[str, Any] = {"denominator": {}, "consumer": {}}
    for name, leaf in leaves.items():
        group, key = name.split("/")
        params[group][key] = jnp.asarray(leaf)
    restored = jaxfold.Contraction(params, SIZES[1], EPSILON, "layernorm", form)
    x = np.random.default_rng(2).standard_normal((50, SIZES[0]), dtype=np.float32)
    y = np.asarray(jaxfold.apply(restored, x))
    assert y.tobytes() == np.asarray(jaxfold.apply(expected, x)).tobytes()
    truth = two_pass(net["up"], net["norm"], net["down"], x, epsilon=EPSILON)
    # 32 products of order 1 in float32, eps 1.2e-7, summed at random signs, relative to the largest output of the row.
    assert row_errors(truth, y).max() < 1e-5


def test_loads_the_leaves_of_the_block_alone(source: tuple[pathlib.Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, format = source
    loaded: list[tuple[int, ...]] = []
    original = StoredLeaf.__array__

    def count(self: StoredLeaf, *args: Any, **kwargs: Any) -> np.ndarray:
        loaded.append(self.shape)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StoredLeaf, "__array__", count)
    contract_checkpoint(path, [BLOCK], path_of(path.parent, format, "out"), rows=0)
    d, n, m = SIZES
    assert sorted(loaded) == sorted([(d, n), (n,), (n,), (n,), (n, m), (m,)])


def test_leaves_load_as_the_library_loads_them(source: tuple[pathlib.Path, str]) -> None:
    path, format = source
    stored, expected = flatten(read_checkpoint(path).tree), load(path, format)
    arrays = {name: leaf for name, leaf in stored.items() if isinstance(leaf, StoredLeaf)}
    assert set(stored) == set(expected)
    assert len(arrays) > 10
    for name, leaf in arrays.items():
        value = np.asarray(leaf)
        assert (leaf.shape, leaf.dtype, leaf.size, leaf.ndim) == (value.shape, value.dtype, value.size, value.ndim)
        assert leaf.nbytes == value.nbytes
        assert identical(value, np.asarray(expected[name]))
        assert value.flags.writeable


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_names_with_dots(format: str, tmp_path: pathlib.Path) -> None:
    path, out = path_of(tmp_path, format), path_of(tmp_path, format, "out")
    tree = make_tree(format)
    save(path, tree, format, separator=".")
    contract_checkpoint(path, [BLOCK], out, rows=0)
    after = load(out, format)
    assert {name.replace("/", ".") for name in NEW} <= set(after)
    assert identical(after["apple.double"], tree["apple"]["double"])
    assert not [name for name in after if "/" in name]


def test_several_blocks_by_a_pattern(tmp_path: pathlib.Path) -> None:
    tree = {f"layer_{index}": make_tree("npz")["net"] for index in range(3)}
    path, out = path_of(tmp_path, "safetensors"), path_of(tmp_path, "safetensors", "out")
    save(path, tree, "safetensors")
    every = jaxfold.BlockPaths(producer="layer_*/up", norm="layer_*/norm", consumers="layer_*/down", epsilon=1e-6)
    report = contract_checkpoint(path, [every], out, rows=0)
    assert len(report.contracted) == 3
    assert len(load(out, "safetensors")) == 9
    assert report.parameters[1] == sum(leaf.size for leaf in load(out, "safetensors").values())
