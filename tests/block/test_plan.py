"""Counts from shapes alone are those of the arrays that contract makes, and of the work that XLA counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.factories import make_case

FORMS = ("direct", "packed", "standard")


def _several(consumers: dict[str, tuple[int, ...]], d: int = 5, n: int = 16, **options: Any) -> tuple[Any, Any, Any]:
    case = make_case(d, n, **options)
    return case.producer, case.norm, {name: make_case(d, n, f).consumer for name, f in consumers.items()}


def _bare(d: int = 5, n: int = 16, m: int = 7) -> tuple[Any, Any, Any]:
    case = make_case(d, n, m, producer_bias=False, scale=False, offset=False, consumer_bias=False)
    return case.layers


def _without_one_bias() -> tuple[Any, Any, Any]:
    producer, norm, consumers = _several({"query": (4, 8), "key": (8,), "value": (2, 2, 3)}, scale=False)
    del consumers["key"]["bias"]
    return producer, norm, consumers


def _mixed() -> tuple[Any, Any, Any]:
    """float16 and bfloat16 meet in float32; each leaf counts with its own bytes, each coefficient with the promoted."""
    producer, norm, consumers = _several({"query": (4, 8), "key": (8,)})
    return (
        {"kernel": producer["kernel"].astype(jnp.bfloat16), "bias": producer["bias"].astype(jnp.bfloat16)},
        {key: leaf.astype(jnp.bfloat16) for key, leaf in norm.items()},
        {
            "query": {key: leaf.astype(np.float16) for key, leaf in consumers["query"].items()},
            "key": {key: leaf.astype(jnp.bfloat16) for key, leaf in consumers["key"].items()},
        },
    )


BLOCKS: dict[str, tuple[Any, Any, Any]] = {
    "all biases": make_case(5, 16, 7).layers,
    "no producer bias": make_case(5, 16, 7, producer_bias=False).layers,
    "no norm scale": make_case(5, 16, 7, scale=False).layers,
    "no norm bias": make_case(5, 16, 7, offset=False).layers,
    "no consumer bias": make_case(5, 16, 7, consumer_bias=False).layers,
    "nothing but kernels": _bare(),
    "wide": make_case(20, 8, 3).layers,
    "wide without bias": _bare(20, 8, 3),
    "n = d + 1": make_case(6, 7, 5).layers,
    "several output axes": make_case(5, 16, (4, 8)).layers,
    "several consumers": _without_one_bias(),
    "half precision": make_case(5, 16, 7).astype(np.float16).layers,
    "mixed precision": _mixed(),
}


def _stack(layers: Any, size: int = 3) -> Any:
    return jax.tree.map(lambda leaf: np.stack([leaf] * size), layers)


def _measure(tree: Any) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size for leaf in leaves), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("stacked", [False, True], ids=["one", "stack"])
@pytest.mark.parametrize("dtype", [None, "float16", "float32", "float64"])
@pytest.mark.parametrize("name", BLOCKS)
def test_parameters_and_bytes_are_those_of_the_arrays(name: str, dtype: Any, stacked: bool) -> None:
    layers = _stack(BLOCKS[name]) if stacked else BLOCKS[name]
    plan = jaxfold.plan(*layers, dtype=dtype, stacked=stacked)
    assert (plan.original.parameters, plan.original.bytes) == _measure(layers)
    for form in FORMS:
        block = jaxfold.contract(*layers, epsilon=1e-3, form=form, dtype=dtype, stacked=stacked, allow_growth=True)
        assert (plan.cost(form).parameters, plan.cost(form).bytes) == _measure(block.params)
    if stacked:
        single = jaxfold.plan(*BLOCKS[name], dtype=dtype)
        for name in ("original", *FORMS):
            three, one = (dataclasses.astuple(getattr(p, name)) for p in (plan, single))
            assert three == tuple(3 * figure for figure in one)


def test_known_counts() -> None:
    """The closed formulas of the README, and blocks whose counts are on record."""
    plan = jaxfold.plan(*make_case(82, 512, 512, rows=1).layers)
    counts = [plan.cost(form).parameters for form in ("direct", "packed")]
    assert (plan.original.parameters, *counts) == (306_176, 49_897, 46_494)
    edges = jaxfold.plan(*make_case(16, 128, 128, rows=1, producer_bias=False).layers)
    assert (edges.original.parameters, edges.direct.parameters) == (18_816, 2_432)
    grown = jaxfold.plan(*make_case(148, 128, 128, rows=1).layers)
    assert (grown.original.parameters, grown.direct.parameters) == (35_840, 38_272)
    assert edges.pays()
    assert not grown.pays()


@pytest.mark.parametrize("sizes", [(82, 512, 512), (148, 128, 128), (128, 128, 4), (4, 3, 1000)])
def test_the_standard_form_is_never_larger(sizes: tuple[int, int, int]) -> None:
    for layers in (make_case(*sizes, rows=1).layers, make_case(*sizes, rows=1, producer_bias=False).layers):
        plan = jaxfold.plan(*layers)
        assert plan.standard.parameters <= plan.original.parameters


SHAPES = ({"kernel": (5, 16), "bias": (16,)}, {"scale": (16,), "bias": (16,)})
CONSUMERS = {"single": {"kernel": (16, 4, 8), "bias": (4, 8)}, "several": {"q": {"kernel": (16, 7)}}}


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and bool(leaf) and isinstance(leaf[0], int)


@pytest.mark.parametrize("stacked", [False, True], ids=["one", "stack"])
@pytest.mark.parametrize("consumers", CONSUMERS)
def test_every_source_of_shapes_gives_the_same_plan(consumers: str, stacked: bool) -> None:
    """Bare shapes, NumPy and JAX arrays, ShapeDtypeStructs, boxed ones, tracers."""
    shapes = [*SHAPES, CONSUMERS[consumers]]
    if stacked:
        shapes = jax.tree.map(lambda shape: (3, *shape), shapes, is_leaf=_is_shape)
    arrays = jax.tree.map(lambda shape: np.ones(shape, np.float32), shapes, is_leaf=_is_shape)
    expected = jaxfold.plan(*arrays, stacked=stacked)
    structs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, arrays))
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, names=(None,) * leaf.ndim), structs)
    traced = []
    jax.jit(lambda layers: traced.append(jaxfold.plan(*layers, stacked=stacked)))(arrays)
    jax.grad(lambda layers: traced.append(jaxfold.plan(*layers, stacked=stacked)) or 0.0)(arrays)
    plans = [jaxfold.plan(*layers, stacked=stacked) for layers in (shapes, structs, boxed)]
    assert [*plans, *traced] == [expected] * 5


def test_from_a_module_that_was_never_initialised() -> None:
    module = nn.Sequential([nn.Dense(16), nn.LayerNorm(), nn.DenseGeneral((4, 8))])
    with jax.numpy_rank_promotion("allow"):
        params = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 5), np.float32))["params"]
    plan = jaxfold.plan(params["layers_0"], params["layers_1"], params["layers_2"])
    assert plan == jaxfold.plan(*SHAPES, CONSUMERS["single"])
    assert plan.original.bytes == 4 * plan.original.parameters


@pytest.mark.parametrize("name", ["all biases", "no producer bias", "mixed precision"])
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_producer_that_stays_is_counted(name: str, dtype: Any) -> None:
    """Its leaves keep their own dtype, whatever the coefficients are stored in, and its product stays."""
    layers = BLOCKS[name]
    gone, kept = (jaxfold.plan(*layers, dtype=dtype, keep_producer=keep) for keep in (False, True))
    assert kept.original == gone.original
    parameters, size = _measure(layers[0])
    flops = 2 * 5 * 16 + (16 if "bias" in layers[0] else 0)
    for form in FORMS:
        assert kept.cost(form) == gone.cost(form) + jaxfold.Cost(parameters, size, flops)


def test_a_producer_that_stays_can_decide_the_matter() -> None:
    """34→40→60 pays only if the wide activation really goes."""
    layers = make_case(34, 40, 60, rows=1).layers
    assert jaxfold.plan(*layers).pays()
    assert not jaxfold.plan(*layers, keep_producer=True).pays()


def test_pays_asks_for_both_parameters_and_flops() -> None:
    low, high = jaxfold.Cost(1, 1, 1), jaxfold.Cost(2, 2, 2)
    for parameters in (1, 2):
        for flops in (1, 2):
            plan = jaxfold.Plan(high, jaxfold.Cost(parameters, 0, flops), low, high)
            assert plan.pays() == plan.pays("direct") == (parameters == flops == 1)
            assert plan.pays("packed")
            assert not plan.pays("standard")


def _original(layers: Any, x: Any, epsilon: float, norm_type: str) -> Any:
    """As stock layers compute it, with the reciprocal root multiplied in."""
    producer, norm, consumers = layers
    h = x @ producer["kernel"]
    h = h + producer["bias"][None] if "bias" in producer else h
    if norm_type == "layernorm":
        h = h - jnp.mean(h, axis=-1, keepdims=True)
    y = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + epsilon)
    y = y * norm["scale"][None] if "scale" in norm else y
    y = y + norm["bias"][None] if "bias" in norm else y
    outputs = []
    for group in consumers.values() if "kernel" not in consumers else (consumers,):
        out = jnp.tensordot(y, group["kernel"], 1)
        outputs.append(out + group["bias"][None] if "bias" in group else out)
    return outputs


def _flops(function: Any, tree: Any, features: int) -> tuple[float, float]:
    """FLOPs per row by XLA's own count: of the program as lowered, and as compiled.

    The difference between two batches, so that what does not depend on the batch drops out.
    """
    counts = []
    for batch in (1024, 2048):
        lowered = jax.jit(function).lower(tree, jax.ShapeDtypeStruct((batch, features), np.float32))
        stages: tuple[Any, Any] = (lowered, lowered.compile())
        counts.append([stage.cost_analysis()["flops"] for stage in stages])
    first, second = np.array(counts)
    lowered, compiled = (second - first) / 1024
    return float(lowered), float(compiled)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("name", ["all biases", "nothing but kernels", "wide", "several consumers"])
def test_flops_are_those_that_xla_counts(name: str, norm_type: Any) -> None:
    """As lowered: exactly one more, the addition of epsilon, which the plan leaves out on both sides.

    As compiled: fusion may compute an element-wise value once for each of its readers. On the wide side these are the
    bias, the deviation and its multiple, at most 3n operations; on the narrow side the bias of R x̄, its multiple and
    x s, at most 2k + d; and one more for each consumer, since the scale s may be made for each.
    """
    layers = jax.tree.map(lambda leaf: leaf.astype(np.float32), BLOCKS[name])
    d, n = layers[0]["kernel"].shape
    k = min(n, d + 1)
    plan = jaxfold.plan(*layers, norm_type=norm_type)
    lowered, compiled = _flops(lambda tree, x: _original(tree, x, 1e-3, norm_type), layers, d)
    assert lowered == plan.original.flops + 1
    assert 0 <= compiled - plan.original.flops <= 3 * n + 4
    for form in FORMS:
        block = jaxfold.contract(*layers, epsilon=1e-3, norm_type=norm_type, form=form, allow_growth=True)
        lowered, compiled = _flops(jaxfold.apply, block, d)
        assert lowered == plan.cost(form).flops + 1
        assert 0 <= compiled - plan.cost(form).flops <= 2 * k + d + 4


def test_prints_a_table() -> None:
    producer, norm, consumer = make_case(82, 512, 512, rows=1).layers
    plan = jaxfold.plan(producer, norm, consumer)
    head, _, *rows = str(plan).splitlines()
    assert head.split() == ["parameters", "bytes", "FLOPs", "per", "row", "pays"]
    assert rows[0].split() == ["original", "306,176", "2,449,408", f"{plan.original.flops:,}"]
    assert rows[1].split() == ["direct", "49,897", "399,176", f"{plan.direct.flops:,}", "yes"]
    assert rows[2].split() == ["packed", "46,494", "371,952", f"{plan.packed.flops:,}", "yes"]
    assert rows[3].split()[0] == "standard"
    grown = str(jaxfold.plan(*make_case(148, 128, 128, rows=1).layers))
    assert grown.splitlines()[3].split()[-1] == "no"
    assert str(plan).splitlines()[-1] == f"training through contract_traced pays from batch {plan.training_batch}"
    assert grown.splitlines()[-1] == "training through contract_traced pays at no batch"


def _training_batch(d: int, n: int, m: int, **options: Any) -> int | None:
    return jaxfold.plan({"kernel": (d, n), "bias": (n,)}, None, {"kernel": (n, m)}, **options).training_batch


@pytest.mark.parametrize(
    ("size", "measured"),
    [((16, 1024, 256), 39), ((17, 512, 2048), 28), ((82, 512, 512), 127), ((128, 2048, 512), 183)],
)
def test_the_batch_from_which_training_pays(size: tuple[int, int, int], measured: int) -> None:
    """Within a factor of 2 of break-even batches that benchmarks.training measured on two CPU cores."""
    assert measured / 2 < (_training_batch(*size) or 0) < 2 * measured


def test_training_that_never_pays() -> None:
    """Wide inputs cost more on every row; so may a producer that has to stay."""
    assert _training_batch(2000, 128, 1000) is None
    assert _training_batch(16, 128, 1, keep_producer=True) != _training_batch(16, 128, 1)
    assert jaxfold.plan({"kernel": (2000, 128)}, None, {"kernel": (128, 1000)}).training_batch is None
    stack = jaxfold.plan({"kernel": (3, 16, 128)}, None, {"kernel": (3, 128, 64)}, stacked=True)
    assert stack.training_batch == jaxfold.plan({"kernel": (16, 128)}, None, {"kernel": (128, 64)}).training_batch


def test_training_batch_by_hand() -> None:
    """The model of the module's docstring for d, n, m = 16, 512, 1, so p = 17, term by term.

    Once: 52,224 + 1,183,744 + 16,377 + 500,000 = 1,752,345. Saved by a row: 32,768 + 3,072 + 30,720, less 102 + 1,156 +
    510: this is 64,792, and without the producer's 32,768 it is 32,024. The quotients are 27.05 and 54.7.
    """
    assert _training_batch(16, 512, 1) == 28
    assert _training_batch(16, 512, 1, keep_producer=True) == 55
