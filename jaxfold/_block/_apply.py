"""Evaluating a contraction.

Direct and packed:  s = 1 / sqrt(‖R x̄‖²/n + ε),  f(x) = [s x̄, 1] @ [D; c]
Standard:           z = R x̄,                     f(x) = z / sqrt(‖z‖²/k + ε n/k) @ V + c

The narrow side is scaled, not the wide one: the product then writes every output once and nothing reads it again.

Derivation: docs/maths.md, The theorem and The standard form.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxfold._algebra._dtype import compute_dtype, promote
from jaxfold._algebra._gram import quadratic_form
from jaxfold._algebra._scale import add_bias, affine, append_one, inverse_scale, project, sum_of_squares
from jaxfold._block._check import check_contraction, require_contraction
from jaxfold._block._contraction import Contraction
from jaxfold._block._leaves import require_floating
from jaxfold._errors import OptionError, ShapeError
from jaxfold._extend import explicit_spec, with_spec


def apply(contraction: Contraction, x: ArrayLike, *, precision: lax.PrecisionLike = None) -> Any:
    """Evaluates a contracted block: what the original block returns for ``x``, to rounding.

    Compiled once for each combination of form, shapes, dtypes, width and epsilon; contractions that share these share
    the compiled function. Differentiable in ``x`` and in ``contraction.params``, to any order and in either mode, and
    usable under ``jit``, ``vmap``, ``remat`` and ``scan``.

    Args:
        contraction: a :class:`Contraction` of one block. One that holds a stack of blocks goes through ``jax.vmap`` or
            ``jax.lax.scan``, as the original's layers did.
        x: ``(..., d)``, any number of leading axes, of a floating dtype. An empty batch is fine.
        precision: of the product that makes the output, as in ``jax.numpy.dot``. The product under the square root is
            always ``jax.lax.Precision.HIGHEST``.

    Returns:
        ``(..., *features)``, or a dict of such by consumer, with its keys sorted as JAX sorts those of any dict, not in
        the order in which the consumers were given. Its dtype is what JAX promotes ``x`` and the parameters to; the
        arithmetic is float32 where that is a half-precision type.

    Raises:
        ShapeError: if the last axis of ``x`` is not d, the contraction is a stack, or its leaves do not fit each other.
        StructureError: if ``contraction`` is none, or its ``params`` lack a leaf or have one too many.
        DtypeError: if ``x`` or a leaf is not real floating.
        OptionError: if a static field is not accepted, or ``epsilon`` is out of the range of the arithmetic.

    Example:
        >>> import jax, numpy as np, jaxfold
        >>> producer = {"kernel": np.eye(2, 8), "bias": np.arange(8.0)}
        >>> block = jaxfold.contract(producer, None, {"kernel": np.ones((8, 4))}, epsilon=1e-6)
        >>> jaxfold.apply(block, np.zeros((3, 5, 2), np.float32)).shape
        (3, 5, 4)
        >>> jax.grad(lambda x: jaxfold.apply(block, x).sum())(np.ones(2, np.float32)).shape
        (2,)
    """
    require_contraction("contraction", contraction)
    if not hasattr(x, "shape"):  # before jit, which has words of its own for what is no array
        require_floating("x", x)
    return _apply(contraction, x, precision)


@functools.partial(jax.jit, static_argnames="precision")
def _apply(contraction: Contraction, x: Any, precision: lax.PrecisionLike) -> Any:
    # Everything that Python does here happens once for each trace.
    if lead := check_contraction("contraction", contraction):
        raise ShapeError(
            "contraction",
            f"a stack of {lead[0]} blocks",
            "a single block",
            "Map over it: jax.vmap(jaxfold.apply)(contraction, x), or pass it to jax.lax.scan.",
        )
    _check_inputs(contraction, x)
    dtype = promote(x, *jax.tree.leaves(contraction.params))
    compute = compute_dtype(dtype)
    limits = jnp.finfo(compute)
    if not float(limits.tiny) <= contraction.epsilon <= float(limits.max):
        raise OptionError(
            "contraction.epsilon",
            f"{contraction.epsilon}",
            f"a number that {compute} holds, {float(limits.tiny):.3g} to {float(limits.max):.3g}",
            "The block computes in that dtype: give it float64 inputs with jax_enable_x64 on.",
        )
    contraction, x = jax.tree.map(lambda leaf: jnp.asarray(leaf, compute), (contraction, x))
    # Explicit mesh axes: the d features are few, and the constant joins them, so every device takes all of them.
    x = with_spec(x, x, (*explicit_spec(x)[:-1], None))
    evaluate = _standard if contraction.form == "standard" else _direct
    outputs = jax.tree.map(lambda y: y.astype(dtype), evaluate(contraction, x, precision))
    return outputs.get(None, outputs)


def _direct(contraction: Contraction, x: jax.Array, precision: lax.PrecisionLike) -> dict[str | None, jax.Array]:
    denominator = contraction.params["denominator"]
    extended = append_one(x) if contraction.has_bias else x
    if "rows" in denominator:  # made by contract_traced: derivatives go to T
        q = quadratic_form(extended, denominator["rows"], contraction.R)[..., None]
    else:
        q = sum_of_squares(project(x, contraction.denominator_kernel, denominator.get("bias")))
    scaled = extended * inverse_scale(q, contraction.width, contraction.epsilon)
    return {name: affine(scaled, group["kernel"], precision) for name, group in contraction.consumers.items()}


def _standard(contraction: Contraction, x: jax.Array, precision: lax.PrecisionLike) -> dict[str | None, jax.Array]:
    z = project(x, contraction.denominator_kernel, contraction.params["denominator"].get("bias"))
    normalised = z * inverse_scale(sum_of_squares(z), contraction.rank, contraction.rms_epsilon)
    return {
        name: add_bias(jnp.tensordot(normalised, group["kernel"], 1, precision=precision), group["bias"])
        for name, group in contraction.consumers.items()
    }


def _check_inputs(contraction: Contraction, x: Any) -> None:
    require_floating("x", x)
    if x.ndim == 0 or x.shape[-1] != contraction.features:
        raise ShapeError(
            "x",
            f"shape {x.shape}" + (f", width {x.shape[-1]}" if x.ndim else ""),
            f"shape (..., {contraction.features}): the block takes {contraction.features} features",
            "",
        )
