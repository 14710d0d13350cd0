"""The verdict of a certificate: on figures, and on blocks that are right, coarse or other functions."""

from __future__ import annotations

import math

import pytest

from jaxfold._block._verdict import EQUAL, OTHER, WORSE, verdict

UNIT = 2.0**-24


@pytest.mark.parametrize(
    ("original", "folded", "expected"),
    [
        (1e-7, 0.0, EQUAL),
        (1e-7, 2e-7, EQUAL),
        (1e-7, 2.1e-7, f"{WORSE}: 2.1 times its typical error"),
        (1e-7, 1.6e-6, f"{WORSE}: 16.0 times its typical error"),
        (1e-7, 1.7e-6, OTHER),
        (0.0, 2 * UNIT, EQUAL),  # an original that happens to be exact
        (0.0, 17 * UNIT, OTHER),
        (1e-3, 1e-7, EQUAL),  # far nearer to the truth than the original
        (1e-7, math.nan, OTHER),
        (1e-7, math.inf, OTHER),
        (math.nan, 1e-7, OTHER),
        (math.inf, 1e-7, OTHER),
    ],
)
def test_figures(original: float, folded: float, expected: str) -> None:
    assert verdict(original, folded, UNIT) == expected


def test_known_reasons() -> None:
    """A coarse storage dtype explains a larger error; nothing explains one of an original that cannot be rounding."""
    assert verdict(1e-7, 1e-3, UNIT) == OTHER
    assert verdict(1e-7, 1e-3, UNIT, expected=2e-3) == f"{WORSE}: 10000.0 times its typical error"
    assert verdict(1e-7, 1e-3, UNIT, expected=5e-4) == OTHER
    assert verdict(1e-5, 1e-7, UNIT, original_limit=1e-6) == OTHER
    assert verdict(1e-5, 1e-7, UNIT, original_limit=2e-5) == EQUAL
