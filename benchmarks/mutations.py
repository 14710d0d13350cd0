"""Random mutations of the algebra, the blocks and fold: which of them does no test notice?

    python -m benchmarks.mutations [--count N] [--seed S] [--state FILE] [--only TEXT] [--tests PATH ...]

A mutation changes one expression or statement: an operator, a constant, a sign, a condition, the order of axes or
arguments, a keyword or a statement that is dropped, a sum that is not sorted. Each mutation is applied to a copy of the
repository in a temporary folder, never to the repository itself, and the tests of the module run there until
the first one fails. A mutation that no test notices survives. Its diff is printed: write a test that fails with it, or
a comment that says why the program is the same.

With ``--state`` each outcome is appended to a file, and a mutation of that file, to the same source, is not run again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import difflib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
# The tests of each part, those that fail fastest first; for all but fold, the tests of fold come after the part's own.
TESTS = {
    "_algebra": ("tests/algebra", "tests/block", "tests/fold"),
    "_block": ("tests/block", "tests/algebra", "tests/fold"),
    "_fold": ("tests/fold",),
}

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "", "reversed": "", "abs": ""}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of one file.

    Attributes:
        path: of the file, from the root of the repository.
        kind: the name of the mutator.
        line: where the change is, from 1.
        source: the whole file as it is.
        mutated: the whole file with the change.
    """

    path: str
    kind: str
    line: int
    source: str
    mutated: str

    @property
    def diff(self) -> str:
        """The change, as a unified diff without context."""
        lines = difflib.unified_diff(
            self.source.splitlines(), self.mutated.splitlines(), self.path, self.path, lineterm="", n=0
        )
        return "\n".join(lines)

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that belong to the module."""
        return TESTS[pathlib.PurePosixPath(self.path).parts[1]]


# The name of the mutator, a node, and what stands in its place.
Change = tuple[str, Any, ast.AST]


def _operators(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in OPERATORS.get(type(operator), ()):
                yield "operator", node, _with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        for other in OPERATORS.get(type(node.op), ()):
            yield "operator", node, _with(node, op=other())
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Div, ast.MatMult)):
        yield "operands", node, _with(node, left=node.right, right=node.left)


def _constants(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield "constant", node, ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield "constant", node, ast.Constant(node.value + 1)
        if node.value > 0:
            yield "constant", node, ast.Constant(node.value - 1)
    elif isinstance(node.value, float):
        yield "constant", node, ast.Constant(2 * node.value if node.value else 1.0)


def _signs(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", node, node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.MatMult)):
        yield "sign", node, ast.UnaryOp(ast.USub(), node)


def _conditions(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition", node, node.operand
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "condition", node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield "condition", test, ast.Constant(True)


def _axes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        first, second, *others = node.elts
        yield "axes", node, _with(node, elts=[second, first, *others])


def _calls(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield "keyword", node, _with(node, keywords=[*node.keywords[:index], *node.keywords[index + 1 :]])
    if len(node.args) > 1 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        first, second, *others = node.args
        yield "arguments", node, _with(node, args=[second, first, *others])
    if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and node.args:
        other = FUNCTIONS[node.func.id]
        yield "function", node, _with(node, func=ast.Name(other, ast.Load())) if other else node.args[0]


def _statements(node: ast.AST) -> Iterator[Change]:
    # Not an assignment of a name: what reads the name fails, whatever is tested.
    stores = isinstance(node, ast.Assign) and all(isinstance(target, ast.Subscript) for target in node.targets)
    if stores or isinstance(node, (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
        yield "statement", node, ast.Pass()


MUTATORS: tuple[Callable[[ast.AST], Iterator[Change]], ...] = (
    _operators,
    _constants,
    _signs,
    _conditions,
    _axes,
    _calls,
    _statements,
)


def _with(node: Any, **fields: object) -> Any:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes below that a test can notice: not annotations, docstrings, names for export, or messages."""
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "format_spec"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if not isinstance(child, ast.AST) or _is_silent(child):
                continue
            yield child
            if not isinstance(child, (ast.Raise, ast.JoinedStr)):
                yield from _nodes(child)


def _is_silent(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mutations_of(source: str, path: str) -> list[Mutation]:
    """Return every mutation of a module's source, each once, in the order of the source."""
    found, tree = {}, ast.parse(source)
    for node in _nodes(tree):
        for mutator in MUTATORS:
            for kind, place, other in mutator(node):
                mutated = _replaced(source, place, other)
                found.setdefault(mutated, Mutation(path, kind, place.lineno, source, mutated))
    same = ast.dump(tree)
    return [mutation for mutation in found.values() if _dumped(mutation.mutated) not in ("", same)]


def _replaced(source: str, place: Any, other: ast.AST) -> str:
    """Return the source with the text of one node replaced; the columns of nodes count bytes."""
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: place.lineno - 1])) + place.col_offset
    end = sum(map(len, lines[: place.end_lineno - 1])) + place.end_col_offset
    text = ast.unparse(ast.fix_missing_locations(other))
    if isinstance(other, ast.expr) and not isinstance(other, (ast.Constant, ast.Name, ast.Call, ast.Attribute)):
        text = f"({text})"
    whole = source.encode()
    return (whole[:start] + text.encode() + whole[end:]).decode()


def _dumped(source: str) -> str:
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:  # as of a generator whose brackets are those of a call
        return ""


def all_mutations(root: pathlib.Path, only: str = "") -> list[Mutation]:
    """Return all mutations of the modules of PARTS whose path contains a text."""
    paths = [path for part in TESTS for path in sorted((root / "jaxfold" / part).glob("*.py"))]
    names = {path.relative_to(root).as_posix(): path for path in paths}
    return [
        mutation
        for name, path in names.items()
        if only in name
        for mutation in mutations_of(path.read_text("utf-8"), name)
    ]


def drawn(mutations: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """Return some of the mutations: at random a module, and of its mutations one, none of them twice."""
    rng = random.Random(seed)
    by_kind: dict[tuple[str, str], list[Mutation]] = {}
    for mutation in mutations:
        by_kind.setdefault((mutation.path, mutation.kind), []).append(mutation)
    chosen = []
    while by_kind and len(chosen) < count:
        path = rng.choice(sorted({path for path, _ in by_kind}))
        kind = rng.choice(sorted(kind for other, kind in by_kind if other == path))
        group = by_kind[path, kind]
        chosen.append(group.pop(rng.randrange(len(group))))
        if not group:
            del by_kind[path, kind]
    return chosen


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Return a copy of the repository in a folder, without what no test reads."""
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "site", "build", "dist")
    return pathlib.Path(shutil.copytree(ROOT, folder / "jaxfold", ignore=ignored))


def examine(mutation: Mutation, root: pathlib.Path, tests: tuple[str, ...], timeout: float) -> str:
    """Return the first test that fails with a mutation in the copy at ``root``, or nothing if it survives."""
    path = root / mutation.path
    if path.samefile(ROOT / mutation.path):
        raise ValueError(f"{root} is the repository itself; expected a copy of it")
    path.write_text(mutation.mutated, "utf-8")
    try:
        return failing(root, tests, timeout)
    finally:
        path.write_text(mutation.source, "utf-8")


def failing(root: pathlib.Path, tests: tuple[str, ...], timeout: float) -> str:
    """Return the first test that fails of the repository at ``root``, or nothing if all pass."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # Python takes a stored module for the new one if size and second are the same: none is stored.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"more than {timeout:.0f} s"
    if done.returncode == 0:
        return ""
    if done.returncode not in (1, 2):  # no test, no such file, usage
        raise RuntimeError(done.stdout + done.stderr)
    named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0].split(" - ")[0].split(" ", 1)[1] if named else "pytest itself"


def stored(state: pathlib.Path | None) -> dict[tuple[str, str], dict[str, object]]:
    """Return the outcomes in a state file, by path and diff; lines that were cut short are passed over."""
    outcomes = {}
    for line in state.read_text("utf-8").splitlines() if state and state.exists() else []:
        try:
            outcome = json.loads(line)
        except json.JSONDecodeError:
            continue
        outcomes[outcome["path"], outcome["diff"]] = outcome
    return outcomes


def run(mutations: list[Mutation], state: pathlib.Path | None, find: Callable[[Mutation], str]) -> list[Mutation]:
    """Run the mutations that a state file has no outcome of, print survivors, and return all survivors."""
    before, survivors = stored(state), []
    for index, mutation in enumerate(mutations, start=1):
        outcome = before.get((mutation.path, mutation.diff))
        if outcome is None:
            start = time.monotonic()
            killer = find(mutation)
            seconds = round(time.monotonic() - start, 1)
            outcome = {"path": mutation.path, "diff": mutation.diff, "killer": killer, "seconds": seconds}
            if state is not None:
                with state.open("a", encoding="utf-8") as file:
                    file.write("\n" + json.dumps(outcome))  # on a line of its own, whatever the last run left
        said = f"killed by {outcome['killer']}" if outcome["killer"] else f"SURVIVED\n{mutation.diff}"
        print(f"{index}/{len(mutations)} {mutation.path}:{mutation.line}, {mutation.kind}: {said}", flush=True)
        if not outcome["killer"]:
            survivors.append(mutation)
    return survivors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--state", type=pathlib.Path, help="a file of outcomes, to continue from and to add to")
    parser.add_argument("--only", default="", metavar="TEXT", help="of modules whose path contains this, as _block/")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="in place of those that belong to the module")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one mutation (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    options = parser.parse_args()
    mutations = drawn(all_mutations(ROOT, options.only), options.count, options.seed)
    if options.list:
        print(*(f"{mutation.kind}\n{mutation.diff}\n" for mutation in mutations), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        root, sound = copied(pathlib.Path(folder)), set()

        def find(mutation: Mutation) -> str:
            tests = tuple(options.tests or mutation.tests)
            if tests not in sound:  # a test that fails anyway kills whatever comes
                if killer := failing(root, tests, options.timeout):
                    raise SystemExit(f"{killer} fails without any mutation")
                sound.add(tests)
            return examine(mutation, root, tests, options.timeout)

        survivors = run(mutations, options.state, find)
    print(f"{len(mutations):,} mutations: {len(mutations) - len(survivors):,} killed, {len(survivors):,} survived")


if __name__ == "__main__":
    main()
