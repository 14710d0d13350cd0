"""What could be a Dense-norm-Dense block in a parameter tree, by paths and shapes.

A norm is a group with a scale of one axis (two in a stack) and no kernel; its producer a group beside it whose kernel
ends in that width; its consumer a group beside it, or one level below a group beside it, whose kernel begins with that
width. Whether the model connects them so, shapes cannot tell.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jaxfold
from jaxfold._block._plan import Plan
from jaxfold._tree._paths import WILDCARD, Keys, children, match

ATTENTION = ("query", "key", "value")  # read one normed input, and share its denominator


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible block; its paths may hold ``*`` where it stands for several of equal shapes.

    Attributes:
        producer, norm, consumers: paths as tuples of keys; a single consumer goes by ``None``.
        plan: what it costs before and after.
        sizes: d, n, m.
        stacked: whether every leaf has a leading axis more.
        count: how many blocks it stands for.
    """

    producer: Keys
    norm: Keys
    consumers: dict[str | None, Keys]
    plan: Plan
    sizes: tuple[int, int, int]
    stacked: bool
    count: int = 1

    @property
    def before(self) -> int:
        """Parameters of the blocks as they are."""
        return self.plan.original.parameters * self.count

    @property
    def after(self) -> int:
        """Parameters of the blocks contracted, in the direct form."""
        return self.plan.direct.parameters * self.count

    @property
    def paths(self) -> tuple[Keys, ...]:
        """All its paths."""
        return (self.producer, self.norm, *self.consumers.values())


def candidates(tree: Any) -> list[Candidate]:
    """All of a tree, those that pay first and the largest saving of those first."""
    found = _merge(tree, list(_below(tree, ())))
    return sorted(found, key=lambda candidate: (not candidate.plan.pays(), candidate.after - candidate.before))


def _below(node: Any, path: Keys) -> Iterator[Candidate]:
    groups = {key: value for key, value in children(node) if isinstance(value, (Mapping, list, tuple))}
    norms = {key: shapes for key, value in groups.items() if (shapes := _norm(value))}
    layers = {key: shapes for key, value in groups.items() if (shapes := _dense(value))}
    for norm, shapes in norms.items():
        width, stack = shapes["scale"][-1], shapes["scale"][:-1]
        consumers = list(_consumers(groups, layers, width, stack))
        for producer, leaves in layers.items():
            kernel = leaves["kernel"]
            if kernel[-1] != width or kernel[:-2] != stack:
                continue
            for named in consumers:
                if all(keys != (producer,) for keys in named):
                    yield from _candidate(path, producer, norm, leaves, shapes, named, stacked=bool(stack))
    for key, value in groups.items():
        yield from _below(value, (*path, key))


def _candidate(
    path: Keys, producer: Any, norm: Any, leaves: Any, shapes: Any, named: dict[Keys, Any], *, stacked: bool
) -> Iterator[Candidate]:
    single = len(named) == 1
    consumers: Any = {None if single else str(keys[-1]): group for keys, group in named.items()}
    places = {None if single else str(keys[-1]): (*path, *keys) for keys in named}
    try:
        plan, m = _plan(
            _hashable(leaves), _hashable(shapes), tuple((n, _hashable(g)) for n, g in consumers.items()), stacked
        )
    except jaxfold.JaxfoldError:
        return  # a bias that does not fit, say
    sizes = (leaves["kernel"][-2], leaves["kernel"][-1], m)
    yield Candidate((*path, producer), (*path, norm), places, plan, sizes, stacked)


@functools.lru_cache(maxsize=1024)
def _plan(producer: Any, norm: Any, consumers: Any, stacked: bool) -> tuple[Plan, int]:
    groups: dict[Any, dict[str, Any]] = {name: dict(group) for name, group in consumers}
    plan = jaxfold.plan(dict(producer), dict(norm), groups.get(None, groups), stacked=stacked)
    m = 0
    for group in groups.values():
        size = 1
        for axis in group["kernel"][1 + stacked :]:
            size *= axis
        m += size
    return plan, m


def _hashable(shapes: Mapping[str, Any]) -> Any:
    return tuple(shapes.items())


def _norm(group: Any) -> dict[str, tuple[int, ...]] | None:
    shapes = _shapes(group, {"scale", "bias"})
    good = shapes and "scale" in shapes and len(shapes["scale"]) in (1, 2) and len(set(shapes.values())) == 1
    return shapes if good else None


def _dense(group: Any) -> dict[str, tuple[int, ...]] | None:
    shapes = _shapes(group, {"kernel", "bias"})
    return shapes if shapes and len(shapes.get("kernel", ())) >= 2 else None


def _shapes(group: Any, keys: set[str]) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the leaves of a layer, if it has none but these."""
    if not isinstance(group, Mapping) or not group or not set(group) <= keys:
        return None
    shapes = {key: getattr(leaf, "shape", None) for key, leaf in group.items()}
    if any(shape is None or not all(shape) for shape in shapes.values()):
        return None
    return {key: tuple(shape) for key, shape in shapes.items() if shape is not None}


def _consumers(groups: Any, layers: Any, width: int, stack: tuple[int, ...]) -> Iterator[dict[Keys, Any]]:
    """Each consumer by its keys below the parent; query, key and value together."""

    def fits(shapes: Any) -> bool:
        kernel, lead = shapes["kernel"], len(stack)
        return kernel[:lead] == stack and len(kernel) >= lead + 2 and kernel[lead] == width

    for key, shapes in layers.items():
        if fits(shapes):
            yield {(key,): shapes}
    for key, group in groups.items():
        below = {(key, name): shapes for name, value in children(group) if (shapes := _dense(value)) and fits(shapes)}
        together = {keys: shapes for keys, shapes in below.items() if keys[1] in ATTENTION}
        if len(together) > 1:
            yield together
        for keys, shapes in below.items():
            if len(together) < 2 or keys not in together:
                yield {keys: shapes}


def _merge(tree: Any, found: list[Candidate]) -> list[Candidate]:
    """Blocks of equal shapes in layer_0, layer_1, … as one, where the pattern names these and no others."""
    alike: dict[Any, list[Candidate]] = {}
    for candidate in found:
        alike.setdefault(_pattern(candidate), []).append(candidate)
    merged = []
    for (paths, *_), members in alike.items():
        producers = {member.producer for member in members}
        first = members[0]
        if len(members) > 1 and {keys for keys, _ in match(tree, paths[0])} == producers:
            named = dict(zip(first.consumers, paths[2:], strict=True))
            first = dataclasses.replace(first, producer=paths[0], norm=paths[1], consumers=named, count=len(members))
            members = [first]
        merged += members
    return merged


def _pattern(candidate: Candidate) -> tuple[Any, ...]:
    """Its paths with the last number in the keys above the block as ``*``, and all else that must be equal."""
    above = candidate.producer[:-1]
    numbered = [index for index, key in enumerate(above) if re.search(r"\d$", str(key))]
    paths = candidate.paths
    if numbered:
        index = numbered[-1]
        key = re.sub(r"\d+$", lambda _: WILDCARD, str(above[index]))
        paths = tuple((*path[:index], key, *path[index + 1 :]) for path in paths)
    return paths, tuple(candidate.consumers), candidate.plan, candidate.sizes, candidate.stacked
