"""Einsum layers that are plain projections of the last axis."""

from __future__ import annotations

import re

from jaxfold._errors import OptionError


def check_einsum(argument: str, equation: str | None) -> None:
    """Accepts ``lead d, d features -> lead features``: ``"...d,dn->...n"``, ``"btd,dhk->bthk"``.

    The last axis of the input meets the first axis of the kernel, and the kernel's other axes follow the input's
    leading ones in their own order. Anything else is refused: another order would need the kernel transposed, and an
    index that kernel and output share with the input is a batch.

    Raises:
        OptionError: naming ``argument``.
    """
    expected = "an equation such as '...d,dn->...n' or 'btd,dhk->bthk'"
    hint = "Only a projection of the last axis, with its output axes last, can be contracted."
    text = (equation or "").replace(" ", "")
    found = re.fullmatch(r"((?:[a-zA-Z]|\.\.\.)*)([a-zA-Z]),\2([a-zA-Z]+)->(.*)", text)
    if found:
        lead, contracted, features, output = found.groups()
        letters = lead.replace("...", "") + contracted + features
        if output == lead + features and len(set(letters)) == len(letters) and lead.count("...") <= 1:
            return
    raise OptionError(argument, repr(equation), expected, hint)
