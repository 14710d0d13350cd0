"""What is particular to .npz and safetensors."""

from __future__ import annotations

import json
import pathlib
import struct
import zipfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxfold
from jaxfold._files import _zip
from jaxfold._files._contract_checkpoint import contract_checkpoint
from jaxfold._files._formats import read_checkpoint
from jaxfold._files._leaf import StoredLeaf, StoredValue
from tests.files.formats import BLOCK, flatten, identical, load, make_block, make_tree, save


def contracted(path: pathlib.Path, **options: Any) -> pathlib.Path:
    out = path.with_name(f"out{path.suffix}")
    contract_checkpoint(path, [BLOCK], out, rows=0, **options)
    return out


def flat_block() -> dict[str, Any]:
    return {f"net/{name}": leaf for name, leaf in flatten(make_block()).items()}


def test_compressed_members_are_passed_on_as_they_lie(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.npz"
    arrays: Any = {**flat_block(), "zeros": np.zeros((100, 100)), "é": np.arange(3)}
    np.savez_compressed(path, **arrays)
    out = contracted(path)
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(out) as after:
        assert after.testzip() is None
        assert {info.compress_type for info in after.infolist()} == {zipfile.ZIP_DEFLATED}
        old, new = before.getinfo("zeros.npy"), after.getinfo("zeros.npy")
        assert (new.compress_size, new.CRC, new.date_time) == (old.compress_size, old.CRC, old.date_time)
        assert old.compress_size < 1000
        # The header before the data says the same as the directory, which is all that Python reads.
        head = out.read_bytes()[new.header_offset :][:30]
        assert struct.unpack("<3L", head[14:26]) == (new.CRC, new.compress_size, new.file_size)
    assert identical(load(out, "npz")["é"], np.arange(3))
    assert not load(out, "npz")["zeros"].any()


@pytest.mark.parametrize("limit", [100, 1000, 3000])
def test_sizes_of_4_gib_and_more(limit: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as such from a smaller limit on; read by zipfile, which knows no other than the true one."""
    path = tmp_path / "a.npz"
    save(path, make_tree("npz"), "npz")
    plain = contracted(path)
    plain = plain.rename(tmp_path / "plain.npz")
    monkeypatch.setattr(_zip, "LIMIT", limit)
    out = contracted(path)
    assert out.stat().st_size > plain.stat().st_size
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    assert list(load(out, "npz")) == list(load(plain, "npz"))


def test_many_members(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zip, "MANY", 5)
    path = tmp_path / "a.npz"
    save(path, make_tree("npz"), "npz")
    out = contracted(path)
    assert len(load(out, "npz")) > 5
    assert b"PK\6\6" in out.read_bytes()


def test_fortran_order_and_byte_order(tmp_path: pathlib.Path) -> None:
    """Both are the business of the file: the block is the same."""
    plain, odd = tmp_path / "plain.npz", tmp_path / "odd.npz"
    block = flat_block()
    np.savez(plain, **block)
    block["net/up/kernel"] = np.asfortranarray(block["net/up/kernel"])
    block["net/down/kernel"] = block["net/down/kernel"].astype(">f4")
    np.savez(odd, **block, swapped=np.arange(3, dtype=">i4"), turned=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    for name, leaf in load(contracted(plain), "npz").items():
        (tmp_path / "out.npz").unlink(missing_ok=True)
        assert identical(load(contracted(odd), "npz")[name], leaf)
    after = load(tmp_path / "out.npz", "npz")
    assert after["swapped"].dtype == np.dtype(">i4")
    assert after["turned"].flags.f_contiguous
    assert after["turned"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_what_is_no_array_is_passed_on_and_never_unpickled(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **flat_block(), pickled=np.array([{"a": 1}, None], object))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "by hand")
    tree = read_checkpoint(path).tree
    assert isinstance(tree["pickled"], StoredValue)
    assert isinstance(tree["notes.txt"], StoredValue)
    with np.load(contracted(path), allow_pickle=True) as arrays:
        assert arrays["pickled"][0] == {"a": 1}
        assert arrays["notes.txt"] == b"by hand"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("pickled.npy", archive.read("pickled.npy"))
    with pytest.raises(jaxfold.StructureError, match="two arrays of one name"):
        read_checkpoint(path)


def test_npz_has_no_bfloat16(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **{name: leaf.astype(jnp.bfloat16) for name, leaf in flat_block().items()})
    out = tmp_path / "out.npz"
    report = contract_checkpoint(path, [BLOCK], out, rows=0)
    assert "dtype |V2" in report.rows[0].reason
    assert not out.exists()
    np.savez(path, **flat_block(), other=np.ones((2, 3), jnp.bfloat16))
    assert load(contracted(path), "npz")["other"].tobytes() == np.ones((2, 3), jnp.bfloat16).tobytes()
    out.unlink()
    with pytest.raises(jaxfold.DtypeError, match=r"dtype bfloat16.*\.npz has no other"):
        contracted(path, dtype="bfloat16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.npz"]


def test_damage_of_the_block_is_noticed_by_its_checksum(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.npz"
    down = np.random.default_rng(0).standard_normal(
        (32, 10_000), dtype=np.float32
    )  # too long to be seen with its header
    save(path, {"net": {**make_block(), "down": {"kernel": down}}}, "npz")
    data = bytearray(path.read_bytes())
    data[data.index(down.tobytes()) + down.nbytes - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(jaxfold.StructureError, match=r"net/down/kernel\.npy.*damaged"):
        contracted(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_every_truncation_is_noticed(format: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"a.{format}"
    save(path, {"a": np.ones(5, np.float32), "b": {"c": np.arange(3)}}, format)
    data = path.read_bytes()
    assert len(read_checkpoint(path).tree) == 2
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(jaxfold.StructureError, match=f"a.{format}"):
            read_checkpoint(path)


def test_safetensors_metadata_and_alignment(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.safetensors"
    tree = {
        "net": make_block(),
        "byte": np.arange(3, dtype=np.uint8),
        "wide": np.arange(2.0),
        "half": np.ones(3, np.float16),
    }
    save(path, tree, "safetensors", metadata={"format": "np", "é": "ü"})
    out = contracted(path)
    with safetensors.safe_open(out, framework="np") as file:
        assert file.metadata() == {"format": "np", "é": "ü"}
    (length,) = struct.unpack("<Q", out.read_bytes()[:8])
    header = json.loads(out.read_bytes()[8 : 8 + length])
    size = {"F64": 8, "F32": 4, "F16": 2, "U8": 1}
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert [entry["data_offsets"][0] % size[entry["dtype"]] for entry in tensors] == [0] * len(tensors)
    assert (8 + length) % 8 == 0


def test_safetensors_dtypes_that_numpy_has_not(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.safetensors"
    write_raw(path, {"odd": ("F4", [3, 2], b"\x12\x34\x56"), **raw_block()})
    leaf = read_checkpoint(path).tree["odd"]
    with pytest.raises(jaxfold.DtypeError, match="F4"):
        np.asarray(leaf)
    out = contracted(path)
    (length,) = struct.unpack("<Q", out.read_bytes()[:8])
    entry = json.loads(out.read_bytes()[8 : 8 + length])["odd"]
    begin, end = entry["data_offsets"]
    assert (entry["dtype"], entry["shape"]) == ("F4", [3, 2])
    assert out.read_bytes()[8 + length :][begin:end] == b"\x12\x34\x56"


def raw_block() -> dict[str, Any]:
    return {name: ("F32", list(leaf.shape), leaf.tobytes()) for name, leaf in flat_block().items()}


def write_raw(path: pathlib.Path, tensors: dict[str, Any], change: Any = None) -> None:
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    if change:
        change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["a"].update(shape=[4]), "12 bytes for 'a'"),
        (lambda header: header["a"].update(shape=[-3]), "entry 'a' with"),
        (lambda header: header["a"].update(data_offsets=[0]), "without a dtype"),
        (lambda header: header["a"].pop("dtype"), "without a dtype"),
        (lambda header: header["b"].update(data_offsets=[8, 20]), "overlap before 'b'"),
        (lambda header: header["b"].update(data_offsets=[16, 28]), "gap .* before 'b'"),
        (lambda header: header.pop("b"), "12 bytes after the last"),
        (lambda header: header.update({"a/x": header.pop("b")}), "a leaf and a group"),
        (lambda header: header.update({"b/x": header.pop("a")}), "a leaf and a group"),
        (lambda header: header.update({"/" * 200: header.pop("a")}), "200 keys"),
    ],
)
def test_malformed_safetensors(change: Any, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.safetensors"
    write_raw(path, {"a": ("F32", [3], bytes(12)), "b": ("F32", [3], bytes(12))})
    assert isinstance(read_checkpoint(path).tree["b"], StoredLeaf)
    write_raw(path, {"a": ("F32", [3], bytes(12)), "b": ("F32", [3], bytes(12))}, change)
    with pytest.raises(jaxfold.StructureError, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "data", [struct.pack("<Q", 10**9) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{x"]
)
def test_headers_that_are_none(data: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(jaxfold.StructureError, match="a header"):
        read_checkpoint(path)


def test_a_tensor_without_bytes_may_be_named_anywhere(tmp_path: pathlib.Path) -> None:
    """Two tensors begin at one offset if one of them is empty; the header names them in any order."""
    path = tmp_path / "a.safetensors"
    save(path, {**make_block_tree(), "empty": np.zeros((0, 3), np.float32)}, "safetensors")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    entry = header.pop("empty")
    for offset in sorted({begin for tensor in header.values() for begin in tensor["data_offsets"]}):
        entry["data_offsets"] = [offset, offset]
        text = json.dumps({**header, "empty": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        assert read_checkpoint(path).tree["empty"].shape == (0, 3)
    assert load(contracted(path, overwrite=True), "safetensors")["empty"].shape == (0, 3)


def make_block_tree() -> dict[str, Any]:
    return {"net": make_block()}


def test_half_a_surrogate_pair_in_a_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.safetensors"
    text = json.dumps({"a\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(jaxfold.StructureError, match="a header that is no JSON object"):
        read_checkpoint(path)
