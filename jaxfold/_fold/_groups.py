"""What belongs together when it comes to a decision: a norm, and all that it scales."""

from __future__ import annotations

import math

from jaxfold._fold._affine import Affine, Quadratic
from jaxfold._fold._analysis import Analysis
from jaxfold._fold._components import Emitted
from jaxfold._fold._emission import EmittedAffine, EmittedQuadratic
from jaxfold._fold._program import Value


def groups(analysis: Analysis, candidates: dict[Value, Emitted]) -> list[dict[Value, Emitted]]:
    """Each quadratic with the affine arrays that its root scales; those of norms that stay; the rest one by one."""
    found: dict[Value, dict[Value, Emitted]] = {}
    alone: list[dict[Value, Emitted]] = []
    absorbing: dict[frozenset[Value], dict[Value, Emitted]] = {}
    quadratics = {value for value, way in candidates.items() if isinstance(way, EmittedQuadratic)}
    for value in sorted(quadratics, key=_place):
        found[value] = {value: candidates[value]}
    for value, way in candidates.items():
        if value in quadratics:
            continue
        behind = norms_of(analysis, way) if isinstance(way, EmittedAffine) else set()
        norms = behind & quadratics
        for norm in norms:
            found[norm][value] = way
        if behind and not norms:
            absorbing.setdefault(frozenset(behind), {})[value] = way
        elif not norms:
            alone.append({value: way})
    return [*found.values(), *absorbing.values(), *alone]


def norms_of(analysis: Analysis, way: EmittedAffine) -> set[Value]:
    """The quadratics whose roots scale its sources, beforehand or in the source itself."""
    return {norm for scale in way.scales() for norm in norms_behind(analysis, scale)} | {
        norm for source in way.values() - way.scales() for norm in _norms_in(analysis, source)
    }


def _norms_in(analysis: Analysis, source: Value) -> set[Value]:
    """Those in ``x · s``, a wide array times a root."""
    origin = source.origin
    while origin is not None and origin.name == "convert_element_type":
        origin = origin.inputs[0].origin
    if origin is None or origin.name not in ("mul", "div"):
        return set()
    size = math.prod(origin.outputs[0].shape)
    scales = [v for v in origin.inputs if math.prod(v.shape) < size or analysis.constant_along(v)]
    return {norm for scale in scales for norm in norms_behind(analysis, scale)}


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


def norms_read(analysis: Analysis, value: Value) -> set[Value]:
    """The quadratics whose roots scale an affine array of the program, however it is computed."""
    abstract = analysis.of(value)
    return norms_of(analysis, EmittedAffine(abstract)) if isinstance(abstract, Affine) and abstract.terms else set()
