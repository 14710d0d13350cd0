"""Patterns: what matches, in which order, and what the other paths of a block get for each star."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfold._errors import OptionError, StructureError
from jaxfold._tree._containers import leaves, rebuild
from jaxfold._tree._paths import fill, lookup, match, split

TREE = {
    "layer_1": {"up": 1, "down": 2},
    "layer_10": {"up": 3},
    "layers": [{"up": 4}, {"up": 5}],
    7: {"up": 6},
    "x.y": 8,
}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer_1/up", [(("layer_1", "up"), ())]),
        ("layer_*/up", [(("layer_1", "up"), ("1",)), (("layer_10", "up"), ("10",))]),
        ("layer_1*/up", [(("layer_10", "up"), ("0",))]),  # a star stands for something
        ("*/up", [(("layer_1", "up"), ("layer_1",)), (("layer_10", "up"), ("layer_10",)), ((7, "up"), (7,))]),
        ("layers/*/up", [(("layers", 0, "up"), (0,)), (("layers", 1, "up"), (1,))]),
        ("layers/1/up", [(("layers", 1, "up"), ())]),
        ("layers/2/up", []),
        ("layers/-1/up", []),
        ("layers/01/up", []),
        ("7/up", [((7, "up"), ())]),
        ("*_1/*", [(("layer_1", "up"), ("layer", "up")), (("layer_1", "down"), ("layer", "down"))]),
        ("x.*", [(("x.y",), ("y",))]),  # the dot is a dot
        ("l*y*_1/up", [(("layer_1", "up"), ("a", "er"))]),
        ("layer_1/up/more", []),
        (("layer_1", "up"), [(("layer_1", "up"), ())]),
    ],
)
def test_match(pattern: Any, expected: Any) -> None:
    assert list(match(TREE, split("producer", pattern))) == expected


def test_an_exact_key_of_a_tuple_is_itself() -> None:
    assert lookup("p", {0: "int", "0": "text"}, (0,)) == ((0,), "int")
    assert lookup("p", {0: "int", "0": "text"}, ("0",)) == (("0",), "text")
    assert lookup("p", {0: "int"}, ("0",)) == ((0,), "int")
    assert lookup("p", {"0": "text"}, (0,)) == (("0",), "text")


def test_fill_puts_each_capture_in_its_place() -> None:
    assert fill("norm", ("a_*", "b", "*_c_*"), ("1", r"\2", "3")) == ("a_1", "b", r"\2_c_3")
    assert fill("norm", ("a", 3), ("1", "2")) == ("a", 3)
    assert fill("norm", ("*", "b_*"), (1, 2)) == (1, "b_2")  # a key that is matched whole keeps its kind
    with pytest.raises(OptionError, match="norm: got 'a_\\*' with 1; expected 2 of"):
        fill("norm", ("a_*",), ("1", "2"))


def test_lookup_says_what_is_there() -> None:
    with pytest.raises(StructureError, match=r"norm: got the path 'layer_1/x', which ends before 'x'.*'up', 'down'"):
        lookup("norm", TREE, ("layer_1", "x"))
    with pytest.raises(StructureError, match="its root has the keys"):
        lookup("norm", TREE, ("x",))
    with pytest.raises(StructureError, match="layer_1/up has no keys"):
        lookup("norm", TREE, ("layer_1", "up", "z"))


trees = st.recursive(
    st.integers(0, 9) | st.text("ab", max_size=2),
    lambda inner: (
        st.dictionaries(st.text("abc", min_size=1, max_size=2) | st.integers(0, 3), inner, min_size=1, max_size=4)
        | st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(trees.filter(lambda tree: isinstance(tree, (dict, list, tuple))), st.data())
def test_rebuild_takes_out_what_is_said_and_nothing_else(tree: Any, data: st.DataObject) -> None:
    paths = [keys for keys, _ in leaves(tree)]
    gone = set(data.draw(st.lists(st.sampled_from(paths), unique=True))) if paths else set()
    new = rebuild(tree, gone, {})
    left = [(keys, leaf) for keys, leaf in leaves(tree) if keys not in gone]
    assert list(leaves(new)) == left
    assert type(new) is type(tree)
    assert rebuild(tree, set(), {}) == tree
    assert not any(a is b for a, b in itertools.product(_containers(tree), _containers(new)) if a)


@given(trees.filter(lambda tree: isinstance(tree, dict)), st.data())
def test_rebuild_puts_in_what_is_said_and_nothing_else(tree: Any, data: st.DataObject) -> None:
    paths = [keys for keys, _ in leaves(tree)]
    place = data.draw(st.sampled_from(paths)) if paths else ("new",)
    marker = object()
    for where, removed in ((place, {place}), (("z", "deep", 0), set()), ((*place, "below"), {place})):
        new = rebuild(tree, removed, {where: marker})
        assert lookup("p", new, where) == (where, marker)
        others = {keys: leaf for keys, leaf in leaves(new) if leaf is not marker}
        assert others == {keys: leaf for keys, leaf in leaves(tree) if keys not in removed}


def _containers(tree: Any) -> list[Any]:
    """Every container that could be changed from outside."""
    if not isinstance(tree, (dict, list, tuple)):
        return []
    inner = tree.values() if isinstance(tree, dict) else tree
    own = [] if isinstance(tree, tuple) else [tree]
    return own + [node for value in inner for node in _containers(value)]
