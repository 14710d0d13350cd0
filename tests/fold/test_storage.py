"""The dtype of coefficients: that of the arithmetic that reads them, or what the caller asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._extend import enable_x64

pytestmark = pytest.mark.usefixtures("usual")

RNG = np.random.default_rng(11)
D, N = 24, 24
EPSILON = 1e-5
# A dozen roundings and sums of at most 24 terms in float32, relative to the largest output; 2e-3 is half a unit of
# bfloat16, the least error of a coefficient that is rounded to it.
FLOAT32, BFLOAT16 = 3e-6, 2e-3
WIDE = {"W": (D, N), "b": (N,), "V": (N, 40), "E": (30, N), "U": (N, N)}
PARAMS = {name: jnp.asarray(RNG.normal(size=shape) / 5, jnp.bfloat16) for name, shape in WIDE.items()}
X = jnp.asarray(RNG.normal(size=(16, D)), jnp.float32)
TOKENS = jnp.arange(16)


def layer_norm(h: Any) -> Any:
    centred = h - h.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)


def fine(array: Any) -> Any:
    """As the program casts it: to float32 if it has fewer digits, so that it can be called with float64 as well."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def dense(p: Any, x: Any) -> Any:
    return layer_norm(x @ fine(p["W"]) + fine(p["b"])) @ fine(p["V"])


def stream(p: Any, inputs: Any) -> Any:
    """An embedding and what a layer adds to it."""
    tokens, x = inputs
    return layer_norm(fine(p["E"][tokens]) + jnp.tanh(x) @ fine(p["U"].T)) @ fine(p["V"])


def twice(p: Any, x: Any) -> Any:
    """A kernel that is cast in two places."""
    h = x @ fine(p["W"]) + jnp.tanh(x[:, ::-1]) @ fine(p["W"])
    return layer_norm(h) @ fine(p["V"])


def moved(p: Any, x: Any) -> Any:
    """A kernel that is reshaped and transposed before it is cast."""
    return layer_norm(x @ fine(p["W"].reshape(N, D).T.reshape(D, N))) @ fine(p["V"])


CAST: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "a Dense layer": (dense, X),
    "an embedding": (stream, (TOKENS, X)),
    "two casts": (twice, X),
    "moved entries": (moved, X),
}


def errors(fn: Any, x: Any, contracted: Any, folded: Any) -> float:
    """The largest error against the same function of the same numbers in float64, of the largest output."""
    with enable_x64():
        truth = np.asarray(fn({name: leaf.astype(np.float64) for name, leaf in PARAMS.items()}, x))
    return float(np.abs(np.asarray(folded.apply(contracted, x)).astype(np.float64) - truth).max() / np.abs(truth).max())


@pytest.mark.parametrize("name", CAST)
def test_centred_writers_have_the_digits_that_the_program_computes_with(name: str) -> None:
    fn, x = CAST[name]
    folded = jaxfold.fold(fn, PARAMS, x)
    assert [row.decision for row in folded.report.rows] == ["centred"]
    contracted = folded.contract(PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(contracted["blocks"])} == {np.dtype(np.float32)}
    assert errors(fn, x, contracted, folded) < FLOAT32
    assert errors(fn, x, folded.contract_traced(PARAMS), folded) < FLOAT32


def test_the_same_stored_in_bfloat16_is_much_worse_and_half_the_bytes() -> None:
    folded = jaxfold.fold(dense, PARAMS, X, dtype="bfloat16")
    by_default = jaxfold.fold(dense, PARAMS, X)
    contracted = folded.contract(PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(contracted["blocks"])} == {jnp.dtype(jnp.bfloat16)}
    assert 2e-4 < errors(dense, X, contracted, folded) < 10 * BFLOAT16
    assert by_default.report.bytes[1] - folded.report.bytes[1] == 2 * (D * N + N)


def test_a_scan_over_layers_in_half_precision() -> None:
    stack = {"W": jnp.stack([PARAMS["W"]] * 2), "U": jnp.stack([PARAMS["U"]] * 2)}

    def fn(p: Any, x: Any) -> Any:
        step = lambda h, l: (h + jnp.tanh(layer_norm(h) @ fine(l["W"])) @ fine(l["U"]), None)  # noqa: E731, E741
        return layer_norm(jax.lax.scan(step, x - x.mean(-1, keepdims=True), p)[0])

    folded = jaxfold.fold(fn, stack, X)
    assert folded.report.centred
    contracted = folded.contract(stack)
    assert {leaf.dtype for leaf in jax.tree.leaves(contracted["blocks"])} == {np.dtype(np.float32)}
    # Two float32 evaluations of the same function.
    np.testing.assert_allclose(folded.apply(contracted, X), fn(stack, X), atol=2e-5)


def test_a_kernel_that_bfloat16_arithmetic_reads_stays_in_bfloat16() -> None:
    def fn(p: Any, x: Any) -> Any:
        return layer_norm((x.astype(jnp.bfloat16) @ p["W"]).astype(jnp.float32)) @ fine(p["V"])

    folded = jaxfold.fold(fn, PARAMS, X)
    assert [row.decision for row in folded.report.rows] == ["centred"]
    contracted = folded.contract(PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(contracted["blocks"])} == {jnp.dtype(jnp.bfloat16)}


def test_a_cast_at_the_end_is_the_last_step() -> None:
    shapes = {"W": (96, 160), "V": (160, 80), "b": (80,)}
    params = {name: jnp.asarray(RNG.normal(size=shape) / 10, jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(RNG.normal(size=(16, 96)), jnp.float32)

    def before(p: Any, x: Any) -> Any:
        return layer_norm(x @ p["W"]) @ p["V"] + p["b"]

    def fn(p: Any, x: Any) -> Any:
        return before(p, x).astype(jnp.bfloat16)

    folded = jaxfold.fold(fn, params, x)
    assert [row.decision for row in folded.report.rows] == ["contracted"]
    contracted = folded.contract(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(contracted["blocks"])} == {np.dtype(np.float32)}
    with enable_x64():
        truth = np.asarray(before(jax.tree.map(lambda leaf: leaf.astype(np.float64), params), x))
    result = folded.apply(contracted, x)
    assert result.dtype == jnp.bfloat16
    # Half a unit of bfloat16, at most 2⁻⁸ of each entry, and what float32 adds to it. Sums in bfloat16 err by more.
    allowed = 2**-8 * np.abs(truth) + FLOAT32 * np.abs(truth).max()
    assert (np.abs(np.asarray(result, np.float64) - truth) <= allowed).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_dtype_that_is_asked_for_is_the_one_that_is_stored(dtype: str) -> None:
    params = {
        name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name, shape in {"A": (3, N), "W": (N, 5)}.items()
    }
    fn = lambda p, x: layer_norm(x @ p["A"]) @ p["W"]  # noqa: E731
    folded = jaxfold.fold(fn, params, X[:, :3], dtype=dtype)
    blocks = folded.contract(params)["blocks"]
    leaves = jax.tree.leaves(blocks)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    assert folded.report.bytes[1] == sum(leaf.nbytes for leaf in leaves)
    (row,) = folded.report.contracted
    assert row.contracted is not None
    assert row.contracted.bytes == folded.report.bytes[1]
    truth = fn(params, X[:, :3])
    unit = max(float(jnp.finfo(dtype).eps), 1e-7)
    np.testing.assert_allclose(folded.apply({"params": {}, "blocks": blocks}, X[:, :3]), truth, atol=30 * unit)
    # Another batch is traced again, with the same coefficients.
    np.testing.assert_allclose(folded.apply({"params": {}, "blocks": blocks}, X[:5, :3]), truth[:5], atol=30 * unit)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", 3, "half a float"])
def test_a_dtype_that_is_none(dtype: Any) -> None:
    with pytest.raises(jaxfold.OptionError, match=r"^dtype: "):
        jaxfold.fold(dense, PARAMS, X, dtype=dtype)
