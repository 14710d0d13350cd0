"""A block as one option of the command line: ``producer=up,norm=norm,consumer=down,epsilon=1e-6``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfold._errors import OptionError
from jaxfold._tree._block_paths import BlockPaths

PATHS = ("producer", "norm", "consumer", "to")
FLAGS = ("unit_offset", "stacked", "keep_producer")
CONSUMERS = "consumers."
KEYS = (*PATHS, f"{CONSUMERS}NAME", "epsilon", "norm_type", *FLAGS)
PLACEHOLDERS = {"epsilon": "EPSILON", "norm_type": "NORM_TYPE"}  # in the options that ``inspect`` prints
BOOLEANS = {"": True, "true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_block(text: str) -> BlockPaths:
    """The block that an option names.

    Raises:
        OptionError: if a key is unknown, missing or given twice, or a value is not accepted.

    Example:
        >>> from jaxfold._cli._block_option import parse_block
        >>> parse_block("producer=up,norm=norm,consumer=down,epsilon=1e-6,stacked").stacked
        True
    """
    given: dict[str, str | None] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in KEYS and not (key.startswith(CONSUMERS) and key != CONSUMERS):
            raise OptionError("--block", f"the key {key!r}", ", ".join(KEYS), "")
        if key in given:
            raise OptionError("--block", f"the key {key!r} twice", "it once", "Several consumers are consumers.NAME=….")
        if not value and (equals or key not in FLAGS) and not (key == "norm" and equals):
            raise OptionError("--block", f"{part!r}", f"{key}=VALUE", "")
        if value == PLACEHOLDERS.get(key):
            accepted = "a number above 0, 1e-6 say" if key == "epsilon" else "layernorm or rmsnorm"
            hint = f"{value} stands for what a checkpoint does not hold: read it from the model's code."
            raise OptionError("--block", f"{key}={value}", accepted, hint)
        given[key] = value
    for key in ("producer", "epsilon"):
        if key not in given:
            hint = "It is not in a checkpoint: read it from the model's code." if key == "epsilon" else ""
            raise OptionError("--block", f"no {key} in {text!r}", f"{key}=VALUE", hint)
    options: dict[str, Any] = {"norm": None}
    options |= {key: value for key, value in given.items() if key in ("producer", "norm", "to", "norm_type")}
    if options["norm"] in ("", "None", "none"):
        options["norm"] = None
    options |= {key: _boolean(key, given[key] or "") for key in FLAGS if key in given}
    return BlockPaths(consumers=_consumers(text, given), epsilon=_epsilon(given["epsilon"] or ""), **options)


def _consumers(text: str, given: Mapping[str, str | None]) -> Any:
    named = {key.removeprefix(CONSUMERS): value for key, value in given.items() if key.startswith(CONSUMERS)}
    single = given.get("consumer")
    if (single is None) == (not named):
        got = f"both kinds of consumers in {text!r}" if named else f"no consumer in {text!r}"
        raise OptionError("--block", got, "consumer=PATH, or consumers.NAME=PATH for each of several", "")
    return named or single


def _epsilon(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise OptionError("--block", f"epsilon={value}", "a number above 0, 1e-6 say", "") from None


def _boolean(key: str, value: str) -> bool:
    if value.lower() not in BOOLEANS:
        raise OptionError("--block", f"{key}={value}", f"{key}, {key}=true or {key}=false", "")
    return BOOLEANS[value.lower()]
