"""The modules of an NNX model by path, and which of their variables have several owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxfold._errors import StructureError

Keys = tuple[Any, ...]


class Walk:
    """One walk over a model. ``modules`` maps paths to modules; ``tree`` is the same as nested dicts of keys."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nnx.Module):
            hint = "For a Linen model there is jaxfold.linen.block_paths." if hasattr(model, "init") else ""
            raise StructureError("model", f"a {type(model).__name__}", "a flax.nnx.Module", hint)
        self.modules: dict[Keys, Any] = {}
        self.tree: dict[Any, Any] = {}
        self._owners: Counter[int] = Counter()
        seen: list[Any] = []  # kept alive, so that no other object gets the identity of one of them
        for path, value in nnx.iter_graph(model):
            if isinstance(value, nnx.Module):
                self.modules[tuple(path)] = value
            for child in _children(value):
                if isinstance(child, (nnx.Variable, nnx.Module)):
                    self._owners[id(child)] += 1
            seen.append(value)
        for path in sorted(self.modules, key=len):
            node = self.tree
            for key in path:
                node = node.setdefault(key, {})

    def require_sole_owner(self, argument: str, path: Keys) -> None:
        """Raises :class:`StructureError` if a module or one of its variables is used in several places."""
        module = self.modules[path]
        hint = "Contracting it here would change it there: give the block layers of its own first."
        if self._owners[id(module)] > 1:
            raise StructureError(argument, "a module that the model holds in several places", "one of its own", hint)
        for name, leaf in vars(module).items():
            if isinstance(leaf, nnx.Variable) and self._owners[id(leaf)] > 1:
                got = "a variable that the model holds in several places"
                raise StructureError(f"{argument}.{name}", got, "one of its own", hint)


def _children(value: Any) -> list[Any]:
    if isinstance(value, nnx.Module):
        return list(vars(value).values())
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, nnx.Variable) else []
