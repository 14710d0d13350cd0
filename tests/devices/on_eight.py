"""Eight virtual devices: evaluating, contracting and training with sharded arrays."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfold
from jaxfold import BlockPaths, contract_tree
from tests.factories import make_case
from tests.reference import row_errors, two_pass

CASE = make_case(8, 64, (4, 6), rows=32, dtype=np.float32)
EPS = 1e-3
# float32: a dozen roundings of 2⁻²⁴ and sums of some 10 terms.
FLOAT32 = 5e-6
SPECS = {
    "up": {"kernel": P("data", "model"), "bias": P("model")},
    "norm": {"scale": P("model"), "bias": P("model")},
    "down": {"kernel": P("model", "data"), "bias": P("data")},
}
TREE = {"up": CASE.producer, "norm": CASE.norm, "down": CASE.consumer}
PATHS = BlockPaths(producer="up", norm="norm", consumers="down", epsilon=EPS)


@pytest.fixture
def mesh() -> Any:
    assert jax.device_count() == 8
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def put(tree: Any, mesh: Any, specs: Any) -> Any:
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs)


def spec_of(leaf: Any) -> tuple[Any, ...]:
    return tuple(leaf.sharding.spec) + (None,) * (leaf.ndim - len(leaf.sharding.spec))


def block(form: Any = "direct") -> jaxfold.Contraction:
    return jax.tree.map(jnp.asarray, jaxfold.contract(*CASE.layers, epsilon=EPS, form=form))


def right(outputs: Any) -> bool:
    truth = two_pass(*CASE.layers, CASE.x, epsilon=EPS)
    return bool(row_errors(truth, outputs, 2).max() < FLOAT32)


def collectives(function: Any, *arguments: Any) -> list[str]:
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    return re.findall(r"(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?=[-\w]*\()", text)


@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
def test_data_parallel(mesh: Any, form: Any) -> None:
    """Every device evaluates its own rows; nothing is exchanged."""
    contraction = jax.device_put(block(form), NamedSharding(mesh, P()))
    x = jax.device_put(CASE.x, NamedSharding(mesh, P(("data", "model"))))
    outputs = jax.jit(jaxfold.apply)(contraction, x)
    assert right(outputs)
    assert not right(outputs[::-1])
    assert outputs.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "model"))), outputs.ndim)
    assert collectives(jaxfold.apply, contraction, x) == []


@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
def test_output_features_sharded(mesh: Any, form: Any) -> None:
    """Every device has its own columns of D; the scalar is computed by each, from the narrow input."""
    contraction = jax.device_put(block(form), NamedSharding(mesh, P()))
    consumer = {
        "kernel": jax.device_put(contraction.params["consumer"]["kernel"], NamedSharding(mesh, P(None, None, "model")))
    }
    if form == "standard":
        consumer["bias"] = jax.device_put(contraction.params["consumer"]["bias"], NamedSharding(mesh, P(None, "model")))
    params = {"denominator": contraction.params["denominator"], "consumer": consumer}
    contraction = jaxfold.Contraction(params, 64, EPS, "layernorm", form)
    for rows in (P(), P("data")):
        x = jax.device_put(CASE.x, NamedSharding(mesh, rows))
        outputs = jax.jit(jaxfold.apply)(contraction, x)
        assert right(outputs)
        expected = NamedSharding(mesh, P(*(rows or (None,)), None, "model"))
        assert outputs.sharding.is_equivalent_to(expected, 3)
        assert collectives(jaxfold.apply, contraction, x) == []


@pytest.mark.parametrize(
    ("form", "kernel"), [("direct", ("data", None)), ("packed", (None,)), ("standard", ("data", None))]
)
def test_contract_places_like_its_sources(mesh: Any, form: Any, kernel: Any) -> None:
    sources = put(TREE, mesh, SPECS)
    contraction = jaxfold.contract(sources["up"], sources["norm"], sources["down"], epsilon=EPS, form=form)
    denominator, consumer = contraction.params["denominator"], contraction.params["consumer"]
    assert spec_of(denominator["kernel"]) == kernel
    assert spec_of(denominator["bias"]) == (None,)
    assert spec_of(consumer["kernel"]) == (None, "data", None)
    if form == "standard":
        assert spec_of(consumer["bias"]) == ("data", None)
    host = jaxfold.contract(*CASE.layers, epsilon=EPS, form=form)
    for ours, theirs in zip(jax.tree.leaves(contraction.params), jax.tree.leaves(host.params), strict=True):
        assert ours.sharding.mesh == mesh
        np.testing.assert_array_equal(ours, theirs)
    assert right(jaxfold.apply(contraction, jax.device_put(CASE.x, NamedSharding(mesh, P("data")))))
    for other in ("direct", "packed"):
        converted = jaxfold.convert(contraction, other)
        assert spec_of(converted.params["consumer"]["kernel"]) == (None, "data", None)
        assert spec_of(converted.params["denominator"]["kernel"])[0] in (None, kernel[0])


def test_contract_tree_on_a_sharded_state(mesh: Any) -> None:
    tree = {**put(TREE, mesh, SPECS), "embed": jax.device_put(np.ones((16, 8)), NamedSharding(mesh, P("data")))}
    new, report = contract_tree(tree, PATHS, strict=True)
    assert new["embed"] is tree["embed"]
    assert spec_of(new["up"]["denominator"]["kernel"]) == ("data", None)
    assert spec_of(new["up"]["consumer"]["kernel"]) == (None, "data", None)
    assert report.rows[0].certificate is not None
    contraction = jaxfold.Contraction(new["up"], 64, EPS, "layernorm", "direct")
    assert right(jaxfold.apply(contraction, CASE.x))
    for key, group in SPECS.items():
        for leaf, spec in group.items():
            assert tree[key][leaf].sharding.spec == spec


def test_stack_sharded_over_its_layers(mesh: Any) -> None:
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 4), TREE)
    specs = jax.tree.map(lambda leaf: P("data"), stacked)
    sources = put(stacked, mesh, specs)
    contraction = jaxfold.contract(sources["up"], sources["norm"], sources["down"], epsilon=EPS, stacked=True)
    for leaf in jax.tree.leaves(contraction.params):
        assert spec_of(leaf) == ("data",) + (None,) * (leaf.ndim - 1)
    outputs = jax.jit(jax.vmap(jaxfold.apply, (0, None)))(contraction, CASE.x)
    assert all(right(output) for output in outputs)


def test_on_the_device_that_the_sources_are_on() -> None:
    third = jax.devices()[3]
    sources = jax.device_put(TREE, third)
    contraction = jaxfold.contract(sources["up"], sources["norm"], sources["down"], epsilon=EPS)
    assert {device for leaf in jax.tree.leaves(contraction) for device in leaf.devices()} == {third}
    uncommitted = jax.tree.map(jnp.asarray, TREE)
    contraction = jaxfold.contract(uncommitted["up"], uncommitted["norm"], uncommitted["down"], epsilon=EPS)
    jaxfold.apply(contraction, jax.device_put(CASE.x, third))  # would fail if the contraction were pinned elsewhere


def test_training_step_over_a_sharded_batch(mesh: Any) -> None:
    """The gradients of a data-parallel step are those on one device, and those of the original's two passes."""

    def loss(tree: Any, x: Any, traced: bool) -> Any:
        layers = tree["up"], tree["norm"], tree["down"]
        if traced:
            return jnp.mean(jaxfold.apply(jaxfold.contract_traced(*layers, epsilon=EPS), x) ** 2)
        return jnp.mean(jaxfold.Block(*layers, epsilon=EPS)(x) ** 2)

    one = jax.tree.map(jnp.asarray, TREE)
    expected = jax.grad(loss)(one, jnp.asarray(CASE.x), False)
    tree = jax.device_put(TREE, NamedSharding(mesh, P()))
    x = jax.device_put(CASE.x, NamedSharding(mesh, P("data")))
    sharded = jax.jit(jax.grad(loss), static_argnums=2)(tree, x, True)
    for ours, theirs in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        size = float(jnp.abs(theirs).max())
        # Sums over 32 rows and 64 features, each to 2⁻²⁴, and the conditioning of the block.
        assert float(jnp.abs(ours - theirs).max()) < 2e-5 * size


# The axes of a mesh are explicit by default in new versions of JAX: where they lie is part of an array's type.
REPLICATED: dict[str, dict[str, P]] = jax.tree.map(lambda leaf: P(), TREE)
BY_ROWS = {**REPLICATED, "up": {"kernel": P("data"), "bias": P()}, "down": {"kernel": P("data"), "bias": P()}}
BY_WIDTH = {
    **SPECS,
    "up": {"kernel": P(None, "model"), "bias": P("model")},
    "down": {"kernel": P("model"), "bias": P()},
}
BY_OUTPUTS = {**REPLICATED, "down": {"kernel": P(None, "model"), "bias": P("model")}}


@pytest.fixture
def explicit() -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def traced_loss(layers: Any, x: Any) -> Any:
    return jnp.mean(jaxfold.apply(jaxfold.contract_traced(*layers, epsilon=EPS), x) ** 2)


@pytest.mark.parametrize("rows", [P("data"), P(None, "model")], ids=["over rows", "over d"])
@pytest.mark.parametrize("specs", [BY_ROWS, BY_WIDTH, BY_OUTPUTS], ids=["rows", "width", "outputs"])
def test_explicit_axes(explicit: Any, specs: Any, rows: Any) -> None:
    """Values, and gradients as on one device; the outputs lie as the original's would."""
    tree = put(TREE, explicit, specs)
    layers = tree["up"], tree["norm"], tree["down"]
    x = jax.device_put(CASE.x, NamedSharding(explicit, rows))
    outputs = jax.jit(lambda layers, x: jaxfold.apply(jaxfold.contract_traced(*layers, epsilon=EPS), x))(layers, x)
    assert right(outputs)
    assert not right(outputs[:, ::-1])
    lies = ("data" if rows == P("data") else None, "model" if specs is BY_OUTPUTS else None, None)
    assert spec_of(outputs) == lies
    contraction = jaxfold.contract(*layers, epsilon=EPS)
    offline = jaxfold.apply(contraction, x)
    assert right(offline)
    assert spec_of(offline) == lies
    certificate = jaxfold.verify(jaxfold.Block(*layers, epsilon=EPS), contraction, x)
    assert certificate.verdict == "equal to rounding"
    ours = jax.jit(jax.grad(traced_loss, (0, 1)))(layers, x)
    theirs = jax.grad(traced_loss, (0, 1))(jax.tree.map(np.asarray, layers), CASE.x)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # Sums over 32 rows and 64 features in another order, and the conditioning of the block, as above.
        assert float(np.abs(np.asarray(one) - other).max()) < 2e-5 * float(np.abs(other).max())
    for one, source in zip(jax.tree.leaves(ours), jax.tree.leaves((layers, x)), strict=True):
        assert spec_of(one) == spec_of(source)


@pytest.mark.parametrize("specs", [BY_ROWS, BY_WIDTH, BY_OUTPUTS], ids=["rows", "width", "outputs"])
def test_contract_tree_on_explicit_axes(explicit: Any, specs: Any) -> None:
    set_mesh: Any = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # pyright: ignore[reportAttributeAccessIssue]
    with set_mesh(explicit):
        new, report = contract_tree(put(TREE, explicit, specs), PATHS, strict=True)
        assert report.rows[0].certificate is not None
        assert right(jaxfold.apply(jaxfold.Contraction(new["up"], 64, EPS, "layernorm", "direct"), CASE.x))


def test_model_on_explicit_axes(explicit: Any) -> None:
    """The model itself runs as it is spread out: its rows over devices, under its own mesh."""
    tree = put(TREE, explicit, BY_OUTPUTS)
    block = jaxfold.Block(tree["up"], tree["norm"], tree["down"], epsilon=EPS)
    contraction = jaxfold.contract(tree["up"], tree["norm"], tree["down"], epsilon=EPS)
    x = jax.device_put(CASE.x, NamedSharding(explicit, P("data")))
    certificate = jaxfold.verify(block, contraction, x, original_fn=jax.jit(block))
    assert certificate.verdict == "equal to rounding"


def test_stack_on_explicit_axes(explicit: Any) -> None:
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 4), TREE)
    for spec in (P("data"), P()):
        tree = put(stacked, explicit, jax.tree.map(lambda leaf, spec=spec: spec, stacked))
        x = jax.device_put(CASE.x, NamedSharding(explicit, P()))

        def evaluate(tree: Any, x: Any) -> Any:
            contraction = jaxfold.contract_traced(tree["up"], tree["norm"], tree["down"], epsilon=EPS, stacked=True)
            return jax.lax.scan(lambda _, block: (None, jaxfold.apply(block, x)), None, contraction)[1]

        assert all(right(output) for output in np.asarray(jax.jit(evaluate)(tree, x)))


def folded_norm(p: Any, x: Any) -> Any:
    h = x @ p["A"]
    h = h - h.mean(-1, keepdims=True)
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + EPS) @ p["W"]


RNG = np.random.default_rng(5)
FOLDED = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in {"A": (4, 48), "W": (48, 5)}.items()}
ROWS = RNG.normal(size=(16, 4)).astype(np.float32)
# Two float32 evaluations of outputs up to 20, of sums of 48 terms.
TWICE = 2e-5


def test_fold_of_a_shard_map_whose_body_has_constants(mesh: Any) -> None:
    def body(h: Any) -> Any:
        return h * 2 + jax.lax.axis_index("data").astype(h.dtype) + jnp.arange(3.0).sum()

    def fn(p: Any, x: Any) -> Any:
        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(folded_norm(p, x))

    folded = jaxfold.fold(fn, FOLDED, ROWS)
    assert [row.decision for row in folded.report.rows] == ["contracted"]
    np.testing.assert_allclose(folded.apply(folded.contract(FOLDED), ROWS), fn(FOLDED, ROWS), atol=TWICE)


def test_a_function_folded_at_the_global_shape_runs_inside_shard_map_and_outside(mesh: Any) -> None:
    folded = jaxfold.fold(folded_norm, FOLDED, ROWS)
    contracted = folded.contract(FOLDED)
    inside = jax.shard_map(folded.apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    truth = folded_norm(FOLDED, ROWS)
    np.testing.assert_allclose(inside(contracted, ROWS), truth, atol=TWICE)
    # The same shape outside: a trace of its own.
    np.testing.assert_allclose(folded.apply(contracted, ROWS[:4]), truth[:4], atol=TWICE)


def test_gradients_of_a_mean_over_devices(mesh: Any) -> None:
    folded = jaxfold.fold(folded_norm, FOLDED, ROWS)

    def gradient(function: Any) -> Any:
        loss = lambda p, x: jax.lax.pmean(jnp.mean(function(p, x) ** 2), "data")  # noqa: E731
        over = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.grad(over)(jax.tree.map(jnp.asarray, FOLDED), ROWS)

    ours = gradient(lambda p, x: folded.apply(folded.contract_traced(p), x))
    for own, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(gradient(folded_norm)), strict=True):
        np.testing.assert_allclose(own, theirs, atol=TWICE)


# Explicit axes and jax.shard_map came with JAX 0.7. Before it there is nothing to test.
if not hasattr(jax, "shard_map"):
    del (
        test_explicit_axes,
        test_contract_tree_on_explicit_axes,
        test_model_on_explicit_axes,
        test_stack_on_explicit_axes,
    )
    del test_fold_of_a_shard_map_whose_body_has_constants, test_gradients_of_a_mean_over_devices
    del test_a_function_folded_at_the_global_shape_runs_inside_shard_map_and_outside
