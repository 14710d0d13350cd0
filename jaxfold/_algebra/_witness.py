"""R of a block that is contracted inside a traced function: once in every training step, so it has to be cheap.

``witness(T)`` is R ``(k, p)`` with ``Rᵀ R = T Tᵀ``. In general it is the triangle of LAPACK's Householder QR. On CPU,
where that is the larger part of a small step, float32 rows take another way to the same triangle:

    Rᵀ R = T Tᵀ + s·diag(T Tᵀ)        Cholesky in float64,  s = 2 p·2⁻⁵²

Forming T Tᵀ squares the condition number, which is why R is never had from it in the dtype of T. In float64 nothing is
lost: the products of float32 numbers are exact, the sums err by some 2⁻⁵² (Σᵢ ‖tᵢ‖ |x̄ᵢ|)² in ‖R x̄‖², so by no more
than 2⁻²⁶ Σᵢ ‖tᵢ‖ |x̄ᵢ| in ‖R x̄‖, and float32 rounds that sum by 2⁻²⁴.

T need not have full rank: a producer's bias is zero when training begins, and rows may depend on each other. The shift
s keeps every pivot positive. Cholesky of a matrix with unit diagonal goes through where the smallest eigenvalue exceeds
a small multiple of p·2⁻⁵³, and it commutes with a scaling of rows, so the shift is relative to each row's own length.
It adds s Σᵢ ‖tᵢ‖² x̄ᵢ² to ‖R x̄‖²: no more than 2⁻²⁶ √(2p) of the length of those terms to ‖R x̄‖, which is again of
the size of their rounding in float32. A row of zeros stays one. Where Cholesky fails nevertheless (hundreds of parallel
rows), QR steps in.

Derivation: docs/maths.md, Rounding: why QR and not the Gram matrix. The bound is Demmel's, in Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, theorem 10.7.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from jaxfold._algebra._cholesky import cholesky
from jaxfold._extend import Primitive, ad, batching, enable_x64, mlir


def witness(rows: jax.Array) -> jax.Array:
    """R ``(..., k, p)``, upper triangular with ``Rᵀ R = T Tᵀ``, for T ``(..., p, n)``: a constant to derivatives."""
    return _witness_p.bind(rows)


def by_qr(rows: jax.Array) -> jax.Array:
    """R by Householder QR of Tᵀ, in the dtype of T."""
    return jnp.asarray(jnp.linalg.qr(rows.mT, mode="r"))


def by_cholesky(rows: jax.Array) -> jax.Array:
    """R by Cholesky of the Gram matrix in float64, for T in float32 with n ≥ p. NaN where Cholesky fails.

    To be traced and lowered with float64 enabled.
    """
    wide = rows.astype(np.float64)
    gram = jnp.matmul(wide, wide.mT, precision=lax.Precision.HIGHEST)
    size = gram.shape[-1]
    squares = jnp.diagonal(gram, axis1=-2, axis2=-1)[..., None]
    shift = 2 * size * float(np.finfo(np.float64).eps)
    eye = jnp.eye(size, dtype=bool).reshape((1,) * (gram.ndim - 2) + (size, size))
    lower = cholesky(jnp.where(eye, jnp.where(squares == 0, 1.0, squares * (1 + shift)), gram))
    return jnp.where(squares == 0, 0.0, lower).mT.astype(rows.dtype)


def _evaluate_on_cpu(rows: jax.Array) -> jax.Array:
    if rows.dtype != np.float32 or rows.shape[-1] < rows.shape[-2]:
        return by_qr(rows)
    upper = by_cholesky(rows)
    succeeded = jnp.all(jnp.isfinite(upper))
    return lax.cond(succeeded, lambda rows, upper: upper, lambda rows, upper: by_qr(rows), rows, upper)


# A primitive, because a lowering may use float64 where the function around it can't, and because a constant of its own
# is one to chex's numerical gradients too, which put something else in the place of lax.stop_gradient.


def _shape(rows: ShapedArray) -> ShapedArray:
    *batch, p, n = rows.shape
    return rows.update(shape=(*batch, min(n, p), p))


def _lower_on_cpu(ctx: Any, rows: Any) -> Any:
    if not all(isinstance(size, int) for size in ctx.avals_in[0].shape):
        return mlir.lower_fun(by_qr, multiple_results=False)(ctx, rows)
    ctx = _without_symbols(ctx)
    with enable_x64():
        return mlir.lower_fun(_evaluate_on_cpu, multiple_results=False)(ctx, rows)


def _without_symbols(ctx: Any) -> Any:
    """Return the lowering context without the module's symbolic dimensions and other platforms.

    T has no symbolic dimension. But every function of a module takes their values, and the index of the platform, as
    arguments. Where float64 is enabled for the lowering only, the functions inside would take them in 64 bits, and the
    module has them in 32.
    """
    module = ctx.module_context
    if jax.config.read("jax_enable_x64") or not module.shape_poly_state.dim_vars:
        return ctx
    state = mlir.ShapePolyLoweringState((), ("cpu",))
    # Functions with and without these arguments do not share a cache, under whichever name a version of JAX has it.
    names = ("lowering_cache", "cached_primitive_lowerings")
    caches: dict[str, Any] = {name: {} for name in names if hasattr(module, name)}
    module = module.replace(shape_poly_state=state, platforms=("cpu",), **caches)
    return ctx.replace(module_context=module, dim_var_values=())


def _jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    upper = _witness_p.bind(*primals)
    return upper, ad.Zero(upper.aval)


def _batch(args: tuple[jax.Array], axes: tuple[int]) -> tuple[jax.Array, int]:
    return _witness_p.bind(jnp.moveaxis(args[0], axes[0], 0)), 0


_witness_p = Primitive("witness")
_witness_p.def_impl(jax.jit(lambda rows: _witness_p.bind(rows)))
_witness_p.def_abstract_eval(_shape)
mlir.register_lowering(_witness_p, mlir.lower_fun(by_qr, multiple_results=False))
mlir.register_lowering(_witness_p, _lower_on_cpu, platform="cpu")
ad.primitive_jvps[_witness_p] = _jvp
batching.primitive_batchers[_witness_p] = _batch
