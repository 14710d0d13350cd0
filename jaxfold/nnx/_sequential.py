"""The order of layers that are members of one nnx.Sequential, the one place where NNX says who feeds whom."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxfold._block._shape import consumer_path
from jaxfold._errors import StructureError
from jaxfold._layers._resolve import Resolved
from jaxfold._tree._paths import Keys, join
from jaxfold.nnx._layers import is_attention
from jaxfold.nnx._walk import Walk


def check_sequential(walk: Walk, found: Resolved) -> None:
    """That the norm follows the producer, and a consumer the norm, where both are members of one nnx.Sequential.

    Raises:
        StructureError: naming the role of the later layer, and what stands between.
    """
    _require_neighbours(walk, ("producer", found.producer), ("norm", found.norm))
    for name, keys in found.consumers.items():
        if is_attention(walk.modules.get(keys[:-1])):
            keys = keys[:-1]  # the member is the attention module, which hands its input to the projections
        _require_neighbours(walk, ("norm", found.norm), (consumer_path(name), keys))


def _require_neighbours(walk: Walk, earlier: tuple[str, Keys], later: tuple[str, Keys]) -> None:
    (before, first), (role, second) = earlier, later
    if first[:-1] != second[:-1] or len(first) < 2 or first[-2] != "layers":
        return
    parent = walk.modules.get(first[:-2])
    if not isinstance(parent, nnx.Sequential) or type(parent).__call__ is not nnx.Sequential.__call__:
        return
    start, end = int(first[-1]), int(second[-1])
    expected = f"the member after {before} ({join(first)})"
    if end < start:
        got = f"a member before {before}: called the other way round"
        raise StructureError(role, got, expected, "A Sequential calls its members in their order: swap the paths.")
    members = list(parent.layers)
    between = [
        f"{_name(members[index])} ({join((*first[:-1], index))})"
        for index in range(start + 1, end)
        if not _is_inert(members[index])
    ]
    if between:
        hint = f"With something between {before} and {role} this is no block; a dropout is none after model.eval()."
        raise StructureError(role, f"{' and '.join(between)} between {before} and it", expected, hint)


def _name(member: Any) -> str:
    return type(member).__name__ if isinstance(member, nnx.Module) else getattr(member, "__name__", repr(member))


def _is_inert(member: Any) -> bool:
    """Whether it is a Dropout that returns its input."""
    return type(member) is nnx.Dropout and (member.rate == 0 or member.deterministic is True)
