"""Blocks of a Linen model, by path, with their options read from one abstract run of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxfold._block._leaves import unbox
from jaxfold._block._shape import consumer_path, flag
from jaxfold._errors import JaxfoldError, StructureError
from jaxfold._layers._assemble import ReadBlock
from jaxfold._layers._resolve import Resolved, patterns_of, resolve
from jaxfold._tree._block_paths import BlockPaths
from jaxfold._tree._paths import Keys, Path, join, match
from jaxfold.linen._chain import check_chain, check_kernels
from jaxfold.linen._layers import PROJECTIONS, check_class, check_definition, is_attention
from jaxfold.linen._read import read
from jaxfold.linen._record import Record, record


def block_paths(
    model: Any,
    *args: Any,
    producer: Path,
    norm: Path,
    consumers: Path | Mapping[str, Path],
    keep_producer: bool = False,
    to: Path | None = None,
    **kwargs: Any,
) -> list[BlockPaths]:
    """Blocks of a Linen model as :class:`jaxfold.BlockPaths`, with nothing guessed.

    Runs ``model.init(key, *args, **kwargs)`` and then ``model.apply`` without computing anything, and sees which module
    reads what in the latter. Where that
    fails, and for no reason that lies in a layer of the block, the model's own error is raised. Epsilon, the kind of
    norm and stacks (``nn.scan``, ``nn.vmap``) come from the modules and their shapes; that the norm reads the
    producer's output, and the consumers the norm's, is checked.

    What it cannot see is a reader that is no module: a residual sum, an activation that is recorded with ``sow`` or
    returned from inside a scan. Where something else reads the producer's output, pass ``keep_producer=True``; where
    something else reads the norm's, the block cannot be contracted.

    Args:
        model: an ``nn.Module``, not bound.
        *args: its example inputs, arrays or ``jax.ShapeDtypeStruct``.
        producer: path of the producer in the tree of modules, which is that of ``params``: ``"encoder/Dense_0"``. ``*``
            stands for any part of a key; each match makes a block.
        norm: path of the norm, whether or not it has parameters. What ``*`` stood for is put in its place here.
        consumers: path of the consumer, or a mapping of names to such. An attention module's path stands for its
            projections.
        keep_producer: whether the producer stays, because something else reads its output.
        to: where the contracted block goes in the tree; see :class:`jaxfold.BlockPaths`. Needed if the producer stays
            and the norm has no parameters.
        **kwargs: keyword arguments of the model; those that are arrays are traced.

    Returns:
        A list of :class:`jaxfold.BlockPaths`, in the order of the model's calls.

    Raises:
        StructureError: if a path leads nowhere or matches nothing, a layer is of another class, something stands
            between the layers, or something else reads what they pass on.
        OptionError: naming the path and attribute that cannot be contracted, as in ``encoder/norm.reduction_axes``.
        ShapeError, DtypeError: if leaves do not fit each other.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, jaxfold.linen
        >>> model = nn.Sequential([nn.Dense(32), nn.LayerNorm(epsilon=1e-5), nn.Dense(3)])
        >>> paths = {"producer": "layers_0", "norm": "layers_1", "consumers": "layers_2"}
        >>> [block] = jaxfold.linen.block_paths(model, jnp.ones((1, 4)), **paths)
        >>> block.producer, block.epsilon
        ('layers_0', 1e-05)
    """
    flag("keep_producer", keep_producer)
    run = record(model, args, kwargs)
    if run.error is not None:
        _refuse_definitions(run, patterns_of(producer, norm, consumers))
        raise run.error
    blocks = []
    modules = run.modules()
    explain = functools.partial(_explain, modules)
    for found in resolve(modules, producer, norm, consumers, to, explain):
        found = _expand_attention(run, found)
        try:
            _check_classes(run, found)
            check_chain(run, found, keep_producer)
            own = _read(run, found)
        except JaxfoldError as error:
            raise found.rename(error) from None
        blocks.append(found.block_paths(own, keep_producer=keep_producer))
    return blocks


def _refuse_definitions(run: Record, patterns: Mapping[str, Keys]) -> None:
    """Of a model that cannot be run: raises what is to be said of the layers of a block that were called by then.

    An attribute that cannot be contracted may be what stopped it: a norm over a named axis needs that axis to run.
    """
    tree = run.entered_modules()
    for role, pattern in patterns.items():
        for keys, _ in match(tree, pattern):
            try:
                if keys in run.entered:
                    check_definition(role, run.entered[keys])
            except JaxfoldError as error:
                raise error.at(join(keys) + error.argument[len(role) :]) from run.error


def _expand_attention(run: Record, found: Resolved) -> Resolved:
    keys = found.consumers.get(None)
    calls = run.of(keys) if keys is not None else []
    if not (calls and keys is not None and is_attention(calls[0].module)):
        return found
    return Resolved(found.producer, found.norm, {name: (*keys, name) for name in PROJECTIONS}, found.to)


def _explain(modules: Mapping[str, Any], argument: str, keys: Keys) -> StructureError | None:
    """What to say of a path from the root of the variables; None for any other."""
    if keys[0] != "params" or "params" in modules:
        return None
    got, expected = f"the path {join(keys)!r}", "a path in the tree of modules, which is that of variables['params']"
    return StructureError(argument, got, expected, "Leave out 'params/', in the other paths too.")


def _check_classes(run: Record, found: Resolved) -> None:
    """Before the calls: those of a subclass or a wrapper look as if the layer were used more than once."""
    roles = {"producer": found.producer, "norm": found.norm}
    for role, keys in (roles | {consumer_path(name): keys for name, keys in found.consumers.items()}).items():
        for call in run.of(keys)[:1]:
            check_class(role, call.module)
        check_kernels(run, role, keys)


def _read(run: Record, found: Resolved) -> ReadBlock:
    def layer(path: Any) -> tuple[Any, Any]:
        node = run.params
        for key in path:
            node = node.get(key, {}) if isinstance(node, Mapping) else {}
        leaves = node if isinstance(node, Mapping) else {}
        return run.of(path)[0].module, {key: unbox(leaf) for key, leaf in leaves.items()}

    consumers = {name: layer(path) for name, path in found.consumers.items()}
    own = read(layer(found.producer), layer(found.norm), consumers.get(None, consumers))
    own.block()
    return own
