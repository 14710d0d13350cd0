"""The errors that jaxfold raises on purpose.

Every message has the same four parts, and the error carries the first as data: the argument or the path of the leaf at
fault, what arrived, what is accepted, and what to do about it.
"""

from __future__ import annotations

import copy
import unicodedata
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from jaxfold._block._plan import Plan


class JaxfoldError(Exception):
    """Base class of all errors that report unusable input.

    Args:
        argument: the public argument, or the path of the leaf, at fault: ``producer["kernel"]``.
        got: what arrived.
        expected: what is accepted.
        hint: what to do, as a sentence; may be empty.

    Attributes:
        argument, got, expected, hint: as above, for programs that want to react to them.

    Example:
        >>> import jaxfold
        >>> str(jaxfold.JaxfoldError("epsilon", "0.0", "a number above 0", "Read it from the module."))
        'epsilon: got 0.0; expected a number above 0. Read it from the module.'
    """

    def __init__(self, argument: str, got: str, expected: str, hint: str = "") -> None:
        self.argument, self.got, self.expected, self.hint = argument, got, expected, hint
        super().__init__(argument, got, expected, hint)

    def __str__(self) -> str:
        text = f"{self.argument}: got {self.got}; expected {self.expected}." + (f" {self.hint}" if self.hint else "")
        return printable(text)

    def at(self, argument: str) -> Self:
        """The same error about an argument or path by another name, such as the path of a leaf in a larger tree.

        Args:
            argument: the other name.

        Returns:
            A copy; this error is not changed.
        """
        moved = copy.copy(self)
        moved.argument = argument
        return moved


def printable(text: str) -> str:
    """Return the text with control characters spelled out, because names come from files and a terminal obeys them."""
    shown = (
        each if each == "\n" or not unicodedata.category(each).startswith("C") else _spelled(each) for each in text
    )
    return "".join(shown)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def article(name: str) -> str:
    """A name with the article that goes before it."""
    return f"{'an' if name[:1].lower() in 'aeio' or name == 'ndarray' else 'a'} {name}"


def kind_of(value: Any) -> str:
    """The name of a value's type with its article, for a sentence."""
    return article(type(value).__name__)


class StructureError(JaxfoldError, ValueError):
    """A tree lacks a leaf, holds one that has no place in the block, or is no mapping at all."""


class OptionError(JaxfoldError, ValueError):
    """An option such as ``epsilon``, ``norm_type`` or ``form`` has a value that is not accepted."""


class ShapeError(JaxfoldError, ValueError):
    """A leaf or an input has a shape that does not fit the rest of the block."""


class DtypeError(JaxfoldError, TypeError):
    """A leaf or an input is integer, complex, quantised or otherwise not a supported floating type."""


class ConcretenessError(JaxfoldError, TypeError):
    """An offline transform was given a tracer or a leaf that has a shape but no values."""


class CoefficientError(JaxfoldError, ArithmeticError):
    """A leaf is not finite, or a coefficient does not fit the dtype that it would be stored in."""


class GrowthError(JaxfoldError, ValueError):
    """The contracted block would hold more parameters than the original.

    Attributes:
        plan: the :class:`jaxfold.Plan` with the counts of every form.
    """

    def __init__(self, argument: str, got: str, expected: str, hint: str, plan: Plan) -> None:
        self.plan = plan
        super().__init__(argument, got, expected, hint)
        self.args = (*self.args, plan)  # what copy and pickle pass on to __init__


class NotFoldedError(JaxfoldError, ValueError):
    """A norm is left alone that :func:`jaxfold.fold` was told to contract, by ``strict=True``."""


# What users import and catch is jaxfold.StructureError: tracebacks, pickles and logs name it by that path.
for _error in (JaxfoldError, *JaxfoldError.__subclasses__()):
    _error.__module__ = "jaxfold"
