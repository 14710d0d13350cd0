"""What is written is whole or not there, and nothing is overwritten unasked."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import jaxfold
from jaxfold._files import _copy, _formats
from jaxfold._files._contract_checkpoint import contract_checkpoint
from jaxfold._files._copy import PAGE, SMALL, Span, writing
from jaxfold._files._formats import read_checkpoint
from jaxfold._files._leaf import StoredLeaf
from tests.files.formats import BLOCK, FORMATS, NEW, load, make_block, make_tree, path_of, save


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for format in ("npz", "safetensors"):
        save(path_of(tmp_path, format), make_tree(format), format)
    return tmp_path


def everything(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below the folder, with its content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, OSError])
def test_an_interruption_leaves_nothing(folder: pathlib.Path, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(folder)

    def stop(self: Any) -> None:
        assert len(list(folder.iterdir())) == 3  # it is under way
        raise error

    monkeypatch.setattr(_copy.Writer, "_copy_span", stop)
    with pytest.raises(error):
        contract_checkpoint(path_of(folder, "npz"), [BLOCK], folder / "out.npz", rows=0)
    assert everything(folder) == before
    with pytest.raises(error):
        contract_checkpoint(path_of(folder, "npz"), [BLOCK], path_of(folder, "npz"), rows=0, overwrite=True)
    assert everything(folder) == before


SIGNALLED = """
import pathlib, signal, sys
from jaxfold._cli import main
from jaxfold._files import _formats, _output
format, source, out, number = *sys.argv[1:4], int(sys.argv[4])
write, remove = _formats.WRITERS[format], _output._remove
def signalled(*arguments):
    write(*arguments)
    print(len(list(pathlib.Path(source).parent.iterdir())), flush=True)
    signal.raise_signal(number)  # Python runs the handler before this call returns, so that nothing depends on time
def signalled_again(folder):
    signal.raise_signal(number)
    remove(folder)
_formats.WRITERS[format], _output._remove = signalled, signalled_again
sys.exit(main(["contract", source, "--out", out, "--rows", "0", "--block",
               "producer=net/up,norm=net/norm,consumer=net/down,epsilon=1e-3"]))
"""


@pytest.mark.parametrize(
    ("format", "number"),
    [(f, number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for f in ("npz", "orbax")][:-1],
)
def test_signals_leave_nothing(format: str, number: signal.Signals, tmp_path: pathlib.Path) -> None:
    """Neither the first one, nor a second one while what is half-written is removed."""
    path = path_of(tmp_path, format)
    save(path, {"net": make_block()}, format)
    before = everything(tmp_path)
    arguments = [format, str(path), str(path_of(tmp_path, format, "out")), str(int(number))]
    done = subprocess.run([sys.executable, "-c", SIGNALLED, *arguments], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n"  # the source, and what was under way
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr
    assert everything(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_nothing_is_overwritten_unasked(folder: pathlib.Path) -> None:
    source, out = path_of(folder, "npz"), folder / "out.npz"
    out.write_text("mine")
    for taken in (out, source, folder / "." / "out.npz"):
        with pytest.raises(jaxfold.OptionError, match="--overwrite"):
            contract_checkpoint(source, [BLOCK], taken, rows=0)
    assert out.read_text() == "mine"
    contract_checkpoint(source, [BLOCK], out, rows=0, overwrite=True)
    assert set(NEW) <= set(load(out, "npz"))
    contract_checkpoint(source, [BLOCK], source, rows=0, overwrite=True)
    assert source.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("name", ["foo.txt", "foo.pt", "x.orbx", "npz.v1"])
def test_an_unknown_suffix_is_refused(name: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredLeaf, "__array__", None)  # before any work
    with pytest.raises(jaxfold.OptionError, match=r"names no format; expected \.npz, .*\.safetensors, \.orbax"):
        contract_checkpoint(path_of(folder, "npz"), [BLOCK], folder / name, rows=0)
    assert not (folder / name).exists()


def test_a_file_that_appears_meanwhile_stays(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write = folder / "out.npz", _formats.WRITERS["npz"]

    def and_another_does(*arguments: Any) -> None:
        write(*arguments)
        out.write_text("mine")

    monkeypatch.setitem(_formats.WRITERS, "npz", and_another_does)
    with pytest.raises(jaxfold.OptionError, match="there by now"):
        contract_checkpoint(path_of(folder, "npz"), [BLOCK], out, rows=0)
    assert out.read_text() == "mine"
    assert len(list(folder.iterdir())) == 3


def test_through_a_symbolic_link(folder: pathlib.Path) -> None:
    (folder / "real.npz").write_text("old")
    (folder / "link.npz").symlink_to(folder / "real.npz")
    contract_checkpoint(path_of(folder, "npz"), [BLOCK], folder / "link.npz", rows=0, overwrite=True)
    assert (folder / "link.npz").is_symlink()
    assert set(NEW) <= set(load(folder / "real.npz", "npz"))


def test_directories_are_swapped(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = path_of(folder, "orbax"), path_of(folder, "orbax", "out")
    save(source, {"net": make_block()}, "orbax")
    save(out, {"other": np.ones(3)}, "orbax")
    before = everything(folder)
    with pytest.raises(jaxfold.OptionError, match="--overwrite"):
        contract_checkpoint(source, [BLOCK], out, rows=0)

    rename = pathlib.Path.rename

    def fail_to_move_in(self: pathlib.Path, target: Any) -> Any:
        if self.parent.suffix == ".tmp":
            raise OSError("no")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", fail_to_move_in)
        with pytest.raises(OSError, match="no"):
            contract_checkpoint(source, [BLOCK], out, rows=0, overwrite=True)
    assert everything(folder) == before  # the old one is back

    contract_checkpoint(source, [BLOCK], out, rows=0, overwrite=True)
    assert set(load(out, "orbax")) == set(NEW)
    contract_checkpoint(source, [BLOCK], source, rows=0, overwrite=True)
    assert set(load(source, "orbax")) == set(NEW)
    assert len(list(folder.iterdir())) == 4


def test_directories_that_must_not_be_replaced(tmp_path: pathlib.Path) -> None:
    step, home = tmp_path / "run" / "7", tmp_path / "home"
    save(step / "params", {"net": make_block()}, "orbax")
    home.mkdir()
    (home / "letter").write_text("dear")
    before = everything(tmp_path)
    for out in (home, step, tmp_path / "run", step / "params" / "inside", tmp_path / "nowhere" / "out"):
        with pytest.raises(jaxfold.OptionError, match="out: "):
            contract_checkpoint(step, [BLOCK], out, rows=0, overwrite=True)
    assert everything(tmp_path) == before


def test_nothing_is_written_if_nothing_was_contracted(folder: pathlib.Path) -> None:
    nothing = jaxfold.BlockPaths(producer="nowhere", norm=None, consumers="net/down", epsilon=1e-6)
    report = contract_checkpoint(path_of(folder, "npz"), [nothing], folder / "out.npz")
    assert report.unmatched == ("nowhere",)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("way", ["aligned", "not aligned", "no such call", "refused", "half way"])
def test_copies(way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of copying ends in the same bytes, and counts them all."""
    data = np.random.default_rng(0).bytes(5 * SMALL)
    (tmp_path / "source").write_bytes(data)
    calls = []

    def fake(source: int, target: int, count: int, offset: int) -> int:
        calls.append(offset)
        if way == "refused" or (way == "half way" and len(calls) > 1):
            raise OSError
        return os.sendfile(target, source, offset, min(count, 2 * SMALL))

    if way == "no such call":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    else:
        monkeypatch.setattr(os, "copy_file_range", fake, raising=False)
    start = 100 if way == "not aligned" else PAGE
    counted: list[int] = []
    with writing(tmp_path / "target", counted.append) as file:
        file.write(b"x" * PAGE)
        file.copy(Span(tmp_path / "source", start, SMALL + 5))
        file.copy(Span(tmp_path / "source", start + SMALL + 5, 2 * SMALL))  # goes on where the last one ended
        file.copy(Span(tmp_path / "source", 7, 10))
        file.write(b"y" * (2 << 20))
        assert file.position == PAGE + 3 * SMALL + 15 + (2 << 20)
    expected = b"x" * PAGE + data[start : start + 3 * SMALL + 5] + data[7:17] + b"y" * (2 << 20)
    assert (tmp_path / "target").read_bytes() == expected
    assert sum(counted) == len(expected)
    assert len(calls) == {"aligned": 2, "refused": 1, "half way": 2}.get(way, 0)


def test_a_source_that_shrinks_is_noticed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "source").write_bytes(bytes(SMALL))
    for length in (2 * SMALL, SMALL):
        with (
            pytest.raises(jaxfold.StructureError, match="ends before byte"),
            writing(tmp_path / f"{length}", lambda count: None) as file,
        ):
            file.copy(Span(tmp_path / "source", 10, length))


@pytest.mark.parametrize("format", FORMATS)
def test_from_each_format_to_each(format: str, tmp_path: pathlib.Path) -> None:
    """Arrays and numbers go everywhere, what the target has no place for is an error, and then nothing is written."""
    tree = {"net": make_block(), "other": {"table": np.arange(6.0).reshape(2, 3)}, "step": np.array(3)}
    path = path_of(tmp_path, format)
    save(path, tree, format)
    for target in FORMATS:
        out = path_of(tmp_path, target, "out")
        contract_checkpoint(path, [BLOCK], out, rows=0)
        after = load(out, target)
        assert set(after) == {*NEW, "other/table", "step"}
        assert after["other/table"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (after["step"], np.shape(after["step"])) == (3, ())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("text", "extra: got a str"),
        (None, "extra: got nothing"),
        ({}, "extra: got an empty"),
        ({"a/b": np.ones(1)}, "a/b"),
    ],
)
@pytest.mark.parametrize("target", ["npz", "safetensors"])
def test_what_a_flat_format_cannot_hold(entry: Any, message: str, target: str, tmp_path: pathlib.Path) -> None:
    path = path_of(tmp_path, "msgpack")
    save(path, {"net": make_block(), "extra": entry}, "msgpack")
    with pytest.raises(jaxfold.StructureError, match=message):
        contract_checkpoint(path, [BLOCK], path_of(tmp_path, target, "out"), rows=0)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_formats_by_their_content(tmp_path: pathlib.Path) -> None:
    """As Flax names its checkpoints, without a suffix; the result has the format of the source then."""
    for format in ("npz", "msgpack", "safetensors"):
        named, bare = path_of(tmp_path, format), tmp_path / f"{format}_0"
        save(named, {"net": make_block()}, format)
        named.rename(bare)
        assert read_checkpoint(bare).format == format
        contract_checkpoint(bare, [BLOCK], tmp_path / f"{format}_1", rows=0)
        assert set(load(tmp_path / f"{format}_1", format)) == set(NEW)
    for name, data in (
        ("empty", b""),
        ("text", b"hello, world"),
        ("wrong.npz", b"hello"),
        ("wrong.safetensors", b"h" * 9),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(jaxfold.StructureError, match=name):
            read_checkpoint(tmp_path / name)
    with pytest.raises(jaxfold.OptionError, match="not there"):
        read_checkpoint(tmp_path / "nothing.npz")
