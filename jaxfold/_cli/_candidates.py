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
from jaxfold._cli._layers import consumers_of, dense_shapes, norm_shapes, unwrapped
from jaxfold._tree._paths import WILDCARD, Keys, children, match

OPTIMISER = "opt_state"  # holds moments in trees like that of the parameters


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible block; its paths may hold ``*`` where it stands for several of equal shapes.

    Attributes:
        producer, norm, consumers: paths as tuples of keys; a single consumer goes by ``None``.
        plan: what it costs before and after.
        sizes: d, n, m.
        stacked: whether every leaf has a leading axis more.
        norm_bias: whether the norm has a bias, so that it can only be a LayerNorm.
        count: how many blocks it stands for.
    """

    producer: Keys
    norm: Keys
    consumers: dict[str | None, Keys]
    plan: Plan
    sizes: tuple[int, int, int]
    stacked: bool
    norm_bias: bool
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
    tree = unwrapped(tree)
    found = _merge(tree, list(_below(tree, ())))
    return sorted(found, key=lambda candidate: (not candidate.plan.pays(), candidate.after - candidate.before))


def _below(node: Any, path: Keys) -> Iterator[Candidate]:
    groups = {key: value for key, value in children(node) if isinstance(value, (Mapping, list, tuple))}
    groups.pop(OPTIMISER, None)
    norms = {key: shapes for key, value in groups.items() if (shapes := norm_shapes(value))}
    layers = {key: shapes for key, value in groups.items() if (shapes := dense_shapes(value))}
    for norm, shapes in norms.items():
        width, stack = shapes["scale"][-1], shapes["scale"][:-1]
        consumers = list(consumers_of(groups, layers, width, stack))
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
    yield Candidate((*path, producer), (*path, norm), places, plan, sizes, stacked, "bias" in shapes)


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
    return paths, tuple(candidate.consumers), candidate.plan, candidate.sizes, candidate.stacked, candidate.norm_bias
