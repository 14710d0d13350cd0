"""What is around the norms: calls, remat, scans, effects, random bits, trees, other shapes, transforms."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import jaxfold
from tests.fold.checks import FLOAT64, check, decisions, difference, layer_norm, named, primitives, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

X = np.random.default_rng(2).normal(size=(6, 4))
SHAPES = {"A": (4, 48), "a": (48,), "W": (48, 3), "K": (4, 4)}
LAYERS = {"A": (3, 4, 48), "a": (3, 48), "V": (3, 48, 4)}
REMAT = ("checkpoint", "remat", "remat2")


def block(p: Any, x: Any) -> Any:
    return layer_norm(x @ p["A"] + p["a"]) @ p["W"]


def step(x: Any, layer: Any) -> Any:
    return x + jnp.tanh(layer_norm(jnp.sin(x) @ layer["A"] + layer["a"]) @ layer["V"]), x.sum(-1)


def inner(fn: Any, *arguments: Any, of: tuple[str, ...]) -> list[Any]:
    """The equations of this kind."""
    return [e for e in primitives(jax.make_jaxpr(fn)(*arguments)) if e.primitive.name in of]


def test_jit_is_inlined() -> None:
    params = weights(**SHAPES)
    fn = jax.jit(lambda p, x: jax.jit(layer_norm)(jax.jit(jnp.matmul)(x, p["A"])) @ p["W"])
    folded = check(fn, params, X)
    assert decisions(folded) == ["contracted"]
    assert folded.report.rows[0].width == 48


def test_remat_stays() -> None:
    """One equation of the same policy, with the contraction inside; what is wide is gone."""
    params = weights(**SHAPES)
    policy = jax.checkpoint_policies.dots_saveable
    fn = jax.checkpoint(lambda p, x: jnp.tanh(block(p, x)), policy=policy)
    folded = check(fn, params, X)
    assert decisions(folded) == ["contracted"]
    (equation,) = inner(folded.apply, folded.contract(params), X, of=REMAT)
    assert equation.params["policy"] is policy
    body = primitives(equation.params["jaxpr"])
    assert sum(e.primitive.name == "dot_general" for e in body) == 2
    assert not any(48 in v.aval.shape for e in body for v in (*e.invars, *e.outvars) if hasattr(v, "aval"))


SCANS = {
    "forwards": lambda p, x: jax.lax.scan(step, x, p),
    "in reverse": lambda p, x: jax.lax.scan(step, x, p, reverse=True),
    "unrolled": lambda p, x: jax.lax.scan(step, x, p, unroll=3),
    "of remat": lambda p, x: jax.lax.scan(jax.checkpoint(step), x, p),
    "in remat": jax.checkpoint(lambda p, x: jax.lax.scan(step, x, p)),
    "with inputs": lambda p, x: jax.lax.scan(lambda c, z: step(c + z[1], z[0]), x, (p, jnp.stack([x, 2 * x, -x]))),
}


@pytest.mark.parametrize("name", SCANS)
def test_scan_over_layers(name: str) -> None:
    """One scan over the coefficients of all layers."""
    params = weights(**LAYERS)
    folded = check(SCANS[name], params, X)
    assert decisions(folded) == ["contracted"]
    assert folded.report.rows[0].stack == 3
    contracted = folded.contract(params)
    blocks = jax.tree.leaves(contracted["blocks"])
    assert blocks
    assert all(leaf.shape[0] == 3 for leaf in blocks)
    found = inner(folded.apply, contracted, X, of=("scan", *REMAT))
    if found[0].primitive.name in REMAT:
        found = [e for e in primitives(found[0].params["jaxpr"]) if e.primitive.name == "scan"]
    (scan,) = found
    assert scan.params["length"] == 3
    assert scan.params["reverse"] == (name == "in reverse")
    assert [e.primitive.name in REMAT for e in primitives(scan.params["jaxpr"])].count(True) == (name == "of remat")
    swapped = {key: leaf[::-1] for key, leaf in params.items()}  # a control: the order of the layers matters
    assert difference(folded.apply(folded.contract(swapped), X), SCANS[name](params, X)) > 1e-3


def test_scan_with_constants() -> None:
    """The layer is shared by all steps: contracted once, not once a step."""
    params = weights(A=(4, 48), a=(48,), V=(48, 4))
    fn = lambda p, x: jax.lax.scan(lambda c, _: (step(c, p)[0], None), x, None, length=5)[0]  # noqa: E731
    folded = check(fn, params, X)
    assert decisions(folded) == ["contracted"]
    assert folded.report.parameters[1] < folded.report.parameters[0] / 3
    assert named(folded.apply, folded.contract(params), X).count("scan") == 1


def test_scan_of_time() -> None:
    """A recurrent network: parameters constant, inputs scanned over, and both in one body."""
    params = weights(**SHAPES)

    def fn(p: Any, x: Any) -> Any:
        xs = jnp.stack([x, x**2])
        return jax.lax.scan(lambda c, z: (jnp.tanh(c @ p["K"] + z), block(p, c)), x, xs)

    assert decisions(check(fn, params, X)) == ["contracted"]


@jax.custom_jvp
def soft(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda primals, tangents: (soft(*primals), tangents[0] * 7.0))  # recognisably not the derivative


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x * 2


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (g * 11.0,))


def test_rebound_whole() -> None:
    """cond, while and custom derivatives beside a norm that is contracted, their own rules included."""
    params = weights(**SHAPES)

    def fn(p: Any, x: Any) -> Any:
        y = jax.lax.cond(x[0, 0] > 0, lambda y: y * 2, jnp.sin, soft(block(p, x)))
        return jax.lax.fori_loop(0, 3, lambda _, z: z * 0.5 + y, y), doubled(y) @ p["W"].T

    folded = check(fn, params, X)
    assert decisions(folded) == ["contracted"]
    names = named(folded.apply, folded.contract(params), X)
    original = named(fn, params, X)
    for name in ("cond", "while", "scan", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"):
        assert names.count(name) == original.count(name)
    assert {"cond", "custom_jvp_call"} <= set(names)
    loss = lambda out: sum(jnp.sum(leaf) for leaf in out)  # noqa: E731
    ours = jax.grad(lambda p: loss(folded.apply(folded.contract_traced(p), X)))(params)
    assert difference(ours, jax.grad(lambda p: loss(fn(p, X)))(params)) < 1e-11


@pytest.mark.parametrize("jit", [False, True])
def test_effects(jit: bool) -> None:
    """Callbacks keep their number, their order and what they see, between and inside of what is contracted."""
    params = weights(**SHAPES)
    seen: list[Any] = []

    def fn(p: Any, x: Any) -> Any:
        h = x @ p["A"] + p["a"]
        jax.debug.callback(lambda v: seen.append(("first", np.asarray(v))), h.mean(), ordered=True)
        y = layer_norm(h) @ p["W"]
        jax.debug.callback(lambda v: seen.append(("second", np.asarray(v))), y[0, 0], ordered=True)
        jax.debug.callback(lambda v: seen.append(("parameter", np.asarray(v))), p["K"][0, 0], ordered=True)
        return jnp.tanh(y)

    def run(f: Any, *arguments: Any) -> list[Any]:
        seen.clear()
        jax.block_until_ready((jax.jit(f) if jit else f)(*arguments))
        jax.effects_barrier()
        return list(seen)

    folded = jaxfold.fold(fn, params, X)
    assert decisions(folded) == ["contracted"]
    original, ours = run(fn, params, X), run(folded.apply, folded.contract(params), X)
    assert [name for name, _ in ours] == [name for name, _ in original] == ["first", "second", "parameter"]
    assert difference([v for _, v in ours], [v for _, v in original]) < FLOAT64


def test_effects_inside_a_scan() -> None:
    """A scan with effects is left whole: once for each layer, in their order."""
    params = weights(**LAYERS)
    seen: list[float] = []

    def noisy(x: Any, layer: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), layer["a"][0], ordered=True)
        return step(x, layer)

    folded = jaxfold.fold(lambda p, x: jax.lax.scan(noisy, x, p), params, X)
    assert decisions(folded) == ["skipped"]
    assert folded.report.rows[0].reason
    jax.block_until_ready(folded.apply(folded.contract(params), X))
    jax.effects_barrier()
    assert seen == [float(v) for v in params["a"][:, 0]]


def test_prints(capfd: pytest.CaptureFixture[str]) -> None:
    params = weights(**SHAPES)

    def fn(p: Any, x: Any) -> Any:
        jax.debug.print("a {}", x.shape[0], ordered=True)
        y = block(p, x)
        jax.debug.print("b {}", jnp.isfinite(y).all(), ordered=True)
        return y

    folded = jaxfold.fold(fn, params, X)
    folded.contract(params)
    jax.effects_barrier()
    assert capfd.readouterr().out == ""  # neither folding nor contracting runs them
    jax.block_until_ready(jax.jit(folded.apply)(folded.contract(params), X))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["a", "6", "b", "True"]


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_random_bits(key: Any) -> None:
    """Dropout drops the same entries."""
    params = weights(**SHAPES)

    def fn(p: Any, x: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        y = block(p, x) * jax.random.bernoulli(first, 0.5, (6, 3))
        return y, jax.random.normal(second, (4,))

    folded = check(fn, params, X, key(3))
    assert decisions(folded) == ["contracted"]
    mask = np.asarray(folded.apply(folded.contract(params), X, key(3))[0]) != 0
    assert 0 < mask.mean() < 1
    assert (mask == (np.asarray(fn(params, X, key(3))[0]) != 0)).all()


def test_keys_among_the_parameters() -> None:
    params = {**weights(**SHAPES), "key": jax.random.key(0), "seed": jax.random.PRNGKey(1)}
    fn = lambda p, x: block(p, x) * jax.random.bernoulli(p["key"], 0.5, (6, 3)) + jax.random.normal(p["seed"], (3,))  # noqa: E731
    assert decisions(check(fn, params, X)) == ["contracted"]


def bits(key: Any) -> Any:
    return jax.random.bernoulli(key, 0.5, (6, 3))


TYPED, KEYS, RBG = jax.random.key(7), jax.random.split(jax.random.key(8), 3), jax.random.key(9, impl="rbg")
CLOSED = {
    "typed": lambda p, x: block(p, x) * bits(TYPED),
    "raw": lambda p, x: block(p, x) * bits(jax.random.PRNGKey(7)),
    "other generator": lambda p, x: block(p, x) * bits(RBG),
    "one of several": lambda p, x: block(p, x) * bits(KEYS[1]),
    "each of several": lambda p, x: block(p, x) * jax.vmap(bits)(KEYS).sum(0),
    "made inside": lambda p, x: block(p, x) * bits(jax.random.fold_in(jax.random.key(7), 3)),
    "in jit": lambda p, x: jax.jit(lambda x: block(p, x) * bits(TYPED))(x),
    "in remat": lambda p, x: jax.checkpoint(lambda x: block(p, x) * bits(jax.random.split(TYPED)[0]))(x),
    "in a scan": lambda p, x: jax.lax.scan(lambda c, k: (c + block(p, x) * bits(k), None), jnp.zeros((6, 3)), KEYS)[0],
    "picked": lambda p, x: block(p, x) * bits(jnp.where(x.shape[0] > 4, KEYS[0], KEYS[2])),
}


@pytest.mark.parametrize("name", CLOSED)
def test_keys_among_the_constants(name: str) -> None:
    """A key is no number: nothing is computed from it before the function runs, and the bits are the same."""
    params = weights(**SHAPES)
    folded = check(CLOSED[name], params, X)
    assert decisions(folded) == ["contracted"]
    mask = np.asarray(folded.apply(folded.contract(params), X)) != 0
    assert (mask == (np.asarray(CLOSED[name](params, X)) != 0)).all()
    assert not mask.all(), "the key is read"


@pytest.mark.parametrize("key", [TYPED, KEYS, RBG, jax.random.PRNGKey(1)], ids=["typed", "several", "rbg", "raw"])
def test_keys_that_nothing_reads(key: jax.Array) -> None:
    params = {**weights(**SHAPES), "key": key}
    folded = check(block, params, X)
    assert decisions(folded) == ["contracted"]
    assert len(jax.tree.leaves(folded.contract(params))) == 2
    check(lambda p, x: jnp.tanh(x @ p["K"]), params, X)  # also where there is nothing to contract


def test_keys_that_are_returned() -> None:
    """Typed keys are returned as such, whether they are constants, parameters or made from either."""
    params = {**weights(**SHAPES), "key": KEYS}

    def fn(p: Any, x: Any) -> Any:
        return block(p, x), TYPED, p["key"], jax.random.split(TYPED), jax.random.fold_in(p["key"][1], 2)

    folded = jaxfold.fold(fn, params, X)
    outputs, truth = folded.apply(folded.contract(params), X), fn(params, X)
    assert difference(outputs[0], truth[0]) < FLOAT64
    for ours, theirs in zip(outputs[1:], truth[1:], strict=True):
        assert ours.dtype == theirs.dtype
        assert (jax.random.key_data(ours) == jax.random.key_data(theirs)).all()


UNTOUCHED = {
    "no norm": lambda p, x: {"y": jnp.tanh(x @ p["A"] + p["a"]) @ p["W"]},
    "post-LN": lambda p, x: layer_norm(x + jnp.tanh(x @ p["K"])) @ p["A"],
    "jit and remat": jax.jit(lambda p, x: jax.checkpoint(lambda x: jnp.tanh(x @ p["A"]) @ p["W"])(x)),
    "scan": lambda p, x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ p["K"]), c.sum()), x, None, length=3),
    "integers": lambda p, x: (x > 0).astype(int).sum(0),
}


def texts(jaxpr: Any) -> list[str]:
    """Each equation's primitive, its parameters that are no jaxprs, and the shapes it reads and writes."""
    found = []
    for e in jaxpr.eqns:
        plain = {key: value for key, value in e.params.items() if not hasattr(value, "eqns")}
        plain = {key: value for key, value in plain.items() if not hasattr(value, "jaxpr") and not callable(value)}
        shapes = [str(v.aval) for v in (*e.invars, *e.outvars)]
        found.append(f"{e.primitive.name} {plain if e.primitive.name not in ('jit', 'pjit') else ''} {shapes}")
        for value in e.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found += texts(getattr(value, "jaxpr", value))
    return found


@pytest.mark.parametrize("name", UNTOUCHED)
def test_untouched(name: str) -> None:
    """The same equations in the same order."""
    params, fn = weights(**SHAPES), UNTOUCHED[name]
    folded = check(fn, params, X, tolerance=1e-300)
    ours = jax.make_jaxpr(folded.apply)(folded.contract(params), X)
    assert texts(ours.jaxpr) == texts(jax.make_jaxpr(fn)(params, X).jaxpr)
    assert folded.contract(params)["blocks"] == {}


@pytest.mark.parametrize("kind", ["block", "scan", "remat"])
def test_folding_again(kind: str) -> None:
    """Changes nothing more."""
    fn = {"block": block, "remat": jax.checkpoint(block), "scan": SCANS["forwards"]}[kind]
    params = weights(**(LAYERS if kind == "scan" else SHAPES))
    folded = jaxfold.fold(fn, params, X)
    assert "contracted" in decisions(folded)
    contracted = folded.contract(params)
    again = check(folded.apply, contracted, X)
    assert again.report.contracted == ()
    assert again.report.parameters[0] == again.report.parameters[1]
    second = again.contract(contracted)
    assert named(again.apply, second, X) == named(folded.apply, contracted, X)


def test_output_trees() -> None:
    params = weights(**SHAPES)
    fn = lambda p, x: {"a": [block(p, x["in"][0]), None], "b": (), "c": flax.core.freeze({"d": x["in"][1]})}  # noqa: E731
    inputs = {"in": (X, jnp.float32(2))}
    folded = check(fn, params, inputs)
    assert decisions(folded) == ["contracted"]


BATCH = {
    "rows": lambda p, x: block(p, x),
    "position": lambda p, x: layer_norm(x @ p["A"] + p["pos"][: x.shape[-2]]) @ p["W"],
    "scaled by a size": lambda p, x: layer_norm(x @ p["A"] / x.shape[-2]) @ p["W"],
    "row of a table by size": lambda p, x: layer_norm(x @ p["A"] + p["pos"][x.shape[-2] - 1]) @ p["W"],
    "branch on a size": lambda p, x: block(p, x) if x.shape[-2] > 3 else layer_norm(x @ p["A"] - p["a"]) @ p["W"],
}
OTHERS = {
    "3": X[:3],
    "1": X[:1],
    "0": X[:0],
    "6 again": -X,
    "2, 3": X.reshape(2, 3, 4),
    "float32": X.astype(np.float32),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", BATCH)
def test_other_inputs(name: str, other: str) -> None:
    """Coefficients are of one set of shapes; for others they serve or are refused, and are never wrong."""
    params, fn, x = weights(**SHAPES, pos=(6, 48)), BATCH[name], OTHERS[other]
    folded = jaxfold.fold(fn, params, X)
    contracted = folded.contract(params)
    try:
        result = folded.apply(contracted, x)
    except jaxfold.ShapeError:
        assert name != "rows" or other == "0"
        return
    assert difference(result, fn(params, x)) < (1e-5 if other == "float32" else FLOAT64)


def test_function_of_the_dtype() -> None:
    """Likewise for another dtype of the inputs."""
    fn = lambda p, x: layer_norm(x @ p["A"] + (p["a"] if x.dtype == np.float64 else -p["a"])) @ p["W"]  # noqa: E731
    params = weights(**SHAPES)
    folded = jaxfold.fold(fn, params, X)
    narrow = X.astype(np.float32)
    try:
        result = folded.apply(folded.contract(params), narrow)
    except jaxfold.JaxfoldError:
        return
    assert difference(result, fn(params, narrow)) < 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    A: Any
    a: Any
    W: Any


def containers() -> dict[str, tuple[Any, Any]]:
    p = weights(A=(4, 48), a=(48,), W=(48, 3))
    module = nnx.Module()
    for key, leaf in p.items():
        setattr(module, key, nnx.Param(leaf))
    graph, state = nnx.split(module)
    nested = {"up": {"kernel": p["A"], "bias": p["a"]}, "down": {"kernel": p["W"]}}

    def of_nested(q: Any, x: Any) -> Any:
        return layer_norm(x @ q["up"]["kernel"] + q["up"]["bias"]) @ q["down"]["kernel"]

    def block_of(m: Any, x: Any) -> Any:
        return layer_norm(x @ m.A[...] + m.a[...]) @ m.W[...]

    return {
        "nested": (of_nested, nested),
        "FrozenDict": (of_nested, flax.core.freeze(nested)),
        "list": (lambda q, x: layer_norm(x @ q[0] + q[1][0]) @ q[2], [p["A"], (p["a"],), p["W"]]),
        "dataclass": (lambda q, x: layer_norm(x @ q.A + q.a) @ q.W, Params(**p)),
        "State": (lambda q, x: block_of(nnx.merge(graph, q), x), state),
        "integer keys": (lambda q, x: layer_norm(x @ q[0] + q[1]) @ q[2], dict(enumerate(p.values()))),
        "None inside": (lambda q, x: layer_norm(x @ q["A"] + q["a"]) @ q["W"], {**p, "z": None}),
        "NumPy": (lambda q, x: layer_norm(x @ q["A"] + q["a"]) @ q["W"], jax.tree.map(np.asarray, p)),
        "single leaf": (lambda q, x: layer_norm(x @ q) @ q.T, p["A"]),
    }


@pytest.mark.parametrize("name", sorted(containers()))
def test_trees_of_parameters(name: str) -> None:
    fn, params = containers()[name]
    assert decisions(check(fn, params, X)) == ["contracted"]


def test_paths_that_read_alike() -> None:
    """Two leaves ``a/b``: one of a key with a slash, one nested."""
    k = weights(k=(3, 3), l=(3, 3))
    params = {**weights(**SHAPES), "q/b": k["k"], "q": {"b": k["l"]}}

    def fn(p: Any, x: Any) -> Any:
        y = jnp.tanh(jnp.tanh(block(p, x)) @ p["q/b"])
        return y @ jnp.tanh(p["q"]["b"]) + jnp.sin(x[:, :3]) @ p["q"]["b"]

    check(fn, params, X)


def test_shapes_alone() -> None:
    """Folded with ShapeDtypeStructs: the same as with arrays."""
    params = weights(**SHAPES)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    folded = jaxfold.fold(block, shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert folded.report.parameters == jaxfold.fold(block, params, X).report.parameters
    assert difference(folded.apply(folded.contract(params), X), block(params, X)) < FLOAT64
    with pytest.raises(jaxfold.ConcretenessError):
        folded.contract(shapes)


def test_transforms_of_apply() -> None:
    params = weights(**SHAPES)
    folded = jaxfold.fold(block, params, X)
    contracted = folded.contract(params)
    truth = block(params, X)
    assert difference(jax.jit(folded.apply)(contracted, X), truth) < FLOAT64
    assert difference(jax.vmap(folded.apply, (None, 0))(contracted, X), truth) < FLOAT64
    stacked = np.stack([X, 2 * X])
    assert difference(jax.vmap(folded.apply, (None, 0))(contracted, stacked), block(params, stacked)) < FLOAT64
    by_input = [jax.grad(lambda x, f=f, p=p: jnp.sum(jnp.sin(f(p, x))))(jnp.asarray(X))
                for f, p in ((folded.apply, contracted), (block, params))]  # fmt: skip
    assert difference(*by_input) < 1e-11
    jax.grad(lambda c: jnp.sum(folded.apply(c, X)))(contracted)  # fine-tuning of the coefficients themselves
    assert difference(jax.checkpoint(folded.apply)(contracted, X), truth) < FLOAT64


def test_export() -> None:
    """Lowered for machines that are not here."""
    params = weights(**LAYERS)
    folded = jaxfold.fold(SCANS["of remat"], params, X)
    contracted = folded.contract(params)
    exported = export.export(jax.jit(folded.apply), platforms=("cpu", "cuda", "tpu"))(contracted, X)
    loaded = export.deserialize(exported.serialize())
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    assert difference(loaded.call(contracted, X), SCANS["of remat"](params, X)) < FLOAT64
    traced = jax.jit(lambda p, x: folded.apply(folded.contract_traced(p), x))
    assert export.export(traced, platforms=("cuda", "tpu"))(params, X).mlir_module_serialized


def test_wrong_arguments() -> None:
    """Trees that do not fit are refused with their paths, not looked up by chance."""
    params = weights(**SHAPES)
    folded = jaxfold.fold(lambda p, x: jnp.tanh(block(p, x)) @ p["K"][:3], params, X)
    with pytest.raises(jaxfold.StructureError):
        folded.contract({key: leaf for key, leaf in params.items() if key != "W"})
    with pytest.raises(jaxfold.ShapeError, match="W"):
        folded.contract({**params, "W": params["W"][:-1]})
    with pytest.raises(jaxfold.ConcretenessError):
        jax.jit(folded.contract)(params)
    with pytest.raises(jaxfold.CoefficientError, match="a"):
        folded.contract({**params, "a": params["a"].at[0].set(jnp.nan)})
    with pytest.raises(jaxfold.DtypeError, match="W: got dtype float32; expected dtype float64, as it was folded with"):
        folded.contract({**params, "W": params["W"].astype(np.float32)})
    with pytest.raises(jaxfold.DtypeError, match="W: got dtype float32"):
        folded.contract_traced({**params, "W": params["W"].astype(np.float32)})


def test_contracted_of_another_kind() -> None:
    """What is missing and what has no place, by name."""
    params = weights(**SHAPES)
    folded = jaxfold.fold(lambda p, x: jnp.tanh(block(p, x)) @ p["K"][:3], params, X)
    contracted = folded.contract(params)
    both = r"; expected keys 'blocks', 'params'\. Pass what contract returned\."
    wrong = {
        r"^contracted: got no keys 'blocks', 'params' and the unknown key 'a'" + both: {"a": 1},
        r"^contracted: got no keys 'blocks', 'params' and the unknown keys 'A', 'K', 'W', 'a'" + both: params,
        r"^contracted: got no key 'blocks'" + both: {"params": contracted["params"]},
        r"^contracted: got the unknown key 'step'" + both: {**contracted, "step": 3},
        r"^contracted: got a list; expected a mapping with keys 'blocks', 'params'\.": [contracted],
        r"^contracted\['params'\]: got no key 'K'; expected key 'K'\.": {**contracted, "params": {}},
        r"^contracted\['params'\]: got a NoneType; expected a mapping with key 'K'\.": {**contracted, "params": None},
        r"^contracted\['blocks'\]: got no keys '0', '1'; expected keys '0', '1'\.": {**contracted, "blocks": {}},
        r"^contracted\['blocks'\]\['0'\]: got no kernel": {**contracted, "blocks": {"0": {}, "1": {}}},
    }
    for message, tree in wrong.items():
        with pytest.raises(jaxfold.StructureError, match=message):
            folded.apply(tree, X)  # pyright: ignore[reportArgumentType]
    frozen = flax.core.freeze(contracted)  # as some checkpoints restore it
    assert difference(folded.apply(frozen, X), folded.apply(contracted, X)) == 0.0
    idle = jaxfold.fold(lambda p, x: jnp.tanh(x @ p["K"]), params, X)
    with pytest.raises(jaxfold.StructureError, match=r"\['blocks'\]: got the unknown key '0'; expected no keys"):
        idle.apply({**idle.contract(params), "blocks": {"0": {}}}, X)


def test_inputs_of_another_tree() -> None:
    """A function that takes them folds otherwise, or as before; one that doesn't has an error of its own."""
    params = weights(**SHAPES)
    folded = jaxfold.fold(lambda p, x: block(p, x[0] if isinstance(x, tuple) else x), params, X)
    contracted = folded.contract(params)
    assert difference(folded.apply(contracted, (X, X)), block(params, X)) < FLOAT64
    with pytest.raises(TypeError, match="dict"):
        folded.apply(contracted, {"x": X})


def test_parameters_of_another_dtype() -> None:
    """Folded in float64 and given float32, or the reverse: refused, or as the function would do it."""
    params = weights(**SHAPES)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    x = X.astype(np.float32)
    folded = jaxfold.fold(block, params, x)
    try:
        result = folded.apply(folded.contract(narrow), x)
    except jaxfold.JaxfoldError:
        return
    truth = block(narrow, x)
    assert result.dtype == truth.dtype


# How a bias is brought to the rank of what it is added to.
RANKS: dict[str, Any] = {
    "as it is": lambda bias, like: bias[0],
    "reshaped": lambda bias, like: bias.reshape((1,) * (like.ndim - 1) + (-1,)),
    "expanded": lambda bias, like: jnp.expand_dims(bias[0], tuple(range(like.ndim - 1))),
    "squeezed": lambda bias, like: bias if like.ndim > 1 else jnp.squeeze(bias, 0),
}


@pytest.mark.parametrize("shape", [(0, 4), (4,), (1, 4), (2, 0, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("first", [(6, 4), (4,)])
@pytest.mark.parametrize("rank", RANKS)
def test_batches_of_any_size_and_rank(rank: str, first: Any, shape: Any) -> None:
    """An empty one, and none, too: contracted and centred."""
    params = weights(A=(4, 64), a=(1, 64), g=(64,), W=(64, 5), B=(5, 32), b=(1, 32), V=(32, 3))

    def affine(x: Any, kernel: Any, bias: Any) -> Any:
        h = x @ kernel
        return h + RANKS[rank](bias, h)

    def fn(p: Any, x: Any) -> Any:
        h = (layer_norm(affine(x, p["A"], p["a"])) * p["g"]) @ p["W"]
        return jnp.tanh(layer_norm(affine(jnp.tanh(h), p["B"], p["b"]))) @ p["V"]

    folded = jaxfold.fold(fn, params, np.ones(first))
    assert [row.decision for row in folded.report.rows] == ["contracted", "centred"]
    x = np.random.default_rng(5).normal(size=shape)
    got, expected = folded.apply(folded.contract(params), x), fn(params, x)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_batches_without_rows() -> None:
    """At that size no FLOPs are saved, so the function folds otherwise; but there is nothing to compute either."""
    model = nn.Sequential(
        [nn.Dense(64), nn.LayerNorm(), nn.Dense(8), jnp.tanh, nn.Dense(64), nn.LayerNorm(), nn.Dense(3)]
    )
    variables = model.init(jax.random.key(0), X)
    folded, empty = (jaxfold.fold(model.apply, variables, x) for x in (X, X[:0]))
    assert set(folded.contract(variables)["blocks"]) != set(empty.contract(variables)["blocks"])
    for shape in ((0, 4), (2, 0, 4)):
        got = folded.apply(folded.contract(variables), np.zeros(shape))
        assert (got.shape, got.dtype) == ((*shape[:-1], 3), np.float64)


def test_axes_in_another_order_are_other_coefficients() -> None:
    """A reshape that reads its axes in another order leaves all sizes as they are, and is another function."""
    params = weights(A=(4, 4), W=(4, 64), V=(64, 3))

    def fn(p: Any, x: Any) -> Any:
        kernel = jax.lax.reshape(p["A"], (4, 4), dimensions=(1, 0) if len(x) > 2 else None)
        return layer_norm(x @ (kernel @ p["W"])) @ p["V"]

    folded = jaxfold.fold(fn, params, X)
    assert [row.decision for row in folded.report.rows] == ["contracted"]
    with pytest.raises(jaxfold.ShapeError, match="folds otherwise"):
        folded.apply(folded.contract(params), X[:2])


def test_inputs_that_are_folded_otherwise_are_shown() -> None:
    params = weights(**SHAPES)
    folded = jaxfold.fold(lambda p, x: block(p, x) if len(x) > 2 else jnp.tanh(x) @ p["K"], params, X)
    with pytest.raises(
        jaxfold.ShapeError, match=r"inputs: got float64\[2,4\], for which .* like float64\[6,4\]\. The co"
    ):
        folded.apply(folded.contract(params), X[:2])


OTHER_TREES: dict[str, tuple[Any, str]] = {
    "a level less": (lambda v: v["params"], "got nothing at 'params' and the unknown 'A'; expected the tree that"),
    "a leaf less": (lambda v: {"params": {"A": v["params"]["A"]}}, r"got nothing at 'params/W'; expected the tree"),
    "a leaf more": (lambda v: {"params": v["params"] | {"z": X}}, r"got the unknown 'params/z'; expected the tree"),
    "another mapping": (flax.core.freeze, "got the same leaves in other containers, FrozenDict in place of dict;"),
    "another container": (lambda v: (v["params"],), "got nothing at 'params' and the unknown '0';"),
    "nothing beside": (
        lambda v: {**v, "none": None},
        "got the same leaves, but a dict with other static fields or empty",
    ),
}


@pytest.mark.parametrize("name", OTHER_TREES)
@pytest.mark.parametrize("method", ["contract", "contract_traced"])
def test_other_trees(name: str, method: str) -> None:
    """The first difference is named, not both trees in whole."""
    change, message = OTHER_TREES[name]
    variables = {"params": weights(A=(4, 64), g=(64,), W=(64, 3))}
    fn = lambda v, x: (layer_norm(x @ v["params"]["A"]) * v["params"]["g"]) @ v["params"]["W"]  # noqa: E731
    folded = jaxfold.fold(fn, variables, X)
    with pytest.raises(jaxfold.StructureError, match=f"params: {message}") as raised:
        getattr(folded, method)(change(variables))
    assert len(str(raised.value)) < 250


def test_tracers_are_told_what_takes_them() -> None:
    params = weights(A=(4, 64), W=(64, 3))
    folded = jaxfold.fold(lambda p, x: layer_norm(x @ p["A"]) @ p["W"], params, X)
    with pytest.raises(jaxfold.ConcretenessError, match=r"Inside them use Folded\.contract_traced\."):
        jax.jit(folded.contract)(params)
