"""The command line: what it prints, what it writes, and how it exits."""

from __future__ import annotations

import io
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
import jaxfold.linen
from jaxfold._cli import main
from jaxfold._cli._block_option import parse_block
from jaxfold._files import _formats
from jaxfold._files._leaf import Span, StoredLeaf
from tests.files.formats import NEW, load, make_block, path_of, save

OPTION = "producer=net/up,norm=net/norm,consumer=net/down,epsilon=1e-3"


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    path = path_of(tmp_path, "safetensors")
    save(path, {"net": make_block(), "other": {"kernel": np.ones((3, 3), np.float32)}}, "safetensors")
    return path


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def dense(d: int, *features: int) -> dict[str, Any]:
    return {"kernel": np.ones((d, *features), np.float32), "bias": np.ones(features, np.float32)}


def norm(*shape: int) -> dict[str, Any]:
    return {"scale": np.ones(shape, np.float32), "bias": np.zeros(shape, np.float32)}


def found(path: pathlib.Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert run("inspect", path, "--json", *options) == 0
    return json.loads(capsys.readouterr().out)["candidates"]


def test_contract(checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = checkpoint.with_name("out.npz"), checkpoint.with_name("report.json")
    assert run("contract", checkpoint, "--block", OPTION, "--out", out, "--report", report) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 blocks contracted" in printed
    after = load(out, "npz")
    assert set(after) == {*NEW, "other/kernel"}
    row = json.loads(report.read_text())["rows"][0]
    assert (row["decision"], row["producer"], row["certificate"]["rows"]) == ("contracted", "net/up", 64)

    # The line that it prints makes the module that the leaves belong to.
    line = next(line for line in printed.splitlines() if "ContractedDense(" in line)
    assert line.startswith("  net/up: ")
    module = eval(line.removeprefix("  net/up: "), {"ContractedDense": jaxfold.linen.ContractedDense})
    params: dict[str, Any] = {"denominator": {}, "consumer": {}}
    for name in NEW:
        _, _, group, key = name.split("/")
        params[group][key] = jnp.asarray(after[name])
    x = np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32)
    expected = jaxfold.apply(jaxfold.contract(*make_block().values(), epsilon=1e-3), x)
    assert np.array_equal(module.apply({"params": params}, x), expected)


def test_several_consumers_stacked_and_kept(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tree = {
        "up": {"kernel": draw(3, 4, 32)},
        "norm": {"scale": draw(3, 32)},
        "att": {"query": {"kernel": draw(3, 32, 2, 5)}, "key": {"kernel": draw(3, 32, 2, 5)}},
    }
    path, out = path_of(tmp_path, "msgpack"), path_of(tmp_path, "msgpack", "out")
    save(path, tree, "msgpack")
    option = "producer=up,norm=norm,consumers.q=att/query,consumers.k=att/key,epsilon=1e-5,norm_type=rmsnorm"
    option += ",stacked,unit_offset=true,keep_producer,to=new/place"
    arguments = ("--form", "packed", "--dtype", "float64", "--rows", 0)
    assert run("contract", path, "--block", option, "--out", out, *arguments) == 0
    printed = capsys.readouterr().out
    module = "ContractedDense(features={'q': (2, 5), 'k': (2, 5)}, width=32, epsilon=1e-05, use_bias=False"
    assert f"{module}, norm_type='rmsnorm', form='packed'), 3 times" in printed
    after = load(out, "msgpack")
    assert after["new/place/consumers/q/kernel"].shape == (3, 5, 2, 5)
    assert after["new/place/denominator/kernel"].dtype == np.float64
    assert after["up/kernel"].shape == (3, 4, 32)
    options: dict[str, Any] = {"epsilon": 1e-5, "norm_type": "rmsnorm", "unit_offset": True, "stacked": True}
    consumers = {"q": tree["att"]["query"], "k": tree["att"]["key"]}
    expected = jaxfold.contract(tree["up"], tree["norm"], consumers, form="packed", dtype="float64", **options)
    assert np.array_equal(after["new/place/consumers/k/kernel"], expected.params["consumers"]["k"]["kernel"])


def test_exit_status_where_something_was_left_alone(
    checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = checkpoint.with_name("out.safetensors")
    bad = "producer=other,norm=missing,consumer=nothing,epsilon=1e-3"
    nowhere = "producer=layer_*,norm=net/norm,consumer=other,epsilon=1e-3"
    for extra in (bad, nowhere):
        assert run("contract", checkpoint, "--block", OPTION, "--block", extra, "--out", out, "--rows", 0) == 1
        assert set(NEW) <= set(load(out, "safetensors"))
        out.unlink()
        assert run("contract", checkpoint, "--block", OPTION, "--block", extra, "--out", out, "--strict") == 2
        assert not out.exists()
        assert run("contract", checkpoint, "--block", extra, "--out", out) == 2
        assert not out.exists()
    assert "nothing was written" in capsys.readouterr().err


def test_growth_is_refused_unless_allowed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = path_of(tmp_path, "npz"), path_of(tmp_path, "npz", "out")
    save(path, {"a": dense(40, 32), "n": norm(32), "b": dense(32, 32)}, "npz")
    option = "producer=a,norm=n,consumer=b,epsilon=1e-3"
    assert run("contract", path, "--block", option, "--out", out) == 2
    assert "allow_growth" in capsys.readouterr().out
    assert run("contract", path, "--block", option, "--out", out, "--allow-growth") == 0


def test_bfloat16_in_npz_is_explained(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(tmp_path, "npz")
    save(path, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), {"net": make_block()}), "npz")
    assert run("contract", path, "--block", OPTION, "--out", tmp_path / "out.npz") == 2
    assert "has no bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("producer=a,consumer=b", "no epsilon"),
        ("producer=a,epsilon=1e-6", "no consumer"),
        ("consumer=b,epsilon=1e-6", "no producer"),
        ("producer=a,consumer=b,consumers.c=d,epsilon=1e-6", "both kinds"),
        ("producer=a,consumer=b,epsilon=EPSILON", "EPSILON stands for what a checkpoint does not hold"),
        ("producer=a,consumer=b,epsilon=1,norm_type=NORM_TYPE", "NORM_TYPE stands for what a checkpoint does not hold"),
        ("producer=a,consumer=b,epsilon=0", "above 0"),
        ("producer=a,producer=c,consumer=b,epsilon=1", "twice"),
        ("producer=a,consumer=b,epsilon=1,colour=red", "'colour'"),
        ("producer=a,consumer=b,epsilon=1,consumers.=x", "'consumers.'"),
        ("producer=a,consumer=b,epsilon=1,norm", "norm=VALUE"),
        ("producer=a,consumer=b,epsilon=1,stacked=", "stacked=VALUE"),
        ("producer=a,consumer=b,epsilon=1,stacked=perhaps", "stacked=perhaps"),
        ("producer=a,consumer=b,epsilon=1,norm_type=batch", "norm_type"),
        ("producer=a/*,consumer=b/*/*,epsilon=1", "'*'"),
        ("", "the key ''"),
    ],
)
def test_bad_blocks(option: str, message: str, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("contract", checkpoint, "--block", option, "--out", checkpoint.with_name("out.npz")) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("jaxfold: error: ")
    assert message in errors
    assert "Traceback" not in errors


def test_good_blocks() -> None:
    assert parse_block(" producer = a , consumer=b, epsilon=1e-3,stacked=no,unit_offset=YES") == jaxfold.BlockPaths(
        producer="a", norm=None, consumers="b", epsilon=1e-3, unit_offset=True
    )
    for norm in ("norm=None,", "norm=,", "norm=none,", ""):
        assert parse_block(f"producer=a,{norm}consumer=b,epsilon=1").norm is None
    assert parse_block("producer=a,norm=n,consumer=b,epsilon=1").norm_type is None
    assert parse_block("producer=a,norm=n,consumer=b,epsilon=1,norm_type=rmsnorm").norm_type == "rmsnorm"


def test_bad_usage(checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = checkpoint.with_name("out.npz")
    for arguments in (
        ("contract", checkpoint, "--block", OPTION, "--out", checkpoint),
        ("contract", checkpoint, "--block", OPTION, "--out", out, "--dtype", "int8"),
        ("contract", checkpoint, "--block", OPTION, "--out", out, "--rows", -1),
        ("contract", checkpoint, "--block", OPTION, "--out", out, "--report", checkpoint.parent / "no" / "r.json"),
        ("contract", checkpoint.with_name("no.npz"), "--block", OPTION, "--out", out),
        ("inspect", checkpoint.with_name("no.npz")),
    ):
        assert run(*arguments) == 2
        assert capsys.readouterr().err.startswith("jaxfold: error: ")
    for usage in (["contract", checkpoint], ["nonsense"], [], ["demo", "--rounds", "0"]):
        with pytest.raises(SystemExit) as exit:
            run(*usage)
        assert exit.value.code == 2
    broken = checkpoint.with_name("broken.npz")
    broken.write_bytes(b"PK")
    assert run("inspect", broken) == 2
    assert "broken.npz: got a file that cannot be read" in capsys.readouterr().err
    assert not out.exists()


def test_where_the_report_may_go(checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = checkpoint.with_name("out.npz"), checkpoint.with_name("report.json")
    link, hard = checkpoint.with_name("link"), checkpoint.with_name("hard")
    link.symlink_to(checkpoint)
    hard.hardlink_to(checkpoint)
    before = checkpoint.read_bytes()
    arguments = ("contract", checkpoint, "--block", OPTION, "--out", out, "--rows", 0, "--report")
    for taken, message in (
        (checkpoint, "the checkpoint that is read"),
        (link, "the checkpoint that is read"),
        (hard, "the checkpoint that is read"),
        (out, "the path of --out"),
        (out / ".." / "out.npz", "the path of --out"),
        (checkpoint.parent, "a directory"),
    ):
        assert run(*arguments, taken, "--overwrite") == 2
        assert message in capsys.readouterr().err
    report.write_text("mine")
    assert run(*arguments, report) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (report.read_text(), checkpoint.read_bytes(), out.exists()) == ("mine", before, False)
    assert run(*arguments, report, "--overwrite") == 0
    assert json.loads(report.read_text())["rows"]


def test_a_report_inside_a_directory_of_orbax(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(tmp_path, "orbax")
    save(path, {"net": make_block()}, "orbax")
    arguments = ("contract", path, "--block", OPTION, "--out", tmp_path / "out.npz", "--report", path / "r.json")
    assert run(*arguments) == 2
    assert "lies in the checkpoint" in capsys.readouterr().err


def test_the_format_that_was_written_is_named(checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, shown in (("a.npz", "a.npz (npz)"), ("bare", "bare (safetensors, as the checkpoint that was read")):
        assert run("contract", checkpoint, "--block", OPTION, "--out", checkpoint.with_name(name), "--rows", 0) == 0
        assert shown in capsys.readouterr().out
    assert run("contract", checkpoint, "--block", OPTION, "--out", checkpoint.with_name("x.orbx")) == 2
    assert ".orbax" in capsys.readouterr().err


def test_a_terminal_without_the_lines_of_a_table(checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    assert run("inspect", checkpoint) == 0
    assert b"????" in raw.getvalue()
    assert b"epsilon=EPSILON" in raw.getvalue()


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_below_standard_output(
    checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = checkpoint.with_name("out.npz")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("contract", checkpoint, "--block", OPTION, "--out", out, "--rows", 0) == 1
    assert set(NEW) <= set(load(out, "npz"))
    errors = capsys.readouterr().err
    assert "No space left on device" in errors
    assert f"{out} was written" in errors
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("inspect", checkpoint) == 2
    assert "was written" not in capsys.readouterr().err


def test_a_report_that_cannot_be_saved(
    checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", fail)
    out, report = checkpoint.with_name("out.npz"), checkpoint.with_name("report.json")
    assert run("contract", checkpoint, "--block", OPTION, "--out", out, "--report", report, "--rows", 0) == 1
    assert f"No space left on device; {out} was written before" in capsys.readouterr().err
    assert (out.exists(), report.exists()) == (True, False)


@pytest.mark.parametrize("status", [0, 1])
def test_a_reader_that_goes_away(status: int, checkpoint: pathlib.Path) -> None:
    """As ``head`` does. In a process of its own, since the interpreter flushes once more on its way out."""
    out = checkpoint.with_name("out.npz")
    command = [sys.executable, "-m", "jaxfold", "contract", checkpoint, "--block", OPTION, "--out", out, "--rows", "0"]
    command += ["--block", "producer=nowhere,consumer=net/down,epsilon=1"] * status
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, "")
    assert out.exists()


def test_errors_of_the_system_and_interrupts(
    checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    errors_and_statuses = (
        (OSError(28, "No space left on device"), 2),
        (KeyboardInterrupt(), 130),
        (TypeError("nobody thought of"), 2),
        (MemoryError(), 2),
    )
    for error, status in errors_and_statuses:

        def fail(*arguments: Any, error: BaseException = error) -> None:
            assert signal.getsignal(signal.SIGTERM) != before
            raise error

        monkeypatch.setitem(_formats.WRITERS, "npz", fail)
        out = checkpoint.with_name("out.npz")
        assert run("contract", checkpoint, "--block", OPTION, "--out", out, "--rows", 0) == status
        assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
    errors = capsys.readouterr().err
    assert "No space left" in errors
    assert "interrupted; nothing was written" in errors
    assert "jaxfold: error: TypeError: nobody thought of\n" in errors
    assert "jaxfold: error: MemoryError" in errors
    assert signal.getsignal(signal.SIGTERM) == before


def test_inspect(checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredLeaf, "__array__", None)  # no values are read
    assert run("inspect", checkpoint) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "(safetensors): 7 arrays, 497 parameters, 1,988 bytes" in printed
    assert "1 1 4/32/8 488 73 85.0%" in printed
    footer = printed[printed.index("Shapes cannot tell") :]
    for word in (
        "how the model connects",
        "epsilon;",
        "norm_type (a scale without a bias",
        "unit_offset",
        "keep_producer",
    ):
        assert word in footer
    assert "norm_type=" not in printed  # its bias makes it a LayerNorm
    assert "net/up,norm=net/norm,consumer=net/down,epsilon=EPSILON" in printed


def test_what_inspect_proposes_can_be_pasted(checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", checkpoint)
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("1: --block "))
    option = shlex.split(line.removeprefix("1: "))
    option[1] = option[1].replace("EPSILON", "1e-3")
    assert run("contract", checkpoint, *option, "--out", checkpoint.with_name("out.safetensors"), "--rows", 0) == 0


def test_inspect_reads_headers_only(checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, counted = Span.read, []

    def count(self: Span) -> bytearray:
        counted.append(self.offset + self.length)
        return read(self)

    monkeypatch.setattr(Span, "read", count)
    assert run("inspect", checkpoint) == 0
    header = 8 + int.from_bytes(checkpoint.read_bytes()[:8], "little")
    assert counted
    assert max(counted) == header


def test_candidates_by_shape(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = {
        "in": dense(4, 32),
        "norm": norm(32),
        "att": {
            **{name: dense(32, 2, 5) for name in ("query", "key", "value")},
            "out": {"kernel": np.ones((2, 5, 32))},
        },
        "mlp": {"wide": dense(32, 64), "back": dense(64, 32)},
        "wrong": dense(33, 8),
        "not_a_layer": {"kernel": np.ones((32, 8)), "lora": np.ones(3)},
    }
    path = path_of(tmp_path, "npz")
    save(path, {"layer_0": layer, "layer_1": layer, "layer_x": {"other": np.ones(3)}}, "npz")
    rows = found(path, capsys)
    assert [(row["consumers"], row["blocks"]) for row in rows] == [
        ("layer_*/mlp/wide", 2),
        ({name: f"layer_*/att/{name}" for name in ("query", "key", "value")}, 2),
    ]
    assert all((row["producer"], row["norm"], row["stacked"]) == ("layer_*/in", "layer_*/norm", False) for row in rows)
    attention = rows[1]
    # 32 (4 + 30 + 3) + 30 before; R 5 × 5, D and c 6 × 30 after.
    assert attention["parameters"] == {"before": 2 * 1214, "after": 2 * 205}
    assert (attention["features"], attention["width"], attention["outputs"]) == (4, 32, 30)
    assert attention["saved"] == pytest.approx(1 - 205 / 1214)
    consumers = ",".join(f"consumers.{name}=layer_*/att/{name}" for name in ("query", "key", "value"))
    assert attention["block"] == f"producer=layer_*/in,norm=layer_*/norm,{consumers},epsilon=EPSILON"
    block = parse_block(attention["block"].replace("EPSILON", "1e-6"))
    assert (
        run("contract", path, "--block", attention["block"].replace("EPSILON", "1e-6"), "--out", tmp_path / "o.npz")
        == 0
    )
    assert block.consumers == {name: f"layer_*/att/{name}" for name in ("query", "key", "value")}


def test_layers_of_different_shapes_are_listed_apart(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def layer(width: int) -> dict[str, Any]:
        return {"in": dense(4, width), "norm": norm(width), "out": dense(width, 6)}

    path = path_of(tmp_path, "msgpack")
    save(path, {"layer_0": layer(32), "layer_1": layer(32), "layer_2": layer(64)}, "msgpack")
    assert sorted(row["producer"] for row in found(path, capsys)) == ["layer_0/in", "layer_1/in", "layer_2/in"]
    save(path, {"layers": [layer(32), layer(32)]}, "msgpack")
    (row,) = found(path, capsys)
    assert (row["producer"], row["blocks"]) == ("layers/*/in", 2)
    option = row["block"].replace("EPSILON", "1e-6")
    assert run("contract", path, "--block", option, "--out", tmp_path / "out.msgpack", "--rows", 0) == 0


def test_stacks_and_what_does_not_pay(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = {
        "in": {"kernel": np.ones((3, 4, 32))},
        "norm": {"scale": np.ones((3, 32))},
        "out": {"kernel": np.ones((3, 32, 6))},
    }
    growing = {"in": dense(148, 128), "norm": norm(128), "out": dense(128, 128)}
    path = path_of(tmp_path, "npz")
    save(path, {"stack": stack, "growing": growing}, "npz")
    rows = found(path, capsys)
    assert [(row["producer"], row["stacked"], row["pays"]) for row in rows] == [("stack/in", True, True)]
    assert rows[0]["block"].endswith(",epsilon=EPSILON,norm_type=NORM_TYPE,stacked")
    every = found(path, capsys, "--all")
    assert every[0] == rows[0]
    assert (every[1]["parameters"], every[1]["pays"]) == ({"before": 35_840, "after": 38_272}, False)
    save(path, {"growing": growing}, "npz")
    assert run("inspect", path) == 0
    printed = capsys.readouterr().out
    assert "No Dense-norm-Dense block" in printed
    assert "1 more would not become smaller" in printed


def test_the_type_of_a_norm_without_bias_is_asked_for(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path_of(tmp_path, "npz")
    save(path, {"a": dense(4, 32), "n": {"scale": np.ones(32, np.float32)}, "b": dense(32, 8)}, "npz")
    (row,) = found(path, capsys)
    assert row["block"] == "producer=a,norm=n,consumer=b,epsilon=EPSILON,norm_type=NORM_TYPE"
    option = row["block"].replace("EPSILON", "1e-6")
    assert run("contract", path, "--block", option, "--out", tmp_path / "out.npz") == 2
    without = option.replace(",norm_type=NORM_TYPE", "")
    assert run("contract", path, "--block", without, "--out", tmp_path / "out.npz") == 2
    assert "norm_type" in capsys.readouterr().out
    option = option.replace("NORM_TYPE", "rmsnorm")
    assert run("contract", path, "--block", option, "--out", tmp_path / "out.npz") == 0
    assert "norm_type='rmsnorm'" in capsys.readouterr().out


def test_moments_of_an_optimiser_are_passed_over(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(tmp_path, "msgpack")
    moments = {"0": {"count": np.array(3), "mu": {"net": make_block()}, "nu": {"net": make_block()}}}
    save(path, {"params": {"net": make_block()}, "opt_state": moments}, "msgpack")
    assert [row["producer"] for row in found(path, capsys)] == ["params/net/up"]


def test_boxed_leaves_and_a_group_of_the_same_name(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    boxed = jax.tree.map(lambda leaf: {"value": leaf}, make_block())
    path = path_of(tmp_path, "msgpack")
    save(path, {"value": boxed}, "msgpack")
    assert [row["consumers"] for row in found(path, capsys)] == ["value/down"]


def test_the_layout_of_pytorch_is_explained(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(tmp_path, "safetensors")
    linear = {"weight": np.ones((32, 4), np.float32), "bias": np.ones(32, np.float32)}
    save(path, {"up": linear, "norm": {"weight": np.ones(32, np.float32)}}, "safetensors", separator=".")
    assert run("inspect", path) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "'up/weight' is named as PyTorch names weights, and those are (out, in)" in printed
    assert "to kernel and transpose it" in printed
    assert run("inspect", path, "--json") == 0
    assert "transpose" in json.loads(capsys.readouterr().out)["notes"][0]
    save(path, {"net": make_block()}, "safetensors")
    assert run("inspect", path) == 0
    assert "PyTorch" not in capsys.readouterr().out


def test_keys_that_an_option_cannot_say(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(tmp_path, "msgpack")
    for key in ("a,b", "a=b", "a*b", "a/b", " a"):
        save(path, {key: make_block()}, "msgpack")
        (row,) = found(path, capsys)
        assert row["block"] is None
    run("inspect", path)
    assert "jaxfold.contract_tree" in capsys.readouterr().out


def test_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxfold", "contract", "--help"], capture_output=True, text=True, check=True
    )
    assert "--allow-growth" in done.stdout
    assert "exit status: 0 if all is done; 1 if" in " ".join(done.stdout.split())


@pytest.mark.parametrize("role", ["producer=net/up/kernel", "norm=net/norm/scale", "consumer=net/down/kernel"])
def test_a_path_of_a_leaf_writes_nothing(
    role: str, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, as for everything that was not written, and the path of the layer."""
    paths = {"producer": "net/up", "norm": "net/norm", "consumer": "net/down", "epsilon": "1e-3"}
    argument, path = role.split("=")
    option = ",".join(f"{name}={value}" for name, value in {**paths, argument: path}.items())
    out = checkpoint.with_name("out.npz")
    assert run("contract", checkpoint, "--block", option, "--out", out, "--rows", 0) == 2
    assert f"Name the layer, '{path.rpartition('/')[0]}'." in capsys.readouterr().out
    assert not out.exists()
