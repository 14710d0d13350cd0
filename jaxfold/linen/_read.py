"""Blocks read from Linen layers: epsilon, axes, biases and dtypes come from the modules, so nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfold._block._block import Block
from jaxfold._block._contraction import Contraction
from jaxfold._block._shape import Form
from jaxfold._layers._assemble import ReadBlock, assemble
from jaxfold.linen._layers import read_affine, read_consumers, read_norm


def read(producer: Any, norm: Any, consumers: Any) -> ReadBlock:
    """The three layers, read and checked against each other."""
    return assemble(read_affine("producer", producer), read_norm("norm", norm), read_consumers(consumers))


def block(producer: Any, norm: Any, consumers: Any | Mapping[str, Any]) -> Block:
    """The block that Linen layers make, as :class:`jaxfold.Block`, with every option read from the modules.

    Args:
        producer: an ``nn.Dense``, ``nn.DenseGeneral`` or ``nn.Einsum`` with one output axis. Each layer is a bound
            module, or a pair ``(definition, params)``.
        norm: an ``nn.LayerNorm`` or ``nn.RMSNorm`` over the last axis; one without parameters may be its definition.
        consumers: one layer such as the producer, with any number of output axes, or a mapping of names to such. An
            attention module stands for its projections, ``"query"``, ``"key"`` and ``"value"``.

    A subclass is read like its base unless it overrides ``__call__``. The leaves of a stack (``nn.scan``, ``nn.vmap``)
    are known by their leading axis, which the definition does not declare.

    Returns:
        A :class:`jaxfold.Block`.

    Raises:
        StructureError: if a layer is of another class, or its leaves are not those that it declares.
        OptionError: naming an attribute that cannot be contracted, as in ``norm.reduction_axes``.
        ShapeError: if shapes do not fit each other or the definition.
        DtypeError: if a leaf is integer, complex or quantised.
        ConcretenessError: if the norm's ``epsilon`` is a tracer.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxfold.linen
        >>> model = nn.Sequential([nn.Dense(32), nn.LayerNorm(epsilon=1e-5), nn.Dense(3)])
        >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
        >>> layers = [(layer, params[f"layers_{i}"]) for i, layer in enumerate(model.layers)]
        >>> jaxfold.linen.block(*layers).epsilon
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
    """:func:`jaxfold.contract` of Linen layers, with every option read from the modules.

    Args:
        producer, norm, consumers: as for :func:`jaxfold.linen.block`.
        form: ``"direct"``, ``"packed"`` or ``"standard"``.
        dtype: storage dtype of every coefficient; by default what its own sources promote to.
        allow_growth: whether to go on when the result has more parameters than the original.

    Returns:
        A :class:`jaxfold.Contraction`.

    Raises:
        StructureError, OptionError, ShapeError, DtypeError: as :func:`jaxfold.linen.block` does.
        ConcretenessError, CoefficientError, GrowthError: as :func:`jaxfold.contract` does.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxfold.linen
        >>> model = nn.Sequential([nn.Dense(32), nn.LayerNorm(), nn.Dense(3)])
        >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
        >>> layers = [(layer, params[f"layers_{i}"]) for i, layer in enumerate(model.layers)]
        >>> jaxfold.linen.contract(*layers).D.shape
        (5, 3)
    """
    return read(producer, norm, consumers).contract(form, dtype, allow_growth)
