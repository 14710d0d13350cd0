"""Flax's msgpack: every kind of value, the chunked form, and files that are not whole."""

from __future__ import annotations

import pathlib
from typing import Any

import flax.serialization
import msgpack
import numpy as np
import pytest

import jaxfold
from jaxfold._files._contract_checkpoint import contract_checkpoint
from jaxfold._files._formats import read_checkpoint
from jaxfold._files._leaf import StoredLeaf
from tests.files.formats import BLOCK, EPSILON, flatten, identical, make_block, make_tree


def pack(value: Any) -> bytes:
    packed: Any = msgpack.packb(value)
    return packed


def write(path: pathlib.Path, tree: Any) -> pathlib.Path:
    path.write_bytes(flax.serialization.msgpack_serialize(tree))
    return path


def test_is_what_flax_would_have_written(tmp_path: pathlib.Path) -> None:
    """Byte for byte, so that lengths, kinds and order of all that is copied are right at once."""
    tree = make_tree("msgpack")
    path, out = write(tmp_path / "a.msgpack", tree), tmp_path / "b.msgpack"
    contract_checkpoint(path, [BLOCK], out, rows=0)
    net = tree["net"]
    contraction = jaxfold.contract(net["up"], net["norm"], net["down"], epsilon=EPSILON)
    expected = {**tree, "net": {"up": contraction.params}}
    assert out.read_bytes() == flax.serialization.msgpack_serialize(expected)
    assert out.read_bytes() != flax.serialization.msgpack_serialize({**expected, "whole": 4})


def test_chunked_leaves(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    tree = {"big": np.arange(300.0).reshape(3, 100), "net": make_block()}
    path, out = write(tmp_path / "a.msgpack", tree), tmp_path / "b.msgpack"
    raw = msgpack.unpackb(path.read_bytes(), ext_hook=lambda code, data: None)
    assert "__msgpack_chunked_array__" in raw["net"]["up"]["kernel"]  # the block's own leaves too
    leaf = read_checkpoint(path).tree["big"]
    assert leaf.shape == (3, 100)
    assert identical(np.asarray(leaf), tree["big"])
    contract_checkpoint(path, [BLOCK], out, rows=0)
    after = flatten(flax.serialization.msgpack_restore(out.read_bytes()))
    assert identical(after["big"], tree["big"])
    expected = jaxfold.contract(*tree["net"].values(), epsilon=EPSILON)
    assert identical(after["net/up/consumer/kernel"], expected.params["consumer"]["kernel"])


@pytest.mark.parametrize(
    ("size", "value"),
    [
        *[(1, 5), (1, -3), (2, -100), (2, 200), (3, 60_000), (5, 2**31), (9, 2**60), (9, -(2**60)), (9, 0.1)],
        *[(1, None), (1, True), (6, "hello"), (42, "x" * 40), (303, "x" * 300), (70_005, "x" * 70_000)],
        *[(12, b"0123456789"), (303, b"1" * 300), (70_005, b"1" * 70_000)],
        *[(1, {}), (1, []), (3 + 2 * 20, [[1]] * 20), (5 + 65_536, [1] * 65_536)],
    ],
)
def test_every_length_of_every_kind(size: int, value: Any, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "a.msgpack", {"value": value, "net": make_block()})
    contract_checkpoint(path, [BLOCK], tmp_path / "b.msgpack", rows=0)
    restored = flax.serialization.msgpack_restore((tmp_path / "b.msgpack").read_bytes())
    assert restored["value"] == value
    assert type(restored["value"]) is type(value)
    assert len(pack(value)) == size  # so that the cases are what they are meant to be


def test_maps_of_every_length(tmp_path: pathlib.Path) -> None:
    tree = {"net": make_block(), "few": {f"k{i}": i for i in range(20)}, "many": {f"k{i}": i for i in range(65_536)}}
    path = write(tmp_path / "a.msgpack", tree)
    contract_checkpoint(path, [BLOCK], tmp_path / "b.msgpack", rows=0)
    restored = flax.serialization.msgpack_restore((tmp_path / "b.msgpack").read_bytes())
    assert (restored["few"], restored["many"]) == (tree["few"], tree["many"])


def test_spelling_of_other_writers_is_kept(tmp_path: pathlib.Path) -> None:
    """A float32, and an integer in more bytes than it needs: Python has neither."""
    block = flax.serialization.msgpack_serialize(make_block())
    odd = b"\xca\x3d\xcc\xcc\xcd" + b"\xd3" + bytes(7) + b"\x05"
    path, out = tmp_path / "a.msgpack", tmp_path / "b.msgpack"
    path.write_bytes(b"\x83\xa1a" + odd[:5] + b"\xa1b" + odd[5:] + b"\xa3net" + block)
    contract_checkpoint(path, [BLOCK], out, rows=0)
    assert out.read_bytes().startswith(b"\x83\xa1a" + odd[:5] + b"\xa1b" + odd[5:])


def test_every_truncation_is_noticed(tmp_path: pathlib.Path) -> None:
    tree = {"a": np.ones(3, np.float32), "text": "xyz", "list": [1, 2.5, None], "c": 1j, "n": np.float32(1)}
    path = write(tmp_path / "a.msgpack", tree)
    data = path.read_bytes()
    assert isinstance(read_checkpoint(path).tree["a"], StoredLeaf)
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(jaxfold.StructureError, match=r"a\.msgpack"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x81\xa1a\x01\x00", "1 bytes after the end"),
        (b"\xc1", "byte 0xc1"),
        (b"\x01", "a single value"),
        (b"\x82\xa1a\x01\xa1a\x02", "the key 'a' twice"),
        (b"\x81\xc0\x01", "the key None"),
        (b"\x81\xa1a\xc7\x02\x01\x91\x01", "no array at 'a'"),
        (b"\x81\xa1a\xa1\xff", "cannot be decoded"),
        (b"\x81\xa1a" * 200 + b"\x01", "nested more than"),
        (b"\x81\xb9__msgpack_chunked_array__\xc3", "chunks of ''"),
    ],
)
def test_malformed(data: bytes, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.msgpack"
    path.write_bytes(data)
    with pytest.raises(jaxfold.StructureError, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [(((3,), "float32", b"\0" * 8), "8 bytes for 'a'"), (((3,), "float33", b"\0" * 12), "dtype 'float33'")],
)
def test_arrays_that_do_not_fit(entry: Any, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.msgpack"
    path.write_bytes(pack({"a": msgpack.ExtType(1, pack(entry))}))
    with pytest.raises(jaxfold.StructureError, match=message):
        read_checkpoint(path)


def test_a_bias_that_is_nil_is_absent(tmp_path: pathlib.Path) -> None:
    """As it is in a tree in memory, with the same leaves in the end."""
    block, out = make_block(), tmp_path / "b.msgpack"
    block["up"]["bias"] = None  # type: ignore[assignment]
    path = write(tmp_path / "a.msgpack", {"net": block, "other": None})
    assert contract_checkpoint(path, [BLOCK], out, rows=0).contracted
    del block["up"]["bias"]
    expected = jaxfold.contract(block["up"], block["norm"], block["down"], epsilon=EPSILON).params
    restored = flax.serialization.msgpack_restore(out.read_bytes())
    assert restored["other"] is None
    found, wanted = flatten(restored["net"]["up"]), flatten(expected)
    assert list(found) == list(wanted)
    assert all(identical(found[name], np.asarray(wanted[name])) for name in wanted)


@pytest.mark.parametrize("dtype", ["O", None, "(2,3", "nonsense", b"\xff", "(2,)f4", 3])
def test_a_dtype_that_is_none(dtype: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.msgpack"
    path.write_bytes(pack({"a": msgpack.ExtType(1, pack(([1], dtype, bytes(8))))}))
    with pytest.raises(jaxfold.StructureError, match=r"the dtype .* of 'a'"):
        read_checkpoint(path)
