"""Rebuilding a tree with some of its parts taken out and others put in; the old tree stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from flax.core import FrozenDict

from jaxfold._errors import StructureError, kind_of
from jaxfold._tree._paths import Keys, children, join

GONE = object()


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
    return _rebuild(tree, (), removed, inserted)


def _rebuild(node: Any, path: Keys, removed: set[Keys], inserted: Mapping[Keys, Any]) -> Any:
    below = {keys for keys in inserted if keys[: len(path)] == path and len(keys) > len(path)}
    if not _is_container(node):
        return node
    items: dict[Any, Any] = {}
    for key, value in children(node):
        keys = (*path, key)
        if keys in inserted:
            items[key] = inserted[keys]
        elif keys in removed:
            items[key] = _fresh({}, keys, removed, inserted) if _leads_on(keys, below) else GONE
        else:
            items[key] = _rebuild(value, keys, removed, inserted)
            if _is_container(value) and len(value) and items[key] is not GONE and not len(items[key]):
                items[key] = GONE
    _fresh(items, path, removed, inserted)
    return _like(node, items, path)


def _fresh(items: dict[Any, Any], path: Keys, removed: set[Keys], inserted: Mapping[Keys, Any]) -> dict[Any, Any]:
    """Adds to ``items`` what is inserted below ``path`` under keys that were not there."""
    for keys in inserted:
        key = keys[len(path)] if keys[: len(path)] == path and len(keys) > len(path) else GONE
        if key is GONE or items.get(key, GONE) is not GONE:
            continue
        own = (*path, key)
        items[key] = inserted[own] if own in inserted else _fresh({}, own, removed, inserted)
    return items


def _leads_on(keys: Keys, below: set[Keys]) -> bool:
    return any(other[: len(keys)] == keys for other in below)


def _is_container(node: Any) -> bool:
    return isinstance(node, (Mapping, list, tuple))


def _like(node: Any, items: dict[Any, Any], path: Keys) -> Any:
    """A container of the type of ``node`` that holds ``items``."""
    if isinstance(node, (list, tuple)):
        values = [{} if value is GONE else value for value in items.values()]
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return type(node)(*values)
        return type(node)(values)
    present = {key: value for key, value in items.items() if value is not GONE}
    if isinstance(node, FrozenDict):
        return FrozenDict(present)
    if type(node) is dict:
        return present
    if hasattr(node, "raw_mapping"):  # an nnx.State, which nests plain dicts
        make: Callable[[Any], Any] = type(node)
        return make({key: getattr(value, "raw_mapping", value) for key, value in present.items()})
    if isinstance(node, MutableMapping):
        result = copy.copy(node)  # of any other type, with what else it holds: a default factory, say
        result.clear()
        result.update(present)
        return result
    raise StructureError(
        join(path) or "params", kind_of(node), "dict, FrozenDict, nnx.State, list or tuple", "Unfreeze it."
    )


def leaves(tree: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every leaf with its path; a boxed leaf counts as one, ``None`` as nothing."""
    if _is_container(tree):
        for key, value in children(tree):
            yield from leaves(value, (*path, key))
    elif tree is not None:
        yield path, tree
