"""One abstract run of a Linen model: which module was called with what, and what it returned.

Arrays are told apart by identity. Within one trace the array that a layer returns is the object that the next one
receives, unless something was computed in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
from flax.core.scope import DenyList

from jaxfold._errors import StructureError, kind_of


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a module. It holds the arrays, so that no later one gets the identity of one of them."""

    module: Any
    path: tuple[str, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    masked: bool
    is_call: bool

    def reads(self, arrays: set[int]) -> bool:
        return any(id(array) in arrays for array in self.inputs)

    def returns(self, arrays: set[int]) -> bool:
        return any(id(array) in arrays for array in self.outputs)

    def passes_through(self) -> bool:
        """Whether it returns what it was given, as a Dropout does that is not in training mode."""
        given = {id(array) for array in self.inputs}
        return bool(self.outputs) and all(id(array) in given for array in self.outputs)


@dataclasses.dataclass(frozen=True)
class Record:
    """The calls of a run in the order in which they ended, and the params that init would make, as shapes.

    A model that cannot be run leaves its ``error``, and in ``entered`` the modules that were called until then.
    """

    calls: list[Call]
    params: Any
    entered: dict[tuple[str, ...], Any] = dataclasses.field(default_factory=dict)
    error: Exception | None = None

    def of(self, path: tuple[Any, ...]) -> list[Call]:
        """The calls of the module at a path."""
        return [call for call in self.calls if call.path == path and call.is_call]

    def modules(self) -> dict[str, Any]:
        """The paths of all modules, as nested dicts of names."""
        return _nested(call.path for call in self.calls)

    def entered_modules(self) -> dict[str, Any]:
        """The same of those that were called before the error."""
        return _nested(self.entered)


def record(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """Runs ``model.init`` and ``model.apply`` without computing anything; an error of the model is part of the record.

    Raises:
        StructureError: if ``model`` is no Linen module.
    """
    if not isinstance(model, nn.Module):
        hint = "For an NNX model there is jaxfold.nnx.block_paths." if hasattr(model, "eval") else ""
        raise StructureError("model", kind_of(model), "a flax.linen.Module", hint)
    calls: list[Call] = []
    entered: dict[tuple[str, ...], Any] = {}

    def intercept(next_call: Any, call_args: Any, call_kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        entered[tuple(context.module.path)] = context.module
        outputs = next_call(*call_args, **call_kwargs)
        calls.append(
            Call(
                module=context.module,
                path=tuple(context.module.path),
                inputs=_arrays((call_args, call_kwargs)),
                outputs=_arrays(outputs),
                masked=call_kwargs.get("mask") is not None,
                is_call=context.method_name == "__call__",
            )
        )
        return outputs

    leaves, structure = jax.tree.flatten((args, kwargs))
    traced = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def run(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if array else leaf for leaf, array in zip(leaves, traced, strict=True)]
        call_args, call_kwargs = jax.tree.unflatten(structure, merged)
        with nn.intercept_methods(intercept):
            variables = model.init(jax.random.key(0), *call_args, **call_kwargs)
            calls.clear()
            # A module can do something else while it is initialised, so what is watched is the call of the model.
            # Collections other than the parameters may be written to, as in training.
            rngs = {"params": jax.random.key(0)}
            model.apply(variables, *call_args, rngs=rngs, mutable=DenyList("params"), **call_kwargs)
        return variables

    arrays = [leaf for leaf, array in zip(leaves, traced, strict=True) if array]
    try:
        variables = jax.eval_shape(run, arrays)
    except Exception as error:  # a model may raise anything
        return Record(calls, {}, entered, error)
    return Record(calls, variables.get("params", {}), entered)


def _nested(paths: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        for name in path:
            node = node.setdefault(name, {})
    return tree


def _arrays(tree: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
