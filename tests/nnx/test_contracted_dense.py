"""ContractedDense: its state is the contraction's params, its values are jaxfold.apply's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

import jaxfold
from jaxfold.nnx import ContractedDense, isometry
from tests.factories import make_case
from tests.nnx.structures import List, Rngs, equal, values, without_mesh

FORMS = ("direct", "packed", "standard")


def make_contraction(form: Any = "direct", *, seed: int = 0, **options: Any) -> Any:
    case = make_case(seed=seed, dtype=np.float32, **options)
    layers = jax.tree.map(jnp.asarray, case.layers)
    return jaxfold.contract(*layers, **case.options, form=form, allow_growth=True)


def described(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def fields(contraction: jaxfold.Contraction) -> dict[str, Any]:
    return {"width": contraction.width, "epsilon": contraction.epsilon, "form": contraction.form}


@pytest.mark.parametrize(
    ("form", "options"),
    [(form, options) for form in FORMS for options in ({}, {"producer_bias": False, "n": 4})]
    + [("direct", {"features": (2, 3)}), ("direct", {"norm_type": "rmsnorm"})],
    ids=str,
)
def test_is_the_contraction(form: Any, options: dict[str, Any]) -> None:
    contraction = make_contraction(form, **options)
    x = np.random.default_rng(1).normal(size=(3, 5, 5)).astype(np.float32)
    module = ContractedDense.from_contraction(contraction)
    assert equal(values(module), contraction.params)
    assert np.array_equal(module(x), jaxfold.apply(contraction, x))
    assert equal(module.contraction.params, contraction.params)
    use_bias = options.get("producer_bias", True)
    fresh = ContractedDense(5, options.get("features", 7), **fields(contraction), use_bias=use_bias, rngs=Rngs(0))
    assert described(values(fresh)) == described(contraction.params)
    assert not np.array_equal(fresh(x), module(x))
    nnx.update(fresh, nnx.state(module))
    assert np.array_equal(fresh(x), module(x))
    assert all(isinstance(leaf, nnx.Param) for _, leaf in nnx.iter_graph(module) if isinstance(leaf, nnx.Variable))


@pytest.mark.parametrize("form", FORMS)
def test_several_consumers(form: Any) -> None:
    case = make_case(dtype=np.float32)
    consumers = {"query": case.consumer, "a/b": {"kernel": np.ones((16, 2, 3), np.float32)}}
    contraction = jaxfold.contract(case.producer, case.norm, consumers, **case.options, form=form)
    module = ContractedDense.from_contraction(contraction)
    result = module(case.x)
    assert isinstance(result, dict)
    assert equal(result, jaxfold.apply(contraction, case.x))
    fresh = ContractedDense(5, {"query": 7, "a/b": (2, 3)}, **fields(contraction), rngs=Rngs(0))
    assert described(values(fresh)) == described(contraction.params)
    drawn = values(fresh)["consumers"]
    assert not np.array_equal(drawn["query"]["kernel"][0, :6], drawn["a/b"]["kernel"][0].ravel())


def test_mixed_dtypes() -> None:
    """Each group of coefficients has the dtype of its own sources; so has a module that is made for them."""
    case = make_case(dtype=np.float32)
    half = {key: jnp.asarray(leaf, jnp.bfloat16) for key, leaf in case.producer.items()}
    contraction = jaxfold.contract(half, case.norm, case.consumer, **case.options)
    dtypes = {"denominator": jnp.bfloat16, "consumer": jnp.float32}
    fresh = ContractedDense(5, 7, **fields(contraction), param_dtype=dtypes, rngs=Rngs(0))
    assert described(values(fresh)) == described(contraction.params)
    assert described(values(ContractedDense.from_contraction(contraction))) == described(contraction.params)


@pytest.mark.parametrize("form", FORMS)
def test_fresh_parameters(form: Any) -> None:
    """R Rᵀ/n = I/d exactly, D Dᵀ/m ≈ I/d, and c and the constant's rows are zero; tests/linen compares with Flax."""
    d, n, m = 6, 64, 512
    contraction = ContractedDense(d, m, width=n, epsilon=1e-6, form=form, rngs=Rngs(0)).contraction
    expected = np.diag([1 / d] * d + [0.0])
    assert np.abs(contraction.R.T @ contraction.R / n - expected).max() < 1e-6
    # m columns know a second moment to sqrt(2/m) = 0.06.
    assert np.abs(contraction.D @ contraction.D.T / m - expected).max() < 0.25 / d
    assert np.abs(contraction.c).max() == 0


def test_output_dtype_is_a_cast_of_the_result() -> None:
    contraction, x = make_contraction(), make_case(dtype=np.float32).x
    expected = jaxfold.apply(contraction, x).astype(jnp.bfloat16)
    result = ContractedDense.from_contraction(contraction, dtype=jnp.bfloat16)(x)
    assert result.dtype == jnp.bfloat16
    assert np.array_equal(result, expected)
    rounded = jaxfold.apply(contraction, jnp.asarray(x, jnp.bfloat16)).astype(jnp.bfloat16)
    assert not np.array_equal(rounded, expected)


def test_transforms() -> None:
    """jit, grad, vmap and remat; a second contraction of the same shapes retraces nothing."""
    first, second = make_contraction(seed=0), make_contraction(seed=1)
    x = jnp.asarray(make_case(dtype=np.float32).x)
    traces = []

    @nnx.jit
    def run(module: Any, x: Any) -> Any:
        traces.append(None)
        return module(x)

    for contraction in (first, second, first):
        # Compiled within a larger function, products may be summed in another order: some units in the last place.
        result = run(ContractedDense.from_contraction(contraction), x)
        np.testing.assert_allclose(result, jaxfold.apply(contraction, x), rtol=1e-5, atol=1e-5)
    assert len(traces) == 1

    module = ContractedDense.from_contraction(first)
    gradient = nnx.grad(lambda module: jnp.sum(jnp.square(module(x))))(module)
    expected = jax.grad(lambda contraction: jnp.sum(jnp.square(jaxfold.apply(contraction, x))))(first)
    assert equal(nnx.to_pure_dict(gradient), expected.params)
    rows = nnx.vmap(lambda module, row: module(row), in_axes=(None, 0))(module, x)
    np.testing.assert_allclose(rows, jaxfold.apply(first, x), rtol=1e-5, atol=1e-5)
    remat = nnx.remat(lambda module, x: module(x))(module, x)
    np.testing.assert_allclose(remat, jaxfold.apply(first, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_partitioning(form: Any) -> None:
    """Initialisers with metadata hand it to the variables, whose values are those without."""
    rank = (None,) if form == "packed" else ("in", None)
    heads = ("in", "heads", None)
    options: dict[str, Any] = {"width": 16, "epsilon": 1e-3, "form": form}
    with without_mesh():
        module = ContractedDense(
            5,
            (2, 3),
            **options,
            denominator_init=nnx.with_partitioning(isometry(16), rank),
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), heads),
            rngs=Rngs(0),
        )
        linear = nnx.Linear(5, 3, kernel_init=nnx.with_partitioning(nnx.initializers.zeros, heads[:2]), rngs=Rngs(0))
    key = next(
        key for key, value in linear.kernel.get_metadata().items() if value == heads[:2]
    )  # one name in each version
    assert module.denominator.kernel.get_metadata()[key] == rank
    assert module.consumer.kernel.get_metadata()[key] == heads
    assert equal(values(module), values(ContractedDense(5, (2, 3), **options, rngs=Rngs(0))))


class Model(nnx.Module):
    def __init__(self, make: Any) -> None:
        self.layers = List([make(0), make(1)])


@pytest.mark.parametrize("form", FORMS)
def test_round_trips(form: Any) -> None:
    """Through split and merge, pure dicts, integer keys and msgpack, bit for bit."""
    contractions = [make_contraction(form, seed=seed) for seed in (0, 1)]
    x = make_case(dtype=np.float32).x
    model = Model(lambda index: ContractedDense.from_contraction(contractions[index]))
    expected = [jaxfold.apply(contraction, x) for contraction in contractions]

    def fresh() -> Any:
        return Model(lambda seed: ContractedDense(5, 7, **fields(contractions[0]), rngs=Rngs(seed)))

    def check(restored: Any) -> None:
        assert [np.array_equal(layer(x), y) for layer, y in zip(restored.layers, expected, strict=True)] == [True, True]

    with pytest.raises(AssertionError):
        check(fresh())
    graph, state = nnx.split(model)
    check(nnx.merge(graph, state))
    hash(graph)

    pure = nnx.to_pure_dict(state)
    assert set(pure["layers"]) == {0, 1}
    target = fresh()
    target_state = nnx.state(target)
    nnx.replace_by_pure_dict(target_state, pure)
    nnx.update(target, target_state)
    check(target)

    # Checkpoints turn integer keys into strings.
    text = {"layers": {str(index): group for index, group in pure["layers"].items()}}
    saved = serialization.msgpack_serialize(jax.tree.map(np.asarray, text))
    restored: Any = serialization.msgpack_restore(saved)
    if hasattr(nnx, "restore_int_paths"):
        restored = nnx.restore_int_paths(restored)
    else:
        restored = {"layers": {int(index): group for index, group in restored["layers"].items()}}
    assert equal(jax.tree.map(np.asarray, pure), restored)
    target = fresh()
    target_state = nnx.state(target)
    nnx.replace_by_pure_dict(target_state, restored)
    nnx.update(target, target_state)
    check(target)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"in_features": 0}, "in_features"),
        ({"features": ()}, "features"),
        ({"features": {"a": 0}}, "features['a']"),
        ({"width": 2.0}, "width"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"use_bias": None}, "use_bias"),
        ({"norm_type": "LayerNorm"}, "norm_type"),
        ({"form": None}, "form"),
        ({"dtype": "int8"}, "module.dtype"),
        ({"param_dtype": "int8"}, "param_dtype"),
    ],
    ids=str,
)
def test_options(change: dict[str, Any], argument: str) -> None:
    options: dict[str, Any] = {"in_features": 5, "features": 7, "width": 16, "epsilon": 1e-3} | change
    with pytest.raises(jaxfold.OptionError) as caught:
        ContractedDense(**options, rngs=Rngs(0))
    assert caught.value.argument == argument


def test_inputs_that_do_not_fit() -> None:
    module = ContractedDense(5, 7, width=16, epsilon=1e-3, rngs=Rngs(0))
    with pytest.raises(jaxfold.ShapeError, match=r"x: got shape \(2, 6\), width 6; expected"):
        module(jnp.zeros((2, 6)))
    with pytest.raises(jaxfold.DtypeError, match="x: got dtype int32"):
        module(jnp.zeros((2, 5), jnp.int32))
    traced = jaxfold.contract_traced(*make_case(dtype=np.float32).layers, epsilon=1e-3)
    with pytest.raises(jaxfold.StructureError, match="contract_traced"):
        ContractedDense.from_contraction(traced)


LOADED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "in_features": ({}, {"in_features": 6}, "in_features", "got 5; expected 6, the features of the block"),
    "features": ({}, {"features": 8}, "params", "as the module declares"),
    "several axes": ({"features": (7, 1)}, {"features": 7}, "params", "as the module declares"),
    "bias": ({"use_bias": False}, {}, "params", "as the module declares"),
    "no bias": ({}, {"use_bias": False}, "module.params['denominator']['kernel']", "5 squares"),
    "standard form": ({}, {"form": "standard"}, "module.params['consumer']", "'kernel' in the direct form"),
    "direct form": ({"form": "standard"}, {}, "module.params['consumer']['kernel']", "shape (7, 7)"),
    "packed form": ({}, {"form": "packed"}, "module.params['denominator']['kernel']", "2 axes in the direct form"),
    "width": ({}, {"width": 4}, "module.params['denominator']['kernel']", "min(width, 6)"),
}


@pytest.mark.parametrize("name", LOADED)
def test_loaded_from_another_block(name: str) -> None:
    """nnx.update takes variables of any shape; the call does not, with inputs that would fit them either."""
    own, loaded, argument, words = LOADED[name]
    options: dict[str, Any] = {"in_features": 5, "features": 7, "width": 16, "epsilon": 1e-3}
    module, other = (ContractedDense(**(options | change), rngs=Rngs(0)) for change in (own, loaded))
    x = jnp.zeros((2, other.in_features))
    other(x)
    nnx.update(module, nnx.state(other))
    with pytest.raises(jaxfold.JaxfoldError) as caught:
        module(x)
    assert caught.value.argument == argument
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("own", "loaded"), [(7, {"a": 7}), ({"a": 7}, 7), ({"a": 7}, {"a": 7, "b": 7}), ({"a": 7}, {"b": 7})], ids=str
)
def test_loaded_with_other_consumers(own: Any, loaded: Any) -> None:
    """Some versions of Flax refuse the state themselves, others keep what has no place."""
    options: dict[str, Any] = {"width": 16, "epsilon": 1e-3, "rngs": Rngs(0)}
    module, other = ContractedDense(5, own, **options), ContractedDense(5, loaded, **options)

    def load_and_call() -> Any:
        nnx.update(module, nnx.state(other))
        return module(jnp.zeros((2, 5)))

    with pytest.raises(ValueError, match=r"Found data|as the module declares"):
        load_and_call()
