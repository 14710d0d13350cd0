"""The package as a whole: its names, its documentation, what it ships, and which way its imports point."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.resources
import inspect
import operator
import pathlib
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
import jaxfold.linen
import jaxfold.nnx

NAMES = (
    *("apply", "contract", "contract_traced", "contract_tree", "convert", "fold", "plan", "verify"),
    *(
        "Block",
        "BlockPaths",
        "Certificate",
        "Contraction",
        "Cost",
        "Errors",
        "Folded",
        "FoldCertificate",
        "FoldReport",
        "FoldRow",
        "Plan",
    ),
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


@pytest.mark.parametrize("path", SOURCES)
def test_derivations_are_there(path: str) -> None:
    """Module docstrings name headings of the page with the mathematics, as they are there."""
    doc = ast.get_docstring(SOURCES[path]) or ""
    page = (pathlib.Path(__file__).parents[1] / "docs" / "maths.md").read_text("utf-8")
    heading = "|".join(re.escape(title) for title in re.findall(r"^#+ (.*)$", page, re.MULTILINE))
    for named in re.findall(r"docs/maths\.md, ((?:.|\n)*?)\.(?:\s|$)", doc):
        assert re.fullmatch(f"({heading})( and ({heading}))*", " ".join(named.split())), named
    assert doc.count("docs/") == doc.count("Derivation: docs/maths.md, ")


CLASSES = [
    *(name for name in NAMES if inspect.isclass(getattr(jaxfold, name))),
    *("linen.ContractedDense", "nnx.ContractedDense"),
]
METHODS = [
    f"{name}.{member}"
    for name in CLASSES
    for member, value in vars(operator.attrgetter(name)(jaxfold)).items()
    if (not member.startswith("_") or member == "__call__")
    and (isinstance(value, (property, classmethod)) or inspect.isfunction(value))
    and getattr(value, "__module__", "jaxfold").startswith("jaxfold")  # not the default of a field, another's function
]
RAISE_NOTHING = ("JaxfoldError.at", "FoldReport.to_json")


@pytest.mark.parametrize("name", METHODS)
def test_documentation_of_methods(name: str) -> None:
    """A docstring; with what comes back, and what is raised, where a caller gives something."""
    owner, member = name.rsplit(".", 1)
    value = vars(operator.attrgetter(owner)(jaxfold))[member]
    function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    assert function.__doc__
    parameters = list(inspect.signature(function).parameters.values())[1:]  # without self
    for parameter in parameters:
        assert re.search(rf"\b{parameter.name}\b.*:", function.__doc__), f"{parameter.name} is not documented"
        assert parameter.annotation is not inspect.Parameter.empty
    assert "Returns:\n" in function.__doc__ or not parameters
    assert "Raises:\n" in function.__doc__ or not parameters or name in RAISE_NOTHING


@pytest.mark.parametrize("name", METHODS)
def test_first_lines_of_properties_have_no_colon(name: str) -> None:
    """What builds the reference takes `text: more` for a type and a description; literals and roles are passed over."""
    owner, member = name.rsplit(".", 1)
    value = vars(operator.attrgetter(owner)(jaxfold))[member]
    if isinstance(value, property):
        first = str(value.__doc__).splitlines()[0]
        assert ":" not in re.sub(r"``.*?``|:\w+:`.*?`", "", first)


LAYERS: Any = {"kernel": np.eye(2, 8)}, None, {"kernel": np.ones((8, 4))}
INTEGERS: Any = {"kernel": np.eye(2, 8, dtype=int)}, *LAYERS[1:]
X = np.ones((3, 2), np.float32)
EPSILON: Any = {"epsilon": 1e-3}
BLOCK, CONTRACTION = jaxfold.Block(*LAYERS, **EPSILON), jaxfold.contract(*LAYERS, **EPSILON)
WHOLE = jax.tree.map(lambda leaf: leaf.astype(int), CONTRACTION)
FOLDED = jaxfold.fold(lambda params, x: jnp.tanh(x @ params), X[:2].T, X)


def edited(**fields: Any) -> Any:
    return dataclasses.replace(CONTRACTION, **fields)


def under_jit(function: Callable[[Any], Any]) -> Callable[[], Any]:
    """With an epsilon that is a tracer."""
    return lambda: jax.jit(lambda epsilon: function(epsilon) and 0)(1e-3)


PATHS: Any = {"producer": "up", "norm": None, "consumers": "down", "norm_type": "rmsnorm", **EPSILON}
TREE: Any = {"up": LAYERS[0], "down": LAYERS[2]}


def contract_tree(inputs: Any) -> Any:
    return jaxfold.contract_tree(TREE, jaxfold.BlockPaths(**PATHS), inputs={"up": inputs})


# Beside what the tests of each function show: what is raised that its docstring is easily forgotten to list.
RAISED: list[tuple[str, str, Callable[[], Any]]] = [
    ("apply", "StructureError", lambda: jaxfold.apply({}, X)),  # pyright: ignore[reportArgumentType]
    ("apply", "OptionError", lambda: jaxfold.apply(edited(width=0), X)),
    ("apply", "OptionError", lambda: jaxfold.apply(edited(epsilon=1e-60), X)),
    ("apply", "DtypeError", lambda: jaxfold.apply(WHOLE, X)),
    ("Block", "ConcretenessError", under_jit(lambda epsilon: jaxfold.Block(*LAYERS, epsilon=epsilon))),
    ("Block.__call__", "ShapeError", lambda: BLOCK(X.T)),
    ("Block.__call__", "DtypeError", lambda: BLOCK(X.astype(int))),
    ("BlockPaths", "ConcretenessError", under_jit(lambda epsilon: jaxfold.BlockPaths(**PATHS | {"epsilon": epsilon}))),
    ("contract", "OptionError", lambda: jaxfold.contract(*LAYERS, **EPSILON, stacked=1)),  # pyright: ignore
    ("contract", "ConcretenessError", under_jit(lambda epsilon: jaxfold.contract(*LAYERS, epsilon=epsilon))),
    ("contract_traced", "ConcretenessError", under_jit(lambda e: jaxfold.contract_traced(*LAYERS, epsilon=e))),
    ("contract_tree", "ShapeError", lambda: contract_tree(X.T)),
    ("contract_tree", "DtypeError", lambda: contract_tree(X.astype(int))),
    ("contract_tree", "CoefficientError", lambda: contract_tree(X * np.nan)),
    ("contract_tree", "ConcretenessError", lambda: jax.jit(lambda x: contract_tree(x) and 0)(X)),
    ("convert", "OptionError", lambda: jaxfold.convert(edited(epsilon=0.0), "packed")),
    ("convert", "StructureError", lambda: jaxfold.convert({}, "packed")),  # pyright: ignore[reportArgumentType]
    ("convert", "ShapeError", lambda: jaxfold.convert(edited(width=1), "packed")),
    ("convert", "DtypeError", lambda: jaxfold.convert(WHOLE, "packed")),
    ("plan", "DtypeError", lambda: jaxfold.plan(*INTEGERS)),
    ("Plan.cost", "OptionError", lambda: jaxfold.plan(*LAYERS).cost("gram")),  # pyright: ignore[reportArgumentType]
    ("Plan.pays", "OptionError", lambda: jaxfold.plan(*LAYERS).pays("gram")),  # pyright: ignore[reportArgumentType]
    ("verify", "StructureError", lambda: jaxfold.verify({}, CONTRACTION, X)),  # pyright: ignore[reportArgumentType]
    ("verify", "DtypeError", lambda: jaxfold.verify(BLOCK, CONTRACTION, X.astype(int))),
    ("verify", "OptionError", lambda: jaxfold.verify(BLOCK, edited(width=0), X)),
    ("Folded.contract", "DtypeError", lambda: FOLDED.contract(X[:2].T.astype(np.float16))),
    ("Folded.contract_traced", "DtypeError", lambda: FOLDED.contract_traced(X[:2].T.astype(np.float16))),
]


@pytest.mark.parametrize(("name", "error", "call"), RAISED, ids=[f"{name} {error}" for name, error, _ in RAISED])
def test_raises_what_it_says(name: str, error: str, call: Callable[[], Any]) -> None:
    with pytest.raises(getattr(jaxfold, error)):
        call()
    listed = re.search(r"\n +Raises:\n((.|\n)*?)(\n\n|$)", operator.attrgetter(name)(jaxfold).__doc__)
    assert listed
    assert re.search(rf"\b{error}\b.*: ", listed[1])


ERRORS = [name for name in NAMES if name.endswith("Error")]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_named_as_they_are_imported(name: str) -> None:
    """In a traceback, and in what pickle stores."""
    details = (jaxfold.plan(*LAYERS),) if name == "GrowthError" else ()
    error = getattr(jaxfold, name)("x", "1", "2", "3", *details)
    assert traceback.format_exception_only(error) == [f"jaxfold.{name}: x: got 1; expected 2. 3\n"]
    stored = pickle.dumps(error, protocol=0)
    assert f"cjaxfold\n{name}\n".encode() in stored
    copied = pickle.loads(stored)
    assert type(copied) is type(error)
    assert (str(copied), vars(copied)) == (str(error), vars(error))


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
    "_block": {"_extend", "_algebra", "_errors"},
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
        ("_block/_plan.py", "_block/_verify.py", "_tree/_fold_report.py", "_fold/_certificate.py"),
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
    # _extend.py compares paths, to tell a user's file from a library's, and opens none of them.
    compares = {"pathlib"} if path == "_extend.py" else set()
    assert not ({"os", "pathlib", "urllib", "socket", "subprocess", "tempfile"} - compares) & _imports(path)


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
