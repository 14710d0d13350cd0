"""Taking the mean out of streams: LayerNorm becomes RMSNorm, and the writers of its input are centred beforehand.

A LayerNorm needs the mean of its input only to take it away. If nothing else sees that mean (``_blind.py``), it may be
gone from the start: ``P h = h − mean(h)`` in place of h. How that is made is decided for each value (``_nodes.py``),
whether it is made for all that hangs together (``_streams.py``): if it takes fewer means than the norms save. A tied
table stays as it is, and its rows are centred where they enter the stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jaxfold._fold._affine import Quadratic
from jaxfold._fold._blame import blame
from jaxfold._fold._blind import NONE, Blindness
from jaxfold._fold._centred import MeanSquare, Recentred, Stored, Uncentred, centred
from jaxfold._fold._components import LEFT_OUT
from jaxfold._fold._emission import EmittedAffine
from jaxfold._fold._known import Known
from jaxfold._fold._nodes import Node, Nodes, opened
from jaxfold._fold._plan import Plan
from jaxfold._fold._program import Value
from jaxfold._fold._streams import Exit, Stream, exits, streams


class Centring:
    """What becomes of every stream of a program and of the programs inside: it goes into their plans.

    Attributes:
        nodes: how each blind value could be computed without its mean.
        exits: what norms make of such values.
        streams: the stream of each node that a norm needs.
        left: the places, among what all norms make of such values, of those that the caller did not want.
    """

    def __init__(
        self,
        plan: Plan,
        unwanted: Iterable[Value] = (),
        wanted: set[Any] | None = None,
        left: Iterable[int] = (),
    ) -> None:
        self.unwanted, self.on = set(unwanted), "centre" in plan.kinds
        self.nodes = Nodes(Blindness(plan, [NONE] * len(plan.analysis.program.outputs), outermost=True))
        each = list(exits(self.nodes.scopes)) if self.on else []
        self.unwanted |= {found.of for place, found in enumerate(each) if place in set(left)}
        self.exits: list[Exit] = [found for found in each if found.of not in self.unwanted]
        self.left = frozenset(place for place, found in enumerate(each) if found.of in self.unwanted)
        self.streams = streams(self.nodes, self.exits)
        for stream in dict.fromkeys(self.streams.values()):
            if wanted is None or not self._was_decided(stream, wanted):
                stream.judge()
        self._build()

    def accepted(self, value: Value) -> bool:
        """Whether the value is without its mean."""
        node = self.nodes.of.get(value)
        return node is not None and node in self.streams and not self.streams[node].refused

    def takes_from(self, value: Value) -> bool:
        """Whether norms of a value find it without its mean, and rely on it."""
        return self.accepted(value) and value not in self.unwanted

    @property
    def means(self) -> int:
        """How many means are taken for all streams that are centred."""
        used = [node for node, stream in self.streams.items() if not stream.refused]
        return sum(node.means * (node.outside or node.scope.plan.repeat) for node in used)

    def writers(self, value: Value) -> int:
        """The parameters that lose their mean for it, as bits."""
        bits = 0
        for node in self.streams[self.nodes.of[value]].nodes:
            way = node.scope.plan.centred.get(node.value)
            for leaf in () if way is None else way.leaves():
                bits |= node.scope.analysis.depends.get(leaf, 0)
        return bits

    def why_not(self, value: Value, axis: int) -> str:
        """Why a norm's input keeps its mean."""
        if value in self.unwanted:
            return LEFT_OUT
        if not self.on:
            return "centring is switched off"
        node = self.nodes.of.get(value)
        if node is not None and node in self.streams:
            return self.streams[node].refused
        scopes = [scope for scope in self.nodes.scopes if value in scope.uses]
        return blame(scopes[0], value, axis) if scopes else ""

    def _was_decided(self, stream: Stream, wanted: set[Any]) -> bool:
        """Whether what was stored for another trace tells what to do, and if so does it."""
        ways = [(node.scope.plan.fingerprints, self._way(node)) for node in stream.nodes]
        asked = [prints.emitted(way) in wanted for prints, way in ways if way is not None and way.size]
        if not asked or stream.cost == math.inf:
            return False
        stream.refused = "" if all(asked) else "it was not centred when the function was folded"
        return True

    def _way(self, node: Node) -> Any:
        """How the node's value is computed, where its equation does not do as it stands."""
        value = node.value
        emitted = node.scope.emitted.get(value)
        if node.how == "stored":
            array = node.scope.analysis.of(value)
            return Stored(array, value.shape, node.axis) if isinstance(array, Known) else None
        if node.how == "emitted":
            abstract = opened(node.scope, value)
            if abstract is None:
                raise TypeError(value)
            way = EmittedAffine(centred(abstract, node.axis))
            way.precision = (
                emitted.precision if isinstance(emitted, EmittedAffine) else node.scope.plan.precision(value)
            )
            return way
        if node.how == "run":
            return Recentred(value, node.axis, {}, emitted)
        if node.how == "through" and node.run:
            return Recentred(value, None, node.run, constant=node.axis)
        return None

    def _build(self) -> None:
        for node, stream in self.streams.items():
            if stream.refused:
                continue
            if (way := self._way(node)) is not None:
                node.scope.plan.centred[node.value] = way
        for scope in self.nodes.scopes:
            for inner, _ in (scope.plan.inner[equation] for equation in scope.inner):
                for index, value in enumerate(inner.program.inputs):
                    if self.accepted(value) and self.nodes.of[value].own:
                        inner.centred[index] = self.nodes.of[value].axis
        for found in self.exits:
            node = self.nodes.get(found.of, found.axis)
            if node is None or not self.accepted(found.of) or found.value in node.scope.emitted:
                continue
            abstract = node.scope.analysis.of(found.value)
            way = MeanSquare(found.of, abstract) if isinstance(abstract, Quadratic) else Uncentred(found.of)
            node.scope.plan.centred[found.value] = way
