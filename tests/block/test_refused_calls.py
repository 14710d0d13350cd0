"""Refusals that depend on how or with what a function is called: tracers, growth, and what apply and verify get."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import jaxfold
from tests.block.test_refusals import BASE, CASE, Refusal, call_refused, snapshot
from tests.factories import make_case
from tests.x64 import set_x64

TRANSFORMS = {"jit": jax.jit, "grad": jax.grad, "vmap": lambda f: lambda leaf: jax.vmap(f)(jnp.stack([leaf, leaf]))}
CONCRETE = "concrete NumPy or JAX array"


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
@pytest.mark.parametrize(("group", "key"), [("producer", "kernel"), ("norm", "scale"), ("consumers", "bias")])
def test_tracers(transform: str, group: str, key: str) -> None:
    row = Refusal({}, jaxfold.ConcretenessError, f"{group}['{key}']", "tracer", CONCRETE, "jaxfold.contract_traced")

    def contract(leaf: Any) -> Any:
        change = {group: {**BASE[group], key: leaf}}
        return jnp.sum(call_refused(jaxfold.contract, change, epsilon=1e-3).params["consumer"]["kernel"])

    row.check(lambda: TRANSFORMS[transform](contract)(jnp.asarray(BASE[group][key])))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_an_epsilon_that_is_a_tracer(transform: str) -> None:
    row = Refusal({}, jaxfold.ConcretenessError, "epsilon", "tracer", "concrete", "outside jit, grad and vmap")
    call = TRANSFORMS[transform](lambda e: call_refused(jaxfold.contract, {}, epsilon=e).params["consumer"]["kernel"])
    row.check(lambda: call(jnp.float32(1e-3)))


def test_tracers_in_convert_and_verify() -> None:
    block, original = jaxfold.contract(*CASE.layers, epsilon=1e-3), jaxfold.Block(*CASE.layers, epsilon=1e-3)
    row = Refusal({}, jaxfold.ConcretenessError, "contraction.params['consumer']['kernel']", "tracer", CONCRETE, "out")
    row.check(lambda: jax.jit(lambda block: jaxfold.convert(block, "packed").params)(block))
    row = dataclasses.replace(row, argument="inputs")
    row.check(lambda: jax.jit(lambda x: jaxfold.verify(original, block, x).rows)(CASE.x))


def test_concrete_leaves_inside_a_trace_are_fine() -> None:
    """What is refused is a tracer, not the place: closed-over leaves contract under jit too, to concrete arrays."""
    layers = jax.tree.map(jnp.asarray, CASE.layers)
    contractions = []

    @jax.jit
    def step(x: Any) -> Any:
        contractions.append(jaxfold.contract(*layers, epsilon=1e-3))
        return jaxfold.apply(contractions[0], x)

    outside = jaxfold.apply(jaxfold.contract(*layers, epsilon=1e-3), CASE.x)
    np.testing.assert_allclose(step(CASE.x), outside, rtol=1e-5, atol=1e-6)
    assert not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(contractions[0]))


@pytest.mark.parametrize(
    "epsilon",
    [1e-3, 64.0, 64, np.float32(1e-6), np.float64(1e-5), np.int64(1), np.array(1e-3), jnp.float32(1e-3), 5e-324],
    ids=repr,
)
def test_epsilons_that_survive_exactly(epsilon: Any) -> None:
    block = jaxfold.contract(*CASE.layers, epsilon=epsilon)
    assert type(block.epsilon) is float
    assert block.epsilon == float(epsilon)
    for form in ("packed", "standard"):
        assert jaxfold.convert(block, form).epsilon == float(epsilon)
    assert jaxfold.Block(*CASE.layers, epsilon=epsilon).epsilon == float(epsilon)


GROWING = make_case(148, 128, 128, rows=1).layers


def test_growth() -> None:
    row = Refusal({}, jaxfold.GrowthError, "consumers", "38,272 parameters", "at most .*35,840", "allow_growth=True")
    before = snapshot(GROWING)
    error: Any = row.check(lambda: jaxfold.contract(*GROWING, epsilon=1e-5))
    assert snapshot(GROWING) == before
    assert error.plan == jaxfold.plan(*GROWING)
    assert (error.plan.original.parameters, error.plan.direct.parameters) == (35_840, 38_272)
    assert "form='packed' or 'standard', which has fewer" in str(error)
    allowed = jaxfold.contract(*GROWING, epsilon=1e-5, allow_growth=True)
    assert sum(leaf.size for leaf in jax.tree.leaves(allowed)) == 38_272
    for form in ("packed", "standard"):  # these do not grow, so nothing has to be allowed
        small = jaxfold.contract(*GROWING, epsilon=1e-5, form=form)
        assert sum(leaf.size for leaf in jax.tree.leaves(small)) < 35_840


def test_growth_counts_the_form_that_was_asked_for() -> None:
    """16→8→64 without a producer bias: packing saves 28 of the direct form's 1,216, so both are above 720."""
    layers = make_case(16, 8, 64, producer_bias=False).layers
    row = Refusal({}, jaxfold.GrowthError, "consumers", "direct form has 1,216 parameters", "720", "'standard', which")
    row.check(lambda: jaxfold.contract(*layers, epsilon=1e-5))
    row = dataclasses.replace(row, got="packed form has 1,188 parameters")
    row.check(lambda: jaxfold.contract(*layers, epsilon=1e-5, form="packed"))
    jaxfold.contract(*layers, epsilon=1e-5, form="standard")


def test_equal_counts_are_not_growth() -> None:
    """5→3→2 with all biases has 32 parameters before and after."""
    layers = make_case(5, 3, 2).layers
    costs = jaxfold.plan(*layers)
    assert costs.original.parameters == costs.direct.parameters == 32
    assert not costs.pays()
    jaxfold.contract(*layers, epsilon=1e-5)


BLOCK = jaxfold.contract(*CASE.layers, epsilon=1e-3)
STACK = jaxfold.contract(
    *(jax.tree.map(lambda a: np.stack([a, a]), g) for g in CASE.layers), epsilon=1e-3, stacked=True
)
X = CASE.x


def _params(**groups: Any) -> jaxfold.Contraction:
    """The block with some groups of its parameters replaced, or left out where they are None."""
    params = {key: group for key, group in {**BLOCK.params, **groups}.items() if group is not None}
    return dataclasses.replace(BLOCK, params=params)


P, H, D, S = jaxfold.OptionError, jaxfold.ShapeError, jaxfold.DtypeError, jaxfold.StructureError
APPLY: dict[str, tuple[Any, Any, Refusal]] = {
    "integer x": (BLOCK, X.astype(np.int32), Refusal({}, D, "x", "dtype int32", "real floating", "astype")),
    "bool x": (BLOCK, X > 0, Refusal({}, D, "x", "dtype bool", "real floating", "astype")),
    "complex x": (BLOCK, X.astype(np.complex64), Refusal({}, D, "x", "dtype complex64", "real floating", "astype")),
    "float8 x": (BLOCK, jnp.asarray(X, jnp.float8_e4m3fn), Refusal({}, D, "x", "dtype float8_e4m3fn", "floating")),
    "list x": (BLOCK, X.tolist(), Refusal({}, D, "x", "a list", "an array", "asarray")),
    "no x": (BLOCK, None, Refusal({}, D, "x", "NoneType", "an array", "asarray")),
    "too wide": (BLOCK, np.zeros((3, 7), np.float32), Refusal({}, H, "x", r"\(3, 7\), width 7", r"4\): .*4 features")),
    "transposed": (BLOCK, X.T.copy(), Refusal({}, H, "x", r"\(4, 33\), width 33", r"\(\.\.\., 4\)")),
    "no axes": (BLOCK, np.zeros((), np.float32), Refusal({}, H, "x", r"shape \(\)", r"\(\.\.\., 4\)")),
    "a float": (BLOCK, 1.0, Refusal({}, D, "x", "float", "an array", "asarray")),
    "a string": (BLOCK, "x", Refusal({}, D, "x", "str", "an array", "asarray")),
    "a scalar": (BLOCK, np.float32(1.0), Refusal({}, H, "x", r"shape \(\)", r"\(\.\.\., 4\)")),
    "params alone": (BLOCK.params, X, Refusal({}, S, "contraction", "dict", r"jaxfold\.Contraction", "restore")),
    "arguments swapped": (X, BLOCK, Refusal({}, S, "contraction", "ndarray", r"jaxfold\.Contraction")),
    "another width": (
        dataclasses.replace(BLOCK, width=3),
        X,
        Refusal({}, H, "contraction.params['denominator']['kernel']", "5 squares for width 3", r"min\(width, 5\) = 3"),
    ),
    "no width": (dataclasses.replace(BLOCK, width=0), X, Refusal({}, P, "contraction.width", "0", "above 0")),
    "epsilon NaN": (
        dataclasses.replace(BLOCK, epsilon=float("nan")),
        X,
        Refusal({}, P, "contraction.epsilon", "nan", "above 0"),
    ),
    "epsilon text": (
        dataclasses.replace(BLOCK, epsilon="a"),  # type: ignore[arg-type]
        X,
        Refusal({}, P, "contraction.epsilon", "'a'", "above 0"),
    ),
    "epsilon beyond float32": (
        dataclasses.replace(BLOCK, epsilon=1e300),
        X,
        Refusal({}, P, "contraction.epsilon", "1e\\+300", r"3\.4e\+38", "float64"),
    ),
    "direct called packed": (
        dataclasses.replace(BLOCK, form="packed"),
        X,
        Refusal({}, H, "contraction.params['denominator']['bias']", r"\(5,\)", "leading axis", "form included"),
    ),
    "standard called direct": (
        dataclasses.replace(jaxfold.convert(BLOCK, "standard"), form="direct"),
        X,
        Refusal({}, S, "contraction.params['consumer']", "'bias', 'kernel'", "'kernel' in the direct form"),
    ),
    "direct called standard": (
        dataclasses.replace(BLOCK, form="standard"),
        X,
        Refusal({}, S, "contraction.params['consumer']", "'kernel'", "'bias' and 'kernel' in the standard form"),
    ),
    "a stack": (STACK, X, Refusal({}, H, "contraction", "a stack of 2 blocks", "single block", r"jax\.vmap")),
    "unknown form": (
        dataclasses.replace(BLOCK, form="gram"),  # type: ignore[arg-type]
        X,
        Refusal({}, P, "contraction.form", "'gram'", "'direct' or 'packed' or 'standard'"),
    ),
    "no consumer": (_params(consumer=None), X, Refusal({}, S, "contraction.params", "denominator", "'consumers'")),
    "no denominator": (_params(denominator=None), X, Refusal({}, S, "contraction.params", "consumer", "'denominator'")),
    "single and several consumers": (
        _params(consumers={"q": BLOCK.params["consumer"]}),
        X,
        Refusal({}, S, "contraction.params", "'consumer', 'consumers'", "'consumer' or 'consumers'"),
    ),
    "no kernel in the denominator": (
        _params(denominator={"bias": BLOCK.params["denominator"]["bias"]}),
        X,
        Refusal({}, S, "contraction.params", "", "kernel"),
    ),
    "no kernel in the consumer": (_params(consumer={}), X, Refusal({}, S, "contraction.params", "", "kernel")),
    "epsilon that float32 flushes to zero": (
        dataclasses.replace(BLOCK, epsilon=1e-39),
        X,
        Refusal({}, P, "contraction.epsilon", "1e-39", r"float32 holds, 1\.18e-38 to", "float64"),
    ),
}


@pytest.mark.parametrize("name", APPLY)
def test_apply(name: str) -> None:
    block, x, row = APPLY[name]
    if row.argument == "contraction.params" and "kernel" in name:  # the message may name the path of the leaf itself
        with pytest.raises(S, match=r"contraction\.params.*: got .*; expected .*kernel"):
            jaxfold.apply(block, x)
        return
    before = snapshot([getattr(block, "params", None), x])
    row.check(lambda: jaxfold.apply(block, x))
    assert snapshot([getattr(block, "params", None), x])[2] == before[2]
    row.check(lambda: jax.jit(lambda: jaxfold.apply(block, x))())  # in the same words inside a trace


def test_apply_takes_a_tiny_epsilon_in_float64() -> None:
    case = make_case(epsilon=1e-39)
    with set_x64(True):
        block = jaxfold.contract(*case.layers, **case.options)
        assert np.isfinite(np.asarray(jaxfold.apply(block, case.x))).all()


ORIGINAL = jaxfold.Block(*CASE.layers, epsilon=1e-3)


def _other(d: int = 4, n: int = 16, m: int = 3) -> jaxfold.Contraction:
    return jaxfold.contract(*make_case(d, n, m).astype(np.float32).layers, epsilon=1e-3)


def _named(*names: str) -> jaxfold.Contraction:
    return jaxfold.contract(CASE.producer, CASE.norm, dict.fromkeys(names, CASE.consumer), epsilon=1e-3)


VERIFY: dict[str, tuple[Any, Any, Refusal]] = {
    "other features": (
        _other(d=5),
        X,
        Refusal({}, H, "contracted", "5 features and width 16", "4 and 16", "very block"),
    ),
    "other width": (_other(n=12), X, Refusal({}, H, "contracted", "4 features and width 12", "4 and 16", "very block")),
    "other outputs": (_other(m=2), X, Refusal({}, S, "contracted", r"\(33, 2\)", r"\(33, 3\)")),
    "named consumers": (_named("q"), X, Refusal({}, S, "contracted", "outputs 'q'", r"\(33, 3\)")),
    "a stack": (STACK, X, Refusal({}, H, "contracted", "2 times", "4 and 16")),
    "no rows": (BLOCK, X[:0], Refusal({}, H, "inputs", r"\(0, 4\)", r"\(\.\.\., 4\) with at least one row")),
    "too wide": (BLOCK, np.zeros((3, 5), np.float32), Refusal({}, H, "inputs", r"\(3, 5\)", r"\(\.\.\., 4\)")),
    "no axes": (BLOCK, np.float32(1), Refusal({}, H, "inputs", r"\(\)", r"\(\.\.\., 4\)")),
    "NaN": (
        BLOCK,
        np.where(np.arange(132).reshape(33, 4) == 6, np.nan, X),
        Refusal(
            {}, jaxfold.CoefficientError, "inputs", r"1 non-finite of 132 entries, the first at \(1, 2\): nan", "fin"
        ),
    ),
    "integers": (BLOCK, X.astype(np.int32), Refusal({}, D, "inputs", "dtype int32", "real floating")),
}


@pytest.mark.parametrize("name", VERIFY)
def test_verify(name: str) -> None:
    contracted, inputs, row = VERIFY[name]
    before = snapshot([contracted.params, inputs])
    row.check(lambda: jaxfold.verify(ORIGINAL, contracted, inputs))
    assert snapshot([contracted.params, inputs])[2] == before[2]


def test_verify_with_arguments_of_other_kinds() -> None:
    for original, contracted, argument in ((CASE.producer, BLOCK, "original"), (ORIGINAL, ORIGINAL, "contracted")):
        row = Refusal({}, S, argument, "dict|Block", r"a jaxfold\.(Block|Contraction)", "Make one")
        row.check(lambda o=original, c=contracted: jaxfold.verify(o, c, X))  # type: ignore[arg-type]
    row = Refusal({}, S, "original_fn", "int", "function")
    row.check(lambda: jaxfold.verify(ORIGINAL, BLOCK, X, original_fn=3))  # type: ignore[arg-type]
    row = Refusal({}, S, "contraction", "dict", r"jaxfold\.Contraction")
    row.check(lambda: jaxfold.convert(BLOCK.params, "packed"))  # type: ignore[arg-type]


def test_the_original_refuses_what_apply_refuses() -> None:
    for x, row in (
        (X[:, :3], Refusal({}, H, "x", r"\(.*, 3\)", r"\(\.\.\., 4\)")),
        (X.astype(np.int32), Refusal({}, D, "x", "int32", "floating", "astype")),
        (None, Refusal({}, D, "x", "NoneType", "an array")),
    ):
        row.check(lambda x=x: ORIGINAL(x))  # type: ignore[arg-type]
    stack: Any = [jax.tree.map(lambda leaf: np.stack([leaf] * 2), layer) for layer in CASE.layers]
    row = Refusal({}, H, "x", r"\(.*, 4\)", r"\(2, \.\.\., 4\)")
    row.check(lambda: jaxfold.Block(*stack, epsilon=1e-3, stacked=True)(X))
    assert repr(ORIGINAL).startswith("Block({\"producer['kernel']\": (4, 16)")


def test_verify_with_some_consumers_missing() -> None:
    original = jaxfold.Block(CASE.producer, CASE.norm, dict.fromkeys("qkv", CASE.consumer), epsilon=1e-3)
    row = Refusal({}, S, "contracted", "'k' of shape.*'q' of shape", "'v' of shape")
    row.check(lambda: jaxfold.verify(original, _named("q", "k"), X))


SHAPES: Any = ({"kernel": (4, 16)}, None, {"kernel": (16, 3)})
PLAN = {
    "norm_type": Refusal({"norm_type": "batchnorm"}, P, "norm_type", "'batchnorm'", "'layernorm' or 'rmsnorm'"),
    "keep_producer": Refusal({"keep_producer": 1}, P, "keep_producer", "1", "True or False"),
    "dtype": Refusal({"dtype": "int8"}, P, "dtype", "'int8'", "float64, float32, bfloat16 or float16"),
    "dtype misspelt": Refusal({"dtype": "flaot32"}, P, "dtype", "'flaot32'", "float64, float32, bfloat16 or float16"),
    "stacked": Refusal({"stacked": "no"}, P, "stacked", "'no'", "True or False"),
}


@pytest.mark.parametrize("row", PLAN.values(), ids=list(PLAN))
def test_plan_options(row: Refusal) -> None:
    row.check(lambda: jaxfold.plan(*SHAPES, **row.change))


def test_form_by_name() -> None:
    row = Refusal({}, P, "form", "'gram'", "'direct' or 'packed' or 'standard'")
    plan: Any = jaxfold.plan(*SHAPES)
    row.check(lambda: plan.cost("gram"))
    row.check(lambda: plan.pays("gram"))
    row.check(lambda: jaxfold.convert(BLOCK, "gram"))  # type: ignore[arg-type]
    row = dataclasses.replace(row, argument="contraction.form")
    row.check(lambda: jaxfold.convert(dataclasses.replace(BLOCK, form="gram"), "packed"))  # type: ignore[arg-type]


def test_convert_refuses_what_is_not_finite() -> None:
    row = Refusal({}, jaxfold.CoefficientError, "contraction.params['denominator']['bias']", r"\(0,\): inf", "finite")
    denominator = {**BLOCK.params["denominator"], "bias": np.array([np.inf, 0, 0, 0, 0], np.float32)}
    row.check(lambda: jaxfold.convert(_params(denominator=denominator), "packed"))


def test_classes() -> None:
    """Every error is a JaxfoldError and the built-in error that says the same, so that either can be caught."""
    builtin = {
        **{jaxfold.StructureError: ValueError, jaxfold.OptionError: ValueError, jaxfold.ShapeError: ValueError},
        **{jaxfold.GrowthError: ValueError, jaxfold.DtypeError: TypeError, jaxfold.ConcretenessError: TypeError},
        **{jaxfold.CoefficientError: ArithmeticError, jaxfold.NotFoldedError: ValueError},
    }
    assert set(builtin) == set(jaxfold.JaxfoldError.__subclasses__())
    assert all(issubclass(ours, theirs) for ours, theirs in builtin.items())


EDITS: dict[str, tuple[Any, str, str, str]] = {
    "consumer of another block": ("direct", "consumer", "kernel", r"\(7, 3\).*\(6, 3\)"),
    "bias of another block": ("packed", "denominator", "bias", r"\(6,\).*\(5,\)"),
    "standard consumer": ("standard", "consumer", "kernel", r"\(6, 3\).*\(5, 3\)"),
}


@pytest.mark.parametrize("name", EDITS)
def test_leaves_that_do_not_fit_each_other(name: str) -> None:
    """As when half of a restored tree belongs to another block: one row more than there should be."""
    form, group, key, shapes = EDITS[name]
    block = jaxfold.contract(*make_case(4, 16, 3).astype(np.float32).layers, epsilon=1e-3, form=form)
    leaf = block.params[group][key]
    params = {**block.params, group: {**block.params[group], key: np.concatenate([leaf, leaf[:1]])}}
    with pytest.raises(jaxfold.ShapeError, match=rf"contraction\.params\['{group}'\]\['{key}'\]: got shape {shapes}"):
        jaxfold.apply(dataclasses.replace(block, params=params), np.ones((2, 4), np.float32))


def test_integer_coefficients_and_masked_leaves() -> None:
    block = jaxfold.contract(*CASE.layers, epsilon=1e-3)
    with pytest.raises(jaxfold.DtypeError, match=r"contraction\.params\['denominator'\]\['bias'\]: got dtype int32"):
        jaxfold.apply(jax.tree.map(lambda leaf: leaf.astype(np.int32), block), CASE.x)
    masked = {"kernel": np.ma.masked_array(CASE.producer["kernel"])}
    with pytest.raises(jaxfold.DtypeError, match=r"producer\['kernel'\]: got a MaskedArray"):
        jaxfold.contract(masked, *CASE.layers[1:], epsilon=1e-3)
    keys = {"scale": jax.random.split(jax.random.key(0), 16)}
    with pytest.raises(jaxfold.DtypeError, match=r"norm\['scale'\]: got dtype key<fry>.* Cast it first"):
        jaxfold.contract(CASE.producer, keys, CASE.consumer, epsilon=1e-3)
    with pytest.raises(jaxfold.ShapeError, match=r"producer\['kernel'\]: got shape \(4, -16\).*no empty axis"):
        jaxfold.plan({"kernel": (4, -16)}, None, {"kernel": (-16, 3)})


@pytest.mark.parametrize("kernel", [(4, 16.0), ("4", 16), (4, None)])
def test_a_tuple_of_anything_but_integers_is_no_shape(kernel: Any) -> None:
    with pytest.raises(jaxfold.DtypeError, match=r"producer\['kernel'\]: got a tuple; expected an array"):
        jaxfold.plan({"kernel": kernel}, None, {"kernel": (16, 3)})
