"""Contracting one block inside a traced function: the coefficients of ``contract``, as differentiable JAX.

R comes from T by a factorisation that no derivative passes through; the gradient of the denominator reaches T by the
rules of ``_algebra/_gram.py``, for which the contraction carries T along. D and c are ordinary products.

Derivation: docs/maths.md, Derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxfold._algebra._dtype import compute_dtype, promote
from jaxfold._algebra._gram import centred_rows
from jaxfold._algebra._product import long_product
from jaxfold._algebra._triangle import pack_triangle
from jaxfold._algebra._witness import witness
from jaxfold._block._block import Block
from jaxfold._block._contract import own_dtype, refuse_growth
from jaxfold._block._contraction import Contraction
from jaxfold._block._leaves import read_dtype
from jaxfold._block._shape import Form, NormType, choose, flag
from jaxfold._errors import OptionError
from jaxfold._extend import explicit_spec, with_spec


def contract_traced(
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
    """Contracts a block inside a jitted or differentiated function, so that its own parameters can go on being trained.

    ``apply(contract_traced(producer, norm, consumers, ...), x)`` has the values and the derivatives, of every order and
    in either mode, of the original block in ``x`` and in all its leaves, but the wide activation never exists. It costs
    one factorisation a call, whatever the batch: :func:`jaxfold.plan` says from which batch on that pays.

    Args:
        producer, norm, consumers, epsilon, norm_type, unit_offset, dtype, stacked, allow_growth: as for
            :func:`jaxfold.contract`, except that leaves may be tracers and that values are not checked. The arithmetic
            is that of the leaves' own dtype, float32 for half precision; on CPU float32 factors by way of float64.
        form: ``"direct"`` or ``"packed"``. The standard form has no derivative where T lacks full rank; contract with
            it once training is over.

    Returns:
        A :class:`Contraction` whose ``params["denominator"]`` holds a further leaf, ``rows``: T ``(p, n)``, by which
        the gradient of the denominator reaches the producer. R itself takes none.

    Raises:
        StructureError, ShapeError, DtypeError, GrowthError: as :func:`jaxfold.contract` does.
        OptionError: likewise, and for ``form="standard"``.
        ConcretenessError: if ``epsilon`` is a tracer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxfold
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> producer = {"kernel": jax.random.normal(keys[0], (4, 64)), "bias": jnp.ones(64)}
        >>> consumer = {"kernel": jax.random.normal(keys[1], (64, 8))}
        >>> def loss(producer, consumer, x):
        ...     block = jaxfold.contract_traced(producer, None, consumer, epsilon=1e-6)
        ...     return jnp.mean(jaxfold.apply(block, x) ** 2)
        >>> gradient = jax.jit(jax.grad(loss))(producer, consumer, jax.random.normal(keys[2], (32, 4)))
        >>> jax.tree.map(jnp.shape, gradient)
        {'bias': (64,), 'kernel': (4, 64)}
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
    if form == "standard":
        raise OptionError("form", "'standard'", "'direct' or 'packed' under tracing", "Use jaxfold.contract for it.")
    choose("form", form, ("direct", "packed"))
    storage = read_dtype(dtype)
    if not flag("allow_growth", allow_growth):
        refuse_growth(block, form)

    layers = (block.layers.producer, block.layers.norm, block.layers.consumers)
    everything = compute_dtype(promote(*jax.tree.leaves(layers)))
    sources = jax.tree.map(jnp.asarray, layers)
    # The wide axis is summed over, and parameters are small beside a batch: every device computes all coefficients.
    layers = jax.tree.map(lambda leaf: with_spec(leaf, leaf, (None,) * leaf.ndim).astype(everything), sources)

    def member(layers: Any) -> Any:
        return _coefficients(block, layers, form)

    params = (member if block.shape.stack is None else jax.vmap(member))(layers)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.astype(jax.dtypes.canonicalize_dtype(storage or own_dtype(block, path))), params
    )
    for name, group in sources[2].items():
        tree = params["consumer"] if name is None else params["consumers"][name]
        tree["kernel"] = _placed_as(group["kernel"], tree["kernel"], stacked)
    return Contraction(params, block.shape.width, block.epsilon, block.norm_type, form)


def _placed_as(source: jax.Array, kernel: jax.Array, stacked: bool) -> jax.Array:
    """The contracted kernel with its output axes on the explicit mesh axes that the source has there.

    Not with the wide axis, in whose place are the rows of D, nor with that of a stack, by which the leaves differ.
    """
    lead = 2 if stacked else 1
    return with_spec(kernel, source, (None,) * lead + explicit_spec(source)[lead:])


def _coefficients(block: Block, layers: Any, form: Form) -> dict[str, Any]:
    """``Contraction.params`` of one member of a stack, and T."""
    producer, norm, consumers = layers
    shape = block.shape
    rows = producer["kernel"]
    if shape.producer_bias:
        rows = jnp.concatenate([rows, producer["bias"][None]])
    if block.norm_type == "layernorm":
        rows = centred_rows(rows)
    columns = witness(rows).T  # constant to derivatives, which reach T by the rules of _gram.py
    kernel = columns[: shape.features]
    denominator = {"kernel": pack_triangle(kernel) if form == "packed" else kernel, "rows": rows}
    if shape.producer_bias:
        denominator["bias"] = columns[-1]

    scale = norm.get("scale", jnp.ones(shape.width, rows.dtype))
    if block.unit_offset and shape.scale:
        scale = 1 + scale
    scaled = rows * scale[None]
    shift = norm.get("bias", jnp.zeros(shape.width, rows.dtype))
    trees = {}
    for name, group in consumers.items():
        features = shape.outputs[name]
        wide = group["kernel"].reshape(shape.width, -1)
        both = jnp.concatenate([scaled, shift[None]])
        product = long_product(both, wide)  # D, and the norm's part of c
        if shape.consumer_bias[name]:
            product = product.at[-1].add(group["bias"].reshape(-1))
        trees[name] = {"kernel": product.reshape(-1, *features)}
    return {"denominator": denominator} | ({"consumer": trees[None]} if None in trees else {"consumers": trees})
