"""The script that mutates: what it changes, that it can be continued, and that it leaves the repository as it is."""

from __future__ import annotations

import ast
import pathlib
import subprocess

import pytest

from benchmarks import mutations
from benchmarks.mutations import Mutation, all_mutations, drawn, examine, mutations_of, stored


def mutated(source: str) -> set[str]:
    return {mutation.mutated for mutation in mutations_of(source, "jaxfold/_block/_x.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("c = a + b", {"c = (a - b)"}),
        ("c = a @ b", {"c = (b @ a)", "c = (-(a @ b))"}),
        ("c += a", {"c -= a", "pass"}),
        ("c = a < b", {"c = (a <= b)", "c = (a >= b)"}),
        ("c = a and b", {"c = (a or b)"}),
        ("c = a is None", {"c = (a is not None)"}),
        ("c = 2", {"c = 3", "c = 1"}),
        ("c = 0.0", {"c = 1.0"}),
        ("c = True", {"c = False"}),
        ("c = -a", {"c = a"}),
        ("c = not a", {"c = a"}),
        ("c = a if t else b", {"c = a if (not t) else b"}),
        ("if t:\n    f = a", {"if (not t):\n    f = a"}),
        ("c = [a for a in b if t]", {"c = [a for a in b if True]"}),
        ("c = a, b, d", {"c = ((b, a, d))"}),
        ("c = f(a, b)", {"c = f(b, a)"}),
        ("c = f(k=a)", {"c = f()"}),
        ("c = sorted(a)", {"c = a"}),
        ("c = any(a)", {"c = all(a)"}),
        ("f(a)", {"pass"}),
        ("a[b] = c", {"pass"}),
        ("é = 'é', f(a)  # é", {"é = ((f(a), 'é'))  # é"}),
    ],
)
def test_mutators(source: str, expected: set[str]) -> None:
    found = mutated(source)
    assert {ast.unparse(ast.parse(text)) for text in found} == {ast.unparse(ast.parse(text)) for text in expected}


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 2 lines."""',
        "__all__ = ['a', 'b']",
        "a: Literal[1, 2]",
        "def f(a: int | None) -> Literal[1, 2]: return a",
        "from __future__ import annotations",
        "if TYPE_CHECKING:\n    a = 1 + 2",
        "c = f'{a + 1}'",
    ],
)
def test_what_no_test_can_notice_is_left_alone(source: str) -> None:
    assert mutated(source) == set()


def test_the_message_of_an_error_is_left_alone_but_not_the_error() -> None:
    assert mutated("if t:\n    raise E(1, 2)") == {"if (not t):\n    raise E(1, 2)", "if t:\n    pass"}


def test_every_mutation_is_another_program() -> None:
    found = all_mutations(mutations.ROOT, "_algebra/_product")
    assert len(found) > 20
    assert len({mutation.mutated for mutation in found}) == len(found)
    for mutation in found:
        assert ast.dump(ast.parse(mutation.mutated)) != ast.dump(ast.parse(mutation.source))
        assert mutation.diff.startswith(f"--- {mutation.path}")
        assert mutation.tests[0] == "tests/algebra"
        assert all((mutations.ROOT / test).exists() for test in mutation.tests)


def test_a_draw() -> None:
    found = mutations_of("c = a + b * 2\nd = f(a, b, k=3)\n" * 3, "jaxfold/_fold/_x.py")
    one, two, other = drawn(found, 8, 0), drawn(list(reversed(found)), 8, 0), drawn(found, 8, 1)
    assert len({mutation.mutated for mutation in one}) == 8
    assert one == drawn(found, 8, 0) != other
    assert {mutation.kind for mutation in one} == {mutation.kind for mutation in two}
    assert len(drawn(found, 1000, 0)) == len(found)


ONE, TWO, THREE = (Mutation("jaxfold/_block/_x.py", "sign", 1, "c = -a\n", f"c = {x}\n") for x in "abc")


def test_a_run_is_continued(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, asked = tmp_path / "state", []

    def find(mutation: Mutation) -> str:
        asked.append(mutation)
        return "" if mutation is TWO else "tests/test_x.py::test_y"

    assert mutations.run([ONE, TWO], state, find) == [TWO]
    with state.open("a") as file:
        file.write('\n{"path": "jaxfold')  # interrupted while it was written
    assert len(stored(state)) == 2
    for _ in range(2):
        assert mutations.run([ONE, TWO, THREE], state, find) == [TWO]
    assert asked == [ONE, TWO, THREE]
    out = capsys.readouterr().out
    assert out.count("SURVIVED\n--- jaxfold/_block/_x.py\n") == 3
    assert "-c = -a\n+c = b\n" in out
    assert out.count("killed by tests/test_x.py::test_y") == 5


def test_the_repository_stays_as_it_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mutated is a copy, and the copy is mended, whatever happens; the repository's own file is refused."""
    repository, root = tmp_path / "repository", tmp_path / "copy"
    for folder in (repository, root):
        (folder / "jaxfold/_block").mkdir(parents=True)
        (folder / ONE.path).write_text(ONE.source)
    monkeypatch.setattr(mutations, "ROOT", repository)
    seen = []

    def failing(root: pathlib.Path, tests: tuple[str, ...], timeout: float) -> str:
        seen.append((root / ONE.path).read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(mutations, "failing", failing)
    with pytest.raises(KeyboardInterrupt):
        examine(ONE, root, ("tests",), 1.0)
    with pytest.raises(ValueError, match="repository itself"):
        examine(ONE, repository, ("tests",), 1.0)
    assert seen == [ONE.mutated]
    assert (root / ONE.path).read_text() == (repository / ONE.path).read_text() == ONE.source


def test_the_first_test_that_fails(tmp_path: pathlib.Path) -> None:
    """Of modules as they are now, though size and second are the same as before."""
    (tmp_path / "test_a.py").write_text("import x\ndef test_one(): pass\ndef test_two(): assert x.a == 1\n")
    for value, killer in ((1, ""), (2, "test_a.py::test_two")):
        (tmp_path / "x.py").write_text(f"a = {value}\n")
        assert mutations.failing(tmp_path, ("test_a.py",), 600) == killer


def test_no_test_is_no_failure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is not there must not count as a test that fails."""
    done = subprocess.CompletedProcess([], 4, "ERROR: file or directory not found: tests/x.py\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    with pytest.raises(RuntimeError, match="not found"):
        mutations.failing(tmp_path, ("tests/x.py",), 600)
