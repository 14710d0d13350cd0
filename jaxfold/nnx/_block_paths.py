"""Blocks of an NNX model, by path, with their options read from its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfold._block._shape import consumer_path, flag
from jaxfold._errors import JaxfoldError, StructureError
from jaxfold._layers._assemble import ReadBlock
from jaxfold._layers._resolve import Resolved, resolve
from jaxfold._tree._block_paths import BlockPaths
from jaxfold._tree._paths import Path
from jaxfold.nnx._layers import PROJECTIONS, is_attention
from jaxfold.nnx._read import read
from jaxfold.nnx._sequential import check_sequential
from jaxfold.nnx._walk import Walk


def block_paths(
    model: Any,
    *,
    producer: Path,
    norm: Path,
    consumers: Path | Mapping[str, Path],
    keep_producer: bool = False,
    to: Path | None = None,
) -> list[BlockPaths]:
    """Blocks of an NNX model as :class:`jaxfold.BlockPaths`, for its state, with nothing guessed.

    Epsilon, the kind of norm and stacks (``nnx.vmap``, ``nnx.scan``) are read from the modules and their shapes. Those
    that are members of one ``nnx.Sequential`` have to be neighbours in it. Elsewhere, in which order the model calls
    them is not seen, nor is what else reads what they return: name only a norm that reads the producer's output and
    nothing else. Where something else reads that output too, pass ``keep_producer=True``; where something else than the
    consumers reads the norm's, the block cannot be contracted.

    Args:
        model: an ``nnx.Module``; abstract variables will do. It is not changed.
        producer: path of the producer by attributes and by items of lists and dicts: ``"layers/0/up"``. ``*`` stands
            for any part of a key, as in ``"layers/*/up"``; each match makes a block.
        norm: path of the norm, whether or not it has parameters. What ``*`` stood for is put in its place here.
        consumers: path of the consumer, or a mapping of names to such. The path of an attention module stands for its
            projections.
        keep_producer: whether the producer stays, because something else reads its output.
        to: where the contracted block goes in the tree; see :class:`jaxfold.BlockPaths`. Needed if the producer stays
            and the norm has no parameters.

    Returns:
        A list of :class:`jaxfold.BlockPaths`, in the order of the model's attributes.

    Raises:
        StructureError: if a path leads nowhere or matches nothing, a layer is of another class or inside an
            ``nnx.LoRA``, ``nnx.WeightNorm`` or ``nnx.SpectralNorm``, one of its variables belongs to another module
            too, something stands between members of one ``nnx.Sequential``, or the block has no place without ``to``.
        OptionError: naming the path and attribute that cannot be contracted, as in ``layers/0/norm.reduction_axes``.
        ShapeError, DtypeError: if leaves do not fit each other.

    Example:
        >>> from flax import nnx
        >>> import jaxfold.nnx
        >>> rngs = nnx.Rngs(0)
        >>> up, norm, down = nnx.Linear(4, 32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)
        >>> model = nnx.Sequential(up, norm, down)
        >>> paths = {"producer": "layers/0", "norm": "layers/1", "consumers": "layers/2"}
        >>> [block] = jaxfold.nnx.block_paths(model, **paths)
        >>> block.producer, block.epsilon
        ('layers/0', 1e-06)
    """
    flag("keep_producer", keep_producer)
    walk = Walk(model)
    blocks = []
    for found in resolve(walk.tree, producer, norm, consumers, to, walk.explain):
        found = _expand_attention(walk, found)
        try:
            own = _read(walk, found)
            check_sequential(walk, found)
        except JaxfoldError as error:
            raise found.rename(error) from None
        blocks.append(found.block_paths(own, keep_producer=keep_producer))
    return blocks


def _expand_attention(walk: Walk, found: Resolved) -> Resolved:
    keys = found.consumers.get(None)
    if keys is None or not is_attention(walk.modules.get(keys)):
        return found
    return Resolved(found.producer, found.norm, {name: (*keys, name) for name in PROJECTIONS}, found.to)


def _read(walk: Walk, found: Resolved) -> ReadBlock:
    roles = {"producer": found.producer, "norm": found.norm}
    roles |= {consumer_path(name): keys for name, keys in found.consumers.items()}
    for role, keys in roles.items():
        if keys not in walk.modules:
            raise StructureError(role, "a container of modules", "a module", "")
        walk.require_plain_holders(role, keys)
        walk.require_sole_owner(role, keys)
    parents = {keys[:-1] for keys in found.consumers.values()}
    attention = walk.modules.get(next(iter(parents))) if len(parents) == 1 else None
    whole = is_attention(attention) and set(found.consumers) == set(PROJECTIONS)
    consumers = {name: walk.modules[keys] for name, keys in found.consumers.items()}
    own = read(
        walk.modules[found.producer],
        walk.modules[found.norm],
        attention if whole else consumers.get(None, consumers),
    )
    own.block()
    return own
