"""Blocks read from NNX layers: epsilon, axes, biases and dtypes come from the modules, so nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfold._block._block import Block
from jaxfold._block._contraction import Contraction
from jaxfold._block._shape import Form
from jaxfold._layers._assemble import ReadBlock, assemble
from jaxfold.nnx._layers import read_affine, read_consumers, read_norm


def read(producer: Any, norm: Any, consumers: Any) -> ReadBlock:
    """The three layers, read and checked against each other."""
    return assemble(read_affine("producer", producer), read_norm("norm", norm), read_consumers(consumers))


def block(producer: Any, norm: Any, consumers: Any | Mapping[str, Any]) -> Block:
    """The block that NNX layers make, as :class:`jaxfold.Block`, with every option read from the modules.

    Args:
        producer: an ``nnx.Linear``, ``nnx.LinearGeneral`` or ``nnx.Einsum`` with one output axis.
        norm: an ``nnx.LayerNorm`` or ``nnx.RMSNorm`` over the last axis.
        consumers: one layer such as the producer, with any number of output axes, or a mapping of names to such. An
            ``nnx.MultiHeadAttention`` stands for its projections, ``"query"``, ``"key"`` and ``"value"``.

    A subclass is read like its base unless it overrides ``__call__``. The leaves of a stack (``nnx.vmap``,
    ``nnx.scan``) are known by their leading axis, which the module does not declare. The modules are not changed.

    Returns:
        A :class:`jaxfold.Block`.

    Raises:
        StructureError: if a layer is of another class, or its leaves are not those that it declares.
        OptionError: naming an attribute that cannot be contracted, as in ``norm.reduction_axes``.
        ShapeError: if shapes do not fit each other or the module.
        DtypeError: if a leaf is integer, complex or quantised.
        ConcretenessError: if the norm's ``epsilon`` is a tracer.

    Example:
        >>> from flax import nnx
        >>> import jaxfold.nnx
        >>> rngs = nnx.Rngs(0)
        >>> up, norm = nnx.Linear(4, 32, rngs=rngs), nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)
        >>> jaxfold.nnx.block(up, norm, nnx.Linear(32, 3, rngs=rngs)).epsilon
        1e-05
    """
    return read(producer, norm, consumers).block()


def contract(
    producer: Any,
    norm: Any,
    consumers: Any | Mapping[str, Any],
    *,
    form: Form = "direct",
    dtype: Any = None,
    allow_growth: bool = False,
) -> Contraction:
    """:func:`jaxfold.contract` of NNX layers, with every option read from the modules.

    Args:
        producer, norm, consumers: as for :func:`jaxfold.nnx.block`.
        form: ``"direct"``, ``"packed"`` or ``"standard"``.
        dtype: storage dtype of every coefficient; by default what its own sources promote to.
        allow_growth: whether to go on when the result has more parameters than the original.

    Returns:
        A :class:`jaxfold.Contraction`.

    Raises:
        StructureError, OptionError, ShapeError, DtypeError: as :func:`jaxfold.nnx.block` does.
        ConcretenessError, CoefficientError, GrowthError: as :func:`jaxfold.contract` does.

    Example:
        >>> from flax import nnx
        >>> import jaxfold.nnx
        >>> rngs = nnx.Rngs(0)
        >>> up, norm = nnx.Linear(4, 32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        >>> jaxfold.nnx.contract(up, norm, nnx.Linear(32, 3, rngs=rngs)).D.shape
        (5, 3)
    """
    return read(producer, norm, consumers).contract(form, dtype, allow_growth)
