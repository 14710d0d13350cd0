"""Flat names such as ``encoder/up/kernel`` as a nested tree, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxfold._errors import StructureError

DEEPEST = 100  # keys on the way to a leaf


def separator_of(names: Iterable[str]) -> str:
    """What joins the keys of a name: ``/`` if any name has one, else ``.``."""
    names = list(names)
    return "/" if any("/" in name for name in names) or not any("." in name for name in names) else "."


def nest(flat: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """A nested dict of the leaves of a flat one.

    Raises:
        StructureError: if one name leads through another, as ``a`` and ``a/b`` do.
    """
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *path, last = name.split(separator)
        if len(path) > DEEPEST:
            raise StructureError(name[:40] + "…", f"a path of {len(path)} keys", f"at most {DEEPEST}", "")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise StructureError(
                name, "a name that is a leaf and a group at once", "either", "Rename one of the leaves."
            )
        node[last] = leaf
    return tree


def flatten(tree: Any, separator: str) -> dict[str, Any]:
    """The leaves of a nested tree by their joined keys; places in a list are keys too.

    Raises:
        StructureError: if two leaves would have the same name, a key holds the separator, or a container is empty, so
            that no name would tell of it.
    """
    flat: dict[str, Any] = {}
    _flatten(tree, (), separator, flat)
    return flat


def _flatten(node: Any, path: tuple[str, ...], separator: str, flat: dict[str, Any]) -> None:
    name = separator.join(path)
    if isinstance(node, (Mapping, list, tuple)):
        items = list(node.items() if isinstance(node, Mapping) else enumerate(node))
        if not items and path:
            hint = "Remove it, or write msgpack or Orbax."
            raise StructureError(name, "an empty container", "arrays only: the format has nothing else", hint)
        for key, value in items:
            if separator in str(key):
                raise StructureError(name, f"the key {key!r}", f"keys without {separator!r}, which joins them here", "")
            _flatten(value, (*path, str(key)), separator, flat)
    elif name in flat:
        raise StructureError(name, "two leaves of this name", "one: keys of this format are strings", "")
    else:
        flat[name] = node


def in_order(flat: Mapping[str, Any], before: Iterable[str]) -> dict[str, Any]:
    """The same leaves, those that were there ``before`` first and in the order that they had."""
    kept = [name for name in before if name in flat]
    known = set(kept)
    return {name: flat[name] for name in [*kept, *(name for name in flat if name not in known)]}
