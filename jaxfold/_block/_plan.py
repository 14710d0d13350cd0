"""Costs before and after, from shapes alone.

With d input features, n = width, m output features, p = d + 1 with a producer bias and d without, k = min(n, p):

    original   dn [+ n] + [n] + [n] + nm + [m]     producer, norm, consumers
    direct     kp + m(p + 1)                       R; D and c
    packed     the same, less R's zeros            kp − k(k−1)/2 for R
    standard   kp + m(k + 1)                       Dense(k); Dense(m) with a bias

FLOPs are for one row of input, a multiplication and an addition each counting 1, as in XLA's cost analysis; a square
root is left out on both sides. Derivation: docs/maths.md, Counts, and when it pays.

A training step that contracts pays for D, for the factor and for both their gradients whatever the batch, and saves on
every row. Its batch breaks even where both steps take the same time, in units of one FLOP of a float32 product:

    once      6pnm               D = T diag(γ) W, and its products with the cotangent of D
            + 2pnm               where n > 512, because D is then summed by pieces
            + 2p²n (1 + 3)       the gradient of T; T Tᵀ, in float64 at three times the price
            + 10 p³/3            its Cholesky factor
            + 5e5                some twenty operations more to start
    a row     4dn + 6nm + 60n    the original: two products, their gradients, some thirty passes over n wide entries
            − 6pm − 4p² − 30p    the contracted block, likewise

The prices were fitted to the break-even batches, 9 to 560, of fifteen shapes, measured as ``benchmarks.training`` does
on two CPU cores, and meet each within a factor of two. Other machines weigh memory against arithmetic differently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxfold._algebra._product import LONGEST_PLAIN
from jaxfold._algebra._triangle import triangle_size
from jaxfold._block._leaves import read_dtype, unbox
from jaxfold._block._shape import FORMS, NORM_TYPES, BlockShape, Form, NormType, choose, flag, read_layers


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a block costs: entries and bytes of its parameters, and FLOPs for one row of input.

    A stack of blocks counts as the sum of its members.

    Example:
        >>> import jaxfold
        >>> 2 * jaxfold.Cost(parameters=10, bytes=40, flops=20) + jaxfold.Cost(1, 4, 2)
        Cost(parameters=21, bytes=84, flops=42)
    """

    parameters: int
    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.parameters + other.parameters, self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.parameters * times, self.bytes * times, self.flops * times)

    __rmul__ = __mul__


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a block as it is, and of what remains of it in each form.

    Attributes:
        original: the block as it is.
        direct, packed, standard: after contraction, with the producer's own cost included where it has to stay.
        training_batch: rows of input from which on a gradient step through :func:`contract_traced` is faster than one
            through the original, or None where no batch is enough. An estimate from a model of float32 on a CPU.

    Example:
        >>> import jaxfold
        >>> costs = jaxfold.plan({"kernel": (148, 128)}, None, {"kernel": (128, 128)})
        >>> costs.pays("direct"), costs.cost("standard").parameters - costs.original.parameters
        (False, 128)
        >>> jaxfold.plan({"kernel": (16, 1024)}, None, {"kernel": (1024, 256)}).training_batch
        22
    """

    original: Cost
    direct: Cost
    packed: Cost
    standard: Cost
    training_batch: int | None = None

    def cost(self, form: Form) -> Cost:
        """The cost of one form.

        Args:
            form: ``"direct"``, ``"packed"`` or ``"standard"``.

        Returns:
            A :class:`Cost`.

        Raises:
            OptionError: if there is no such form.
        """
        return getattr(self, choose("form", form, FORMS))

    def pays(self, form: Form = "direct") -> bool:
        """Whether the form has fewer parameters and needs fewer FLOPs than the original.

        Args:
            form: ``"direct"``, ``"packed"`` or ``"standard"``.

        Returns:
            True if both are fewer.

        Raises:
            OptionError: if there is no such form.
        """
        after = self.cost(form)
        return after.parameters < self.original.parameters and after.flops < self.original.flops

    def __str__(self) -> str:
        from jaxfold._report import plan_table, render

        return render(plan_table(self))


def plan(
    producer: Mapping[str, Any],
    norm: Mapping[str, Any] | None,
    consumers: Mapping[str, Any],
    *,
    norm_type: NormType = "layernorm",
    keep_producer: bool = False,
    dtype: Any = None,
    stacked: bool = False,
) -> Plan:
    """Counts parameters, bytes and FLOPs of a block before and after contraction, from shapes alone.

    Args:
        producer, norm, consumers, norm_type, dtype, stacked: as for :func:`contract`. A leaf may also be a
            ``jax.ShapeDtypeStruct``, a tracer, or a bare shape such as ``(82, 512)``, which counts as float32.
        keep_producer: whether something else reads the producer's output, so that its parameters and its product
            stay whatever becomes of the norm.

    Returns:
        A :class:`Plan`; printing it gives a table.

    Raises:
        StructureError, ShapeError, DtypeError, OptionError: as :func:`contract` does.

    Example:
        >>> import jaxfold
        >>> producer = {"kernel": (82, 512), "bias": (512,)}
        >>> norm = {"scale": (512,), "bias": (512,)}
        >>> consumer = {"kernel": (512, 512), "bias": (512,)}
        >>> costs = jaxfold.plan(producer, norm, consumer)
        >>> costs.original.parameters, costs.direct.parameters, costs.packed.parameters
        (306176, 49897, 46494)
        >>> costs.pays()
        True
    """
    choose("norm_type", norm_type, NORM_TYPES)
    keep_producer = flag("keep_producer", keep_producer)
    _, shape = read_layers(producer, norm, consumers, stacked=stacked, read_leaf=_read_leaf)
    return plan_shape(shape, norm_type, read_dtype(dtype), keep_producer=keep_producer)


def _read_leaf(leaf: Any) -> Any:
    leaf = unbox(leaf)
    is_shape = isinstance(leaf, tuple) and all(isinstance(size, (int, np.integer)) for size in leaf)
    return jax.ShapeDtypeStruct(leaf, np.float32) if is_shape else leaf


def plan_shape(
    shape: BlockShape, norm_type: NormType, dtype: np.dtype | None = None, *, keep_producer: bool = False
) -> Plan:
    """The same from a :class:`BlockShape`."""
    d, n, m, p, k = shape.features, shape.width, shape.output_size, shape.rows, shape.rank
    stack = shape.stack or 1

    producer_flops = 2 * d * n + n * shape.producer_bias
    # Mean (n), deviations (n); squares (n), their sum (n), division by the root (n); scale and bias.
    norm_flops = (2 * n if norm_type == "layernorm" else 0) + 3 * n + n * (shape.scale + shape.offset)
    consumer_bias = sum(int(np.prod(shape.outputs[name])) for name, has in shape.consumer_bias.items() if has)
    original = Cost(shape.parameters, shape.nbytes, producer_flops + norm_flops + 2 * n * m + consumer_bias)
    kept = Cost(shape.producer_parameters, shape.producer_bytes, producer_flops) if keep_producer else Cost(0, 0, 0)

    factor_flops = 2 * d * k + k * shape.producer_bias + 2 * k

    def cost(factor: int, rows: int, flops: int) -> Cost:
        size = (dtype or shape.factor_dtype).itemsize
        nbytes = factor * size
        for name, features in shape.outputs.items():
            nbytes += (rows + 1) * int(np.prod(features)) * (dtype or shape.kernel_dtypes[name]).itemsize
        return Cost(factor + (rows + 1) * m, nbytes, factor_flops + flops)

    dense = k * p
    packed = triangle_size(d, k) + k * shape.producer_bias
    scaled = p + 2 * (p + 1) * m  # s x̄, then [s x̄, 1] @ [D; c]
    return Plan(
        original=original * stack,
        direct=(cost(dense, p, scaled) + kept) * stack,
        packed=(cost(packed, p, scaled) + kept) * stack,
        standard=(cost(dense, k, k + 2 * k * m + m) + kept) * stack,
        training_batch=_training_batch(shape, keep_producer=keep_producer),
    )


def _training_batch(shape: BlockShape, *, keep_producer: bool) -> int | None:
    """The break-even of the module's docstring; a producer that stays costs the contracted step what it always did."""
    d, n, m, p = shape.features, shape.width, shape.output_size, shape.rows
    pieces = 2 if n > LONGEST_PLAIN else 0
    once = (6 + pieces) * p * n * m + 8 * p**2 * n + 10 * p**3 / 3 + 5e5
    saved = 4 * d * n + 6 * n * m + 60 * n - (6 * p * m + 4 * p**2 + 30 * p) - (4 * d * n if keep_producer else 0)
    return math.ceil(once / saved) if saved > 0 else None
