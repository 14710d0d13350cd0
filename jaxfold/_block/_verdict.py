"""One sentence on measured errors: rounding like the original's, more of it, or another function.

Both errors are root mean squares against the same float64 truth, relative to the largest entry of each row. Largest
errors are not compared, because the largest of many rounding errors is a matter of luck.

The original's error is the scale, because it contains the conditioning of the inputs: both evaluations round the same
quantities, in other orders. It has a floor of one ``unit``, because an original may happen to be exact.

- Up to twice the scale is the same rounding.
- Up to sixteen times the scale is more rounding. A sum of n terms errs by between one unit and √n units, depending on
  the order of its terms. A sum that is stored, as a folded coefficient, errs alike in all rows. Coefficients that were
  summed in float32 over n = 1024 terms came out four times as far from the truth as the original; sixteen leaves that
  factor once more.
- More than that is not rounding, unless the caller knows better: ``expected`` is a rounding error that the caller has
  derived from the coefficients, such as that of a coarser storage dtype.
"""

from __future__ import annotations

import math

EQUAL = "equal to rounding"
WORSE = "worse than the original's rounding"
OTHER = "not this function: check epsilon, norm type, layers"
SAME, MORE = 2.0, 16.0


def verdict(
    original_error: float, folded_error: float, unit: float, *, expected: float = 0.0, original_limit: float = math.inf
) -> str:
    """Return what two measured errors say about the folded function.

    Args:
        original_error: the root mean square error of the original function.
        folded_error: the root mean square error of the folded function, against the same truth.
        unit: half a unit in the last place of the outputs' dtype, relative: ``jnp.finfo(dtype).eps / 2``.
        expected: a rounding error that the folded function may have for a known reason, or 0.
        original_limit: the largest error that rounding explains in the original. It matters only if the truth was
            not computed from the original itself.

    Returns:
        ``"equal to rounding"``, ``"worse than the original's rounding: 4.0 times its typical error"`` or ``"not this
        function: check epsilon, norm type, layers"``. An error that is not finite is no rounding error.

    >>> verdict(1e-7, 8e-8, 6e-8)
    'equal to rounding'
    >>> verdict(1e-7, 4e-7, 6e-8)
    "worse than the original's rounding: 4.0 times its typical error"
    >>> verdict(1e-7, 4e-6, 6e-8)
    'not this function: check epsilon, norm type, layers'
    """
    scale = max(original_error, unit)
    explained = original_error <= original_limit and folded_error <= max(MORE * scale, expected)
    if not (explained and math.isfinite(original_error) and math.isfinite(folded_error)):
        return OTHER
    if folded_error <= SAME * scale:
        return EQUAL
    return f"{WORSE}: {folded_error / scale:,.1f} times its typical error"
