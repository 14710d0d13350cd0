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
        for index, block in enumerate(good):
            if problem := _occupied(params, block, removed, [other.to for other in good[:index]]):
                block.error = problem
                break
        else:
            return stays


def _occupied(params: Any, block: Found, removed: set[Keys], taken: list[Keys | None]) -> JaxfoldError | None:
    hint = "Say where the contracted block goes with BlockPaths(to=...)."
    if block.to is None:
        return StructureError(
            f"to, of the block of {join(block.producer)}",
            "nothing",
            "a path: the producer stays and no norm goes",
            hint,
        )
    for other in taken:
        if other and (block.to[: len(other)] == other or other[: len(block.to)] == block.to):
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
