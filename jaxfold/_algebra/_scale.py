"""The one scalar that the normalisation needs from its input."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def sum_of_squares(z: jax.Array) -> jax.Array:
    """``‖z‖²`` over the last axis: ``(..., k)`` → ``(..., 1)``."""
    return jnp.sum(jnp.square(z), axis=-1, keepdims=True)


def inverse_scale(q: jax.Array, width: int, epsilon: float) -> jax.Array:
    """``1 / sqrt(q/width + epsilon)``.

    With ``q = ‖R x̄‖²`` this is LayerNorm's ``1 / sqrt(var(h) + epsilon)``: the width n of the original activation
    divides, not the k squares that are left of it.
    """
    return lax.rsqrt(q / width + epsilon)


def project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """``z = x @ kernel + bias``, in full precision on every platform.

    Accelerators round the operands of a default float32 product to TF32 or bfloat16. The scale is a difference of large
    terms wherever an input nearly cancels the producer's bias, so its product never gets less than ``HIGHEST``.
    """
    return add_bias(jnp.dot(x, kernel, precision=lax.Precision.HIGHEST), bias)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """``y + bias`` along the trailing axes, spelled out so that it passes with ``jax_numpy_rank_promotion="raise"``."""
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def append_one(x: jax.Array) -> jax.Array:
    """``[x, 1]`` along the last axis. Padding fuses with what made x; concatenation costs a tenth of a call on CPU."""
    return lax.pad(x, jnp.ones((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, 1, 0)])


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def affine(x: jax.Array, kernel: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """``[x, 1] @ kernel``: ``(..., p)``, ``(p + 1, *features)`` → ``(..., *features)``; the last row is an offset.

    On CPU the offset goes through the product: adding it afterwards would read and write the wide output once more.
    Elsewhere the addition is fused into the product anyway, and has to stay outside it: at default precision the
    product would round the offset, which the original adds exactly.

    Derivatives take the offset apart everywhere: its gradient is a sum over rows, as that of any bias, and ten times
    nearer to the truth in float32 than what a product with a column of ones makes of it.
    """

    def through(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.tensordot(append_one(x), kernel, 1, precision=precision)

    def after(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return add_bias(jnp.tensordot(x, kernel[:-1], 1, precision=precision), kernel[-1])

    return lax.platform_dependent(x, kernel, cpu=through, default=after)


@functools.partial(affine.defjvp, symbolic_zeros=True)  # a stored kernel has no tangent: no product for it
def _affine_jvp(precision: lax.PrecisionLike, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    product = functools.partial(jnp.tensordot, axes=1, precision=precision)
    out = affine(x, kernel, precision)
    tangent = jnp.zeros_like(out)
    if type(dx) is not jax.custom_derivatives.SymbolicZero:
        tangent = tangent + product(dx, kernel[:-1])
    if type(dkernel) is not jax.custom_derivatives.SymbolicZero:
        tangent = tangent + add_bias(product(x, dkernel[:-1]), dkernel[-1])
    return out, tangent
