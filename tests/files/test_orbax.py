"""Directories of Orbax in all the shapes that its writers make."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxfold
import jaxfold.linen
from jaxfold._cli import main
from jaxfold._files import _orbax
from jaxfold._files._contract_checkpoint import contract_checkpoint
from jaxfold._files._formats import read_checkpoint
from tests.files.formats import BLOCK, NEW, flatten, identical, load, make_block


def tree() -> dict[str, Any]:
    return {"net": make_block(), "lists": [np.ones(3), {"a": np.arange(2)}], "step": 3, "rate": 0.5, "none": None}


def manager(path: pathlib.Path, **items: Any) -> None:
    with ocp.CheckpointManager(path) as steps:
        for step in (3, 12):
            saved = {name: ocp.args.StandardSave(item) for name, item in items.items()}
            steps.save(step, args=ocp.args.Composite(**saved) if "default" not in items else saved["default"])
        steps.wait_until_finished()


def test_standard_checkpointer_both_ways(tmp_path: pathlib.Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "in", tree())
        checkpointer.wait_until_finished()
        contract_checkpoint(tmp_path / "in", [BLOCK], tmp_path / "out", rows=0)
        restored = flatten(checkpointer.restore(tmp_path / "out"))
    expected = flatten(tree())
    assert set(restored) >= set(NEW)
    for name in ("lists/0", "lists/1/a"):
        assert identical(np.asarray(restored[name]), expected[name])
    assert (restored["step"], restored["rate"], restored["none"]) == (3, 0.5, None)


class Block(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)
        self.other = nnx.Linear(8, 3, rngs=rngs)


def test_a_state_of_nnx_on_the_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Orbax saves each variable as ``{"value": array}``; jaxfold shows the paths without, and writes the same."""
    model, path, out = Block(), tmp_path / "in", tmp_path / "out"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.state(model, nnx.Param))
        checkpointer.wait_until_finished()
    assert "kernel/value" in "".join(flatten(load(path, "orbax")))  # else there is nothing to test
    assert main(["inspect", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["candidates"]
    assert (row["producer"], row["norm"], row["consumers"]) == ("up", "norm", "down")
    option = row["block"].replace("EPSILON", "1e-6")
    assert main(["contract", str(path), "--out", str(out), "--block", option]) == 0
    printed = capsys.readouterr().out
    assert "(orbax, as the checkpoint that was read" in printed

    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(out)
    state: Any = nnx.to_pure_dict(nnx.state(model.other))
    for name in ("kernel", "bias"):
        assert identical(np.asarray(restored["other"][name]["value"]), np.asarray(state[name]))
    line = next(line for line in printed.splitlines() if line.startswith("  up: "))
    folded = eval(line.removeprefix("  up: "), {"ContractedDense": jaxfold.linen.ContractedDense})
    params = jax.tree.map(lambda box: box["value"], restored["up"], is_leaf=lambda node: "value" in node)
    x = np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32)
    # Two float32 computations of numbers of order 1 with sums of 32 terms: 32 eps is 4e-6 each.
    np.testing.assert_allclose(
        folded.apply({"params": params}, x), model.down(model.norm(model.up(jnp.asarray(x)))), rtol=0, atol=1e-5
    )


def metadata(path: pathlib.Path) -> Any:
    found: Any = ocp.PyTreeCheckpointer().metadata(path).item_metadata
    return found.tree


def test_numbers_keep_their_dtype(tmp_path: pathlib.Path) -> None:
    scalars = {"single": np.float32(0.1), "small": np.int8(3), "whole": 3, "real": 0.1}
    ocp.PyTreeCheckpointer().save(tmp_path / "in", {"net": make_block(), **scalars})
    contract_checkpoint(tmp_path / "in", [BLOCK], tmp_path / "out", rows=0)
    before, after = (metadata(tmp_path / name) for name in ("in", "out"))
    for name in scalars:
        assert (before[name].dtype, type(before[name])) == (after[name].dtype, type(after[name]))
    assert after["single"].dtype == np.float32
    assert load(tmp_path / "out", "orbax")["single"] == np.float32(0.1)


@pytest.mark.parametrize("items", [("default",), ("params", "opt"), ("weights",)])
def test_steps_of_a_manager(items: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    manager(tmp_path / "run", **dict.fromkeys(items, tree()))
    contract_checkpoint(tmp_path / "run" / "12", [BLOCK], tmp_path / "out", rows=0)
    assert set(NEW) <= set(load(tmp_path / "out", "orbax"))
    with pytest.raises(jaxfold.StructureError, match=r"run/12 is the last"):
        read_checkpoint(tmp_path / "run")


def test_items_of_unknown_names_are_listed(tmp_path: pathlib.Path) -> None:
    manager(tmp_path / "run", one=tree(), two=tree())
    with pytest.raises(jaxfold.StructureError, match=r"run/3/one, .*run/3/two"):
        read_checkpoint(tmp_path / "run" / "3")


def test_the_rest_is_read_in_one_go(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore, calls = _orbax._restore, []

    def count(item: pathlib.Path, only: int | None = None) -> list[Any]:
        calls.append(only)
        return restore(item, only)

    monkeypatch.setattr(_orbax, "_restore", count)
    ocp.PyTreeCheckpointer().save(tmp_path / "in", tree())
    for out in ("out.orbax", "out.msgpack"):
        calls.clear()
        contract_checkpoint(tmp_path / "in", [BLOCK], tmp_path / out, rows=0)
        assert len(calls) == 7  # the leaves of the block one by one
        assert calls[-1] is None


def test_directories_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(jaxfold.StructureError, match=r"empty.*an Orbax directory"):
        read_checkpoint(tmp_path / "empty")
    ocp.PyTreeCheckpointer().save(tmp_path / "in", tree())
    (tmp_path / "in" / "_METADATA").write_text("{")
    with pytest.raises(jaxfold.StructureError, match="Orbax cannot read"):
        read_checkpoint(tmp_path / "in")


def test_a_directory_without_its_data(tmp_path: pathlib.Path) -> None:
    """In a process of its own, for threads of Orbax go on for a while after it has given up."""
    ocp.PyTreeCheckpointer().save(tmp_path / "in", tree())
    for path in (tmp_path / "in" / "d").iterdir():
        path.unlink()
    command = [sys.executable, "-m", "jaxfold", "contract", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    command += ["--block", "producer=net/up,norm=net/norm,consumer=net/down,epsilon=1e-3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Orbax cannot read" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_orbax_does_not_save(tmp_path: pathlib.Path) -> None:
    import flax.serialization

    data = flax.serialization.msgpack_serialize({"net": make_block(), "z": 1j})
    (tmp_path / "a.msgpack").write_bytes(data)
    with pytest.raises(jaxfold.StructureError, match="Orbax does not save"):
        contract_checkpoint(tmp_path / "a.msgpack", [BLOCK], tmp_path / "out.orbax", rows=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.msgpack"]
