"""What another format would not restore is refused before anything is written; what is not a file is not replaced."""

from __future__ import annotations

import os
import pathlib
import signal
import stat
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._cli import _terminable
from jaxfold._files._contract_checkpoint import contract_checkpoint
from tests.files.formats import BLOCK, NEW, load, make_block, path_of, save

LEAVES: dict[str, np.ndarray] = {
    "objects": np.array([{"a": 1}, None], dtype=object),
    "strings": np.array(["one", "three"]),
    "bytes": np.array([b"one", b"three"]),
    "records": np.zeros(3, dtype=[("x", np.float32), ("y", np.int8)]),
    "dates": np.array(["2026-12-01"], dtype="datetime64[D]"),
    "bfloat16": np.ones(3, jnp.bfloat16),
}


@pytest.mark.parametrize("format", ["msgpack", "orbax", "safetensors"])
@pytest.mark.parametrize("name", LEAVES)
def test_what_the_other_format_would_lose_is_refused(name: str, format: str, tmp_path: pathlib.Path) -> None:
    source, out = path_of(tmp_path, "npz"), path_of(tmp_path, format, "out")
    save(source, {"net": make_block(), "more": {"leaf": LEAVES[name]}}, "npz")
    with pytest.raises(jaxfold.JaxfoldError, match="more/leaf: got "):
        contract_checkpoint(source, [BLOCK], out, rows=0)
    assert [entry.name for entry in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize("name", LEAVES)
def test_in_its_own_format_it_is_copied_as_it_lies(name: str, tmp_path: pathlib.Path) -> None:
    source, out = path_of(tmp_path, "npz"), path_of(tmp_path, "npz", "out")
    save(source, {"net": make_block(), "more": {"leaf": LEAVES[name]}}, "npz")
    contract_checkpoint(source, [BLOCK], out, rows=0)
    arrays = [np.load(path, allow_pickle=True)["more/leaf"] for path in (source, out)]
    assert arrays[0].dtype == arrays[1].dtype
    assert arrays[0].tolist() == arrays[1].tolist()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_others_read_is_not_replaced(kind: str, tmp_path: pathlib.Path) -> None:
    source, out = path_of(tmp_path, "npz"), tmp_path / "out.npz"
    save(source, {"net": make_block()}, "npz")
    if kind == "pipe":
        os.mkfifo(out)
    else:
        out.symlink_to(os.devnull)
    before = os.stat(out)
    with pytest.raises(
        jaxfold.OptionError, match=r"out\.npz, which is neither a file nor a directory; expected a file"
    ):
        contract_checkpoint(source, [BLOCK], out, rows=0, overwrite=True)
    assert (os.stat(out).st_mode, os.stat(out).st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_overwritten_keeps_its_mode(mode: int, tmp_path: pathlib.Path) -> None:
    source, out = path_of(tmp_path, "npz"), tmp_path / "out.npz"
    save(source, {"net": make_block()}, "npz")
    out.write_text("private")
    out.chmod(mode)
    contract_checkpoint(source, [BLOCK], out, rows=0, overwrite=True)
    assert stat.S_IMODE(out.stat().st_mode) == mode
    assert set(NEW) <= set(load(out, "npz"))


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_does_not_interrupt_the_removal(first: Any) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    removed = False
    with pytest.raises(KeyboardInterrupt if first == signal.SIGINT else SystemExit), _terminable():  # noqa: PT012
        try:
            signal.raise_signal(first)
        finally:
            for each in before:
                signal.raise_signal(each)
            removed = True
    assert removed
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_pipe_is_not_read(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(jaxfold.OptionError, match=r"checkpoint: got .*neither a file nor a directory"):
        contract_checkpoint(tmp_path / "pipe.npz", [BLOCK], tmp_path / "out.npz", rows=0)


@pytest.mark.parametrize(("source", "target"), [("orbax", "orbax"), ("npz", "orbax"), ("orbax", "npz")])
def test_who_may_read_a_directory(source: str, target: str, tmp_path: pathlib.Path) -> None:
    """Also where a directory takes the place of a file, and the other way round."""
    path, out = path_of(tmp_path, source), tmp_path / "out.orbax"
    save(path, {"net": make_block()}, source)
    if target == "orbax":
        save(out, {"old": np.ones(1)}, "orbax")
    else:
        out.write_text("old")
    out.chmod(0o700 if out.is_dir() else 0o640)
    contract_checkpoint(path, [BLOCK], out, rows=0, overwrite=True)
    assert set(load(out, "orbax")) == set(NEW)
    assert stat.S_IMODE(out.stat().st_mode) == (0o700 if target == "orbax" else 0o750)


def test_keys_of_several_types_are_refused_before_orbax_sorts_them(tmp_path: pathlib.Path) -> None:
    source = path_of(tmp_path, "msgpack")
    tree = {"net": make_block(), "other": [{1: np.ones(1), "1": np.ones(2)}]}
    source.write_bytes(flax.serialization.msgpack_serialize(tree, in_place=True))  # in a copy, JAX sorts the keys
    with pytest.raises(jaxfold.StructureError, match="other/0: got keys of several types"):
        contract_checkpoint(source, [BLOCK], path_of(tmp_path, "orbax", "out"), rows=0)
    assert [entry.name for entry in tmp_path.iterdir()] == [source.name]
    contract_checkpoint(source, [BLOCK], path_of(tmp_path, "msgpack", "out"), rows=0)
