"""Deployment: an artefact of jax.export, called where jaxfold is not installed."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxfold
from tests.factories import make_case
from tests.reference import row_errors, two_pass

CASE = make_case(8, 64, (4, 6), dtype=np.float32)
KEY = make_case(8, 64, 5, seed=3, dtype=np.float32).consumer
EPS = 1e-3
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# float32: a dozen roundings of 2⁻²⁴ and sums of some 10 terms.
FLOAT32 = 5e-6

SERVER = """
import sys
sys.modules["jaxfold"] = None  # an import of it would fail
import jax.numpy as jnp, numpy as np
from jax import export
jnp.linalg.cholesky(jnp.eye(2))  # before JAX 0.7 an artefact does not load LAPACK by itself
blob, inputs, outputs = sys.argv[1:]
exported = export.deserialize(open(blob, "rb").read())
with np.load(inputs) as given:
    results = [exported.call(given[name]) for name in given.files]
flat = {f"{index}/{name}": value for index, result in enumerate(results)
        for name, value in (result.items() if isinstance(result, dict) else [("", result)])}
np.savez(outputs, **flat)
assert "jaxfold" not in {name for name, module in sys.modules.items() if module is not None}
"""


def serve(exported: Any, batches: list[np.ndarray], folder: pathlib.Path) -> dict[str, np.ndarray]:
    """What a process without jaxfold returns for each batch."""
    (folder / "block").write_bytes(exported.serialize())
    np.savez(folder / "inputs.npz", *batches)
    command = [sys.executable, "-c", SERVER, *(str(folder / name) for name in ("block", "inputs.npz", "outputs.npz"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "outputs.npz") as outputs:
        return dict(outputs)


def symbolic(features: int = 8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(export.symbolic_shape(f"batch, {features}"), np.float32)


@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
def test_served_without_jaxfold(form: Any, tmp_path: pathlib.Path) -> None:
    """One artefact for four platforms and any batch."""
    block = jaxfold.contract(*CASE.layers, epsilon=EPS, form=form)
    exported = export.export(jax.jit(functools.partial(jaxfold.apply, block)), platforms=PLATFORMS)(symbolic())
    assert exported.platforms == PLATFORMS
    batches = [CASE.x, CASE.x[:1], CASE.x[:7]]
    outputs = serve(exported, batches, tmp_path)
    for index, x in enumerate(batches):
        served = outputs[f"{index}/"]
        truth = two_pass(*CASE.layers, x, epsilon=EPS)
        assert served.shape == truth.shape
        assert (row_errors(truth, served, 2) < FLOAT32).all()
    assert not (row_errors(truth := two_pass(*CASE.layers, CASE.x, epsilon=2 * EPS), outputs["0/"], 2) < FLOAT32).all()
    assert truth.shape == (33, 4, 6)


def test_several_consumers(tmp_path: pathlib.Path) -> None:
    block = jaxfold.contract(CASE.producer, CASE.norm, {"query": CASE.consumer, "key": KEY}, epsilon=EPS)
    exported = export.export(jax.jit(functools.partial(jaxfold.apply, block)), platforms=PLATFORMS)(symbolic())
    outputs = serve(exported, [CASE.x], tmp_path)
    for name, consumer in (("query", CASE.consumer), ("key", KEY)):
        truth = two_pass(CASE.producer, CASE.norm, consumer, CASE.x, epsilon=EPS)
        assert row_errors(truth, outputs[f"0/{name}"], consumer["kernel"].ndim - 1).max() < FLOAT32


def test_parameters_as_an_argument(tmp_path: pathlib.Path) -> None:
    """One artefact for all blocks of these sizes: the parameters come with the call, as in a training checkpoint."""
    block = jaxfold.contract(*CASE.layers, epsilon=EPS)

    def call(params: Any, x: Any) -> Any:
        return jaxfold.apply(jaxfold.Contraction(params, 64, EPS, "layernorm", "direct"), x)

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), block.params)
    exported = export.deserialize(export.export(jax.jit(call), platforms=PLATFORMS)(shapes, symbolic()).serialize())
    truth = two_pass(*CASE.layers, CASE.x, epsilon=EPS)
    assert row_errors(truth, exported.call(block.params, CASE.x), 2).max() < FLOAT32


def test_gradients_of_an_artefact() -> None:
    block = jaxfold.contract(*CASE.layers, epsilon=EPS)
    apply = jax.jit(functools.partial(jaxfold.apply, block))
    exported = export.deserialize(export.export(apply, platforms=PLATFORMS)(symbolic()).serialize(vjp_order=1))
    ours = jax.grad(lambda x: exported.call(x).sum())(CASE.x)
    theirs = jax.grad(lambda x: apply(x).sum())(CASE.x)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=FLOAT32 * float(np.abs(theirs).max()))


def traced(layers: Any, x: Any) -> Any:
    return jaxfold.apply(jaxfold.contract_traced(*layers, epsilon=EPS), x)


@pytest.mark.usefixtures("either_x64")
@pytest.mark.parametrize("platforms", [("cpu",), PLATFORMS])
def test_contracted_inside_the_artefact(platforms: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    """The layers are arguments and the batch is symbolic; on CPU the factor is computed in float64 nevertheless."""
    exported = export.export(jax.jit(functools.partial(traced, CASE.layers)), platforms=platforms)(symbolic())
    batches = [CASE.x, CASE.x[:1]]
    outputs = serve(exported, batches, tmp_path)
    for index, x in enumerate(batches):
        assert row_errors(two_pass(*CASE.layers, x, epsilon=EPS), outputs[f"{index}/"], 2).max() < FLOAT32
        assert row_errors(two_pass(*CASE.layers, x, epsilon=2 * EPS), outputs[f"{index}/"], 2).max() > FLOAT32


@pytest.mark.parametrize("platforms", [("cpu",), PLATFORMS])
def test_gradients_contracted_inside_the_artefact(platforms: tuple[str, ...]) -> None:
    """Two blocks in one artefact, beside ordinary uses of the functions that the factorisation calls in float64."""

    def loss(layers: Any, x: Any) -> Any:
        once = traced(layers, x)
        doubled = traced(jax.tree.map(lambda leaf: 2 * leaf, layers), x)
        return jnp.sum(once * doubled) + jnp.sum(jnp.diagonal(x.T @ x) * jnp.where(jnp.arange(8) < 3, 1.0, 0.0))

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), CASE.layers)
    exported = export.export(jax.jit(jax.grad(loss)), platforms=platforms)(shapes, symbolic())
    exported = export.deserialize(exported.serialize())
    ours, theirs = exported.call(CASE.layers, CASE.x), jax.grad(loss)(CASE.layers, CASE.x)
    # One computation, compiled twice: sums over 33 rows in another order at most.
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=4 * FLOAT32 * float(np.abs(other).max()))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowering_for_other_platforms(platform: str) -> None:
    export.export(jax.jit(jax.grad(lambda x: traced(CASE.layers, x).sum())), platforms=(platform,))(symbolic())


def test_symbolic_blocks_by_vmap() -> None:
    """As many blocks as there are in the call: the factor is had from QR, whose batch may be symbolic."""
    layers = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf, -leaf]), CASE.layers)
    (count,) = export.symbolic_shape("count")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), layers)
    exported = export.export(jax.jit(jax.vmap(traced, (0, None))))(shapes, CASE.x)
    for index, outputs in enumerate(exported.call(layers, CASE.x)):
        producer, norm, consumer = jax.tree.map(lambda leaf, index=index: leaf[index], layers)
        assert row_errors(two_pass(producer, norm, consumer, CASE.x, epsilon=EPS), outputs, 2).max() < FLOAT32


@pytest.mark.parametrize("size", [64, 8, 6])
def test_symbolic_sizes_of_a_leaf_are_refused(size: int) -> None:
    (symbol,) = export.symbolic_shape("s")

    def shape(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(symbol if axis == size else axis for axis in leaf.shape), leaf.dtype)

    with pytest.raises(jaxfold.ShapeError, match=r"the symbolic shape .*s.*sizes that are numbers"):
        export.export(jax.jit(lambda layers: traced(layers, CASE.x)))(jax.tree.map(shape, CASE.layers))


def test_a_folded_function_with_a_symbolic_batch() -> None:
    def fn(p: Any, x: Any) -> Any:
        h = x @ p["A"]
        h = h - h.mean(-1, keepdims=True)
        return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + EPS) @ p["W"]

    rng = np.random.default_rng(2)
    params = {
        "A": jnp.asarray(rng.normal(size=(4, 48)), jnp.float32),
        "W": jnp.asarray(rng.normal(size=(48, 5)), jnp.float32),
    }
    x = jnp.asarray(rng.normal(size=(7, 4)), jnp.float32)
    folded = jaxfold.fold(fn, params, x)
    contracted = folded.contract(params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), contracted)
    batch = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), jnp.float32)
    with pytest.raises(jaxfold.ShapeError, match=r"jax\.vmap\(folded\.apply, \(None, 0\)\)"):
        export.export(jax.jit(folded.apply))(shapes, batch)
    exported = export.export(jax.jit(jax.vmap(folded.apply, (None, 0))))(shapes, batch)
    # Two float32 evaluations of sums of at most 48 terms.
    np.testing.assert_allclose(exported.call(contracted, x), fn(params, x), atol=2e-5)
