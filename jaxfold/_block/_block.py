"""The original block: its leaves, checked, and its own evaluation."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxfold._algebra._dtype import compute_dtype, promote
from jaxfold._algebra._scale import add_bias
from jaxfold._block._leaves import require_concrete, require_floating, unbox
from jaxfold._block._shape import NORM_TYPES, BlockShape, Layers, NormType, choose, flag, read_layers
from jaxfold._errors import OptionError, ShapeError


class Block:
    """A Dense-norm-Dense block as it was trained: the argument that :func:`jaxfold.verify` measures against.

    Args:
        producer: ``{"kernel": (d, n)[, "bias": (n,)]}``.
        norm: ``{["scale": (n,)][, "bias": (n,)]}``, or ``None`` for a norm without parameters.
        consumers: ``{"kernel": (n, *features)[, "bias": features]}``, or a mapping of names to such.
        epsilon: what the norm adds to the variance, above 0: 1e-6 in Flax unless it was set, 1e-5 in PyTorch.
        norm_type: ``"layernorm"``, or ``"rmsnorm"`` for the same without centring.
        unit_offset: whether the norm multiplies by ``1 + scale``, as Gemma's does.
        stacked: whether every leaf has one more leading axis, over layers or ensemble members.

    Leaves are float64, float32, bfloat16 or float16, NumPy or JAX, bare or in a Flax box, and are not changed.

    Raises:
        StructureError, ShapeError, DtypeError, OptionError: as :func:`jaxfold.contract` does.
        ConcretenessError: if ``epsilon`` is a tracer. Leaves may be tracers.

    Example:
        >>> import numpy as np, jaxfold
        >>> block = jaxfold.Block({"kernel": np.eye(2, 8)}, None, {"kernel": np.ones((8, 4))}, epsilon=1e-6)
        >>> block(np.ones((3, 2), np.float32)).shape
        (3, 4)
    """

    layers: Layers
    shape: BlockShape
    epsilon: float
    norm_type: NormType
    unit_offset: bool

    def __init__(
        self,
        producer: Mapping[str, Any],
        norm: Mapping[str, Any] | None,
        consumers: Mapping[str, Any],
        *,
        epsilon: float,
        norm_type: NormType = "layernorm",
        unit_offset: bool = False,
        stacked: bool = False,
    ) -> None:
        self.norm_type = choose("norm_type", norm_type, NORM_TYPES)
        self.epsilon = check_epsilon(epsilon)
        self.unit_offset = flag("unit_offset", unit_offset)
        for name, group in (("producer", producer), ("norm", norm), ("consumers", consumers)):
            _require_sizes(name, group)
        self.layers, self.shape = read_layers(producer, norm, consumers, stacked=stacked)

    def __repr__(self) -> str:
        shapes = {path: tuple(leaf.shape) for path, leaf in self.layers.named().items()}
        options = f"epsilon={self.epsilon}, norm_type={self.norm_type!r}, unit_offset={self.unit_offset}"
        return f"Block({shapes}, {options}, stacked={self.shape.stack is not None})"

    def __call__(self, x: ArrayLike, *, precision: lax.PrecisionLike = None) -> Any:
        """The block as written, in JAX: ``(..., d)`` → ``(..., *features)``, or a dict of such by consumer.

        Layer by layer in the dtype that ``x`` and the layer's parameters promote to, with the norm's statistics in at
        least float32 and the variance in two passes.

        Args:
            x: ``(..., d)`` of a floating dtype; for a stack with the leading axis too.
            precision: of the products with both kernels, as in ``jax.numpy.dot``.

        Returns:
            What the block computes, for a stack with the leading axis too.

        Raises:
            ShapeError: if ``x`` has another width, or not the leading axis of the stack.
            DtypeError: if ``x`` is not real floating.
        """
        evaluate = functools.partial(_evaluate, self, precision=precision)
        if self.shape.stack is not None:
            evaluate = jax.vmap(evaluate)
        require_floating("x", x)
        shape: tuple[int, ...] = getattr(x, "shape", ())
        lead = () if self.shape.stack is None else (self.shape.stack,)
        if len(shape) <= len(lead) or shape[: len(lead)] != lead or shape[-1:] != (self.shape.features,):
            expected = f"shape {(*lead, '...', self.shape.features)}".replace("'", "")
            raise ShapeError("x", f"shape {shape}", expected, "")
        layers = (self.layers.producer, self.layers.norm, self.layers.consumers)
        outputs = evaluate(*jax.tree.map(jnp.asarray, (*layers, x)))
        return outputs.get(None, outputs)


def _evaluate(block: Block, producer: Any, norm: Any, consumers: Any, x: jax.Array, precision: Any) -> dict[Any, Any]:
    h = _dense(producer, x, precision)
    dtype = promote(h, *norm.values())
    h = h.astype(compute_dtype(h))
    if block.norm_type == "layernorm":
        h = h - h.mean(axis=-1, keepdims=True)
    y = h * lax.rsqrt(jnp.square(h).mean(axis=-1, keepdims=True) + block.epsilon)
    if "scale" in norm:
        scale = norm["scale"].astype(y.dtype)
        y = y * jnp.broadcast_to(1 + scale if block.unit_offset else scale, y.shape)
    y = add_bias(y, norm["bias"].astype(y.dtype) if "bias" in norm else None)
    return {name: _dense(group, y.astype(dtype), precision) for name, group in consumers.items()}


def _dense(group: Mapping[str, Any], x: jax.Array, precision: Any) -> jax.Array:
    dtype = promote(x, *group.values())
    y = jnp.tensordot(x.astype(dtype), group["kernel"].astype(dtype), 1, precision=precision)
    return add_bias(y, group["bias"].astype(dtype) if "bias" in group else None)


def _require_sizes(path: str, node: Any) -> None:
    """Raise :class:`ShapeError` for a leaf with a symbolic dimension of ``jax.export``: counts decide what is made."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            _require_sizes(f"{path}[{key!r}]", value)
        return
    shape = getattr(unbox(node), "shape", ())
    if isinstance(shape, tuple) and not all(isinstance(size, (int, np.integer)) for size in shape):
        hint = "Only the batch may be symbolic. For a symbolic number of blocks, use jax.vmap over a function of one."
        raise ShapeError(path, f"the symbolic shape {shape}", "sizes that are numbers", hint)


def check_epsilon(epsilon: Any) -> float:
    hint = "Read it from the norm: Flax's default is 1e-6, PyTorch's 1e-5, and the wrong one changes the function."
    if isinstance(epsilon, (jax.Array, np.ndarray)) and epsilon.ndim == 0:
        require_concrete("epsilon", epsilon)
        epsilon = epsilon.item()
    if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real):
        raise OptionError("epsilon", repr(epsilon), "a real number above 0", hint)
    try:
        value = float(epsilon)
    except OverflowError:
        value = math.inf
    if not (0 < value < math.inf):
        raise OptionError("epsilon", str(value), "a finite number above 0", hint)
    return value
