"""The package as a whole: its names, its documentation, what it ships, and which way its imports point."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import operator
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import jaxfold
import jaxfold.linen
import jaxfold.nnx

NAMES = (
    *("apply", "contract", "contract_traced", "contract_tree", "convert", "fold", "plan", "verify"),
    *("Block", "BlockPaths", "Certificate", "Contraction", "Cost", "Errors", "Folded", "FoldReport", "FoldRow", "Plan"),
    *(
        "CoefficientError",
        "ConcretenessError",
        "DtypeError",
        "GrowthError",
        "JaxfoldError",
        "NotFoldedError",
        "OptionError",
    ),
    *("ShapeError", "StructureError"),
)
ROOT = pathlib.Path(str(importlib.resources.files("jaxfold")))
SOURCES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py")}


def test_public_names() -> None:
    public = {name for name, value in vars(jaxfold).items() if not (name.startswith("_") or inspect.ismodule(value))}
    assert public == set(NAMES)
    assert [name for name in NAMES if not hasattr(jaxfold, name)] == []


def test_init_holds_nothing_but_exports() -> None:
    """Each name spelled out twice, `import x as x`, which is what type checkers take for a re-export."""
    docstring, *statements = SOURCES["__init__.py"].body
    assert isinstance(docstring, ast.Expr)
    exported = []
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("jaxfold."):
            exported += [(alias.name, alias.asname) for alias in statement.names]
    assert sorted(exported) == sorted((name, name) for name in NAMES)
    rest = [s for s in statements if not (isinstance(s, ast.ImportFrom) and str(s.module).startswith("jaxfold."))]
    assert [ast.unparse(s) for s in rest] == [
        "from importlib.metadata import version as _version",
        "__version__ = _version('jaxfold')",
    ]


LIBRARIES = ("ContractedDense", "block", "block_paths", "contract", "isometry")


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_public_names_of_the_libraries(library: str) -> None:
    module = importlib.import_module(f"jaxfold.{library}")
    names = {name for name, value in vars(module).items() if not (name.startswith("_") or inspect.ismodule(value))}
    assert names == set(LIBRARIES)


@pytest.mark.parametrize("name", [*NAMES, *(f"{library}.{n}" for library in ("linen", "nnx") for n in LIBRARIES)])
def test_documentation(name: str) -> None:
    """A docstring of its own, with an example for whatever a user calls or gets; the errors share their base's."""
    value: Any = operator.attrgetter(name)(jaxfold)
    name = name.split(".")[-1]
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc
    assert not doc.startswith(f"{name}(")  # what dataclasses write by themselves
    if value is jaxfold.JaxfoldError or not (inspect.isclass(value) and issubclass(value, Exception)):
        assert re.search(r"\n +Example:\n +>>> ", doc)
    if inspect.isfunction(value):
        for parameter in inspect.signature(value).parameters.values():
            assert re.search(rf"\b{parameter.name}\b.*:", doc), f"{parameter.name} is not documented"
            assert parameter.annotation is not inspect.Parameter.empty
        assert "Returns:\n" in doc
        assert "Raises:\n" in doc


def test_version() -> None:
    assert jaxfold.__version__ == importlib.metadata.version("jaxfold")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", jaxfold.__version__)


def test_ships_its_types_data_and_licence() -> None:
    assert (ROOT / "py.typed").is_file()
    assert (ROOT / "_data" / "ligandmpnn_heads.npz").is_file()
    assert "MIT" in (ROOT / "_data" / "ligandmpnn_heads.LICENSE").read_text("utf-8")


def test_run_time_dependencies() -> None:
    requirements = importlib.metadata.requires("jaxfold") or []
    names = {re.split(r"[^\w-]", line)[0] for line in requirements if "extra ==" not in line}
    assert names == {"jax", "jaxlib", "flax", "numpy"}


def _imports(path: str) -> set[str]:
    """The modules that a file imports, anywhere in it; `from a import b` counts as a and as a.b."""
    modules = set()
    for node in ast.walk(SOURCES[path]):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            modules |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def _typing_only(path: str) -> set[str]:
    """What is imported for the type checker alone."""
    guarded = [n for n in ast.walk(SOURCES[path]) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    nodes = [node for guard in guarded for node in ast.walk(guard) if isinstance(node, ast.ImportFrom)]
    return {str(n.module) for n in nodes} | {f"{n.module}.{alias.name}" for n in nodes for alias in n.names}


# Each part may import itself and what is named here; `_report`, `_plots` and `_demo` are looked up when needed only.
ALLOWED = {
    "_errors": set(),
    "_extend": set(),
    "_algebra": {"_extend", "_errors"},
    "_block": {"_algebra", "_errors"},
    "_tree": {"_block", "_algebra", "_errors"},
    "_fold": {"_extend", "_tree", "_block", "_algebra", "_errors"},
    "extend": {"_fold"},
    "_files": {"_tree", "_block", "_algebra", "_errors"},
    "_layers": {"_tree", "_block", "_algebra", "_errors"},
    "linen": {"_layers", "_tree", "_block", "_algebra", "_errors"},
    "nnx": {"_layers", "_tree", "_block", "_algebra", "_errors"},
    "_report": {"_tree", "_block", "_algebra", "_errors"},
    "_plots": {"_report", "_tree", "_block", "_algebra", "_errors"},
}


@pytest.mark.parametrize("path", SOURCES)
def test_what_extends_jax_is_imported_in_one_place(path: str) -> None:
    extending = {
        module for module in _imports(path) if module.startswith(("jax.extend", "jax.interpreters", "jax._src"))
    }
    assert not extending or path == "_extend.py"


@pytest.mark.parametrize("path", SOURCES)
def test_imports_point_one_way(path: str) -> None:
    part = path.split("/")[0].removesuffix(".py")
    if part not in ALLOWED:
        return
    ours = {module.split(".")[1] for module in _imports(path) - _typing_only(path) if module.startswith("jaxfold.")}
    printing, drawing = (
        ("_block/_plan.py", "_block/_verify.py", "_tree/_fold_report.py"),
        ("_block/_verify.py", "_tree/_fold_report.py"),
    )
    lazily = ({"_report"} if path in printing else set()) | ({"_plots"} if path in drawing else set())
    assert ours <= ALLOWED[part] | {part} | lazily
    at_the_top = {str(n.module) for n in SOURCES[path].body if isinstance(n, ast.ImportFrom)}
    assert not {"jaxfold._report", "jaxfold._plots"} & at_the_top or part == "_plots"


@pytest.mark.parametrize("path", SOURCES)
def test_imports_from_outside(path: str) -> None:
    """Nothing private of JAX or Flax, each module system and each file format in its own part, rich for tables only."""
    modules = _imports(path)
    for module in modules:
        names = module.split(".")
        if names[0] in ("jax", "jaxlib", "flax", "numpy"):
            assert not any(name.startswith("_") for name in names), module
    for module in ("linen", "nnx"):
        assert path.startswith(f"{module}/") or not any(name.startswith(f"flax.{module}") for name in modules)
        # Both take long to import, and few need both.
        assert path.startswith(f"{module}/") or f"jaxfold.{module}" not in modules
    own = {
        "_report.py": {"rich"},
        "_plots.py": {"matplotlib"},
        "_demo.py": {"rich"},
        "_files/_progress.py": {"rich"},
        "_files/_msgpack.py": {"msgpack"},
        "_files/_msgpack_index.py": {"msgpack"},
        "_files/_orbax.py": {"orbax"},
    }
    roots = {module.split(".")[0] for module in modules - _typing_only(path)}
    assert roots <= sys.stdlib_module_names | {"jax", "flax", "numpy", "jaxfold"} | own.get(path, set())


@pytest.mark.parametrize("path", SOURCES)
def test_reads_nothing_but_its_own_data(path: str) -> None:
    """No path outside of the package is named; only the command line and `_files` open files, those they are given."""
    texts = [n.value for n in ast.walk(SOURCES[path]) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not [text for text in texts if re.search(r"(^|\s)(\.\./|~/|/\w+/)", text)]
    if path.startswith(("_files/", "_cli/")):
        return
    calls = {ast.unparse(node.func) for node in ast.walk(SOURCES[path]) if isinstance(node, ast.Call)}
    readers = r"(^|\.)(open|fromfile|loadtxt|genfromtxt|memmap|read_text|read_bytes|urlopen|Path|getenv)$"
    assert not [call for call in calls if re.search(readers, call)]
    assert "np.load" not in calls or (path == "_demo.py" and "importlib.resources.as_file" in calls)
    assert not {"os", "pathlib", "urllib", "socket", "subprocess", "tempfile"} & _imports(path)


def test_importing_it_changes_nothing() -> None:
    """No option of JAX is touched."""
    code = """
import sys
import jax
before = dict(jax.config.values)
import jaxfold
assert dict(jax.config.values) == before
assert not {"jaxfold.linen", "jaxfold.nnx"} & set(sys.modules), "each is for whoever imports it"
print(jaxfold.plan({"kernel": (2, 8)}, None, {"kernel": (8, 4)}).direct.parameters)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "16", done.stderr
