"""Which files of a traceback are the user's, whatever the folders that hold them are called."""

from __future__ import annotations

import contextlib
import ntpath
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import equinox
import flax.linen
import haiku
import jax
import jax.numpy as jnp
import jaxlib
import pytest

import jaxfold
from jaxfold import _extend

LIBRARIES = {"jax": jax, "jaxlib": jaxlib, "flax": flax, "haiku": haiku, "equinox": equinox, "jaxfold": jaxfold}
SITE = pathlib.Path(jax.__file__).parents[1]

MODEL = """
import flax.linen as nn
import jax, jax.numpy as jnp

def rms(h):
    return jax.nn.standardize(h)  # jitted by the library

class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="down")(nn.LayerNorm(name="norm")(nn.Dense(64, name="up")(x)))
"""

# Folders of users that have the names of libraries, or of what a library lies in.
FILES = [
    *(f"/home/{name}/model.py" for name in LIBRARIES),
    "/home/jax/.venv/lib/python3.12/site-packages/mine/model.py",
    "/x/jaxfold/jaxfold/model.py",
    "/flax/jax/model.py",
    f"{SITE}/jax_mine/model.py",
    f"{SITE}/mine/jax/model.py",
    f"{SITE}/jax.py",
    f"{pathlib.Path(os.__file__).parent}/site-packages/mine.py",
    "model.py",
    "jax/model.py",
    "<stdin>",
    "<ipython-input-1-0123456789ab>",
]


@pytest.mark.parametrize("file", FILES)
def test_lines_of_a_file(file: str) -> None:
    """A report names the line of the user's file: of a module of a library, and of a function that the library jits."""
    jax.clear_caches()  # before JAX 0.7 the library's function remembers who called it first
    names: dict[str, Any] = {"__name__": "model"}
    exec(compile(MODEL, file, "exec"), names)
    model, x = names["Model"](), jnp.ones((6, 4))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    (row,) = jaxfold.fold(model.apply, params, x).report.rows
    assert f"{file}:11 (" in row.source  # (__call__), or (Model.__call__) since Python 3.11
    kernel = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    (row,) = jaxfold.fold(lambda a, x: jnp.tanh(names["rms"](jnp.tanh(x @ a))), kernel, x).report.rows
    assert row.source.endswith(f"{file}:6 (rms)")


@pytest.mark.parametrize("name", LIBRARIES)
def test_files_of_libraries(name: str) -> None:
    package = pathlib.Path(str(LIBRARIES[name].__file__)).parent
    assert _extend.is_library(str(package / "_src" / "module.py"))
    assert not _extend.is_library(str(package.with_name(f"{name}_mine") / "module.py"))
    assert not _extend.is_library(str(package.parent / "tests" / name / "test_module.py"))


def test_files_of_the_standard_library() -> None:
    """A function in a context, as by a decorator, is called by a line of contextlib."""
    assert _extend.is_library(contextlib.__file__)
    assert _extend.is_library("<frozen importlib._bootstrap>")
    assert not _extend.is_library("<frozen>")


def test_a_module_that_has_the_name_of_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """One file of a user, and a folder without ``__init__.py``: not what the names stand for."""
    monkeypatch.setattr(equinox, "__file__", str(tmp_path / "equinox.py"))
    monkeypatch.setattr(haiku, "__file__", None)
    assert not _extend.is_library(str(tmp_path / "equinox.py"))
    assert not _extend.is_library(str(tmp_path / "haiku" / "model.py"))


def test_a_library_that_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(pathlib.Path(haiku.__file__).with_name("module.py"))
    assert _extend.is_library(file)
    monkeypatch.delitem(sys.modules, "haiku")
    assert not _extend.is_library(file)
    assert "haiku" not in sys.modules, "a question imports nothing"


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both separators, and letters of either case."""
    for name, value in (
        ("PurePath", pathlib.PureWindowsPath),
        *((name, getattr(ntpath, name)) for name in ("dirname", "isabs", "realpath")),
        ("_folders", _extend._folders.__wrapped__),
        ("_standard", lambda: (r"C:\Python\Lib",)),
    ):
        monkeypatch.setattr(_extend, name, value)
    packages = (r"C:\Python\Lib\site-packages\jax\__init__.py", r"D:\jaxfold\jaxfold\__init__.py")
    is_library = _extend._is_library.__wrapped__
    for file in (
        r"C:\Python\Lib\site-packages\jax\_src\nn.py",
        "c:/python/lib/SITE-PACKAGES/JAX/nn.py",
        r"D:\jaxfold\jaxfold/_demo.py",
        r"C:\Python\Lib\contextlib.py",
    ):
        assert is_library(file, packages), file
    for file in (
        r"D:\jaxfold\tests\test_model.py",
        r"C:\Users\jax\model.py",
        r"C:\Python\Lib\site-packages\jax_mine\model.py",
        "D:/jaxfold/model.py",
    ):
        assert not is_library(file, packages), file


SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:]
import jax.numpy as jnp
import jaxfold
import tests.model
print(jaxfold.__file__)
print(jaxfold.fold(tests.model.fn, jnp.ones((4, 64)), jnp.ones((6, 4))).report.rows[0].source)
"""


@pytest.mark.parametrize("link", ["", "folder", "files"])
def test_a_clone_in_a_folder_named_jaxfold(link: str, tmp_path: pathlib.Path) -> None:
    """The package is a library there, what lies beside it is the user's: also where links lead to the package."""
    clone = tmp_path / "jaxfold"
    package = clone / "jaxfold"
    shutil.copytree(pathlib.Path(jaxfold.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "tests").mkdir()
    (clone / "tests" / "__init__.py").touch()
    body = "import jax.numpy as jnp\ndef fn(a, x):\n    h = jnp.tanh(x @ a)\n    return jnp.tanh(rms(h))\n"
    rms = "def rms(h):\n    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-3)\n"
    (clone / "tests" / "model.py").write_text("from jaxfold._rms import rms\n" + body)
    (package / "_rms.py").write_text("import jax.numpy as jnp\n" + rms)
    first = tmp_path / "first"
    first.mkdir()
    if link == "folder":
        (first / "jaxfold").symlink_to(package)
    if link == "files":
        for file in package.rglob("*.*"):
            if file.is_file():
                place = first / file.relative_to(clone)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(file)
    command = [sys.executable, "-c", SCRIPT, *([str(first)] if link else []), str(clone)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where, source = done.stdout.splitlines()
    assert where == str((first if link else clone) / "jaxfold" / "__init__.py")
    assert source == f"{clone / 'tests' / 'model.py'}:5 (fn)"
