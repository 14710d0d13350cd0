"""Which layers stay in the tree, and whether the contracted blocks have a free place in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfold._errors import JaxfoldError, StructureError, kind_of
from jaxfold._tree._paths import Keys, child, join
from jaxfold._tree._resolve import Found, kind

Stays = set[tuple[str, Keys]]


def settle_places(params: Any, found: list[Found]) -> Stays:
    """The layers that stay, with their role: those a block that was skipped needs, and producers that were to be kept.

    A block that would overwrite something that stays is skipped too, which may make more layers stay.
    """
    while True:
        good = [block for block in found if not block.error]
        alone = [block for block in found if block.error and not block.repeats]
        stays = {(kind(role), keys) for block in alone for role, keys in block.roles.items()}
        stays |= {("producer", block.producer) for block in good if block.spec.keep_producer}
        removed = removed_paths(good, stays)
        taken = _Taken()
        for block in good:
            if problem := _occupied(params, block, removed, taken):
                block.error = problem
                break
            taken.add(block.to)
        else:
            return stays


class _Taken:
    """The places of contracted blocks, and what lies above them."""

    def __init__(self) -> None:
        self.places: set[Keys] = set()
        self.above: set[Keys] = set()

    def add(self, place: Keys | None) -> None:
        if place is not None:
            self.places.add(place)
            self.above |= set(_starts(place))

    def __contains__(self, place: Keys) -> bool:
        """Whether a place is one of these, above one of them or below one."""
        return place in self.above or any(start in self.places for start in _starts(place))


def _starts(place: Keys) -> list[Keys]:
    return [place[:end] for end in range(1, len(place) + 1)]


def _occupied(params: Any, block: Found, removed: set[Keys], taken: _Taken) -> JaxfoldError | None:
    hint = "Say where the contracted block goes with BlockPaths(to=...)."
    if block.to is None:
        return StructureError(
            f"to, of the block of {join(block.producer)}",
            "nothing",
            "a path: the producer stays and no norm goes",
            hint,
        )
    if block.to in taken:
        return StructureError(join(block.to), "the place of another block", "a place of its own", hint)
    node = params
    for end in range(1, len(block.to) + 1):
        if block.to[:end] in removed:
            return None
        parent, node = node, None
        try:
            _, node = child(parent, block.to[end - 1])
        except KeyError:
            if not isinstance(parent, (list, tuple)):
                return None
            got = f"no place in {join(block.to[: end - 1]) or 'params'}, {kind_of(parent)} of {len(parent)}"
            return StructureError(join(block.to[:end]), got, "one that is there, or a key of a mapping", hint)
        if end == len(block.to) or not isinstance(node, (Mapping, list, tuple)):
            return StructureError(join(block.to[:end]), "something that stays", "a free place", hint)
    return None


def removed_paths(found: list[Found], stays: Stays) -> set[Keys]:
    """The paths of the layers that go."""
    good = [block for block in found if not block.error]
    return {keys for block in good for role, keys in block.roles.items() if (kind(role), keys) not in stays}
