"""The modules of an NNX model by path, and which of their variables have several owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from flax import nnx

from jaxfold._errors import StructureError, kind_of
from jaxfold._tree._paths import Keys, join

# Modules of Flax that call the modules they hold with their variables as they are stored.
_HANDS_ON = ("Sequential", "List", "Dict", "MultiHeadAttention", "RNN", "Bidirectional")
_SHARED = "Contracting it here would change it there: give the block layers of its own first."


class Walk:
    """One walk over a model. ``modules`` maps paths to modules; ``tree`` is the same as nested dicts of keys."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nnx.Module):
            hint = "For a Linen model there is jaxfold.linen.block_paths." if hasattr(model, "init") else ""
            raise StructureError("model", kind_of(model), "a flax.nnx.Module", hint)
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
        self._root = model
        self._paths = {id(module): path for path, module in self.modules.items()}
        for path in sorted(self.modules, key=len):
            node = self.tree
            for key in path:
                node = node.setdefault(key, {})

    def explain(self, argument: str, keys: Keys) -> StructureError | None:
        """What to say of a path that leads nowhere in ``tree``, if it names a module that is also somewhere else."""
        node = self._root
        for end, key in enumerate(keys, start=1):
            node = _child(node, key)
            own = self._paths.get(id(node))
            if own is None or join(own) == join(keys[:end]):
                continue
            there = f"{join(own)!r}" if own else "the root"
            if end == len(keys):  # the other path is no way out: it is one and the same layer
                got = f"the path {join(keys)!r} of a module that the model holds at {there} too"
                return StructureError(argument, got, "one of its own", _SHARED)
            got = f"the path {join(keys)!r}, though the module at {join(keys[:end])!r} is also at {there}"
            expected = f"a path as in the state, which holds it there alone: {join((*own, *keys[end:]))!r}"
            return StructureError(argument, got, expected, "")
        return None

    def require_plain_holders(self, argument: str, path: Keys) -> None:
        """Raise :class:`StructureError` if a module of Flax that computes something of its own holds the layer.

        ``nnx.LoRA`` adds to what the layer returns. ``nnx.WeightNorm`` and ``nnx.SpectralNorm`` replace its kernel.
        """
        for end in range(len(path)):
            holder = self.modules.get(path[:end])
            if holder is None or not _computes_on_its_own(type(holder)):
                continue
            got = f"a layer inside {kind_of(holder)} ({join(path[:end]) or 'the model itself'})"
            hint = f"{type(holder).__name__} changes what the layer computes: merge its parameters into a plain layer."
            raise StructureError(argument, got, "a layer that computes with its stored variables alone", hint)

    def require_sole_owner(self, argument: str, path: Keys) -> None:
        """Raises :class:`StructureError` if a module or one of its variables is used in several places."""
        module = self.modules[path]
        if self._owners[id(module)] > 1:
            raise StructureError(argument, "a module that the model holds in several places", "one of its own", _SHARED)
        for name, leaf in vars(module).items():
            if isinstance(leaf, nnx.Variable) and self._owners[id(leaf)] > 1:
                got = "a variable that the model holds in several places"
                raise StructureError(f"{argument}.{name}", got, "one of its own", _SHARED)


def _computes_on_its_own(kind: type) -> bool:
    """Return whether a class is, or derives from, a layer of Flax that does more than call what it holds."""
    hands_on = tuple(getattr(nnx, name) for name in _HANDS_ON if hasattr(nnx, name))
    layers = [base for base in kind.__mro__ if base.__module__.startswith("flax.nnx.nn.")]
    return bool(layers) and not issubclass(kind, hands_on)


def _child(node: Any, key: Any) -> Any:
    """The item or attribute of that name; None if there is none."""
    if isinstance(key, str) and isinstance(node, nnx.Module) and key in vars(node):
        return vars(node)[key]
    for candidate in (key, int(key) if isinstance(key, str) and key.isdecimal() else key):
        try:
            return cast(Any, node)[candidate]
        except (TypeError, KeyError, IndexError, AttributeError, ValueError):
            continue
    return None


def _children(value: Any) -> list[Any]:
    if isinstance(value, nnx.Module):
        return list(vars(value).values())
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, nnx.Variable) else []
