"""Constant factors, and what each of them may stand for.

A program cannot write 1/48. It writes the number of its dtype that is nearest, which stands for 1/48 as for every other
number that rounds to it. A :class:`Number` therefore has bounds: those of all that would be written so. A factor is
taken for 1/n if 1/n lies within the bounds, and for no other reason: 0.9/48 lies within those of no dtype.

The bounds of products, quotients and sums are those of interval arithmetic, rounded outwards.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

# What was rounded to a finer dtype first may lie this much of half a unit further away.
TWICE = 2.0**-12


@dataclasses.dataclass(frozen=True)
class Number:
    """A real number of which the program has a rounded one.

    Attributes:
        value: what the program has.
        low, high: the bounds of what it stands for.
    """

    value: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value

    def may_be(self, number: float) -> bool:
        """Return whether ``number`` lies within the bounds."""
        return self.low <= number <= self.high

    def times(self, other: Number | float) -> Number:
        """Return the product with ``other``, a plain float standing for itself."""
        other = exactly(other)
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return _between(self.value * other.value, ends)

    def inverse(self) -> Number:
        """Return one over the number, without bounds if the number may be zero."""
        if self.low <= 0 <= self.high:
            return Number(1 / self.value if self.value else math.inf, -math.inf, math.inf)
        return _between(1 / self.value, [1 / self.low, 1 / self.high])

    def plus(self, other: Number, sign: float = 1.0) -> Number:
        """Return the sum with ``sign`` times ``other``."""
        ends = [a + sign * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return _between(self.value + sign * other.value, ends)


def exactly(number: Number | float) -> Number:
    """A number that stands for itself alone."""
    return number if isinstance(number, Number) else Number(float(number), float(number), float(number))


def written(value: float, dtype: Any) -> Number:
    """A constant of a program: it stands for whatever is rounded to it in its dtype."""
    if not jnp.issubdtype(dtype, jnp.floating) or value == 0 or not math.isfinite(value):
        return exactly(value)
    info = jnp.finfo(dtype)
    fraction, exponent = math.frexp(abs(value))
    gap = math.ldexp(1.0, max(exponent - 1, int(info.minexp)) - int(info.nmant))  # to the next one, away from zero
    inwards = gap / 2 if fraction == 0.5 and exponent - 1 > info.minexp else gap  # a power of two is closer to the last
    away, towards = abs(value) + gap / 2 * (1 + TWICE), abs(value) - inwards / 2 * (1 + TWICE)
    ends = [math.copysign(away, value), math.copysign(towards, value)]
    return _between(value, ends)


def _between(value: float, ends: list[float]) -> Number:
    if any(map(math.isnan, ends)):
        return Number(value, -math.inf, math.inf) if not math.isnan(value) else Number(value, value, value)
    return Number(value, math.nextafter(min(ends), -math.inf), math.nextafter(max(ends), math.inf))
