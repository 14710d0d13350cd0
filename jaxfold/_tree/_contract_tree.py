"""Contracting blocks inside a parameter tree.

The patterns are resolved to blocks first, then each block is contracted by itself, and the tree is rebuilt once at the
end. Nothing is written before all is known, so a failure half-way leaves nothing half-changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxfold._block._block import Block
from jaxfold._block._contract import contract_block
from jaxfold._block._leaves import read_dtype
from jaxfold._block._shape import FORMS, Form, choose, consumer_path, flag
from jaxfold._block._verify import verify
from jaxfold._errors import ConcretenessError, JaxfoldError, OptionError, StructureError, kind_of
from jaxfold._tree._block_paths import BlockPaths
from jaxfold._tree._boxes import bare, boxed
from jaxfold._tree._containers import rebuild
from jaxfold._tree._fold_report import FoldReport
from jaxfold._tree._paths import Keys, join, reached, settle, split
from jaxfold._tree._placement import removed_paths, settle_places
from jaxfold._tree._resolve import Found, resolve
from jaxfold._tree._rows import copies_in, make_row, places_of, size_of


def contract_tree(
    params: Any,
    blocks: BlockPaths | Iterable[BlockPaths],
    *,
    form: Form = "direct",
    dtype: Any = None,
    allow_growth: bool = False,
    strict: bool = False,
    inputs: Mapping[str, ArrayLike] | None = None,
    rows: int = 64,
) -> tuple[Any, FoldReport]:
    """Contracts the blocks of a parameter tree that are named by path.

    The leaves of producer, norm and consumers go, and in place of the producer comes ``Contraction.params``, which is
    the tree of ``jaxfold.linen.ContractedDense`` and ``jaxfold.nnx.ContractedDense``. Runs on the host in float64, like
    :func:`jaxfold.contract`.

    Args:
        params: nested dicts, FrozenDicts, ``nnx.State``, lists and tuples of arrays. Leaves may be boxed, as in
            ``nn.Partitioned`` or ``nnx.Param``; then so are the new ones, with the sharding names of the axes that
            survive. Leaves that are sharded arrays make coefficients that are sharded along those axes.
        blocks: which layers make a block: one :class:`BlockPaths` or several of them. Whether the model connects
            these layers so, and reads them nowhere else, a tree cannot tell.
        form, dtype, allow_growth: as for :func:`jaxfold.contract`.
        strict: whether a block that cannot be contracted, or a pattern that matches nothing, is an error rather than a
            row of the report.
        inputs: real inputs of blocks, ``(..., d)``, by the path of their producer, to measure errors on. For the others
            standard normal numbers are drawn.
        rows: how many to draw; 0 measures only the blocks with ``inputs``.

    Returns:
        The new tree and a :class:`FoldReport`. Containers are new and of the same types, the leaves that were not
        touched are the same objects. A producer with ``keep_producer``, or one that a block that was skipped needs,
        stays.

    Raises:
        OptionError: if an option, or what ``blocks`` holds, is not accepted.
        StructureError: if ``params`` is no container or holds one that cannot be rebuilt, or ``inputs`` names a
            producer that is in no block.
        ShapeError, DtypeError, CoefficientError: if ``inputs`` do not fit their block, or are not finite.
        ConcretenessError: if a leaf of a block, or of ``inputs``, is a tracer or has no values.
        JaxfoldError: the reason for the first block that cannot be contracted, if ``strict``.

    Example:
        >>> import jax, flax.linen as nn, jax.numpy as jnp, jaxfold
        >>> model = nn.Sequential([nn.Dense(64), nn.LayerNorm(), nn.Dense(8)])
        >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
        >>> paths = jaxfold.BlockPaths(producer="layers_0", norm="layers_1", consumers="layers_2", epsilon=1e-6)
        >>> contracted, report = jaxfold.contract_tree(params, paths)
        >>> jax.tree.map(jnp.shape, contracted)
        {'layers_0': {'consumer': {'kernel': (6, 8)}, 'denominator': {'bias': (5,), 'kernel': (4, 5)}}}
        >>> report.parameters
        (968, 73)
    """
    specs = _check(params, blocks, form, allow_growth, strict, rows)
    storage = read_dtype(dtype)
    found, unmatched = resolve(params, specs)
    if strict and unmatched:
        got = f"the pattern {unmatched[0]!r}, which matches nothing"
        raise StructureError("blocks", got, "a path in the tree", reached(params, split("blocks", unmatched[0])))
    given = {settle(params, keys): x for keys, x in _inputs(inputs).items()}
    fed: set[Keys] = set()
    feeds = Counter(block.producer for block in found if not block.repeats)
    for block in found:
        keep = block.spec.keep_producer or feeds[block.producer] > 1
        block.to = block.to or (block.norm if keep else block.producer)
        x = given.get(block.producer)
        fed.add(block.producer)
        if block.error is None:
            _contract(block, form, storage, allow_growth=allow_growth, keep_producer=keep)
            if block.error is None and (x is not None or rows):
                _verify(block, x, rows)
    if unused := [keys for keys in given if keys not in fed]:
        raise StructureError("inputs", f"the path {join(unused[0])!r}", "paths of producers in blocks", "")
    stays = settle_places(params, found)
    if strict and (failed := next((block.error for block in found if block.error), None)):
        raise failed

    good = [block for block in found if block.error is None and block.to]
    removed = removed_paths(good, stays)
    new = rebuild(params, removed, {block.to: boxed(block) for block in good if block.to})
    places = places_of(params)
    copies = copies_in(places)
    before, after = size_of(params), size_of(new)
    rows_made = tuple(
        make_row(
            block,
            form,
            storage,
            keep_producer=("producer", block.producer) in stays,
            places=places,
            copies=copies,
            removed=removed,
        )
        for block in found
    )
    return new, FoldReport(
        rows=rows_made,
        unmatched=tuple(unmatched),
        hints=tuple(reached(params, split("blocks", pattern)) for pattern in unmatched),
        parameters=(before[0], after[0]),
        bytes=(before[1], after[1]),
    )


def _check(params: Any, blocks: Any, form: Any, allow_growth: Any, strict: Any, rows: Any) -> list[BlockPaths]:
    choose("form", form, FORMS)
    flag("allow_growth", allow_growth)
    flag("strict", strict)
    if not isinstance(rows, (int, np.integer)) or isinstance(rows, bool) or rows < 0:
        raise OptionError("rows", repr(rows), "an integer, 0 or above", "")
    if not isinstance(params, (Mapping, list, tuple)):
        hint = (
            "Pass the parameters: variables['params'] of a Linen module, state.params of a TrainState, "
            "nnx.state(model) of an NNX model."
        )
        raise StructureError("params", kind_of(params), "a dict, FrozenDict, nnx.State, list or tuple", hint)
    if not isinstance(blocks, (BlockPaths, Iterable)) or isinstance(blocks, (str, Mapping)):
        raise OptionError("blocks", kind_of(blocks), "a jaxfold.BlockPaths or several of them", "")
    specs = [blocks] if isinstance(blocks, BlockPaths) else list(blocks)
    for index, spec in enumerate(specs):
        if not isinstance(spec, BlockPaths):
            raise OptionError(f"blocks[{index}]", kind_of(spec), "a jaxfold.BlockPaths", "")
    return specs


def _inputs(inputs: Any) -> dict[Keys, Any]:
    """The inputs by the keys of their producers."""
    if not (inputs is None or isinstance(inputs, Mapping)):
        raise OptionError("inputs", kind_of(inputs), "a mapping from paths of producers to arrays", "")
    return {split("inputs", path): x for path, x in (inputs or {}).items()}


def _contract(found: Found, form: Form, dtype: np.dtype | None, *, allow_growth: bool, keep_producer: bool) -> None:
    """Contracts one block, or says in ``found.error`` why not."""
    spec = found.spec
    groups = {role: _loaded(group) for role, group in found.groups.items()}
    consumers = {name: groups[consumer_path(name)] for name in found.names}
    try:
        if spec.norm_type is None and not (found.norm is not None and "bias" in groups["norm"]):
            raise OptionError(
                "norm_type",
                "nothing",
                "'layernorm' or 'rmsnorm'",
                "A norm without a bias may be either: read it from the model's code.",
            )
        found.block = Block(
            groups["producer"],
            groups.get("norm"),
            consumers.get(None, consumers),
            epsilon=spec.epsilon,
            norm_type=spec.norm_type or "layernorm",
            unit_offset=spec.unit_offset,
            stacked=spec.stacked,
        )
        found.contraction = contract_block(
            found.block, form=form, dtype=dtype, allow_growth=allow_growth, keep_producer=keep_producer
        )
    except JaxfoldError as error:
        found.error = error.at(_path_of(found, error.argument))
        if isinstance(error, ConcretenessError):  # the call is at fault, not the block
            raise found.error from None


def _verify(found: Found, inputs: Any, rows: int) -> None:
    """Measures the errors on the inputs, or on so many rows of standard normal numbers."""
    if found.block is None or found.contraction is None:
        return
    shape = found.block.shape
    if inputs is None:
        lead = () if shape.stack is None else (shape.stack,)
        drawn = np.random.default_rng(0).standard_normal((*lead, rows, shape.features))
        inputs = drawn.astype(jax.dtypes.canonicalize_dtype(shape.factor_dtype))
    try:
        found.certificate = verify(found.block, found.contraction, inputs)
    except JaxfoldError as error:
        raise error.at(f"inputs[{join(found.producer)!r}]") if error.argument == "inputs" else error from None


def _loaded(group: Any) -> Any:
    """The leaves without boxes, those that lie in a file as arrays; a leaf that is None counts as absent."""
    if not isinstance(group, Mapping):
        return group
    leaves = {key: array for key, leaf in group.items() if (array := bare(leaf)) is not None}
    lies = {key for key, leaf in leaves.items() if not isinstance(leaf, (np.ndarray, jax.Array, jax.ShapeDtypeStruct))}
    return {k: np.asarray(leaf) if k in lies and hasattr(leaf, "__array__") else leaf for k, leaf in leaves.items()}


def _path_of(found: Found, argument: str) -> str:
    """A leaf of ``contract``, such as ``norm['scale']``, by its path in the tree; a coefficient by its future one."""
    roles = {**found.roles, "params": found.to or found.producer}
    for role in sorted(roles, key=len, reverse=True):
        rest = argument.removeprefix(role)
        if argument.startswith(role) and re.fullmatch(r"(\['[^']*'\])*", rest):
            return join((*roles[role], *re.findall(r"\['([^']*)'\]", rest)))
    return f"{argument} of the block of {join(found.producer)}"
