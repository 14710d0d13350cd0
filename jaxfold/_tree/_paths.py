"""Paths in a parameter tree, and patterns of them.

A path is a string of keys joined by ``/``, or a tuple of keys. In a string, ``*`` stands for any part of one key; what
it matched in one path of a block is put in place of the ``*`` of its other paths, so that layer 3's producer goes with
layer 3's norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxfold._errors import OptionError, StructureError

Path = str | tuple[Any, ...]
Keys = tuple[Any, ...]
WILDCARD = "*"


def split(argument: str, path: Any) -> Keys:
    """The keys of a path; those of a string are strings.

    Raises:
        OptionError: if it is neither a string nor a tuple, or has an empty key.
    """
    expected = "a path such as 'encoder/layer_*/Dense_0', or a tuple of keys"
    if isinstance(path, tuple) and path:
        return path
    if not isinstance(path, str) or not path:
        several = "For several consumers pass a mapping of their names to paths." if argument == "consumers" else ""
        raise OptionError(argument, repr(path), expected, several)
    keys = tuple(path.split("/"))
    if not all(keys):
        raise OptionError(argument, repr(path), expected, "It has an empty key: remove the extra '/'.")
    return keys


def join(keys: Keys) -> str:
    """A path as reports and messages show it."""
    return "/".join(map(str, keys))


def wildcards(keys: Keys) -> int:
    """How many ``*`` there are."""
    return sum(key.count(WILDCARD) for key in keys if isinstance(key, str))


def fill(argument: str, keys: Keys, captures: Keys) -> Keys:
    """The path with each ``*`` replaced by what the producer's matched, in order.

    A key that is nothing but ``*`` becomes the matched key itself: ``1`` and ``"1"`` may both be keys of one mapping.

    Raises:
        OptionError: if it has another number of ``*`` than the producer, and is not without any.
    """
    count = wildcards(keys)
    if count not in (0, len(captures)):
        expected = f"{len(captures)} of '*', as in the producer, or none"
        raise OptionError(argument, f"{join(keys)!r} with {count}", expected, "")
    rest = iter(captures)

    def filled(key: Any) -> Any:
        if key == WILDCARD:
            return next(rest, key)
        return re.sub(r"\*", lambda _: str(next(rest)), key) if isinstance(key, str) else key

    return tuple(filled(key) for key in keys)


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a container; nothing for a leaf."""
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)


def child(node: Any, key: Any) -> tuple[Any, Any]:
    """The key as the container has it, and its value.

    A string names an integer key too, as in ``layers/0``, and an integer names a string, unless there is a key of its
    own kind.

    Raises:
        KeyError: if there is none.
    """
    if isinstance(node, Mapping):
        for candidate in (key, *_as_integer(key), *_as_string(key)):
            if candidate in node:
                return candidate, node[candidate]
    elif isinstance(node, (list, tuple)):
        for candidate in (key, *_as_integer(key)):
            if isinstance(candidate, int) and 0 <= candidate < len(node):
                return candidate, node[candidate]
    raise KeyError(key)


def _as_integer(key: Any) -> tuple[int, ...]:
    return (int(key),) if isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]*", key) else ()


def _as_string(key: Any) -> tuple[str, ...]:
    return (str(key),) if isinstance(key, int) and not isinstance(key, bool) else ()


def lookup(argument: str, tree: Any, keys: Keys) -> tuple[Keys, Any]:
    """The path in the tree's own keys, and what is there.

    Raises:
        StructureError: naming the argument, the first key that is missing and the keys that are there instead.
    """
    found: list[Any] = []
    node = tree
    for key in keys:
        try:
            own, node = child(node, key)
        except KeyError:
            there = [repr(name) for name, _ in children(node)]
            shown = f"the keys {', '.join(there[:8])}{', …' if len(there) > 8 else ''}" if there else "no keys"
            raise StructureError(
                argument,
                f"the path {join(keys)!r}, which ends before {key!r}",
                f"a path in the tree: {join(tuple(found)) or 'its root'} has {shown}",
                _advice(tree, keys, len(found)),
            ) from None
        found.append(own)
    return tuple(found), node


def settle(tree: Any, keys: Keys) -> Keys:
    """The path with the tree's own keys as far as it leads, and as it is written beyond."""
    own: list[Any] = []
    node = tree
    for key in keys:
        try:
            key, node = child(node, key)
        except KeyError:
            node = None
        own.append(key)
    return tuple(own)


def reached(tree: Any, pattern: Keys) -> str:
    """A sentence about where a pattern that matches nothing stops to match."""
    end = next(
        end for end in range(len(pattern) + 1) if end == len(pattern) or not any(match(tree, pattern[: end + 1]))
    )
    first = next(match(tree, pattern[:end]))[0]
    there = [str(key) for key, _ in children(lookup("blocks", tree, first)[1])]
    if not there:
        return f"{join(first) or 'The tree'} has no keys."
    shown = ", ".join(map(repr, there[:8])) + (", …" if len(there) > 8 else "")
    if any("/" in key for key in there) or any("." in key for key in there):
        hint = "The tree is flat: nest it first, as flax.traverse_util.unflatten_dict(params, sep=...) does."
    else:
        hint = _advice(tree, pattern, end)
    return f"{join(first) or 'Its root'} has the keys {shown}. {hint}".rstrip()


def _advice(tree: Any, pattern: Keys, end: int) -> str:
    """What to do about a pattern that matches so many keys and no more: a level too few or too many, or dots."""
    if end == 0:
        below = [key for key, value in children(tree) if any(match(value, pattern[:1]))]
        if below:
            key = below[0]
            return f"Pass what is at {key!r} in it, as in params[{key!r}], or begin the paths with '{key}/'."
        if any(match(tree, pattern[1:2] or ("",))):
            return f"Leave out '{pattern[0]}/', in the other paths too."
    key = pattern[end] if end < len(pattern) else ""
    if isinstance(key, str) and "." in key:
        return "Keys are separated by '/', not by dots."
    return ""


def match(tree: Any, pattern: Keys) -> Iterator[tuple[Keys, Keys]]:
    """Every path of the tree that the pattern matches, in the tree's order, and what each ``*`` stood for."""
    if not pattern:
        yield (), ()
        return
    first, rest = pattern[0], pattern[1:]
    if first == WILDCARD:
        options: list[tuple[Any, Any, Keys]] = [(key, value, (key,)) for key, value in children(tree) if key != ""]
    elif isinstance(first, str) and WILDCARD in first:
        expression = re.compile("(.+?)".join(map(re.escape, first.split(WILDCARD))))
        matched = [(key, value, expression.fullmatch(str(key))) for key, value in children(tree)]
        options = [(key, value, found.groups()) for key, value, found in matched if found]
    else:
        try:
            options = [(*child(tree, first), ())]
        except KeyError:
            return
    for key, value, captures in options:
        for keys, more in match(value, rest):
            yield (key, *keys), (*captures, *more)
