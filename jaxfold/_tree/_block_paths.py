"""Which layers of a tree make a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxfold._block._block import check_epsilon
from jaxfold._block._shape import NORM_TYPES, NormType, choose, consumer_path, flag
from jaxfold._errors import OptionError
from jaxfold._tree._paths import Path, fill, split, wildcards


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPaths:
    """A Dense-norm-Dense block, or one in every layer, by the paths of its leaves in a parameter tree.

    A path leads to the leaves of one layer: ``"encoder/layer_0/Dense_0"``, or the tuple of its keys where a key holds a
    slash. ``*`` stands for any part of a key of the producer's path, and what it matched is put in place of each ``*``
    of the other paths. To have everything but the paths read from the modules, use ``jaxfold.linen.block_paths`` or
    ``jaxfold.nnx.block_paths``.

    Attributes:
        producer: path of ``{"kernel"[, "bias"]}``.
        norm: path of ``{["scale"][, "bias"]}``, or None for a norm without parameters.
        consumers: path of one consumer, or a mapping of names to such. The path of an attention module, which holds
            ``query``, ``key`` and ``value``, stands for these three.
        norm_type: ``"layernorm"`` or ``"rmsnorm"``. It may be left out for a norm with a bias, which is a LayerNorm;
            without one, leaves cannot tell.
        epsilon, unit_offset, stacked: as for :func:`jaxfold.contract`.
        keep_producer: whether something else reads the producer's output, a residual say. It stays in the tree then,
            and is counted.
        to: where the contracted block goes. By default in the place of its producer, or of the norm if the producer
            stays.

    Raises:
        OptionError: if a path is malformed, has another number of ``*`` than the producer's, or an option is not
            accepted.
        ConcretenessError: if ``epsilon`` is a tracer.

    Example:
        >>> import jaxfold
        >>> block = jaxfold.BlockPaths(
        ...     producer="encoder/*/up", norm="encoder/*/norm", consumers="encoder/*/down", epsilon=1e-6
        ... )
    """

    producer: Path
    norm: Path | None
    consumers: Path | Mapping[str, Path]
    epsilon: float
    norm_type: NormType | None = None
    unit_offset: bool = False
    stacked: bool = False
    keep_producer: bool = False
    to: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        if self.norm_type is not None:
            choose("norm_type", self.norm_type, NORM_TYPES)
        for name in ("unit_offset", "stacked", "keep_producer"):
            flag(name, getattr(self, name))
        if isinstance(self.consumers, Mapping):
            if not self.consumers:
                raise OptionError("consumers", "an empty mapping", "at least one consumer", "")
            for name in self.consumers:
                if not isinstance(name, str):
                    raise OptionError("consumers", f"the name {name!r}", "names that are strings", "")
        count = wildcards(split("producer", self.producer))
        for argument, path in self.paths().items():
            fill(argument, split(argument, path), ("",) * count)

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names of the consumers; a single one goes by ``None``."""
        return tuple(self.consumers) if isinstance(self.consumers, Mapping) else (None,)

    def paths(self) -> dict[str, Path]:
        """Every path that is given, by the name of its argument."""
        consumers: Any = self.consumers if isinstance(self.consumers, Mapping) else {None: self.consumers}
        named: dict[str, Path | None] = {"producer": self.producer, "norm": self.norm}
        named |= {consumer_path(name): path for name, path in consumers.items()}
        named["to"] = self.to
        return {argument: path for argument, path in named.items() if path is not None}
