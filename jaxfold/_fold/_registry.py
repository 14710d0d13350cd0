"""Which rule says what an operation makes of arrays of the domain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfold._fold._affine import Affine, Quadratic, Square, Sum, trivial
from jaxfold._fold._known import Known, constant, reshape
from jaxfold._fold._numbers import Number, written
from jaxfold._fold._program import Equation, Value, small_constant

Abstract = Known | Affine | Square | Quadratic | None
Rule = Callable[["Operands"], Abstract]
RULES: dict[str, Rule] = {}


class Operands:
    """The operands of one equation, as a rule sees them."""

    __slots__ = ("_own", "abstract", "equation")

    def __init__(self, equation: Equation, abstract: list[Abstract], own: Callable[[Value], Affine]) -> None:
        self.equation, self.abstract, self._own = equation, abstract, own

    def __getitem__(self, index: int) -> Abstract:
        return self.abstract[index]

    def __len__(self) -> int:
        return len(self.abstract)

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self.equation.outputs[0].shape

    def value(self, index: int) -> Value:
        return self.equation.inputs[index]

    def affine(self, index: int) -> Affine:
        """A runtime operand as an affine array: over itself, if it is nothing better."""
        abstract = self.abstract[index]
        return abstract if isinstance(abstract, Affine) else self.source(index)

    def source(self, index: int) -> Affine:
        """A runtime operand over itself, whatever is known of it."""
        return self._own(self.value(index))

    def opaque(self, *, sum_of: Sum | None = None, centred: Sum | None = None) -> Affine:
        """The result over itself, with what is remembered of how it was made."""
        return dataclasses.replace(trivial(self.equation.outputs[0]), sum_of=sum_of, centred=centred)

    def spread(self, index: int) -> Affine:
        """The same with as many axes as the result: a scalar operand of arithmetic may have fewer."""
        return self._spread(self.affine(index))

    def _spread(self, affine: Affine) -> Affine:
        missing = len(self.shape) - len(affine.shape)
        if not missing:
            return affine
        ones = (1,) * missing
        terms = {}
        for source, node in affine.terms.items():
            rows = source.row_shape
            own = node.shape[len(rows) :]
            terms[source.map(lambda axes: (None,) * missing + axes)] = reshape(node, (*rows, *ones, *own))
        bias = None if affine.bias is None else reshape(affine.bias, (*ones, *affine.bias.shape))
        return Affine((*ones, *affine.shape), terms, bias)

    def spread_source(self, index: int) -> Affine:
        """Both: over itself, with as many axes as the result."""
        return self._spread(self.source(index))

    def number(self, index: int) -> float | None:
        """The one number that all entries of a constant operand are, or None."""
        array = small_constant(self.value(index))
        if array is None or (array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16") or array.size == 0:
            return None
        first = array[(0,) * array.ndim]
        uniform = not any(array.strides) or bool((array == first).all())  # a broadcast number has no strides
        return float(first) if array.size == 1 or uniform else None

    def factor(self, index: int) -> Number | None:
        """The same number, with the bounds of what is rounded to it in its dtype."""
        number = self.number(index)
        return None if number is None else written(number, self.value(index).aval.dtype)

    def known(self, index: int) -> Known:
        """A known operand with as many axes as the result, each of the result's size, or 1 where it is constant."""
        number, rank = self.number(index), len(self.shape)
        if number is not None:
            return constant(np.full((1,) * rank, number))
        node = self.abstract[index]
        if not isinstance(node, Known):
            raise TypeError(node)
        return reshape(node, (1,) * (rank - len(node.shape)) + node.shape)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the primitives of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register
