"""ContractedDense: its parameters are the contraction's, its values are jaxfold.apply's."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.core import FrozenDict, freeze

import jaxfold
from jaxfold.linen import ContractedDense, isometry
from tests.factories import make_case

FORMS = ("direct", "packed", "standard")


def make_contraction(form: Any = "direct", *, seed: int = 0, stacked: bool = False, **options: Any) -> Any:
    case = make_case(seed=seed, dtype=np.float32, **options)
    layers = case.layers
    if stacked:
        layers = tuple(jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), layer) for layer in layers)
    layers = jax.tree.map(jnp.asarray, layers)
    return jaxfold.contract(*layers, **case.options, form=form, stacked=stacked, allow_growth=True)


def evaluate(module: Any, params: Any, x: Any) -> Any:
    return module.apply({"params": params}, x)


def described(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def equal(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"producer_bias": False},
        {"n": 4},
        {"n": 4, "producer_bias": False},
        {"features": (2, 3)},
        {"norm_type": "rmsnorm"},
    ],
    ids=str,
)
def test_is_the_contraction(form: Any, options: dict[str, Any]) -> None:
    contraction = make_contraction(form, **options)
    module = ContractedDense.from_contraction(contraction)
    x = np.random.default_rng(1).normal(size=(3, 5, 5)).astype(np.float32)
    fresh = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    assert described(fresh) == described(contraction.params)
    expected = jaxfold.apply(contraction, x)
    assert np.array_equal(evaluate(module, contraction.params, x), expected)
    assert not np.array_equal(evaluate(module, make_contraction(form, seed=1, **options).params, x), expected)


@pytest.mark.parametrize("form", FORMS)
def test_several_consumers(form: Any) -> None:
    case = make_case(dtype=np.float32)
    consumers = {"query": case.consumer, "a/b": {"kernel": np.ones((16, 2, 3), np.float32)}}
    contraction = jaxfold.contract(case.producer, case.norm, consumers, **case.options, form=form)
    module = ContractedDense.from_contraction(contraction)
    assert dict(module.features) == {"query": 7, "a/b": (2, 3)}  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert described(jax.eval_shape(module.init, jax.random.key(0), case.x)["params"]) == described(contraction.params)
    result = evaluate(module, contraction.params, case.x)
    assert isinstance(result, dict)
    assert equal(result, jaxfold.apply(contraction, case.x))
    drawn: Any = module.init(jax.random.key(0), case.x)["params"]["consumers"]
    assert not np.array_equal(drawn["query"]["kernel"][0, :6], drawn["a/b"]["kernel"][0].ravel())


def test_mixed_dtypes() -> None:
    """Each group of coefficients has the dtype of its own sources; the definition knows them all."""
    case = make_case(dtype=np.float32)
    half = {key: jnp.asarray(leaf, jnp.bfloat16) for key, leaf in case.producer.items()}
    contraction = jaxfold.contract(half, case.norm, {"a": case.consumer, "b": case.consumer}, **case.options)
    module = ContractedDense.from_contraction(contraction)
    fresh = jax.eval_shape(module.init, jax.random.key(0), case.x)["params"]
    assert described(fresh) == described(contraction.params)
    assert fresh["denominator"]["kernel"].dtype == jnp.bfloat16
    assert hash(module) == hash(ContractedDense.from_contraction(contraction))


@pytest.mark.parametrize("form", FORMS)
def test_fresh_parameters_are_those_of_a_wide_fresh_original(form: Any) -> None:
    """Every second moment of R and D against a fresh Dense(n), LayerNorm, Dense(m) of n = 4096."""
    d, n, m = 6, 4096, 512
    x = jnp.zeros((1, d))
    layers = nn.Dense(n), nn.LayerNorm(), nn.Dense(m)
    keys = iter(jax.random.split(jax.random.key(0), 4))
    params = [
        layer.init(next(keys), jnp.zeros((1, size)))["params"] for layer, size in zip(layers, (d, n, n), strict=True)
    ]
    original = jaxfold.contract(*params, epsilon=1e-6)
    module = ContractedDense(m, width=n, epsilon=1e-6, form=form)
    contraction = jaxfold.Contraction(module.init(next(keys), x)["params"], n, 1e-6, "layernorm", form)

    def gram(rows: Any) -> Any:
        return np.asarray(rows @ rows.T, np.float64)

    # T Tᵀ/n of n random columns is known to sqrt(2/n) = 0.022 of its diagonal: allow four times that. The exact one is
    # I/d with a zero row for the bias.
    expected = np.diag([1 / d] * d + [0.0])
    assert np.abs(gram(contraction.R.T) / n - expected).max() < 1e-6
    assert np.abs(gram(original.R.T) / n - expected).max() < 0.1 / d
    # D Dᵀ/m of m columns: sqrt(2/m) = 0.06 for each of the two, in units of 1/d.
    for drawn in (contraction, original):
        assert np.abs(gram(drawn.D) / m - expected).max() < 0.25 / d
        assert np.abs(drawn.c).max() == 0


def test_isometry() -> None:
    kernel = isometry(50)(jax.random.key(0), (2, 3))
    assert np.allclose(kernel, 5 * np.eye(2, 3), rtol=1e-6)
    assert isometry(50)(jax.random.key(0), (2, 3), jnp.bfloat16).dtype == jnp.bfloat16


def test_output_dtype_is_a_cast_of_the_result() -> None:
    """Neither x nor the parameters are rounded to the dtype of the output."""
    contraction, x = make_contraction(), make_case(dtype=np.float32).x
    expected = jaxfold.apply(contraction, x).astype(jnp.bfloat16)
    result: Any = ContractedDense.from_contraction(contraction, dtype=jnp.bfloat16).apply(
        {"params": contraction.params}, x
    )
    assert result.dtype == jnp.bfloat16
    assert np.array_equal(result, expected)
    rounded = jaxfold.apply(contraction, jnp.asarray(x, jnp.bfloat16)).astype(jnp.bfloat16)
    assert not np.array_equal(rounded, expected)


def test_precision_reaches_the_product() -> None:
    contraction, x = make_contraction(), make_case(dtype=np.float32).x
    module = ContractedDense.from_contraction(contraction, precision="highest")
    text = str(jax.make_jaxpr(module.apply)({"params": contraction.params}, x))
    plain = str(jax.make_jaxpr(ContractedDense.from_contraction(contraction).apply)({"params": contraction.params}, x))
    assert text.count("HIGHEST") > plain.count("HIGHEST") > 0


def test_transforms() -> None:
    """jit, grad, vmap and remat; a second contraction of the same shapes retraces nothing."""
    first, second = make_contraction(seed=0), make_contraction(seed=1)
    module, x = ContractedDense.from_contraction(first), make_case(dtype=np.float32).x
    traces = []

    @jax.jit
    def apply(params: Any, x: Any) -> Any:
        traces.append(None)
        return evaluate(module, params, x)

    for contraction in (first, second, first):
        # Compiled within a larger function, products may be summed in another order: some units in the last place.
        np.testing.assert_allclose(apply(contraction.params, x), jaxfold.apply(contraction, x), rtol=1e-5, atol=1e-5)
    assert len(traces) == 1

    def loss(params: Any) -> Any:
        return jnp.sum(jnp.square(evaluate(module, params, x)))

    def reference(contraction: jaxfold.Contraction) -> Any:
        return jnp.sum(jnp.square(jaxfold.apply(contraction, x)))

    assert equal(jax.grad(loss)(first.params), jax.grad(reference)(first).params)
    rows = jax.vmap(lambda row: evaluate(module, first.params, row))(x)
    np.testing.assert_allclose(rows, jaxfold.apply(first, x), rtol=1e-5, atol=1e-5)

    class Checkpointed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.remat(ContractedDense)(7, width=16, epsilon=1e-3, name="layer")(x)

    result: Any = Checkpointed().apply({"params": {"layer": first.params}}, x)
    assert np.array_equal(result, jaxfold.apply(first, x))


@pytest.mark.parametrize("form", FORMS)
def test_partitioning(form: Any) -> None:
    """Initialisers in boxes keep them, nn.scan adds its axis to their names, and the values are those without."""
    rank = (None,) if form == "packed" else ("in", None)
    boxed: dict[str, Any] = {
        "denominator_init": nn.with_partitioning(isometry(16), rank),
        "kernel_init": nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "heads", None)),
    }
    options: dict[str, Any] = {"width": 16, "epsilon": 1e-3, "form": form}
    x = make_case(dtype=np.float32).x
    module, plain = ContractedDense((2, 3), **options, **boxed), ContractedDense((2, 3), **options)
    variables: Any = module.init(jax.random.key(0), x)
    assert variables["params"]["denominator"]["kernel"].names == rank
    assert variables["params"]["consumer"]["kernel"].names == ("in", "heads", None)
    bare = plain.init(jax.random.key(0), x)
    assert equal(nn.unbox(variables), bare)
    assert np.array_equal(evaluate(module, variables["params"], x), evaluate(plain, bare["params"], x))

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, _: Any) -> Any:
            return carry, ContractedDense((2, 3), **options, **boxed)(carry)

    scanned = nn.scan(
        Layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()
    params: Any = scanned.init(jax.random.key(0), x, None)["params"]["ContractedDense_0"]
    assert params["consumer"]["kernel"].names == ("layers", "in", "heads", None)
    assert params["denominator"]["kernel"].names == ("layers", *rank)
    assert nn.unbox(params)["denominator"]["bias"].shape == (2, 6)


@pytest.mark.parametrize("form", FORMS)
def test_round_trips(form: Any) -> None:
    """Through msgpack, a state dict and a FrozenDict, bit for bit, and into the module."""
    contraction, x = make_contraction(form), make_case(dtype=np.float32).x
    module = ContractedDense.from_contraction(contraction)
    fresh = module.init(jax.random.key(0), x)["params"]
    expected = jaxfold.apply(contraction, x)
    assert not equal(fresh, contraction.params)
    saved = serialization.to_bytes(contraction.params)
    for restored in (
        serialization.from_bytes(fresh, saved),
        serialization.msgpack_restore(saved),
        serialization.from_state_dict(fresh, serialization.to_state_dict(contraction.params)),
    ):
        assert equal(restored, contraction.params)
        assert np.array_equal(evaluate(module, restored, x), expected)
    frozen = freeze(dict(contraction.params))
    assert isinstance(frozen["denominator"], FrozenDict)
    assert np.array_equal(evaluate(module, frozen, x), expected)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no features": ({"features": 0}, "features"),
    "features of a kind": ({"features": 2.5}, "features"),
    "a flag": ({"features": True}, "features"),
    "no axes": ({"features": ()}, "features"),
    "an empty axis": ({"features": (2, 0)}, "features"),
    "text": ({"features": "7"}, "features"),
    "no names": ({"features": {}}, "features"),
    "a number for a name": ({"features": {1: 2}}, "features"),
    "nested": ({"features": {"a": {"b": 2}}}, "features['a']"),
    "named and empty": ({"features": {"a": -1}}, "features['a']"),
    "width": ({"width": 0}, "width"),
    "epsilon": ({"epsilon": 0.0}, "epsilon"),
    "use_bias": ({"use_bias": 1}, "use_bias"),
    "norm_type": ({"norm_type": "batchnorm"}, "norm_type"),
    "form": ({"form": "compact"}, "form"),
    "dtype": ({"dtype": jnp.int32}, "module.dtype"),
    "param_dtype": ({"param_dtype": jnp.int8}, "param_dtype"),
    "no param_dtype": ({"param_dtype": None}, "param_dtype"),
    "part of a tree": ({"param_dtype": {"denominator": jnp.float32}}, "param_dtype"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    change, argument = OPTIONS[name]
    fields: dict[str, Any] = {"features": 7, "width": 16, "epsilon": 1e-3} | change
    with pytest.raises(jaxfold.OptionError) as caught:
        ContractedDense(**fields).init(jax.random.key(0), jnp.zeros((1, 5)))
    assert caught.value.argument == argument


def test_inputs_and_parameters_that_do_not_fit() -> None:
    contraction = make_contraction()
    module, params = ContractedDense.from_contraction(contraction), contraction.params
    with pytest.raises(jaxfold.ShapeError, match=r"x: got width 6; expected 5"):
        module.apply({"params": params}, jnp.zeros((2, 6)))
    with pytest.raises(jaxfold.ShapeError, match=r"x: got shape \(\)"):
        module.apply({"params": params}, jnp.zeros(()))
    with pytest.raises(jaxfold.DtypeError, match="x: got dtype int32"):
        module.apply({"params": params}, jnp.zeros((2, 5), jnp.int32))
    with pytest.raises(jaxfold.DtypeError, match="x: got a list"):
        module.apply({"params": params}, [0.0] * 5)
    with pytest.raises(jaxfold.StructureError, match="as the module declares"):
        module.clone(use_bias=False).apply({"params": params}, jnp.zeros((2, 5)))
    with pytest.raises(jaxfold.StructureError, match="as the module declares"):
        module.clone(features=8).apply({"params": params}, jnp.zeros((2, 5)))
    with pytest.raises(jaxfold.JaxfoldError, match="kernel"):
        module.clone(form="packed").apply({"params": params}, jnp.zeros((2, 5)))
    short = {**params, "consumer": {"kernel": params["consumer"]["kernel"][:-1]}}
    with pytest.raises(jaxfold.ShapeError, match=r"params\['consumer'\]\['kernel'\]"):
        module.apply({"params": short}, jnp.zeros((2, 5)))
    with pytest.raises(jaxfold.ShapeError, match=r"nn\.scan or nn\.vmap"):
        module.apply({"params": make_contraction(stacked=True).params}, jnp.zeros((2, 5)))


def test_contractions_that_no_module_holds() -> None:
    case = make_case(dtype=np.float32)
    traced = jaxfold.contract_traced(*jax.tree.map(jnp.asarray, case.layers), **case.options)
    with pytest.raises(jaxfold.StructureError, match="contract_traced"):
        ContractedDense.from_contraction(traced)
    with pytest.raises(jaxfold.StructureError, match=r"expected a jaxfold\.Contraction"):
        ContractedDense.from_contraction(traced.params)  # pyright: ignore[reportArgumentType]
    mixed = make_contraction()
    mixed.params["denominator"]["bias"] = mixed.params["denominator"]["bias"].astype(jnp.bfloat16)
    with pytest.raises(jaxfold.StructureError, match="one dtype in each group"):
        ContractedDense.from_contraction(mixed)
