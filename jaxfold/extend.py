"""Teaching :func:`jaxfold.fold` what an operation makes of affine arrays.

A rule is a function of the :class:`Operands` of one equation. It returns what is known of the result, one of
:class:`Known`, :class:`Affine`, :class:`Square` and :class:`Quadratic`, or None if that is nothing. An operation
without a rule is opaque: always right, and the end of what can be contracted. Rules see operations only of which some
operand depends on the inputs; those on parameters alone are computed as they stand.

Example:
    The gradient-stopping identity of some library, as a primitive ``tap``:

    >>> import jaxfold.extend
    >>> @jaxfold.extend.rule("tap")
    ... def tap(operands):
    ...     return operands[0]
    >>> from jaxfold._fold._registry import RULES
    >>> RULES.pop("tap") is tap
    True
"""

from jaxfold._fold._affine import Affine as Affine
from jaxfold._fold._affine import Quadratic as Quadratic
from jaxfold._fold._affine import Raw as Raw
from jaxfold._fold._affine import Source as Source
from jaxfold._fold._affine import Square as Square
from jaxfold._fold._affine import Sum as Sum
from jaxfold._fold._affine import View as View
from jaxfold._fold._known import Known as Known
from jaxfold._fold._numbers import Number as Number
from jaxfold._fold._registry import Operands as Operands
from jaxfold._fold._registry import rule as rule
