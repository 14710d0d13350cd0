"""From patterns to the blocks of a given tree, and which of them can be contracted together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfold._block._block import Block
from jaxfold._block._contraction import Contraction
from jaxfold._block._shape import consumer_path
from jaxfold._block._verify import Certificate
from jaxfold._errors import JaxfoldError, StructureError, kind_of
from jaxfold._tree._block_paths import BlockPaths
from jaxfold._tree._paths import Keys, fill, join, lookup, match, settle, split

PROJECTIONS = ("query", "key", "value")


@dataclasses.dataclass(eq=False)
class Found:
    """One block of the tree: its paths in the tree's own keys, its leaves, and what became of it or why not."""

    spec: BlockPaths
    producer: Keys
    norm: Keys | None = None
    consumers: dict[str | None, Keys] = dataclasses.field(default_factory=dict)
    to: Keys | None = None
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: JaxfoldError | None = None
    block: Block | None = None
    contraction: Contraction | None = None
    repeats: bool = False
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        self.names: tuple[str | None, ...] = self.spec.names

    @property
    def roles(self) -> dict[str, Keys]:
        """The path of every group of leaves, by the name of the argument of :func:`jaxfold.contract`."""
        named = {"producer": self.producer} | ({} if self.norm is None else {"norm": self.norm})
        return named | {consumer_path(name): keys for name, keys in self.consumers.items()}


def resolve(tree: Any, blocks: Sequence[BlockPaths]) -> tuple[list[Found], list[str]]:
    """Every block that the patterns match, and the patterns that matched nothing."""
    found, unmatched = [], []
    for spec in blocks:
        matches = list(match(tree, split("producer", spec.producer)))
        if not matches:
            unmatched.append(join(split("producer", spec.producer)))
        found += [_find(tree, spec, keys, captures) for keys, captures in matches]
    owners: dict[Keys, tuple[Found, str]] = {}
    for block in found:
        if block.error is None:
            block.error = _conflict(block, owners)
        if block.error is None:
            owners |= {keys: (block, kind(role)) for role, keys in block.roles.items()}
    return found, unmatched


def _find(tree: Any, spec: BlockPaths, producer: Keys, captures: Keys) -> Found:
    block = Found(spec, producer)
    # As they are written first, so that a report shows them all, wherever they lead.
    wanted = {argument: fill(argument, split(argument, path), captures) for argument, path in spec.paths().items()}
    wanted |= {"producer": producer}
    block.norm = wanted.get("norm")
    block.consumers = {name: wanted[consumer_path(name)] for name in spec.names}
    try:
        for argument in (role for role in wanted if role != "to"):
            wanted[argument], block.groups[argument] = _layer(argument, tree, wanted[argument])
    except StructureError as error:
        block.error = error
        if error.argument == "norm" and not error.hint:
            block.error.hint = "For a norm without parameters, which has no leaves, leave norm out (None)."
        return block
    if spec.names == (None,) and _is_attention(block.groups["consumers"]):
        keys, group = wanted.pop("consumers"), block.groups.pop("consumers")
        for name in PROJECTIONS:
            wanted[consumer_path(name)], block.groups[consumer_path(name)] = (*keys, name), group[name]
        block.names = PROJECTIONS
    block.norm = wanted.get("norm")
    block.consumers = {name: wanted[consumer_path(name)] for name in block.names}
    block.to = settle(tree, wanted["to"]) if "to" in wanted else None
    paths = list(block.roles.values())
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        block.error = StructureError(join(twice[0]), "one layer in two roles", "a layer for each role", "")
    return block


def _layer(argument: str, tree: Any, keys: Keys) -> tuple[Keys, Mapping[Any, Any]]:
    """Return the path of a layer in the tree's own keys, and its leaves.

    Raises:
        StructureError: if there is nothing, or something else than a layer: one of its leaves, say.
    """
    own, group = lookup(argument, tree, keys)
    if isinstance(group, Mapping):
        return own, group
    got = f"the path {join(own)!r}, which leads to {'a leaf' if hasattr(group, 'shape') else kind_of(group)}"
    hint = f"Name the layer, {join(own[:-1])!r}." if own[1:] and hasattr(group, "shape") else ""
    raise StructureError(argument, got, "the path of a layer, which is a mapping of its leaves", hint)


def _is_attention(group: Any) -> bool:
    """Whether these are the leaves of an attention module: no kernel of its own, but three projections."""
    return isinstance(group, Mapping) and "kernel" not in group and all(name in group for name in PROJECTIONS)


def _conflict(block: Found, owners: Mapping[Keys, tuple[Found, str]]) -> JaxfoldError | None:
    """Why the block cannot be contracted beside the earlier ones. A producer may feed several norms."""
    for role, keys in block.roles.items():
        other, other_kind = owners.get(keys, (None, ""))
        if other is None or kind(role) == other_kind == "producer":
            continue
        if block.roles == other.roles:
            block.repeats = True
            return StructureError(join(block.producer), "a block that is named twice", "each block once", "")
        got = f"a {kind(role)} that is the {other_kind} of the block of {join(other.producer)} too"
        return StructureError(join(keys), got, "a layer in one block only", "Contract either of them.")
    return None


def kind(role: str) -> str:
    """``"consumer"`` for any of the consumers, else the role itself."""
    return "consumer" if role.startswith("consumers") else role
