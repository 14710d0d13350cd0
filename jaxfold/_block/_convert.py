"""Conversion between the forms of a contraction, on the host in float64.

packed and direct hold the same numbers. From standard to them, R is the first kernel and ``D = sqrt(k/n) Rᵀ V``.
Back, ``Rᵀ V = sqrt(n/k) D`` has to be solved for V. D is in the range of Rᵀ by construction, D = Rᵀ Uᵀ diag(γ) W, so
the minimum-norm least-squares solution reproduces it; singular values of R below the rounding of its own storage
carry no information about V and are left out.

Derivation: docs/maths.md, The standard form.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._algebra._triangle import pack_triangle
from jaxfold._block._axes import PRODUCER
from jaxfold._block._check import check_contraction, require_contraction
from jaxfold._block._contraction import Contraction
from jaxfold._block._leaves import to_host
from jaxfold._block._shape import FORMS, Form, choose, consumer_path
from jaxfold._block._store import Coefficient, store


def convert(contraction: Contraction, form: Form) -> Contraction:
    """The same block in another form.

    Between ``"direct"`` and ``"packed"`` the coefficients are the same numbers; to and from ``"standard"`` they are
    computed in float64 and rounded to the dtype they had. To get the standard form of a block whose original is at
    hand, :func:`contract` it with ``form="standard"`` instead: that needs no solving.

    Args:
        contraction: of one block or of a stack, with concrete leaves; it is not changed. One by ``contract_traced``
            loses the rows that it carries for the derivative.
        form: ``"direct"``, ``"packed"`` or ``"standard"``.

    Returns:
        A new :class:`Contraction`; the argument itself if it has that form already.

    Raises:
        OptionError: if ``form`` is not one of these, or a static field of the contraction is not accepted.
        StructureError, ShapeError, DtypeError: if the argument is no contraction, or one that does not hang together.
        ConcretenessError: if the contraction holds tracers, or leaves without values.
        CoefficientError: if a coefficient is not finite, or does not fit its dtype.

    Example:
        >>> import numpy as np, jaxfold
        >>> producer = {"kernel": np.eye(2, 8), "bias": np.arange(8.0)}
        >>> block = jaxfold.contract(producer, None, {"kernel": np.ones((8, 4))}, epsilon=1e-6)
        >>> jaxfold.convert(block, "packed").params["denominator"]["kernel"].shape
        (3,)
    """
    choose("form", form, FORMS)
    require_contraction("contraction", contraction)
    check_contraction("contraction", contraction)
    if form == contraction.form:
        return contraction
    host = jax.tree_util.tree_map_with_path(
        lambda path, leaf: to_host("contraction.params" + jax.tree_util.keystr(path), leaf), contraction.params
    )
    source = dataclasses.replace(contraction, params=host)
    kernel = source.denominator_kernel
    denominator = {**host["denominator"], "kernel": pack_triangle(kernel) if form == "packed" else kernel}
    denominator.pop("rows", None)
    factor_eps, kernel_eps = (_eps(contraction.params[key]) for key in ("denominator", _consumer_key(contraction)))
    consumers = source.consumers
    if form == "standard":
        consumers = {name: _to_standard(source, group, factor_eps) for name, group in consumers.items()}
    elif source.form == "standard":
        numerators, offsets = _as_dict(source.D), _as_dict(source.c)
        axis = source._lead
        consumers = {
            name: {"kernel": np.concatenate([numerators[name], np.expand_dims(offsets[name], axis)], axis=axis)}
            for name in consumers
        }
    params = {"denominator": denominator}
    params |= {"consumer": consumers[None]} if None in consumers else {"consumers": consumers}

    def own_dtype(path: Any) -> np.dtype:
        group = contraction.params
        for key in path[:-1]:
            group = group[key.key]
        return np.dtype(group["kernel"].dtype)

    # Coefficients are known to the rounding of their storage, so nothing finer than that can be lost.
    eps = {"denominator": factor_eps}
    wrapped = jax.tree_util.tree_map_with_path(
        lambda path, value: _known_to(value, eps.get(path[0].key, kernel_eps), source._lead), params
    )
    kernels = {f"{consumer_path(name)}['kernel']": group["kernel"] for name, group in contraction.consumers.items()}
    kernels[PRODUCER] = contraction.params["denominator"]["kernel"]
    stored = store(wrapped, own_dtype, kernels, form=form, stacked=bool(source._lead))
    return dataclasses.replace(contraction, params=stored, form=form)


def _to_standard(source: Contraction, group: Any, eps: float) -> dict[str, np.ndarray]:
    lead, kernel = source._lead, group["kernel"]
    flat = kernel.reshape(*kernel.shape[: lead + 1], -1)
    numerator, offset = flat[..., :-1, :], flat[..., -1, :]
    inverse = np.linalg.pinv(np.swapaxes(source.R, -1, -2), rcond=eps * np.sqrt(source.rank))
    product = np.sqrt(source.width / source.rank) * (inverse @ numerator)
    tail = kernel.shape[lead + 1 :]
    return {
        "kernel": product.reshape(*product.shape[:-1], *tail),
        "bias": offset.reshape(*offset.shape[:-1], *tail),
    }


def _consumer_key(contraction: Contraction) -> str:
    return "consumer" if "consumer" in contraction.params else "consumers"


def _as_dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {None: value}


def _eps(tree: Any) -> float:
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))


def _known_to(value: np.ndarray, eps: float, lead: int) -> Coefficient:
    return Coefficient(value, eps * np.sqrt(np.sum(value**2, axis=tuple(range(lead, value.ndim)))))
