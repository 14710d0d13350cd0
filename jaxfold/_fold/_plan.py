"""Which arrays are computed from their narrow sources, and which as the program says.

The equations whose results are affine or quadratic fall into components, separated by whatever is opaque. Within a
component the arrays that something opaque, or an output, reads are demanded; each is either emitted from its sources or
computed by the original equations. A component is contracted if that leaves fewer parameters and fewer FLOPs, net of
every equation and every parameter that has to stay for another reader.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import lax

from jaxfold._block._plan import Cost
from jaxfold._fold._affine import Affine, Quadratic
from jaxfold._fold._analysis import Analysis
from jaxfold._fold._centred import Way
from jaxfold._fold._components import NOTHING, Component, Emitted, components, live_equations
from jaxfold._fold._emission import EmittedAffine, EmittedQuadratic
from jaxfold._fold._fingerprint import Fingerprints
from jaxfold._fold._groups import groups, norms_of, norms_read
from jaxfold._fold._inner import Inner, inner_of
from jaxfold._fold._program import Equation, Program, Value
from jaxfold._fold._rules_arithmetic import is_sum_of_squares
from jaxfold._fold._storage import natural_dtype

KINDS = frozenset({"contract", "centre", "absorb"})
LAYOUT = {"reshape", "broadcast_in_dim", "transpose", "squeeze", "convert_element_type", "slice", "copy", "concatenate"}


@dataclasses.dataclass
class Tally:
    """What it takes to compute something in some way: FLOPs, entries and bytes of coefficients, parameters as bits."""

    flops: int = 0
    coefficients: int = 0
    nbytes: int = 0
    parameters: int = 0


class Plan:
    """The decisions about one program.

    Attributes:
        storage: the dtype that the caller wants coefficients to be stored in, or None.
        uncut: the plan before inputs of norms were taken for sources, if they are; it tells why those did not pay.
    """

    def __init__(
        self,
        analysis: Analysis,
        sizes: list[tuple[int, int]],
        *,
        stays: int = 0,
        repeat: int = 1,
        minimum_saving: float = 0.0,
        wanted: set[Any] | None = None,
        storage: np.dtype | None = None,
        kinds: frozenset[str] = KINDS,
    ) -> None:
        self.analysis, self.sizes, self.repeat = analysis, sizes, repeat
        self.minimum_saving, self.wanted, self.storage, self.kinds = minimum_saving, wanted, storage, kinds
        self.uncut: Plan | None = None
        self.fingerprints = Fingerprints(analysis)
        self.live = live_equations(analysis)
        self.components = components(analysis, self.live)
        self.inner: dict[Equation, tuple[Inner, Plan]] = {}
        self.centred: dict[Value, Emitted | Way] = {}
        inside = {equation for component in self.components for equation in component.equations}
        entered = [found for equation in self.live if (found := self._enter(equation)) is not None]
        known = {equation for equation in self.live if all(analysis.is_known(value) for value in equation.outputs)}
        apart = inside | known | {inner.equation for inner in entered}
        fixed = stays | self._bits(equation for equation in self.live if equation not in apart)
        for value in analysis.program.outputs:
            fixed |= analysis.depends.get(value, 0)
        units: list[Component | Inner] = [*self.components, *entered]
        used = [self._bits(u.equations if isinstance(u, Component) else [u.equation]) for u in units]
        for unit, others in zip(units, _others(used), strict=True):
            if isinstance(unit, Component):
                self._decide(unit, fixed | others)
            else:
                own = [b if k else None for b, k in zip(self._each(unit.equation), unit.known, strict=True)]
                options: dict[str, Any] = {"minimum_saving": minimum_saving, "wanted": wanted, "storage": storage}
                options["kinds"] = kinds
                times = repeat * unit.repeat
                plan = plan_of(unit.program, own, sizes, stays=fixed | others, repeat=times, **options)
                self.inner[unit.equation] = unit, plan

    @property
    def emitted(self) -> dict[Value, Emitted | Way]:
        """How values are computed that are not computed as the program says."""
        contracted = {value: way for component in self.components for value, way in component.emitted.items()}
        return contracted | self.centred

    @property
    def saved(self) -> int:
        """How many parameters fewer it takes."""
        own = sum(c.before.parameters - c.after.parameters for c in self.components if c.pays)
        return own + sum(plan.saved for _, plan in self.inner.values())

    def all_components(self) -> list[Component]:
        """Those of the program and of the programs inside it."""
        return self.components + [c for _, plan in self.inner.values() for c in plan.all_components()]

    def in_vain(self) -> frozenset[Value]:
        """The inputs of norms that are affine in something, where that does not pay."""
        found: set[Value] = set()
        for component in self.components:
            for equation in () if component.pays else component.equations:
                quadratic = self.analysis.of(equation.outputs[0])
                if isinstance(quadratic, Quadratic) and quadratic.narrow():
                    base = quadratic.base.centred.base if quadratic.base.centred else quadratic.base
                    found |= {self.analysis.first[base]} if base in self.analysis.first else set()
        return frozenset(found)

    def uncentred(self) -> None:
        """Forgets what streams were centred."""
        self.centred = {}
        for inner, body in self.inner.values():
            inner.centred = {}
            body.uncentred()

    def precision(self, value: Value) -> Any:
        """That of the products behind an affine value."""
        found = (component for component in self.components if value.origin in component.equations)
        return next((precision(component) for component in found), None)

    def _enter(self, equation: Equation) -> Inner | None:
        if all(self.analysis.is_known(value) for value in equation.outputs):
            return None
        return inner_of(equation, self.analysis.is_known)

    def _each(self, equation: Equation) -> list[int]:
        return [self.analysis.depends.get(value, 0) for value in equation.inputs]

    @property
    def contracts(self) -> bool:
        """Whether anything is computed otherwise than the program says."""
        inside = any(plan.contracts or inner.centred for inner, plan in self.inner.values())
        return bool(self.emitted) or inside

    @property
    def read(self) -> list[int]:
        """The indices of the parameters that anything reads, in the program as it stands."""
        bits = self._bits(self.live)
        for value in self.analysis.program.outputs:
            bits |= self.analysis.depends.get(value, 0)
        return [index for index in range(len(self.sizes)) if bits >> index & 1]

    def _bits(self, equations: Iterable[Equation]) -> int:
        """The parameters that equations read, through whatever is computed from these alone."""
        bits = 0
        for equation in equations:
            for value in equation.inputs:
                bits |= self.analysis.depends.get(value, 0)
        return bits

    def entries(self, bits: int) -> tuple[int, int]:
        """How many entries and bytes these parameters have."""
        entries = nbytes = 0
        while bits:
            lowest = bits & -bits
            own = self.sizes[lowest.bit_length() - 1]
            entries, nbytes, bits = entries + own[0], nbytes + own[1], bits ^ lowest
        return entries, nbytes

    def _decide(self, component: Component, elsewhere: int) -> None:
        candidates: dict[Value, Emitted] = {}
        self._tally(component, candidates, grow=True)
        original = self._tally(component, {})
        component.before = self._totals(original, elsewhere)
        if not candidates:
            component.after = component.before
            return
        if self.wanted is not None:
            component.after = self._totals(self._tally(component, candidates), elsewhere)
            self._accept(component, candidates)
            return
        chosen: dict[Value, Emitted] = {}
        best = component.before
        allowed = NOTHING
        for group in groups(self.analysis, candidates):  # a norm, with all that it scales
            more = chosen | group
            totals = self._totals(self._tally(component, more), elsewhere)
            offsets = self._offsets(component, group)
            if _weight(totals, component.before) < _weight(best + offsets, component.before):
                chosen, best, allowed = more, totals, allowed + offsets
        for value in list(chosen):  # and what is as cheap from the wide array, which may be there anyhow
            fewer = {other: way for other, way in chosen.items() if other is not value}
            totals = self._totals(self._tally(component, fewer), elsewhere)
            if _weight(totals, component.before) <= _weight(best, component.before):
                chosen, best = fewer, totals
        component.after = best
        before = component.before
        limit = before + allowed if self.minimum_saving == 0 else before
        enough = best.parameters <= limit.parameters - self.minimum_saving * before.parameters
        component.pays = bool(chosen) and best.parameters < limit.parameters and best.flops < limit.flops and enough
        if component.pays:
            self._accept(component, chosen)

    def _candidate(self, value: Value) -> Emitted | None:
        """How to compute a value from narrow sources, if that takes no more than the parameters behind it.

        It does where a product follows that T has to repeat for every position: rotary embeddings. Then what that reads
        is the better candidate.
        """
        if self.wanted is not None and self.identities.get(value) not in self.wanted:
            return None
        found = way_to_emit(self.analysis.of(value))
        if found is not None and not self._kinds_of(found) <= self.kinds:
            return None
        if found is None or self.wanted is not None:
            return found
        bits = 0
        for leaf in found.leaves():
            bits |= self.analysis.depends.get(leaf, 0)
        return found if found.size * self.repeat <= self.entries(bits)[0] else None

    def _kinds_of(self, way: Emitted) -> set[str]:
        """Whether computing a value so contracts something, absorbs scale and bias of a norm that stays, or both."""
        if isinstance(way, EmittedQuadratic):
            return {"contract"}
        found = [self.analysis.of(value) for value in norms_of(self.analysis, way)]
        kinds = {"contract" if isinstance(norm, Quadratic) and norm.narrow() else "absorb" for norm in found}
        return kinds or {"contract"}  # without a norm, several affine maps become one

    @functools.cached_property
    def identities(self) -> dict[Value, Any]:
        """For each value that could be emitted, its coefficients' fingerprint, and how many before it have the same.

        That is what a value is known by in another trace: several may have the same coefficients, as ``z`` and
        ``z[None]`` do.
        """
        found: dict[Value, Any] = {}
        counts: dict[Any, int] = {}
        for value in (value for equation in self.live for value in equation.outputs):
            if (way := way_to_emit(self.analysis.of(value))) is not None:
                fingerprint = self.fingerprints.emitted(way)
                counts[fingerprint] = counts.get(fingerprint, -1) + 1
                found[value] = fingerprint, counts[fingerprint]
        return found

    def _offsets(self, component: Component, group: dict[Value, Emitted]) -> Cost:
        """What may be added for a norm to lose its bias: an offset in each reader, if all its readers are products."""
        if any(isinstance(way, EmittedQuadratic) for way in group.values()):
            return NOTHING
        ways = [way for way in group.values() if isinstance(way, EmittedAffine)]
        behind = set().union(*(norms_of(self.analysis, way) for way in ways))
        readers = [value for value in component.demanded if norms_read(self.analysis, value) & behind]
        if not behind or not set(readers) <= set(group):
            return NOTHING
        entries = flops = 0
        for product in (product for way in ways for product in way.products if product.constant):
            features = math.prod(product.shape[axis] for axis in product.own_axes())
            entries, flops = entries + features, flops + features * math.prod(product.sizes)
        return Cost(entries * self.repeat, 0, flops * self.repeat)

    def _accept(self, component: Component, chosen: dict[Value, Emitted]) -> None:
        # In the program's order, which names the coefficients, whatever order they were found in.
        in_order = sorted(chosen, key=lambda value: value.origin.index if value.origin else -1)
        component.emitted, component.pays = {value: chosen[value] for value in in_order}, bool(chosen)
        if chosen:
            for way in chosen.values():
                if isinstance(way, EmittedAffine):
                    way.precision = precision(component)

    def _totals(self, tally: Tally, elsewhere: int) -> Cost:
        entries, nbytes = self.entries(tally.parameters & ~elsewhere)
        times = self.repeat
        return Cost(entries + tally.coefficients * times, nbytes + tally.nbytes * times, tally.flops * times)

    def _tally(self, component: Component, emitted: dict[Value, Emitted], *, grow: bool = False) -> Tally:
        """What it takes to compute the demanded values; with ``grow``, also collects all that could be emitted."""
        tally = Tally()
        inside = set(component.equations)
        seen: set[Value] = set()
        stack = list(component.demanded)
        while stack:
            value = stack.pop()
            equation = value.origin
            if value in seen or equation is None or equation not in inside:
                continue
            seen.add(value)
            if grow and value not in emitted and (found := self._candidate(value)) is not None:
                emitted[value] = found
            way = emitted.get(value)
            if way is not None:
                tally.flops += way.flops
                tally.coefficients += way.size
                tally.nbytes += way.size * (self.storage or natural_dtype(value, way)).itemsize
                stack += way.values()
                continue
            tally.flops += flops(equation)
            for operand in equation.inputs:
                tally.parameters |= self.analysis.depends.get(operand, 0)
                stack.append(operand)
        return tally


def plan_of(program: Program, given: list[int | None], sizes: list[tuple[int, int]], **options: Any) -> Plan:
    """A plan; where contracting a norm does not pay, its scale and bias may still go into what reads it.

    For that, its input is not to be taken apart any further: the program is analysed once more, with these inputs as
    sources.
    """
    plan = Plan(Analysis(program, given), sizes, **options)
    if not (cut := plan.in_vain()):
        return plan
    other = Plan(Analysis(program, given, cut), sizes, **options)
    other.uncut = plan
    return other if other.saved > plan.saved else plan


def _others(bits: list[int]) -> list[int]:
    """For each place, the union of all other places; in linear time."""
    after = [0] * (len(bits) + 1)
    for index in range(len(bits) - 1, -1, -1):
        after[index] = after[index + 1] | bits[index]
    result, before = [], 0
    for index, own in enumerate(bits):
        result.append(before | after[index + 1])
        before |= own
    return result


def precision(component: Component) -> Any:
    """The finest of the precisions of its products; None for the default."""
    asked = [e.params["precision"] for e in component.equations if e.name == "dot_general"]
    each = [p for pair in asked if pair is not None for p in (pair if isinstance(pair, tuple) else (pair,))]
    named = [p for p in each if isinstance(p, lax.Precision)]
    return max(named, key=list(lax.Precision).index) if named else None


def _weight(cost: Cost, before: Cost) -> float:
    return cost.parameters / max(before.parameters, 1) + cost.flops / max(before.flops, 1)


def way_to_emit(abstract: Any) -> Emitted | None:
    """How to compute it from narrow sources, if it is an array for which that may be worthwhile."""
    if isinstance(abstract, Quadratic) and is_sum_of_squares(abstract) and abstract.narrow():
        return EmittedQuadratic(abstract)
    if isinstance(abstract, Affine) and abstract.terms:
        summed = any(source.row_shape for source in abstract.terms)  # into one number, perhaps
        return EmittedAffine(abstract) if summed or abstract.features() else None
    return None


def flops(equation: Equation) -> int:
    """Of one equation: a multiplication and an addition count 1 each."""
    if equation.name in LAYOUT:
        return 0
    out = sum(math.prod(value.shape) for value in equation.outputs)
    if equation.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * out * math.prod(equation.inputs[0].shape[axis] for axis in contracted)
    return max(out, *(math.prod(value.shape) for value in equation.inputs)) if equation.inputs else out
