"""Reports as text: the same in a terminal, a file and a notebook."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rich.console

import jaxfold

ERRORS = jaxfold.Errors(2e-7, 5e-8, contracted_max=1e-7, contracted_typical=2e-8, unit=6e-8)


def _printed() -> list[str]:
    layers: Any = {"kernel": np.eye(4, 64)}, None, {"kernel": np.ones((64, 8))}
    params = {"up": layers[0], "down": layers[2]}
    paths = jaxfold.BlockPaths(producer="up", norm=None, consumers="down", epsilon=1e-6, norm_type="layernorm")
    report = jaxfold.contract_tree(params, paths)[1]
    certificate = jaxfold.Certificate(ERRORS, ERRORS, 1.0, 0.25, rows=1000, dtype="float32")
    return [str(jaxfold.plan(*layers)), str(report), str(certificate)]


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """There rich displays what it prints by itself, unless it is told not to: text would be lost, or come twice."""
    expected = _printed()
    capsys.readouterr()
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert rich.console.Console().is_jupyter  # a control: rich does believe it
    assert _printed() == expected
    assert capsys.readouterr().out == ""


def test_lines_are_whole() -> None:
    """No line of a caption breaks in the middle of a sentence, and none ends in blanks."""
    plan, _, certificate = _printed()
    assert "training through contract_traced pays from batch" in plan.splitlines()[-1]
    assert certificate.splitlines()[-2:] == ["1,000 rows against float64", "condition of R 1; variance at least 0.25"]
    assert all(line == line.rstrip() for text in _printed() for line in text.splitlines())


def test_half_precision_under_wider_inputs() -> None:
    """The certificate itself says what to do about digits that the coefficients do not have."""
    layers: Any = {"kernel": np.eye(4, 64, dtype="float16")}, None, {"kernel": np.ones((64, 8), "float16")}
    block = jaxfold.Block(*layers, epsilon=1e-3, norm_type="rmsnorm")
    advice = "coefficients are float16: contract with dtype='float32'"

    def printed(x: Any, **options: Any) -> tuple[jaxfold.Certificate, list[str]]:
        contracted = jaxfold.contract(*layers, epsilon=1e-3, norm_type="rmsnorm", **options)
        certificate = jaxfold.verify(block, contracted, x)
        return certificate, str(certificate).splitlines()

    wide = np.eye(3, 4, dtype="float32")
    certificate, lines = printed(wide)
    assert (certificate.storage, certificate.dtype, lines[-1]) == ("float16", "float32", advice)
    certificate, lines = printed(wide, dtype="float32")
    assert (certificate.storage, advice in lines) == ("float32", False)
    certificate, lines = printed(wide.astype("float16"))
    assert (certificate.storage, certificate.dtype, advice in lines) == ("float16", "float16", False)


ODD = "up\x1b[2J\x07[red]\u202e"


def test_names_with_control_characters_are_spelled_out() -> None:
    """Names come from files, and a terminal obeys such characters; what looks like markup is a part of the name."""
    rng = np.random.default_rng(0)
    tree = {
        ODD: {"kernel": rng.normal(size=(4, 32)), "bias": rng.normal(size=32)},
        "norm": {"scale": np.ones(32), "bias": np.zeros(32)},
        "down": {"kernel": rng.normal(size=(32, 3))},
    }
    spelled = r"up\x1b[2J\x07[red]\u202e"
    paths = {"norm": "norm", "consumers": "down", "epsilon": 1e-6}
    _, report = jaxfold.contract_tree(tree, jaxfold.BlockPaths(producer=(ODD,), **paths))
    assert report.contracted
    assert spelled in str(report)
    error = jaxfold.StructureError(ODD, "nothing", "something\nelse")
    assert str(error) == f"{spelled}: got nothing; expected something\nelse."
    for text in (str(report), str(error)):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert report.rows[0].producer == ODD  # as data it is what it is
