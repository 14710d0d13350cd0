"""Every refusal: its class, the argument that it names, what arrived and what is accepted, and that nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.factories import make_case

D, N, M = 4, 12, 3


def layers(**changed: Any) -> dict[str, Any]:
    """The arguments of a good call, with some of them replaced."""
    case = make_case(D, N, M).astype(np.float32)
    return {"producer": case.producer, "norm": case.norm, "consumers": case.consumer, "epsilon": 1e-6, **changed}


def leaf(group: str, key: str, value: Any) -> dict[str, Any]:
    """The same with one leaf replaced, or added; ``None`` stays in the tree."""
    good = layers()
    return {**good, group: {**good[group], key: value}}


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


NAN = ones(D, N)
NAN[1, 2] = np.nan
INF = ones(N, M)
INF[3, 1] = -np.inf

S, H, T, O, C = (  # noqa: E741
    jaxfold.StructureError,
    jaxfold.ShapeError,
    jaxfold.DtypeError,
    jaxfold.OptionError,
    jaxfold.CoefficientError,
)

# name: (error, argument, words of the message in order, arguments of contract)
CONTRACT: dict[str, tuple[type[Exception], str, str, dict[str, Any]]] = {
    "no producer kernel": (S, "producer['kernel']", "nothing.*array", layers(producer={"bias": ones(N)})),
    "producer kernel None": (S, "producer['kernel']", "nothing.*array", leaf("producer", "kernel", None)),
    "no consumer kernel": (S, "consumers['a']['kernel']", "nothing", layers(consumers={"a": {"bias": ones(M)}})),
    "producer not a mapping": (S, "producer", "ndarray.*mapping.*'kernel'", layers(producer=ones(D, N))),
    "norm not a mapping": (S, "norm", "list.*mapping.*'scale'", layers(norm=[ones(N)])),
    "consumers not a mapping": (S, "consumers", "ndarray.*mapping", layers(consumers=ones(N, M))),
    "no consumers": (S, "consumers", "empty.*at least one", layers(consumers={})),
    "consumer name": (S, "consumers", "name 3.*strings", layers(consumers={3: {"kernel": ones(N, M)}})),
    "unmerged LoRA": (S, "producer", "'lora_a'.*'kernel'.*Merge", leaf("producer", "lora_a", ones(D, 2))),
    "torch names": (S, "producer", "'weight'.*'kernel'.*weight.T", layers(producer={"weight": ones(N, D)})),
    "running statistics": (S, "norm", "'mean'.*'scale'", leaf("norm", "mean", ones(N))),
    "flat producer kernel": (H, "producer['kernel']", r"\(4,\).*two axes", leaf("producer", "kernel", ones(D))),
    "stack unannounced": (H, "producer['kernel']", "stacked=True", leaf("producer", "kernel", ones(2, D, N))),
    "producer bias": (H, "producer['bias']", r"\(4,\).*\(12,\)", leaf("producer", "bias", ones(D))),
    "norm scale": (H, "norm['scale']", r"\(11,\).*\(12,\)", leaf("norm", "scale", ones(N - 1))),
    "norm bias": (H, "norm['bias']", r"\(1, 12\).*\(12,\)", leaf("norm", "bias", ones(1, N))),
    "consumer transposed": (
        H,
        "consumers['kernel']",
        r"\(3, 12\).*\(12, 12\)",
        leaf("consumers", "kernel", ones(M, N)),
    ),
    "consumer kernel flat": (H, "consumers['kernel']", r"\(12,\).*features", leaf("consumers", "kernel", ones(N))),
    "consumer bias": (H, "consumers['bias']", r"\(12,\).*\(3,\)", leaf("consumers", "bias", ones(N))),
    "named consumer": (H, "consumers['q']['kernel']", r"\(3, 12\)", layers(consumers={"q": {"kernel": ones(M, N)}})),
    "no features": (
        H,
        "producer['kernel']",
        r"\(0, 12\).*no empty axis",
        layers(producer={"kernel": ones(0, N)}),
    ),
    "no outputs": (H, "consumers['kernel']", r"\(12, 0\).*empty", layers(consumers={"kernel": ones(N, 0)})),
    "integers": (T, "producer['kernel']", "int32.*float32", leaf("producer", "kernel", ones(D, N, dtype=np.int32))),
    "quantised": (T, "consumers['kernel']", "int8.*Dequant", leaf("consumers", "kernel", ones(N, M, dtype=np.int8))),
    "float8": (
        T,
        "producer['kernel']",
        "float8.*Dequant",
        leaf("producer", "kernel", jnp.ones((D, N), jnp.float8_e4m3fn)),
    ),
    "complex": (T, "norm['scale']", "complex64.*float32", leaf("norm", "scale", ones(N, dtype=np.complex64))),
    "booleans": (T, "norm['bias']", "bool.*float32", leaf("norm", "bias", ones(N, dtype=bool))),
    "list leaf": (T, "producer['bias']", "list.*asarray", leaf("producer", "bias", [0.0] * N)),
    "float leaf": (T, "norm['bias']", "float.*array", leaf("norm", "bias", 0.0)),
    "NaN": (C, "producer['kernel']", r"1 non-finite of 48.*\(1, 2\): nan", leaf("producer", "kernel", NAN)),
    "infinity": (C, "consumers['kernel']", r"\(3, 1\): -inf", leaf("consumers", "kernel", INF)),
    "epsilon 0": (O, "epsilon", "0.*above 0.*1e-6.*1e-5", layers(epsilon=0)),
    "epsilon negative": (O, "epsilon", "-1e-06.*above 0", layers(epsilon=-1e-6)),
    "epsilon NaN": (O, "epsilon", "nan.*above 0", layers(epsilon=float("nan"))),
    "epsilon infinite": (O, "epsilon", "inf.*finite", layers(epsilon=float("inf"))),
    "epsilon boolean": (O, "epsilon", "True.*real", layers(epsilon=True)),
    "epsilon text": (O, "epsilon", "'1e-6'.*real", layers(epsilon="1e-6")),
    "epsilon None": (O, "epsilon", "None.*real", layers(epsilon=None)),
    "epsilon array": (O, "epsilon", "real number", layers(epsilon=ones(2))),
    "norm type": (O, "norm_type", "'batchnorm'.*'layernorm' or 'rmsnorm'", layers(norm_type="batchnorm")),
    "form": (O, "form", "'gram'.*'direct' or 'packed' or 'standard'", layers(form="gram")),
    "dtype": (O, "dtype", "int8.*float64, float32", layers(dtype="int8")),
    "no dtype": (O, "dtype", "'wide'.*float32", layers(dtype="wide")),
    "unit_offset": (O, "unit_offset", "1.*True or False", layers(unit_offset=1)),
    "stacked": (O, "stacked", "'yes'.*True or False", layers(stacked="yes")),
    "allow_growth": (O, "allow_growth", "None.*True or False", layers(allow_growth=None)),
    "not stacked": (H, "producer['bias']", "leading axis of length 4", layers(stacked=True)),
    "overflow": (
        C,
        "params['consumer']['kernel']",
        "at most 6.55e",
        leaf("consumers", "kernel", 1e6 * np.eye(N, M, dtype=np.float32)) | {"dtype": "float16", "norm": None},
    ),
    "underflow": (
        C,
        "params['denominator']['kernel']",
        "underflow.*float16",
        {**leaf("producer", "kernel", 1e-9 * make_case(D, N, M).producer["kernel"]), "dtype": "float16"},
    ),
}


def snapshot(tree: Any) -> Any:
    return copy.deepcopy(tree)


def unchanged(before: Any, after: Any) -> bool:
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(unchanged(before[key], after[key]) for key in before)
    if isinstance(before, (np.ndarray, jax.Array)):
        return np.asarray(before).tobytes() == np.asarray(after).tobytes()
    if isinstance(before, list):
        return all(unchanged(a, b) for a, b in zip(before, after, strict=True))
    return before == after or before != before  # NaN is not itself


@pytest.mark.parametrize("name", CONTRACT)
def test_contract_refuses(name: str) -> None:
    error, argument, words, arguments = CONTRACT[name]
    before = snapshot(arguments)
    with pytest.raises(error, match=f"(?s)got .*{words}") as raised:
        jaxfold.contract(**arguments)
    assert isinstance(raised.value, jaxfold.JaxfoldError)
    assert raised.value.argument == argument
    assert str(raised.value).startswith(f"{argument}: got ")
    assert "; expected " in str(raised.value)
    assert unchanged(before, arguments)


def test_the_good_call_is_accepted() -> None:
    """The control of the table above: what its entries replace is all that is wrong with them."""
    jaxfold.contract(**layers())
    jaxfold.contract(**layers(), dtype="float16")


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.grad, lambda f: lambda x: jax.vmap(f)(x[None])], ids=["jit", "grad", "vmap"]
)
def test_tracers_are_refused(transform: Callable[..., Any]) -> None:
    good = layers()

    def f(kernel: Any) -> Any:
        block = jaxfold.contract(**{**good, "producer": {"kernel": kernel}})
        return jnp.sum(block.c)

    with pytest.raises(jaxfold.ConcretenessError, match=r"producer\['kernel'\]: got a tracer.*outside jit") as raised:
        transform(f)(jnp.ones((D, N)))
    assert raised.value.argument == "producer['kernel']"


def test_a_traced_epsilon_is_refused() -> None:
    with pytest.raises(jaxfold.ConcretenessError, match="epsilon: got a tracer"):
        jax.jit(lambda epsilon: jaxfold.contract(**layers(epsilon=epsilon)).c)(1e-6)


def test_shapes_without_values_are_refused() -> None:
    abstract = {"kernel": jax.ShapeDtypeStruct((D, N), np.float32)}
    with pytest.raises(jaxfold.ConcretenessError, match=r"ShapeDtypeStruct without values.*jaxfold\.plan"):
        jaxfold.contract(**layers(producer=abstract))


def test_unequal_stacks_are_refused() -> None:
    stack = {
        "producer": {"kernel": ones(2, D, N)},
        "norm": {"scale": ones(3, N)},
        "consumers": {"kernel": ones(2, N, M)},
    }
    with pytest.raises(jaxfold.ShapeError, match=r"norm\['scale'\].*\(3, 12\).*length 2.*stacked=True"):
        jaxfold.contract(**stack, epsilon=1e-6, stacked=True)


def test_growth_is_refused_with_both_counts() -> None:
    case = make_case(148, 128, 128)
    with pytest.raises(jaxfold.GrowthError, match=r"38,272.*35,840.*packed.*allow_growth=True") as raised:
        jaxfold.contract(*case.layers, **case.options)
    assert raised.value.plan.original.parameters == 35_840
    assert raised.value.plan.direct.parameters == 38_272
    grown = jaxfold.contract(*case.layers, **case.options, allow_growth=True)
    assert sum(leaf.size for leaf in jax.tree.leaves(grown)) == 38_272
    packed = jaxfold.contract(*case.layers, **case.options, form="packed")
    assert sum(leaf.size for leaf in jax.tree.leaves(packed)) == raised.value.plan.packed.parameters < 35_840


@pytest.mark.parametrize("epsilon", [1e-3, 64.0, 64, np.float32(0.25), np.array(0.5), jnp.float32(0.125)])
def test_epsilon_survives_exactly(epsilon: Any) -> None:
    block = jaxfold.contract(**layers(epsilon=epsilon))
    assert type(block.epsilon) is float
    assert block.epsilon == float(epsilon)


APPLY: dict[str, tuple[type[Exception], str, str, Any]] = {
    "integers": (T, "x", "int32.*floating.*astype", ones(2, D, dtype=np.int32)),
    "booleans": (T, "x", "bool.*floating", ones(2, D, dtype=bool)),
    "complex": (T, "x", "complex64.*floating", ones(2, D, dtype=np.complex64)),
    "a list": (T, "x", "list.*asarray", [1.0, 2.0, 3.0, 4.0]),
    "a scalar": (H, "x", r"\(\).*4 features", np.float32(1.0)),
    "too wide": (H, "x", r"\(2, 5\), width 5.*4 features", ones(2, D + 1)),
    "transposed": (H, "x", r"\(4, 2\), width 2.*4 features", ones(D, 2)),
}


@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
@pytest.mark.parametrize("name", APPLY)
def test_apply_refuses(name: str, form: Any) -> None:
    error, argument, words, x = APPLY[name]
    block = jaxfold.contract(**layers(), form=form)
    with pytest.raises(error, match=f"(?s)got .*{words}") as raised:
        jaxfold.apply(block, x)
    assert isinstance(raised.value, jaxfold.JaxfoldError)
    assert raised.value.argument == argument


def test_apply_refuses_a_stack_and_a_broken_contraction() -> None:
    stack = {"producer": {"kernel": ones(2, D, N)}, "norm": None, "consumers": {"kernel": ones(2, N, M)}}
    with pytest.raises(jaxfold.ShapeError, match=r"contraction: got a stack of 2 blocks.*jax\.vmap"):
        jaxfold.apply(jaxfold.contract(**stack, epsilon=1e-6, stacked=True), ones(2, D))
    block = jaxfold.contract(**layers())
    broken = jaxfold.Contraction(block.params, block.width, block.epsilon, block.norm_type, "gram")  # type: ignore[arg-type]
    with pytest.raises(jaxfold.OptionError, match=r"contraction\.form: got 'gram'"):
        jaxfold.apply(broken, ones(2, D))
    half = jaxfold.Contraction({"denominator": block.params["denominator"]}, N, 1e-6, "layernorm", "direct")
    with pytest.raises(jaxfold.StructureError, match=r"contraction\.params: got the keys \['denominator'\]"):
        jaxfold.apply(half, ones(2, D))


def test_apply_refuses_an_epsilon_that_float32_does_not_hold() -> None:
    block = jaxfold.contract(**layers(epsilon=1e-60))
    with pytest.raises(jaxfold.OptionError, match=r"contraction\.epsilon: got 1e-60.*1\.18e-38"):
        jaxfold.apply(block, ones(2, D))


def test_plan_refuses() -> None:
    with pytest.raises(jaxfold.OptionError, match="keep_producer: got 1"):
        jaxfold.plan({"kernel": (D, N)}, None, {"kernel": (N, M)}, keep_producer=1)  # type: ignore[arg-type]
    with pytest.raises(jaxfold.OptionError, match="norm_type: got 'none'"):
        jaxfold.plan({"kernel": (D, N)}, None, {"kernel": (N, M)}, norm_type="none")  # type: ignore[arg-type]
    with pytest.raises(jaxfold.ShapeError, match=r"consumers\['kernel'\]: got shape \(3, 12\)"):
        jaxfold.plan({"kernel": (D, N)}, None, {"kernel": (M, N)})
    with pytest.raises(jaxfold.OptionError, match="form: got 'gram'"):
        jaxfold.plan({"kernel": (D, N)}, None, {"kernel": (N, M)}).cost("gram")  # type: ignore[arg-type]


def test_verify_refuses() -> None:
    good = layers()
    block, contracted = jaxfold.Block(**good), jaxfold.contract(**good)
    with pytest.raises(jaxfold.ShapeError, match=r"inputs: got shape \(2, 5\)"):
        jaxfold.verify(block, contracted, ones(2, D + 1))
    with pytest.raises(jaxfold.ShapeError, match=r"inputs: got shape \(0, 4\).*at least one row"):
        jaxfold.verify(block, contracted, ones(0, D))
    with pytest.raises(jaxfold.CoefficientError, match="inputs: got 1 non-finite"):
        jaxfold.verify(block, contracted, np.array([[0, 1, np.nan, 2]], np.float32))
    with pytest.raises(jaxfold.DtypeError, match="inputs: got dtype int"):
        jaxfold.verify(block, contracted, ones(2, D, dtype=np.int32))
    other = jaxfold.contract(*make_case(D, N + 1, M).layers, epsilon=1e-6)
    with pytest.raises(jaxfold.ShapeError, match=r"contracted: got 4 features and width 13.*4 and 12"):
        jaxfold.verify(block, other, ones(2, D))
    named = jaxfold.contract(**{**good, "consumers": {"q": good["consumers"]}})
    with pytest.raises(
        jaxfold.StructureError, match=r"contracted: got outputs 'q' of shape \(2, 3\); expected of shape \(2, 3\)"
    ):
        jaxfold.verify(block, named, ones(2, D))


def test_convert_refuses() -> None:
    block = jaxfold.contract(**layers())
    with pytest.raises(jaxfold.OptionError, match="form: got 'gram'"):
        jaxfold.convert(block, "gram")  # type: ignore[arg-type]
    with pytest.raises(jaxfold.ConcretenessError, match=r"contraction\.params\['consumer'\]\['kernel'\]: got a tracer"):
        jax.jit(lambda block: jaxfold.convert(block, "packed").c)(block)
