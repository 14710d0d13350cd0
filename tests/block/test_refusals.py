"""What is refused, by name: the error's class, the argument at fault, what arrived, what is accepted, what to do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import jaxfold
from tests.factories import make_case

CASE = make_case(4, 16, 3).astype(np.float32)
BASE: dict[str, Any] = {"producer": CASE.producer, "norm": CASE.norm, "consumers": CASE.consumer}
FLOATS = "float64, float32, bfloat16 or float16"


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def with_(group: str, **leaves: Any) -> dict[str, Any]:
    """The arguments with some leaves of one group replaced."""
    return {group: {**BASE[group], **leaves}}


def only(group: str, **leaves: Any) -> dict[str, Any]:
    return {group: leaves}


def stack(size: int, tree: Any) -> Any:
    """In the order of the keys, which jax.tree.map would sort."""
    return {key: stack(size, leaf) if isinstance(leaf, dict) else np.stack([leaf] * size) for key, leaf in tree.items()}


STACK = {**stack(2, BASE), "stacked": True}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One row of the table: changed arguments, and the four parts of the message as regular expressions."""

    change: dict[str, Any]
    error: type[jaxfold.JaxfoldError]
    argument: str
    got: str
    expected: str
    hint: str = ""

    def check(self, call: Callable[[], Any]) -> jaxfold.JaxfoldError:
        pattern = rf"^{re.escape(self.argument)}: got .*{self.got}.*; expected .*{self.expected}.*{self.hint}"
        with pytest.raises(self.error, match=pattern) as info:
            call()
        assert info.value.argument == self.argument
        return info.value


S, H, D = jaxfold.StructureError, jaxfold.ShapeError, jaxfold.DtypeError
K, B = r"'kernel'", r"'bias' \(optional\)"

# Changes of a producer with a kernel in (out, in), (16, 4); what does not fit it, and which leaves fit its first axis.
TURNED: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "the consumer": ({}, "consumers['kernel']", r"\(16, 3\)", r"\(4, 3\)", "consumers['kernel']"),
    "one of several": (
        {"consumers": {"a": {"kernel": zeros(4, 3)}} | {key: {"kernel": zeros(16, 3)} for key in "bc"}},
        *("consumers['b']['kernel']", r"\(16, 3\)", r"\(4, 3\)", "consumers['b']['kernel'], consumers['c']['kernel']"),
    ),
    "the norm, beside a torch consumer": (
        {"norm": {"scale": zeros(16)}, "consumers": {"kernel": zeros(3, 16)}},
        *("consumers['kernel']", r"\(3, 16\)", r"\(4, 16\)", "norm['scale']"),
    ),
    "its own bias, beside a torch consumer that fits": (
        {"producer": {"kernel": zeros(16, 4), "bias": zeros(16)}, "norm": {"scale": zeros(16)}}
        | {"consumers": {"kernel": zeros(4, 16)}},
        *("producer['bias']", r"\(16,\)", r"\(4,\)", "producer['bias'], norm['scale']"),
    ),
    "a consumer in a stack": (
        {"producer": {"kernel": zeros(2, 16, 4)}, "consumers": {"kernel": zeros(2, 16, 3)}, "stacked": True},
        *("consumers['kernel']", r"\(2, 16, 3\)", r"\(2, 4, 3\)", "consumers['kernel']"),
    ),
}
FLOATING = r"Convert it to a floating dtype first, as in leaf\.astype\('float32'\)\.$"

# Seen from names, shapes and dtypes alone: contract, Block and plan all refuse these, in the same words.
STRUCTURE = {
    "no producer kernel": Refusal(only("producer", bias=zeros(16)), S, "producer['kernel']", "nothing", f"{K}, {B}"),
    "no consumer kernel": Refusal(only("consumers", bias=zeros(3)), S, "consumers['kernel']", "nothing", f"{K}, {B}"),
    "no kernel in one of several": Refusal(
        only("consumers", q=BASE["consumers"], k={"bias": zeros(3)}), S, "consumers['k']['kernel']", "nothing", K
    ),
    "a kernel that is None": Refusal(with_("producer", kernel=None), S, "producer['kernel']", "nothing", K),
    "unmerged LoRA": Refusal(with_("producer", lora_a=zeros(4, 2)), S, "producer", "'lora_a'", f"{K}, {B}", "Merge"),
    "a torch weight": Refusal(only("producer", weight=zeros(16, 4)), S, "producer", "'weight'", K, r"weight\.T"),
    "a running mean": Refusal(with_("norm", mean=zeros(16)), S, "norm", "'mean'", r"'scale' \(opt.*, 'bias' \(opt"),
    "an unknown key in one of several": Refusal(
        only("consumers", q={**BASE["consumers"], "g": zeros(3)}), S, "consumers['q']", "'g'", K, "Pass only"
    ),
    "a producer that is an array": Refusal({"producer": zeros(4, 16)}, S, "producer", "ndarray", "mapping with the"),
    "a norm that is an array": Refusal({"norm": zeros(16)}, S, "norm", "ndarray", "mapping with the keys 'scale'"),
    "consumers in a list": Refusal({"consumers": [BASE["consumers"]]}, S, "consumers", "list", "mapping of names"),
    "no consumers": Refusal({"consumers": {}}, S, "consumers", "empty mapping", "at least one"),
    "a consumer without a name": Refusal({"consumers": {0: BASE["consumers"]}}, S, "consumers", "0", "strings"),
    "names of two kinds": Refusal(
        {"consumers": {"q": BASE["consumers"], 0: BASE["consumers"]}}, S, "consumers", "0", "strings"
    ),
    "a producer kernel of one axis": Refusal(
        with_("producer", kernel=zeros(16)), H, "producer['kernel']", r"\(16,\)", r"\(in, out\)"
    ),
    "a consumer kernel of one axis": Refusal(
        with_("consumers", kernel=zeros(16)), H, "consumers['kernel']", r"\(16,\)", r"\(16,\) \+ features"
    ),
    "a producer bias too long": Refusal(
        with_("producer", bias=zeros(17)), H, "producer['bias']", r"\(17,\)", r"\(16,\)", "width of the producer"
    ),
    "a scalar bias": Refusal(with_("producer", bias=zeros()), H, "producer['bias']", r"\(\)", r"\(16,\)"),
    "a scale too short": Refusal(
        with_("norm", scale=zeros(4)), H, "norm['scale']", r"\(4,\)", r"\(16,\)", r"producer\.$"
    ),
    "a norm bias in rows": Refusal(with_("norm", bias=zeros(1, 16)), H, "norm['bias']", r"\(1, 16\)", r"\(16,\)"),
    "a transposed consumer kernel": Refusal(
        with_("consumers", kernel=zeros(3, 16)),
        H,
        "consumers['kernel']",
        r"\(3, 16\)",
        r"\(16, 16\)",
        r"\.T turns them\.$",
    ),
    "a transposed kernel in one of several": Refusal(
        only("consumers", q={"kernel": zeros(3, 16)}), H, "consumers['q']['kernel']", r"\(3, 16\)", r"\(16, 16\)"
    ),
    **{
        f"a torch producer, known by {name}": Refusal(
            {"producer": {"kernel": zeros(16, 4)}, "norm": None, "consumers": {"kernel": zeros(16, 3)}} | change,
            *(H, argument, got, expected),
            rf"It may be producer\['kernel'\] that is to be turned: its first axis, 16, fits {re.escape(fits)}\.$",
        )
        for name, (change, argument, got, expected, fits) in TURNED.items()
    },
    "a consumer bias too short": Refusal(
        with_("consumers", bias=zeros(2)), H, "consumers['bias']", r"\(2,\)", r"\(3,\)", "features of its kernel"
    ),
    "a flat bias for features on two axes": Refusal(
        with_("consumers", kernel=zeros(16, 4, 8), bias=zeros(32)), H, "consumers['bias']", r"\(32,\)", r"\(4, 8\)"
    ),
    "no features": Refusal(with_("producer", kernel=zeros(0, 16)), H, "producer['kernel']", r"\(0, 16\)", "no empty"),
    "no width": Refusal(
        {"producer": {"kernel": zeros(4, 0)}, "norm": None, "consumers": {"kernel": zeros(0, 3)}},
        H,
        "producer['kernel']",
        r"\(4, 0\)",
        "no empty axis",
    ),
    "no outputs": Refusal(
        only("consumers", kernel=zeros(16, 0)), H, "consumers['kernel']", r"\(16, 0\)", "no empty axis"
    ),
    "stacked, but the leaves are not": Refusal(
        {"stacked": True}, H, "producer['bias']", r"\(16,\)", r"length 4, as in producer\['kernel'\], .*stacked=True"
    ),
    "stacked kernels alone, but they are not": Refusal(
        {"producer": {"kernel": zeros(16, 16)}, "norm": None, "consumers": {"kernel": zeros(16, 3)}, "stacked": True},
        H,
        "producer['kernel']",
        r"\(16, 16\)",
        r"\(layers, in, out\)",
    ),
    "a stack, but not said": Refusal(
        {**STACK, "stacked": False}, H, "producer['kernel']", r"\(2, 4, 16\)", r"\(in, out\)", "stacked=True"
    ),
    "unequal stacks": Refusal(
        {**STACK, "norm": stack(3, CASE.norm)},
        H,
        "norm['scale']",
        r"\(3, 16\)",
        r"length 2, as in producer\['kernel'\]",
    ),
    "an empty stack": Refusal(
        {**STACK, "producer": {"kernel": zeros(0, 4, 16)}, "norm": None, "consumers": {"kernel": zeros(0, 16, 3)}},
        H,
        "producer['kernel']",
        r"\(0, 4, 16\)",
        "no empty axis",
    ),
    "stacked as a number": Refusal({"stacked": 1}, jaxfold.OptionError, "stacked", "1", "True or False"),
    "norm_type in Flax's spelling": Refusal(
        {"norm_type": "LayerNorm"}, jaxfold.OptionError, "norm_type", "'LayerNorm'", "'layernorm' or 'rmsnorm'"
    ),
    **{
        f"{kind} leaves": Refusal(with_("norm", scale=leaf), D, "norm['scale']", re.escape(got), FLOATS, hint)
        for kind, leaf, got, hint in [
            ("int8-quantised", zeros(16, dtype=np.int8), "dtype int8", "Dequantise"),
            ("uint8-quantised", zeros(16, dtype=np.uint8), "dtype uint8", "Dequantise"),
            ("int4-quantised", zeros(16, dtype=jnp.int4), "dtype int4", "Dequantise"),
            ("float8", zeros(16, dtype=jnp.float8_e4m3fn), "dtype float8_e4m3fn", "Dequantise"),
            *(
                (name, zeros(16, dtype=name), f"dtype {name}", FLOATING)
                for name in ("int16", "uint16", "int32", "uint32")
            ),
            *((name, zeros(16, dtype=name), f"dtype {name}", FLOATING) for name in ("int64", "uint64", "bool")),
            ("raw", zeros(16, dtype="V2"), "dtype |V2", r"leaf\.view\('bfloat16'\)"),
            ("complex", zeros(16, dtype=np.complex64), "dtype complex64", ""),
            ("string", zeros(16, dtype="U3"), "dtype <U3", ""),
            ("list", [1.0] * 16, "a list", "numpy.asarray"),
            ("float", 1.0, "a float", "numpy.asarray"),
        ]
    },
}


def snapshot(tree: Any) -> Any:
    """Everything that a call could change: container types, keys in order, identities and bytes of leaves."""
    if isinstance(tree, Mapping):
        return type(tree), id(tree), [(key, snapshot(leaf)) for key, leaf in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), id(tree), [snapshot(leaf) for leaf in tree]
    concrete = isinstance(tree, np.ndarray) or (isinstance(tree, jax.Array) and not isinstance(tree, Tracer))
    return (id(tree), np.asarray(tree).tobytes()) if concrete else id(tree)


def call_refused(function: Any, change: dict[str, Any], **options: Any) -> Any:
    """Calls with the base block, changed, and whatever comes of it, the arguments are as they were."""
    arguments = {**BASE, **options, **change}
    layers = [arguments.pop(key) for key in BASE]
    before = snapshot(layers)
    try:
        return function(*layers, **arguments)
    finally:
        assert snapshot(layers) == before


@pytest.mark.parametrize("row", STRUCTURE.values(), ids=list(STRUCTURE))
def test_structure(row: Refusal) -> None:
    messages = {
        str(row.check(lambda: call_refused(jaxfold.contract, row.change, epsilon=1e-3))),
        str(row.check(lambda: call_refused(jaxfold.Block, row.change, epsilon=1e-3))),
        str(row.check(lambda: call_refused(jaxfold.plan, row.change))),
    }
    assert len(messages) == 1


def _with_entry(leaf: np.ndarray, index: Any, value: float) -> np.ndarray:
    changed = leaf.copy()
    changed[index] = value
    return changed


P, C, A = jaxfold.OptionError, jaxfold.CoefficientError, jaxfold.ConcretenessError
EPSILONS: list[tuple[Any, str]] = [  # and what of them the message shows
    *((0, "0"), (np.float32(0), "0"), (-1e-5, "-1e-05"), (float("nan"), "nan"), (float("inf"), "inf"), (10**400, "")),
    *((True, "True"), (np.array(True), "True"), ("1e-6", "'1e-6'"), (np.array("1e-6"), "'1e-6'"), (None, "None")),
    *(([1e-3], r"\[0\.001\]"), (np.array([1e-3]), r"array\(\[0\.001\]\)"), (1e-3 + 0j, "0j")),
]
STORED = "params['consumer']['kernel']"
HALF = {key: {k: leaf.astype(np.float16) for k, leaf in group.items()} for key, group in BASE.items()}


def _scaled(factor: float) -> dict[str, Any]:
    return {name: {"kernel": BASE[name]["kernel"] * factor} for name in ("producer", "consumers")} | {"norm": None}


TINY, LARGE = _scaled(1e-4), _scaled(1e30)

# Seen by contract, which looks at values and has more options.
VALUES = {
    **{
        f"epsilon {e!r:.20}": Refusal({"epsilon": e}, P, "epsilon", shown, "number above 0", "Flax's default is 1e-6")
        for e, shown in EPSILONS
    },
    "form": Refusal({"form": "gram"}, P, "form", "'gram'", "'direct' or 'packed' or 'standard'"),
    "unit_offset": Refusal({"unit_offset": 1}, P, "unit_offset", "1", "True or False"),
    "allow_growth": Refusal({"allow_growth": 1}, P, "allow_growth", "1", "True or False"),
    "dtype int8": Refusal({"dtype": "int8"}, P, "dtype", "'int8'", FLOATS),
    "dtype complex": Refusal({"dtype": complex}, P, "dtype", "complex", FLOATS),
    "dtype float8": Refusal({"dtype": jnp.float8_e5m2}, P, "dtype", "float8_e5m2", FLOATS),
    "dtype misspelt": Refusal({"dtype": "flaot32"}, P, "dtype", "'flaot32'", FLOATS),
    "NaN": Refusal(
        with_("producer", kernel=_with_entry(CASE.producer["kernel"], (2, 5), np.nan)),
        *(C, "producer['kernel']", r"1 non-finite of 64 entries, the first at \(2, 5\): nan", "finite", "Find out"),
    ),
    "infinity": Refusal(
        with_("norm", bias=_with_entry(CASE.norm["bias"], 7, -np.inf)),
        *(C, "norm['bias']", r"1 non-finite of 16 entries, the first at \(7,\): -inf", "finite values only"),
    ),
    "both infinities, whose sum is NaN": Refusal(
        with_("consumers", bias=np.array([np.inf, 1, -np.inf], np.float32)),
        *(C, "consumers['bias']", r"2 non-finite of 3 entries, the first at \(0,\): inf", "finite values only"),
    ),
    "NaN in a JAX leaf of one of several": Refusal(
        only("consumers", q={"kernel": jnp.asarray(_with_entry(CASE.consumer["kernel"], (9, 1), np.nan))}),
        *(C, "consumers['q']['kernel']", r"first at \(9, 1\): nan", "finite values only"),
    ),
    "a shape without values": Refusal(
        with_("producer", bias=jax.ShapeDtypeStruct((16,), np.float32)),
        *(A, "producer['bias']", "ShapeDtypeStruct without values", "concrete NumPy or JAX array", "jaxfold.plan"),
    ),
    "float16 overflow": Refusal(
        {
            "producer": HALF["producer"],
            "norm": {"scale": HALF["norm"]["scale"] * np.float16(100)},
            "consumers": {"kernel": HALF["consumers"]["kernel"] * np.float16(1e4)},
        },
        *(C, STORED, r"size \d\.\d+e\+0\d", r"at most 6\.55e\+04, .*float16", "dtype='float32'"),
    ),
    "bfloat16 overflow": Refusal(
        {**LARGE, "dtype": "bfloat16"}, C, STORED, r"e\+[56]\d", r"3\.39e\+38, .*bfloat16", "wider"
    ),
    "float32 overflow": Refusal(LARGE, C, STORED, r"e\+[56]\d", r"3\.4e\+38, .*float32"),
    "float64 overflow": Refusal(
        {**LARGE, "producer": {"kernel": np.eye(4, 16) * 1e300}, "form": "packed", "dtype": "float64"},
        *(C, STORED, "beyond the range of float64", "parameters of moderate size"),
    ),
    "overflow of a form": Refusal(
        {**LARGE, "dtype": "float16", "form": "standard"},
        *(C, STORED, r"size", "largest float16"),
    ),
    "float16 underflow": Refusal(
        {**TINY, "dtype": "float16"},
        *(C, STORED, "underflow", r"6\.1e-05, the smallest normal float16", "dtype='float32'"),
    ),
    "underflow of one member of a stack": Refusal(
        {
            "producer": {"kernel": np.stack([CASE.producer["kernel"], TINY["producer"]["kernel"]])},
            "consumers": {"kernel": np.stack([CASE.consumer["kernel"], TINY["consumers"]["kernel"]])},
            **{"norm": None, "stacked": True, "dtype": "float16"},
        },
        *(C, STORED, "underflow", "smallest normal float16"),
    ),
}


@pytest.mark.parametrize("row", VALUES.values(), ids=list(VALUES))
def test_values_and_options(row: Refusal) -> None:
    defaults = {} if "epsilon" in row.change else {"epsilon": 1e-3}
    row.check(lambda: call_refused(jaxfold.contract, row.change, **defaults))


def test_epsilon_is_required() -> None:
    with pytest.raises(TypeError, match="epsilon"):
        jaxfold.contract(*CASE.layers)  # type: ignore[call-arg]
