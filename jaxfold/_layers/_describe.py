"""Between a contraction that exists and the fields of the module that it fits into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfold._block._check import check_contraction, require_contraction
from jaxfold._block._contraction import Contraction
from jaxfold._errors import ShapeError, StructureError
from jaxfold._layers._layout import Layout, by_consumer


def describe(contraction: Contraction) -> tuple[dict[str, Any], int]:
    """The fields of the ContractedDense that a contraction fits into, and its d; those of one member for a stack.

    Raises:
        StructureError, ShapeError, DtypeError, OptionError: if it is no contraction that a module can hold.
    """
    require_contraction("contraction", contraction)
    lead = len(check_contraction("contraction", contraction))
    if "rows" in contraction.params["denominator"]:
        hint = "It is made anew in every step, and its parameters are the original's: use jaxfold.contract."
        raise StructureError("contraction", "a contraction by contract_traced", "one by jaxfold.contract", hint)
    skipped = lead + 1
    outputs = {name: tuple(group["kernel"].shape[skipped:]) for name, group in contraction.consumers.items()}
    features = {name: axes[0] if len(axes) == 1 else axes for name, axes in outputs.items()}
    denominator = _dtype_of("contraction.params['denominator']", contraction.params["denominator"])
    consumers = {name: _dtype_of(f"consumer {name!r}", group) for name, group in contraction.consumers.items()}
    mixed = {denominator, *consumers.values()} != {denominator}
    fields = {
        "features": features.get(None, features),
        "width": int(contraction.width),
        "epsilon": float(contraction.epsilon),
        "use_bias": contraction.has_bias,
        "norm_type": contraction.norm_type,
        "form": contraction.form,
        "param_dtype": {"denominator": denominator, **by_consumer(dict(consumers))} if mixed else denominator,
    }
    return fields, contraction.features


def _dtype_of(path: str, group: Mapping[str, Any]) -> np.dtype:
    dtypes = {np.dtype(leaf.dtype) for leaf in group.values()}
    if len(dtypes) != 1:
        got = " and ".join(sorted(map(str, dtypes)))
        raise StructureError(path, f"leaves of dtype {got}", "one dtype in each group of leaves", "")
    return dtypes.pop()


def check_loaded(params: Any, layout: Layout, contraction: Contraction, features: str, stack_hint: str) -> None:
    """That leaves which were loaded fit what the module declares, and the inputs.

    Args:
        params: the leaves, without boxes.
        layout: what the module declares.
        contraction: the same leaves as a contraction.
        features: the argument that d comes from, ``"x"`` or ``"in_features"``.
        stack_hint: how a stack is evaluated.

    Raises:
        ShapeError: naming that argument if its d is not theirs, else the leaf at fault.
        StructureError: if a leaf is missing or has no place.
    """
    expected = layout.shapes()
    found = _shapes(params)
    if found == expected:
        return
    if lead := check_contraction("module", contraction):
        raise ShapeError("params", f"a stack of {lead[0]} blocks", "the params of a single block", stack_hint)
    if contraction.features != layout.features:
        got = f"width {layout.features}" if features == "x" else f"{layout.features}"
        accepted = f"{contraction.features}, the features of the block that was loaded"
        raise ShapeError(features, got, accepted, "")
    raise StructureError("params", f"{found}", f"{expected}, as the module declares", "Load what fits the module.")


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _shapes(value) for key, value in tree.items()}
    return tuple(tree.shape)
