"""Contracting one block, offline, on the host in float64.

LayerNorm's denominator is the norm of ``R x̄`` (see ``_algebra/_factor.py``). Its numerator is linear in x̄ too, so the
scale γ, the bias β and the consumer ``W, b`` multiply into it:

    f(x) = [P h · s · γ + β] W + b,   s = 1/sqrt(‖P h‖²/n + ε)
         = s · x̄ T diag(γ) W + (β W + b)
         = s · x̄ D + c,               D = T diag(γ) W,  c = β W + b

The standard form keeps the k-dimensional ``z = R x̄`` as an activation. From T = (U R)ᵀ = Rᵀ Uᵀ,

    x̄ D = x̄ Rᵀ (Uᵀ diag(γ) W) = z · Uᵀ diag(γ) W

and RMSNorm over k features divides by sqrt(‖z‖²/k + ε n/k) = sqrt(n/k)/s, so ``V = sqrt(n/k) Uᵀ diag(γ) W`` makes up
for it. RMSNorm as the original norm is the same with P the identity.

Derivation: docs/maths.md, The theorem and The standard form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfold._algebra._factor import Factor, centre, factor
from jaxfold._algebra._triangle import pack_triangle
from jaxfold._block._block import Block
from jaxfold._block._contraction import Contraction
from jaxfold._block._leaves import read_dtype, to_host
from jaxfold._block._plan import plan_shape
from jaxfold._block._shape import FORMS, Form, NormType, choose, consumer_path, flag
from jaxfold._block._store import Coefficient, store
from jaxfold._errors import GrowthError

EPS = float(np.finfo(np.float64).eps)


def contract(
    producer: Mapping[str, Any],
    norm: Mapping[str, Any] | None,
    consumers: Mapping[str, Any],
    *,
    epsilon: float,
    norm_type: NormType = "layernorm",
    unit_offset: bool = False,
    form: Form = "direct",
    dtype: Any = None,
    stacked: bool = False,
    allow_growth: bool = False,
) -> Contraction:
    """Contracts a Dense-norm-Dense block into one that computes the same function without the wide activation.

    Runs on the host in float64 whatever ``jax_enable_x64`` says, so its arrays must be concrete. In real arithmetic
    nothing is approximated; what rounding remains is that of storing the coefficients and of evaluating them.

    Args:
        producer: ``{"kernel": (d, n)[, "bias": (n,)]}``.
        norm: ``{["scale": (n,)][, "bias": (n,)]}``, or ``None``. A missing scale is ones, a missing bias zeros.
        consumers: ``{"kernel": (n, *features)[, "bias": features]}``, or a mapping of names to such, which then share
            one denominator.
        epsilon: what the norm adds to the variance, above 0. Required: Flax's default is 1e-6, PyTorch's 1e-5.
        norm_type: ``"layernorm"``, or ``"rmsnorm"`` for the same without centring.
        unit_offset: whether the norm multiplies by ``1 + scale``, as Gemma's does. Never inferred.
        form: ``"direct"`` to evaluate, ``"packed"`` to store, ``"standard"`` for stock Dense and RMSNorm modules, and
            for inputs that nearly cancel the producer's bias, where it rounds less.
        dtype: storage dtype of every coefficient: float64, float32, bfloat16 or float16. By default each coefficient
            has the dtype that JAX promotes its own sources to. For half-precision leaves under float32 inputs ask for
            float32: the leaves are exact numbers to the original, while half precision cuts digits off D and R.
        stacked: whether every leaf has one more leading axis, as ``nn.scan`` and ``nn.vmap`` make; then so has every
            coefficient.
        allow_growth: whether to go on when the result has more parameters than the original.

    Leaves may be NumPy arrays, JAX arrays, or either in a Flax box, in any mapping (a FrozenDict, say). None of the
    arguments is changed or kept.

    Returns:
        A :class:`Contraction`. Its arrays are JAX arrays if all the leaves were, and NumPy arrays otherwise or where
        JAX cannot hold their dtype. Where leaves are sharded by a ``NamedSharding``, the result is sharded likewise:
        the denominator's kernel along the producer's input axis, the consumers' along their output axes.

    Raises:
        StructureError: if a leaf is missing or has no place in the block.
        ShapeError: if shapes do not fit, or an axis is empty.
        DtypeError: if a leaf is integer, complex or quantised.
        OptionError: if ``epsilon``, ``norm_type``, ``form``, ``dtype`` or a flag is not accepted.
        ConcretenessError: if a leaf, or ``epsilon``, is a tracer or has no values.
        CoefficientError: if a leaf is not finite, or a coefficient does not fit its storage dtype.
        GrowthError: if the result has more parameters than the original, unless ``allow_growth``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxfold
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> producer = {"kernel": jax.random.normal(keys[0], (4, 64)), "bias": jnp.ones(64)}
        >>> norm = {"scale": jax.random.normal(keys[1], (64,)), "bias": jnp.zeros(64)}
        >>> consumer = {"kernel": jax.random.normal(keys[2], (64, 8)), "bias": jnp.zeros(8)}
        >>> block = jaxfold.contract(producer, norm, consumer, epsilon=1e-6)
        >>> jax.tree.map(jnp.shape, block.params)
        {'consumer': {'kernel': (6, 8)}, 'denominator': {'bias': (5,), 'kernel': (4, 5)}}
        >>> jaxfold.apply(block, jnp.ones((2, 4))).shape
        (2, 8)
    """
    block = Block(
        producer,
        norm,
        consumers,
        epsilon=epsilon,
        norm_type=norm_type,
        unit_offset=unit_offset,
        stacked=stacked,
    )
    return contract_block(block, form=form, dtype=dtype, allow_growth=allow_growth)


def contract_block(
    block: Block, *, form: Form, dtype: Any, allow_growth: bool, keep_producer: bool = False
) -> Contraction:
    """The same for a block that was read already; a producer that has to stay counts when it comes to growth."""
    choose("form", form, FORMS)
    storage = read_dtype(dtype)
    if not flag("allow_growth", allow_growth):
        refuse_growth(block, form, keep_producer=keep_producer)

    host = {path: to_host(path, leaf, "jaxfold.contract_traced") for path, leaf in block.layers.named().items()}
    with np.errstate(all="ignore"):  # what overflows here is caught, by name, when it is stored
        coefficients = _coefficients(block, host, form)
    params = store(
        coefficients,
        lambda path: storage or own_dtype(block, path),
        block.layers.named(),
        form=form,
        stacked=block.shape.stack is not None,
    )
    return Contraction(params, block.shape.width, block.epsilon, block.norm_type, form)


def refuse_growth(block: Block, form: Form, *, keep_producer: bool = False) -> None:
    """Raises :class:`GrowthError`, with the counts before and after, if the form has more parameters than the block."""
    costs = plan_shape(block.shape, block.norm_type, keep_producer=keep_producer)
    before, after = costs.original.parameters, costs.cost(form).parameters
    if after > before:
        smaller = [repr(other) for other in FORMS if costs.cost(other).parameters < before]
        instead = f"contract it with form={' or '.join(smaller)}, which has fewer, " if smaller else ""
        raise GrowthError(
            "consumers",
            f"a block whose {form} form has {after:,} parameters"
            + (", its producer included" if keep_producer else ""),
            f"at most the original's {before:,}",
            f"Leave it as it is, {instead}or pass allow_growth=True.",
            costs,
        )


def _coefficients(block: Block, host: dict[str, np.ndarray], form: Form) -> dict[str, Any]:
    """The tree of :class:`Coefficient` that becomes ``Contraction.params``."""
    rows = host["producer['kernel']"]
    if block.shape.producer_bias:
        rows = np.concatenate([rows, host["producer['bias']"][..., None, :]], axis=-2)
    resolution = EPS * _norm(rows)
    if block.norm_type == "layernorm":
        rows = centre(rows)
    factored = factor(rows, with_basis=form == "standard")
    columns = np.swapaxes(factored.upper, -1, -2)
    kernel = columns[..., : block.shape.features, :]
    denominator = {"kernel": Coefficient(pack_triangle(kernel) if form == "packed" else kernel, resolution)}
    if block.shape.producer_bias:
        denominator["bias"] = Coefficient(columns[..., -1, :], resolution)
    consumers = {name: _consumer(block, name, host, rows, factored) for name in block.shape.outputs}
    if None in consumers:
        return {"denominator": denominator, "consumer": consumers[None]}
    return {"denominator": denominator, "consumers": consumers}


def _consumer(
    block: Block, name: str | None, host: dict[str, np.ndarray], rows: np.ndarray, factored: Factor
) -> dict[str, Coefficient]:
    """D and c in one kernel; or V and c, where the factor came with its basis."""
    shape, path, lead = block.shape, consumer_path(name), rows.shape[:-2]
    features = shape.outputs[name]
    kernel = host[f"{path}['kernel']"].reshape(*lead, shape.width, -1)
    bias = host.get(f"{path}['bias']", np.zeros((*lead, *features))).reshape(*lead, -1)
    shift = host.get("norm['bias']", np.zeros((*lead, shape.width)))[..., None, :]
    scale = host.get("norm['scale']", np.ones((*lead, shape.width)))
    if block.unit_offset and shape.scale:
        scale = 1.0 + scale
    offset = (shift @ kernel)[..., 0, :] + bias
    scaled = scale[..., :, None] * kernel
    # A product of n terms in float64 is known to n·eps of the product of the norms.
    offset_error = shape.width * EPS * (_norm(shift) * _norm(kernel) + _norm(bias[..., None]))
    kernel_error = shape.width * EPS * _norm(rows) * _norm(scaled)
    if factored.basis is not None:
        product = np.sqrt(shape.width / shape.rank) * (np.swapaxes(factored.basis, -1, -2) @ scaled)
        return {
            "kernel": Coefficient(product.reshape(*lead, -1, *features), shape.width * EPS * _norm(scaled)),
            "bias": Coefficient(offset.reshape(*lead, *features), offset_error),
        }
    augmented = np.concatenate([rows @ scaled, offset[..., None, :]], axis=-2)
    return {"kernel": Coefficient(augmented.reshape(*lead, -1, *features), kernel_error + offset_error)}


def _norm(matrix: np.ndarray) -> np.ndarray:
    """The Frobenius norm, in one pass and without a copy."""
    return np.sqrt(np.einsum("...ij,...ij->...", matrix, matrix))


def own_dtype(block: Block, path: Any) -> np.dtype:
    """The dtype that the sources of the coefficient at ``path`` promote to."""
    if path[0].key == "denominator":
        return block.shape.factor_dtype
    return block.shape.kernel_dtypes[None if path[0].key == "consumer" else path[1].key]
