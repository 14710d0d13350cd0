"""What was decided about each block of a model, and what it brought."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jaxfold._block._plan import Cost
from jaxfold._block._shape import Form, NormType
from jaxfold._block._verify import Certificate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxfold._plots import Quantity

Decision = Literal["contracted", "centred", "absorbed", "skipped"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldRow:
    """One block of a :class:`FoldReport`.

    Attributes:
        producer, norm, consumers: their paths, a mapping of names for several consumers; ``norm`` is None where it has
            no parameters.
        to: path of the contracted block, or None if there is none.
        decision: ``"contracted"`` or ``"skipped"``; from :func:`jaxfold.fold` also ``"centred"``, where LayerNorm
            became RMSNorm as its input has no mean any more, and ``"absorbed"``, where the norm stays and only its
            scale and bias are gone.
        reason: why it was skipped, or, where only scale and bias were absorbed, why the mean is still taken; empty
            otherwise.
        features, width, outputs, stack: d, n, the output features of each consumer in order, and the number of layers
            that a stack holds; None where the leaves could not be read.
        epsilon, norm_type, form, use_bias: what a ``ContractedDense`` in place of the block is made with;
            ``module_kwargs`` has all its arguments.
        keep_producer: whether the producer stays in the tree.
        original, contracted: costs before and after, with the producer included where it stays. FLOPs are those for one
            row of input, or, from :func:`jaxfold.fold`, for inputs of the shapes that it was given.
        certificate: errors against float64, or None if they were not measured.
        notes: sentences about sharding names and shared leaves.
        parameters: paths of all parameters involved, where :func:`jaxfold.fold` found the block.
        source: the module, if it has a name, and the line of code that the norm was traced from, likewise.
        weightless: whether scale and bias of the norm are in its readers.
        reductions: how many sums over its features there are, before and after, in one layer.

    Example:
        >>> import jaxfold
        >>> row = jaxfold.FoldRow(
        ...     producer="up", norm="norm", consumers="down", decision="skipped", reason="no path 'norm'", epsilon=1e-6,
        ...     norm_type="layernorm", form="direct"
        ... )
        >>> row.to_dict()["decision"]
        'skipped'
    """

    producer: str
    norm: str | None
    consumers: str | Mapping[str, str]
    decision: Decision
    reason: str
    epsilon: float
    norm_type: NormType | None
    form: Form
    to: str | None = None
    features: int | None = None
    width: int | None = None
    outputs: tuple[tuple[int, ...], ...] | None = None
    stack: int | None = None
    use_bias: bool | None = None
    keep_producer: bool = False
    original: Cost | None = None
    contracted: Cost | None = None
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    source: str = ""
    weightless: bool = False
    reductions: tuple[int, int] | None = None

    @property
    def module_kwargs(self) -> dict[str, Any]:
        """Arguments of the Linen ``ContractedDense`` in place of the block; that of NNX has ``in_features`` besides."""
        if self.outputs is None:
            return {}
        outputs = [features[0] if len(features) == 1 else features for features in self.outputs]
        several = not isinstance(self.consumers, str)
        return {
            "features": dict(zip(self.consumers, outputs, strict=True)) if several else outputs[0],
            "width": self.width,
            "epsilon": self.epsilon,
            "use_bias": self.use_bias,
            "norm_type": self.norm_type,
            "form": self.form,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a figure that is not finite becomes None."""
        return _plain(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldReport:
    """What :func:`jaxfold.contract_tree` did, block by block; prints as a table.

    Attributes:
        rows: a :class:`FoldRow` for every block, contracted or not, in the order of the tree within each pattern.
        unmatched: the patterns that no path of the tree matched.
        hints: for each of them, where it stops to match and what is there.
        parameters, bytes: of the whole tree, before and after. An array that stands in two places counts once.
        means: how many means are taken where something enters a stream that could not be centred beforehand.
        unread: how many parameters :func:`jaxfold.fold` found that the function never reads. Neither total counts them.
        merged: in how many places :func:`jaxfold.fold` made one affine map of several with no norm between them, which
            have no row.

    Example:
        >>> import numpy as np, jaxfold
        >>> params = {"up": {"kernel": np.eye(2, 8)}, "down": {"kernel": np.ones((8, 4))}}
        >>> block = jaxfold.BlockPaths(producer="up", norm=None, consumers="down", epsilon=1e-6, norm_type="rmsnorm")
        >>> _, report = jaxfold.contract_tree(params, block)
        >>> report.parameters, [row.decision for row in report.rows]
        ((48, 16), ['contracted'])
    """

    rows: tuple[FoldRow, ...]
    unmatched: tuple[str, ...]
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    hints: tuple[str, ...] = ()
    means: int = 0
    merged: int = 0
    unread: int = 0

    @property
    def contracted(self) -> tuple[FoldRow, ...]:
        """The rows of the blocks that were contracted."""
        return tuple(row for row in self.rows if row.decision == "contracted")

    @property
    def centred(self) -> tuple[FoldRow, ...]:
        """The rows of the LayerNorms that became RMSNorms."""
        return tuple(row for row in self.rows if row.decision == "centred")

    @property
    def absorbed(self) -> tuple[FoldRow, ...]:
        """The rows of the norms of which only scale and bias went into their readers."""
        return tuple(row for row in self.rows if row.decision == "absorbed")

    @property
    def reductions(self) -> tuple[int, int]:
        """Sums over the features of all norms, before and after; with the means that are taken instead of theirs."""
        counts = [(row.stack or 1, row.reductions) for row in self.rows if row.reductions is not None]
        before = sum(times * own for times, (own, _) in counts)
        return before, sum(times * own for times, (_, own) in counts) + self.means

    @property
    def skipped(self) -> tuple[FoldRow, ...]:
        """The rows of the blocks that were left alone, each with its reason."""
        return tuple(row for row in self.rows if row.decision == "skipped")

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs of the contracted blocks alone, before and after.

        For one row of input; from :func:`jaxfold.fold`, for inputs of the shapes that it was given.
        """
        before, after = Cost(0, 0, 0), Cost(0, 0, 0)
        for row in self.contracted:
            before, after = before + (row.original or before), after + (row.contracted or after)
        return before.flops, after.flops

    def to_dict(self) -> dict[str, Any]:
        """Plain values, such as ``json`` writes; a figure that is not finite becomes None."""
        totals = {"parameters": self.parameters, "bytes": self.bytes, "flops": self.flops}
        return {
            "rows": [row.to_dict() for row in self.rows],
            "unmatched": list(self.unmatched),
            "totals": {name: {"before": before, "after": after} for name, (before, after) in totals.items()},
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON text.

        Args:
            indent: how many blanks for each level; None for one line.

        Returns:
            The text.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def plot(self, *, quantity: Quantity = "parameters", ax: Axes | None = None) -> Axes:
        """Draws what each block was and is, one bar over the other; blocks without such a figure say what was decided.

        Needs matplotlib, the extra ``plots``.

        Args:
            quantity: ``"parameters"``, ``"bytes"``, ``"flops"`` or ``"reductions"``.
            ax: where to draw; by default the axes of a new figure, so that ``plot().figure.savefig(path)`` keeps it.

        Returns:
            The matplotlib ``Axes``.

        Raises:
            ImportError: if matplotlib is not installed.
            OptionError: if there is no such quantity.

        Example:
            >>> import numpy as np, jaxfold
            >>> params = {"up": {"kernel": np.eye(2, 8)}, "down": {"kernel": np.ones((8, 4))}}
            >>> paths = {"producer": "up", "norm": None, "consumers": "down"}
            >>> block = jaxfold.BlockPaths(**paths, epsilon=1e-6, norm_type="rmsnorm")
            >>> ax = jaxfold.contract_tree(params, block)[1].plot()
            >>> ax.get_title(loc="left"), [text.get_text().strip() for text in ax.texts]
            ('the whole tree: 48 → 16', ['−67%'])
        """
        from jaxfold._plots import report_axes

        return report_axes(self, quantity, ax)

    def __str__(self) -> str:
        from jaxfold._report import fold_text

        return fold_text(self)


def shown(source: str) -> str:
    """A line of code as people are shown it: ``module at file:line (function)``, the file without its folders."""
    *module, line = source.split(" at ")
    return " at ".join([*module, re.sub(r"^.*[/\\]", "", line)])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
