"""From patterns of paths to the layers of each block, in a tree of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxfold._block._shape import consumer_path
from jaxfold._errors import JaxfoldError, OptionError, StructureError
from jaxfold._layers._assemble import ReadBlock
from jaxfold._tree._block_paths import BlockPaths
from jaxfold._tree._paths import Keys, Path, fill, join, lookup, match, split


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The keys of each layer of one block; a single consumer goes by the name None."""

    producer: Keys
    norm: Keys
    consumers: dict[str | None, Keys]
    to: Path | None

    def labels(self) -> dict[str, str]:
        """The path of each layer by the argument that it was given as."""
        labels = {"producer": join(self.producer), "norm": join(self.norm)}
        return labels | {consumer_path(name): join(keys) for name, keys in self.consumers.items()}

    def rename(self, error: JaxfoldError) -> JaxfoldError:
        """The error about ``norm.epsilon``, say, as one about ``encoder/norm.epsilon``."""
        for role, path in self.labels().items():
            if error.argument.startswith(role):
                return error.at((path or "the model") + error.argument[len(role) :])
        return error

    def block_paths(self, read: ReadBlock, *, keep_producer: bool) -> BlockPaths:
        """The paths of the block's leaves, with the options that its modules gave.

        Raises:
            StructureError: if it has no place in the tree: the producer stays, and no norm goes.
        """
        normed = any(leaf is not None for leaf in read.layers[1].values())
        if keep_producer and not normed and self.to is None:
            got = f"None for the block of {join(self.producer)}, whose norm has no parameters"
            hint = "The producer stays and no norm goes, so neither leaves a place: pass to='...'."
            raise StructureError("to", got, "a path for the contracted block", hint)
        named = {name: as_path(keys) for name, keys in self.consumers.items()}
        return BlockPaths(
            producer=as_path(self.producer),
            norm=as_path(self.norm) if normed else None,
            consumers=named[None] if None in named else {str(name): path for name, path in named.items()},
            keep_producer=keep_producer,
            to=self.to,
            **read.options,
        )


def resolve(
    tree: Any,
    producer: Any,
    norm: Any,
    consumers: Any,
    to: Any,
    explain: Callable[[str, Keys], StructureError | None],
) -> Iterator[Resolved]:
    """Each block that the patterns name in a tree of nested mappings.

    Args:
        tree: the modules, as nested mappings of keys.
        producer, norm, consumers, to: paths, as the user gave them.
        explain: what to say of an argument and its path that leads nowhere, if there is more to say than that.

    Raises:
        OptionError: if a path is malformed, or has another number of ``*`` than the producer's.
        StructureError: if nothing matches the producer's path, or one of the others leads nowhere.
    """
    patterns = patterns_of(producer, norm, consumers)
    target = None if to is None else split("to", to)
    found = list(match(tree, patterns["producer"]))
    if not found:
        raise explain("producer", patterns["producer"]) or _nothing(tree, patterns["producer"])
    for keys, captures in found:
        filled = {role: fill(role, pattern, captures) for role, pattern in patterns.items()}
        at: dict[str, Keys] = {}
        for role, path in filled.items():
            try:
                at[role], _ = lookup(role, tree, path)
            except StructureError as error:
                raise explain(role, path) or error from None
        yield Resolved(
            producer=keys,
            norm=at["norm"],
            consumers={name: at[consumer_path(name)] for name in _by_name(consumers)},
            to=None if target is None else as_path(fill("to", target, captures)),
        )


def patterns_of(producer: Any, norm: Any, consumers: Any) -> dict[str, Keys]:
    """The keys of each layer's path, as the user gave it, by the argument that it was given as.

    Raises:
        OptionError: if a path is malformed, or a consumer has no name.
    """
    patterns = {"producer": split("producer", producer), "norm": split("norm", norm)}
    return patterns | {
        consumer_path(name): split(consumer_path(name), path) for name, path in _by_name(consumers).items()
    }


def _by_name(consumers: Any) -> Mapping[Any, Any]:
    """The paths of the consumers; a single one goes by None."""
    if not isinstance(consumers, Mapping):
        return {None: consumers}
    if not consumers:
        raise OptionError("consumers", "an empty mapping", "at least one consumer", "")
    for name in consumers:
        if not isinstance(name, str):
            raise OptionError("consumers", f"the name {name!r}", "names that are strings", "")
    return consumers


def _nothing(tree: Any, pattern: Keys) -> StructureError:
    if all("*" not in str(key) for key in pattern):
        lookup("producer", tree, pattern)  # says where the path ends
    there = ", ".join(repr(str(key)) for key in tree) or "none"
    expected = f"one that a module matches; at the root there are {there}"
    return StructureError("producer", f"the pattern {join(pattern)!r}, which matches nothing", expected, "")


def as_path(keys: Keys) -> Path:
    """A path as :class:`jaxfold.BlockPaths` takes it, a string where that is unambiguous."""
    plain = all(isinstance(key, int) or (isinstance(key, str) and key and "/" not in key) for key in keys)
    return join(keys) if plain and keys else keys
