"""Rebuilding a tree with some of its parts taken out and others put in; the old tree stays as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax.core import FrozenDict

from jaxfold._errors import StructureError, kind_of
from jaxfold._tree._paths import Keys, children, join

GONE = object()
REBUILT = "dict, FrozenDict, nnx.State, list or tuple"


def rebuild(tree: Any, removed: set[Keys], inserted: Mapping[Keys, Any]) -> Any:
    """A tree of new containers of the same types, with the leaves that stay being the same objects.

    Args:
        tree: nested mappings, lists and tuples; anything else is a leaf.
        removed: paths of what goes, in the tree's own keys. A mapping that is left empty goes too; in a list or tuple,
            whose places are names, an empty dict stays instead.
        inserted: what comes where. A path may be new, be one of those removed, or lead through new mappings.

    Raises:
        StructureError: if a container cannot be rebuilt.
    """
    return _rebuild(tree, (), removed, _nested(inserted))


@dataclasses.dataclass(frozen=True)
class _New:
    """What comes at a path."""

    value: Any


# What comes below a path: by the next key either what comes there, or what comes below that.
_Below = dict[Any, Any]


def _nested(inserted: Mapping[Keys, Any]) -> _Below:
    result: _Below = {}
    for keys, value in inserted.items():
        node = result
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = _New(value)
    return result


def _rebuild(node: Any, path: Keys, removed: set[Keys], new: _Below) -> Any:
    if not _is_container(node):
        return node
    items: dict[Any, Any] = {}
    for key, value in children(node):
        own, here = (*path, key), new.get(key, {})
        if isinstance(here, _New):
            items[key] = here.value
        elif own in removed:
            items[key] = _fresh({}, here) if here else GONE
        else:
            items[key] = _rebuild(value, own, removed, here)
            if _is_container(value) and len(value) and items[key] is not GONE and not len(items[key]):
                items[key] = GONE
    return _like(node, _fresh(items, new), path)


def _fresh(items: dict[Any, Any], new: _Below) -> dict[Any, Any]:
    """Add to ``items`` what comes under keys that are not there."""
    for key, here in new.items():
        if items.get(key, GONE) is GONE:
            items[key] = here.value if isinstance(here, _New) else _fresh({}, here)
    return items


def _is_container(node: Any) -> bool:
    return isinstance(node, (Mapping, list, tuple))


def _like(node: Any, items: dict[Any, Any], path: Keys) -> Any:
    """A container of the type of ``node`` that holds ``items``."""
    if isinstance(node, (list, tuple)):
        return _sequence(node, [{} if value is GONE else value for value in items.values()], path)
    present = {key: value for key, value in items.items() if value is not GONE}
    if isinstance(node, FrozenDict):
        return FrozenDict(present)
    if type(node) is dict:
        return present
    if hasattr(node, "raw_mapping"):  # an nnx.State, which nests plain dicts
        make: Callable[[Any], Any] = type(node)
        return make({key: getattr(value, "raw_mapping", value) for key, value in present.items()})
    if isinstance(node, (dict, UserDict)):
        result = copy.copy(node)  # with what else it holds: a default factory, say
        if type(result) is type(node) and result is not node:
            result.clear()
            result.update(present)
            return result
    # A shallow copy of any other mapping may share its storage: to clear the copy would empty the caller's own.
    raise StructureError(join(path) or "params", kind_of(node), REBUILT, "Convert it first, as in dict(params).")


def _sequence(node: Any, values: list[Any], path: Keys) -> Any:
    """A list or tuple of the type of ``node``."""
    try:
        result = node._make(values) if hasattr(node, "_fields") and hasattr(node, "_make") else type(node)(values)
    except Exception as error:  # a constructor of its own
        hint = "Convert it to a list or tuple first."
        raise StructureError(join(path) or "params", kind_of(node), REBUILT, hint) from error
    if type(result) is not type(node) or len(result) != len(values):
        raise StructureError(join(path) or "params", kind_of(node), REBUILT, "Convert it to a list or tuple first.")
    return result


def leaves(tree: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every leaf with its path; a boxed leaf counts as one, ``None`` as nothing."""
    if _is_container(tree):
        for key, value in children(tree):
            yield from leaves(value, (*path, key))
    elif tree is not None:
        yield path, tree
