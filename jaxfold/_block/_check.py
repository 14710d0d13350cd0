"""Whether a contraction, restored or edited by hand perhaps, hangs together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxfold._algebra._triangle import triangle_size
from jaxfold._block._contraction import Contraction
from jaxfold._block._leaves import require_floating
from jaxfold._block._shape import FORMS, choose
from jaxfold._errors import OptionError, ShapeError, StructureError, kind_of

RESTORE = "Give params and static fields of one and the same contraction, its form included."


def require_contraction(argument: str, value: Any) -> None:
    """Raises :class:`StructureError` for anything that is no :class:`Contraction`."""
    if not isinstance(value, Contraction):
        hint = "Make one with jaxfold.contract, or restore it: Contraction(params, width, epsilon, norm_type, form)."
        raise StructureError(argument, kind_of(value), "a jaxfold.Contraction", hint)


def check_contraction(argument: str, contraction: Contraction) -> tuple[int, ...]:
    """Checks static fields, names, dtypes and shapes; the values are not looked at.

    Returns:
        The leading shape of all leaves: ``()``, or ``(layers,)`` for a stack.

    Raises:
        OptionError, StructureError, DtypeError, ShapeError: naming the field or the path of the leaf at fault.
    """
    choose(f"{argument}.form", contraction.form, FORMS)
    width, epsilon = contraction.width, contraction.epsilon
    if not isinstance(width, (int, np.integer)) or isinstance(width, bool) or width < 1:
        raise OptionError(f"{argument}.width", repr(width), "the original's width, an integer above 0", RESTORE)
    if not isinstance(epsilon, (float, int, np.floating)) or not 0 < epsilon < math.inf:
        raise OptionError(f"{argument}.epsilon", repr(epsilon), "a finite number above 0", RESTORE)
    groups = _groups(argument, contraction)
    standard, packed = contraction.form == "standard", contraction.form == "packed"

    name, denominator = next(iter(groups.items()))
    kernel = denominator["kernel"]
    own_axes = 1 if packed else 2
    if kernel.ndim not in (own_axes, own_axes + 1):
        expected = f"{own_axes} axes in the {contraction.form} form, or one more for a stack"
        raise ShapeError(f"{name}['kernel']", f"shape {tuple(kernel.shape)}", expected, RESTORE)
    lead = tuple(kernel.shape[: kernel.ndim - own_axes])
    for path, group in groups.items():
        for key, leaf in group.items():
            if tuple(leaf.shape[: len(lead)]) != lead or leaf.ndim <= len(lead):
                expected = f"the leading axis of {name}['kernel'], of length {lead[0] if lead else 0}"
                raise ShapeError(f"{path}[{key!r}]", f"shape {tuple(leaf.shape)}", expected, RESTORE)

    features, rank = contraction.features, contraction.rank
    rows = features + contraction.has_bias
    if rank != min(width, rows) or features < 1:
        got = f"{rank} squares for width {width} and {features} features"
        raise ShapeError(f"{name}['kernel']", got, f"min(width, {rows}) = {min(width, rows)} of them", RESTORE)
    if packed:
        _check_shape(f"{name}['kernel']", kernel, (*lead, triangle_size(features, rank)))
    if "rows" in denominator:  # T, which contract_traced adds
        _check_shape(f"{name}['rows']", denominator["rows"], (*lead, rows, width))
    if contraction.has_bias:
        _check_shape(f"{name}['bias']", denominator["bias"], (*lead, rank))
    for path, group in list(groups.items())[1:]:
        tail = tuple(group["kernel"].shape[len(lead) + 1 :])
        _check_shape(f"{path}['kernel']", group["kernel"], (*lead, rank if standard else rows + 1, *tail))
        if standard:
            _check_shape(f"{path}['bias']", group["bias"], (*lead, *tail))
    return lead


def _groups(argument: str, contraction: Contraction) -> dict[str, Any]:
    """The groups of leaves by path, the denominator first, with their keys and dtypes checked."""
    params = contraction.params
    if not hasattr(params, "keys") or set(params) not in ({"denominator", "consumer"}, {"denominator", "consumers"}):
        got = f"the keys {sorted(map(str, params))}" if hasattr(params, "keys") else kind_of(params)
        raise StructureError(f"{argument}.params", got, "'denominator' and 'consumer' or 'consumers'", RESTORE)
    groups = {f"{argument}.params['denominator']": params["denominator"]}
    for name, group in contraction.consumers.items():
        groups[f"{argument}.params" + ("['consumer']" if name is None else f"['consumers'][{name!r}]")] = group
    consumer_keys = {"kernel", "bias"} if contraction.form == "standard" else {"kernel"}
    for index, (path, group) in enumerate(groups.items()):
        accepted = [consumer_keys] if index else [{"kernel"}, {"kernel", "bias"}]
        keys = set(group) - (set() if index or contraction.form == "standard" else {"rows"})
        if keys not in accepted:
            expected = " or ".join(" and ".join(map(repr, sorted(keys))) for keys in accepted)
            got = f"the keys {sorted(map(str, group))}"
            raise StructureError(path, got, f"{expected} in the {contraction.form} form", RESTORE)
        for key, leaf in group.items():
            require_floating(f"{path}[{key!r}]", leaf)
    return groups


def _check_shape(path: str, leaf: Any, expected: tuple[int, ...]) -> None:
    if tuple(leaf.shape) != expected:
        raise ShapeError(path, f"shape {tuple(leaf.shape)}", f"shape {expected}", RESTORE)
