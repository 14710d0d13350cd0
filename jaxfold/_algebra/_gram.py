"""The Gram product: the one linear map through which a loss sees the factor, with derivative rules of its own.

A contraction that is made inside a training step has to pass gradients back to the rows T (p, n) that R was factored
from. Differentiating the factorisation would do it where T has full rank, and gives NaN elsewhere. But R is only a
means: by ``Rᵀ R = T Tᵀ`` the denominator is a function of the Gram matrix alone,

    q(x̄) = ‖R x̄ᵀ‖² = x̄ T Tᵀ x̄ᵀ

and all that derivatives of q ever need of T Tᵀ is its product with a row,

    G(w; T) = w T Tᵀ = (w Rᵀ) R

evaluated on the right, without squaring the condition number. R enters as a constant witness: values come from it,
derivatives never do. Differentiating w T Tᵀ as written, with S = dT Tᵀ, gives every rule there is:

    dG(w; T) = G(dw; T) + w (S + Sᵀ)
    Gᵀ = G                                          T Tᵀ is symmetric: the transpose of G in w is G itself
    dq(x̄; T) = 2 ⟨G(x̄; T), dx̄⟩ + 2 ⟨x̄ S, x̄⟩

S is (p, p) and formed first, so that in reverse mode the cotangent of T is a (p, p) matrix times T: nothing of the size
batch × n ever exists. The rules mention only G and products of T, so they are closed under differentiation: every order
and every composition of forward and reverse mode follows, for T of any shape and rank.

G and q have to be primitives. As ``custom_jvp`` functions they would be right to first order, but JAX inlines the
function where it transposes a tangent, or takes a scan apart into what is known and what is not, and in the function R
is a constant: forward over reverse would silently lose a term.

Derivation: docs/maths.md, Derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfold._extend import Primitive, ad, batching, mlir

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _transposed(matrix: Any) -> Any:
    return jnp.swapaxes(matrix, -1, -2)


def centred_rows(rows: jax.Array) -> jax.Array:
    """Every row of ``(p, n)`` less its own mean, twice, as :func:`jaxfold._algebra._factor.centre` does it."""
    rows = rows - jnp.mean(rows, axis=-1, keepdims=True)
    return rows - jnp.mean(rows, axis=-1, keepdims=True)


def gram_product(w: jax.Array, rows: jax.Array, upper: jax.Array) -> jax.Array:
    """``w T Tᵀ`` for each row of w: ``(..., p)``, T ``(p, n)``, its factor R ``(k, p)`` → ``(..., p)``.

    ``upper`` must be such that ``upperᵀ upper = rows rowsᵀ``; derivatives with respect to it are taken to be zero.
    """
    flat = w.reshape(-1, w.shape[-1])
    return _gram_p.bind(flat, rows, upper).reshape(w.shape)


def quadratic_form(x: jax.Array, rows: jax.Array, upper: jax.Array) -> jax.Array:
    """``q = ‖R x̄ᵀ‖²`` for each row x̄ of ``x``: ``(..., p)`` → ``(...)``; differentiable in ``x`` and ``rows``."""
    return _form_p.bind(x.reshape(-1, x.shape[-1]), rows, upper).reshape(x.shape[:-1])


# The primitives take matrices with the same leading batch axes: w or x (..., r, p), rows (..., p, n), upper
# (..., k, p).


def _evaluate(w: jax.Array, rows: jax.Array, upper: jax.Array) -> jax.Array:
    return _matmul(_matmul(w, _transposed(upper)), upper)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    w, rows, upper = primals
    dw, drows, _ = tangents
    out = _gram_p.bind(w, rows, upper)
    terms = []
    if type(dw) is not ad.Zero:
        terms.append(_gram_p.bind(dw, rows, upper))
    if type(drows) is not ad.Zero:
        s = _matmul(drows, _transposed(rows))
        terms.append(_matmul(w, s + _transposed(s)))
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


def _transpose(cotangent: Any, w: Any, rows: Any, upper: Any) -> tuple[Any, None, None]:
    if type(cotangent) is ad.Zero:
        return ad.Zero(w.aval), None, None
    return _gram_p.bind(cotangent, rows, upper), None, None


def _batcher(primitive: Primitive) -> Callable[..., tuple[Any, int]]:
    def batch(args: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, int]:
        w, rows, upper = args
        if axes[1] is None and axes[2] is None:
            # More rows of w for the same T: one product of more rows.
            w = jnp.moveaxis(w, axes[0], -3)
            flat = primitive.bind(w.reshape(*w.shape[:-3], -1, w.shape[-1]), rows, upper)
            lead = w.ndim - 3
            return flat.reshape(*w.shape[:-1], *flat.shape[lead + 1 :]), lead
        size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
        batched = [
            jnp.broadcast_to(arg, (size, *arg.shape)) if axis is None else jnp.moveaxis(arg, axis, 0)
            for arg, axis in zip(args, axes, strict=True)
        ]
        return primitive.bind(*batched), 0

    return batch


def _evaluate_form(x: jax.Array, rows: jax.Array, upper: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(_matmul(x, _transposed(upper))), axis=-1)


def _form_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    x, rows, upper = primals
    dx, drows, _ = tangents
    out = _form_p.bind(x, rows, upper)
    terms = []
    if type(dx) is not ad.Zero:
        terms.append(2 * jnp.sum(_gram_p.bind(x, rows, upper) * dx, axis=-1))
    if type(drows) is not ad.Zero:
        terms.append(2 * jnp.sum(_matmul(x, _matmul(drows, _transposed(rows))) * x, axis=-1))
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


_gram_p = Primitive("gram_product")
_gram_p.def_impl(jax.jit(_evaluate))
_gram_p.def_abstract_eval(lambda w, rows, upper: w)
mlir.register_lowering(_gram_p, mlir.lower_fun(_evaluate, multiple_results=False))
ad.primitive_jvps[_gram_p] = _jvp
ad.primitive_transposes[_gram_p] = _transpose
batching.primitive_batchers[_gram_p] = _batcher(_gram_p)

_form_p = Primitive("gram_quadratic_form")
_form_p.def_impl(jax.jit(_evaluate_form))
_form_p.def_abstract_eval(lambda x, rows, upper: x.update(shape=x.shape[:-1]))
mlir.register_lowering(_form_p, mlir.lower_fun(_evaluate_form, multiple_results=False))
ad.primitive_jvps[_form_p] = _form_jvp
batching.primitive_batchers[_form_p] = _batcher(_form_p)
