"""What is centred together, and whether that pays.

What a norm reads without its mean, all that this is made of without its mean, and whatever else that is needed for:
one stream. Each norm over it saves one mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from jaxfold._fold._blind import Blindness
from jaxfold._fold._moments import moments
from jaxfold._fold._nodes import Node, Nodes
from jaxfold._fold._program import Value


@dataclasses.dataclass(eq=False)
class Stream:
    """Nodes that are centred together or not at all.

    Attributes:
        cost, saved: numbers averaged for it, and by the norms over it, which need not.
        means, norms: in how many operations, in one layer.
        constants: whether some of these means are of constants, such as weights that the function closes over.
        refused: why it is left as it is.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    cost: float = 0.0
    saved: float = 0.0
    means: int = 0
    norms: int = 0
    constants: bool = False
    refused: str = ""

    def judge(self) -> None:
        """Refuses what takes as many means as it saves."""
        # A mean of fewer numbers is a gain, but of a constant it may be none: the compiler may have folded either.
        fewer = self.means < self.norms or (self.means == self.norms and not self.constants)
        if self.cost < self.saved and fewer:
            return
        times = self.cost / max(self.saved, 1)
        numbers = "" if times == 1 else f", over {times:.2g} times the numbers"
        self.refused = (
            f"without its mean, its input would take {self.means} at run time where {self.norms} would be saved"
            f"{numbers}: a part of it is no product with parameters that only it reads"
        )


@dataclasses.dataclass(frozen=True)
class Exit:
    """What a norm makes of a stream whatever its mean: the value, the stream, and the axis of that."""

    value: Value
    of: Value
    axis: int


def exits(scopes: Iterable[Blindness]) -> Iterator[Exit]:
    """Those of all streams that are blind."""
    for scope in scopes:
        for value in (value for step in scope.steps if not isinstance(step, Value) for value in step.outputs):
            for found in moments(scope.analysis, value):
                if found.invariant and found.axis is not None and found.axis in scope.of(found.of):
                    yield Exit(value, found.of, found.axis)


def streams(nodes: Nodes, found: Iterable[Exit]) -> dict[Node, Stream]:
    """The stream of each node that a norm needs."""
    result: dict[Node, Stream] = {}
    ends = dict.fromkeys(node for each in found if (node := nodes.get(each.of, each.axis)) is not None)
    for end in ends:
        stream, stack = Stream(), [end]
        while stack:
            top = stack.pop()
            if (other := result.get(top)) is stream:
                continue
            for node in [top] if other is None else other.nodes:  # or two streams that turn out to be one
                result[node] = stream
                stream.nodes.append(node)
            stack += top.operands
    for stream in dict.fromkeys(result.values()):
        stream.cost = sum(node.own for node in stream.nodes)
        stream.means = sum(node.means for node in stream.nodes)
        stream.constants = any(node.averages_constants for node in stream.nodes)
    for end in ends:
        result[end].saved += math.prod(end.value.shape) * end.scope.plan.repeat
        result[end].norms += 1
    return result
