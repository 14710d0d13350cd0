"""The tree of shapes of a contraction's params, from sizes alone, as a module declares them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfold._algebra._triangle import triangle_size
from jaxfold._block._block import check_epsilon
from jaxfold._block._leaves import read_dtype
from jaxfold._block._shape import FORMS, NORM_TYPES, Form, choose, flag
from jaxfold._errors import OptionError


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a contracted block: ``features`` in, ``outputs`` by consumer, a single one by the name None."""

    features: int
    outputs: dict[str | None, tuple[int, ...]]
    width: int
    use_bias: bool
    form: Form

    @property
    def rank(self) -> int:
        """k, the rows of R."""
        return min(self.width, self.features + self.use_bias)

    def shapes(self) -> dict[str, Any]:
        """The tree of ``Contraction.params``, with shapes for leaves."""
        kernel = (self.features, self.rank)
        packed = (triangle_size(*kernel),)
        denominator: dict[str, Any] = {"kernel": packed if self.form == "packed" else kernel}
        if self.use_bias:
            denominator["bias"] = (self.rank,)
        rows = self.rank if self.form == "standard" else self.features + self.use_bias + 1
        groups: dict[Any, Any] = {name: {"kernel": (rows, *features)} for name, features in self.outputs.items()}
        if self.form == "standard":
            groups = {name: {**group, "bias": self.outputs[name]} for name, group in groups.items()}
        return {"denominator": denominator, **by_consumer(groups)}


def by_consumer(groups: dict[Any, Any]) -> dict[str, Any]:
    """Consumers as ``Contraction.params`` holds them: under ``consumer``, or by name under ``consumers``."""
    return {"consumer": groups[None]} if None in groups else {"consumers": groups}


def read_size(argument: str, value: Any) -> int:
    """A positive integer."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise OptionError(argument, repr(value), "an integer above 0", "")
    return size


def read_features(features: Any) -> dict[str | None, tuple[int, ...]]:
    """``features`` of a ContractedDense as axes by consumer: an int, ints, or a mapping of names to either.

    Raises:
        OptionError: naming ``features`` or ``features['query']``.
    """
    if isinstance(features, Mapping):
        for name in features:
            if not isinstance(name, str):
                raise OptionError("features", f"the name {name!r}", "names that are strings", "")
        if features:
            return {name: _axes(f"features[{name!r}]", value) for name, value in features.items()}
        raise OptionError("features", "an empty mapping", "at least one consumer", "")
    return {None: _axes("features", features)}


def _axes(argument: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (tuple, list)) and value:
        return tuple(read_size(argument, size) for size in value)
    if isinstance(value, (tuple, list, Mapping, str)):
        raise OptionError(argument, repr(value), "an integer above 0, or a sequence of such", "")
    return (read_size(argument, value),)


def read_options(
    in_features: Any, features: Any, width: Any, epsilon: Any, use_bias: Any, norm_type: Any, form: Any
) -> Layout:
    """The layout that the fields of a ContractedDense describe, all of them checked."""
    check_epsilon(epsilon)
    choose("norm_type", norm_type, NORM_TYPES)
    choose("form", form, FORMS)
    return Layout(
        read_size("in_features", in_features),
        read_features(features),
        read_size("width", width),
        flag("use_bias", use_bias),
        form,
    )


def group_dtype(param_dtype: Any, *path: str) -> np.dtype:
    """The dtype of one group of leaves: ``param_dtype`` is one for all, or a tree of dtypes like params."""
    here = param_dtype
    for key in path:
        if isinstance(here, Mapping):
            if key not in here:
                raise OptionError("param_dtype", f"{param_dtype!r}", f"a dtype, or a tree with the key {key!r}", "")
            here = here[key]
    try:
        dtype = read_dtype(here)
    except OptionError as error:
        raise error.at("param_dtype") from None
    if dtype is None:
        raise OptionError("param_dtype", "None", "float64, float32, bfloat16 or float16", "")
    return dtype
