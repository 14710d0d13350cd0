"""What belongs together when it comes to a decision: a norm, and all that it scales."""

from __future__ import annotations

import math

from jaxfold._fold._affine import Quadratic
from jaxfold._fold._analysis import Analysis
from jaxfold._fold._components import Emitted
from jaxfold._fold._emission import EmittedAffine, EmittedQuadratic
from jaxfold._fold._program import Value


def groups(analysis: Analysis, candidates: dict[Value, Emitted]) -> list[dict[Value, Emitted]]:
    """Each quadratic with the affine arrays that its root scales, then each of the rest by itself."""
    found: dict[Value, dict[Value, Emitted]] = {}
    alone: list[dict[Value, Emitted]] = []
    quadratics = {value for value, way in candidates.items() if isinstance(way, EmittedQuadratic)}
    for value in sorted(quadratics, key=_place):
        found[value] = {value: candidates[value]}
    for value, way in candidates.items():
        if value in quadratics:
            continue
        scales = way.scales() if isinstance(way, EmittedAffine) else set()
        norms = {norm for scale in scales for norm in norms_behind(analysis, scale)} & quadratics
        for norm in norms:
            found[norm][value] = way
        if not norms:
            alone.append({value: way})
    return [*found.values(), *alone]


def _place(value: Value) -> int:
    return -1 if value.origin is None else value.origin.index


def norms_behind(analysis: Analysis, scale: Value) -> set[Value]:
    """The quadratics that a narrow array is computed from, through a few equations of its own size."""
    found: set[Value] = set()
    stack = [(scale, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(analysis.of(value), Quadratic):
            found.add(value)
        elif value.origin is not None and depth < 12 and not analysis.is_known(value):
            spread = value.origin.name == "broadcast_in_dim"
            same = [v for v in value.origin.inputs if spread or math.prod(v.shape) == math.prod(value.shape)]
            stack += [(v, depth + 1) for v in same]
    return found
