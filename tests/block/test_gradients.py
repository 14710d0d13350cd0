"""Derivatives: in the inputs, and in D, R and c through the chain rule back to the leaves that they are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._algebra._triangle import pack_triangle
from tests.factories import Case, make_case
from tests.reference import row_errors
from tests.x64 import set_x64

# As for the outputs: 1e-13 of the largest entry of a row, with a factor for the two products that a gradient adds.
FLOAT64 = 4e-13

CASES = {
    "all biases": make_case(),
    "no producer bias": make_case(producer_bias=False),
    "no norm bias": make_case(offset=False),
    "no consumer bias": make_case(consumer_bias=False),
    "no affine": make_case(scale=False, offset=False),
    "rmsnorm": make_case(norm_type="rmsnorm"),
    "wide": make_case(20, 8, 3),
    "square": make_case(7, 7, 7),
    "one feature": make_case(1, 4, 2),
    "rank 2, zero bias": dataclasses.replace(
        make_case(6, 32, 4),
        producer={
            "kernel": np.random.default_rng(2).normal(size=(6, 2)) @ np.random.default_rng(3).normal(size=(2, 32)),
            "bias": np.zeros(32),
        },
    ),
    "zero kernel": dataclasses.replace(
        make_case(6, 32, 4), producer={"kernel": np.zeros((6, 32)), "bias": make_case(6, 32, 4).producer["bias"]}
    ),
    "zero producer": dataclasses.replace(
        make_case(6, 32, 4), producer={"kernel": np.zeros((6, 32)), "bias": np.zeros(32)}
    ),
}


def original(leaves: Any, x: Any, options: dict[str, Any]) -> Any:
    """The block as written, in JAX, from float64 leaves (producer, norm, consumer); missing ones are absent."""
    producer, norm, consumer = leaves
    h = jnp.dot(x, producer["kernel"])
    if "bias" in producer:
        h = h + producer["bias"][None]
    if options["norm_type"] == "layernorm":
        h = h - jnp.mean(h, axis=-1, keepdims=True)
    y = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + options["epsilon"])
    if "scale" in norm:
        y = y * norm["scale"][None]
    if "bias" in norm:
        y = y + norm["bias"][None]
    y = jnp.dot(y, consumer["kernel"])
    return y + consumer["bias"][None] if "bias" in consumer else y


def loss(outputs: Any) -> Any:
    """A scalar whose cotangent differs from entry to entry and depends on the output."""
    return jnp.sum(jnp.sin(outputs) * jnp.arange(outputs.size, dtype=outputs.dtype).reshape(outputs.shape))


@pytest.mark.maths
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
@pytest.mark.parametrize("name", CASES)
def test_input_gradients(name: str, form: Any) -> None:
    case = CASES[name]
    block = jaxfold.contract(*case.layers, **case.options, form=form, allow_growth=True)
    truth = jax.grad(lambda x: loss(original(case.layers, x, case.options)))(case.x)
    result = jax.grad(lambda x: loss(jaxfold.apply(block, x)))(case.x)
    chex.assert_tree_all_finite(result)
    # Rank 2 without a bias and one feature have rows whose activation nearly vanishes: the gradient has 1/σ in it.
    assert row_errors(np.asarray(truth), result).max() < FLOAT64 * (
        100 if "one" in name else 10 if "rank" in name else 1
    )


@pytest.mark.maths
@pytest.mark.parametrize("name", CASES)
def test_input_gradients_in_float32(name: str) -> None:
    """2⁻²⁴ times the 64 terms of the longest chain of two products is 4e-6."""
    case = CASES[name].astype(np.float32)
    block = jaxfold.contract(*case.layers, **case.options, allow_growth=True)
    result = jax.grad(lambda x: loss(jaxfold.apply(block, x)))(case.x)
    assert result.dtype == np.float32
    with set_x64(True):
        truth = jax.grad(lambda x: loss(original(_float64(case.layers), x, case.options)))(case.x.astype(np.float64))
    # The cotangent is computed from outputs of float32: sin' of outputs of size 1, which the factor 4 covers.
    assert row_errors(np.asarray(truth), result).max() < 4 * 4e-6 * (10 if "rank" in name or "one" in name else 1)


def _float64(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["all biases", "no producer bias", "no norm bias", "rmsnorm", "no affine"])
def test_coefficient_gradients(name: str) -> None:
    """Gradients in D, R and c, pulled back by hand to the six leaves, are those of the original.

    With T = [A; a] P, D = T diag(γ) W, c = β W + b, and R from Tᵀ = U R in the gauge dR = Uᵀ dTᵀ:
        ∂T = ∂D (diag(γ) W)ᵀ + ∂Rᵀ Uᵀ,   ∂[A; a] = ∂T P
        ∂W = diag(γ) Tᵀ ∂D + βᵀ ∂c,      ∂γ = rows of W ∘ (Tᵀ ∂D),   ∂β = ∂c Wᵀ,   ∂b = ∂c
    """
    case = CASES[name]
    block = jaxfold.contract(*case.layers, **case.options)
    truth = jax.grad(lambda leaves: loss(original(leaves, case.x, case.options)))(case.layers)
    grads = jax.grad(lambda block: loss(jaxfold.apply(block, case.x)))(block)
    chex.assert_trees_all_close(_pull_back(case, block, grads), jax.tree.map(np.asarray, truth), rtol=1e-11, atol=1e-11)


def _pull_back(case: Case, block: Any, grads: Any) -> Any:
    producer, norm, consumer = case.layers
    n = producer["kernel"].shape[1]
    projector = np.eye(n) - (1 / n if case.options["norm_type"] == "layernorm" else 0)
    rows = np.concatenate(
        [leaf.reshape(-1, n) for leaf in (producer["kernel"], producer.get("bias")) if leaf is not None]
    )
    rows = rows @ projector
    basis = np.linalg.solve(block.R.T, rows).T  # U = Tᵀ R⁻¹
    kernel = np.asarray(grads.params["consumer"]["kernel"])
    d_numerator, d_offset, d_factor = kernel[:-1], kernel[-1], np.asarray(grads.R)
    scale, shift = norm.get("scale", np.ones(n)), norm.get("bias", np.zeros(n))
    d_rows = (d_numerator @ (scale[:, None] * consumer["kernel"]).T + d_factor.T @ basis.T) @ projector
    back = rows.T @ d_numerator
    d = producer["kernel"].shape[0]
    full = (
        {"kernel": d_rows[:d], "bias": d_rows[-1]},
        {"scale": np.sum(consumer["kernel"] * back, axis=1), "bias": consumer["kernel"] @ d_offset},
        {"kernel": scale[:, None] * back + np.outer(shift, d_offset), "bias": d_offset},
    )
    return tuple({key: wide[key] for key in given} for wide, given in zip(full, case.layers, strict=True))


@pytest.mark.usefixtures("x64")
def test_packed_gradient_is_the_triangle_of_the_direct_one() -> None:
    case = make_case()
    direct = jaxfold.contract(*case.layers, **case.options)
    packed = jaxfold.convert(direct, "packed")
    of_direct, of_packed = (jax.grad(lambda block: loss(jaxfold.apply(block, case.x)))(b) for b in (direct, packed))
    expected = pack_triangle(np.asarray(of_direct.params["denominator"]["kernel"]))
    chex.assert_trees_all_close(of_packed.params["denominator"]["kernel"], expected, rtol=1e-12, atol=1e-12)
    chex.assert_trees_all_close(of_packed.params["consumer"], of_direct.params["consumer"], rtol=1e-12, atol=1e-12)


@pytest.mark.maths
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
def test_every_mode_agrees_with_finite_differences(form: Any) -> None:
    case = make_case(3, 8, 2, rows=4)
    block = jaxfold.contract(*case.layers, **case.options, form=form)
    chex.assert_numerical_grads(lambda x: jaxfold.apply(block, x), (jnp.asarray(case.x),), order=2, atol=1e-5)
    flat, unravel = jax.flatten_util.ravel_pytree(block)
    chex.assert_numerical_grads(lambda flat: jaxfold.apply(unravel(flat), case.x), (flat,), order=2, atol=1e-5)


@pytest.mark.usefixtures("x64")
def test_under_every_transform() -> None:
    """jit, vmap, jvp, vjp, remat, scan and their nestings see one and the same function."""
    case = make_case()
    block = jax.tree.map(jnp.asarray, jaxfold.contract(*case.layers, **case.options))
    x, tangent = jnp.asarray(case.x), jnp.cos(jnp.asarray(case.x))

    def f(block: Any, x: Any) -> Any:
        return loss(jaxfold.apply(block, x))

    expected = jax.grad(f, argnums=(0, 1))(block, x)
    for transformed in (
        jax.jit(jax.grad(f, (0, 1))),
        jax.grad(jax.checkpoint(f), (0, 1)),
        jax.grad(jax.jit(f), (0, 1)),
    ):
        chex.assert_trees_all_close(transformed(block, x), expected, rtol=1e-11, atol=1e-12)
    _, pushed = jax.jvp(lambda x: f(block, x), (x,), (tangent,))
    assert pushed == pytest.approx(float(jnp.vdot(expected[1], tangent)), rel=1e-11)
    rows = jax.vmap(jaxfold.apply, in_axes=(None, 0))(block, x)
    chex.assert_trees_all_close(rows, jaxfold.apply(block, x), rtol=1e-12, atol=1e-13)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, jaxfold.apply(block, row)), 0, x)
    chex.assert_trees_all_close(scanned, rows, rtol=1e-12, atol=1e-13)
    hessian = jax.hessian(lambda row: f(block, row[None]))(x[0])
    reverse = jax.jacrev(jax.grad(lambda row: f(block, row[None])))(x[0])
    truth = jax.hessian(lambda row: loss(original(case.layers, row[None], case.options)))(x[0])
    chex.assert_trees_all_close(hessian, truth, rtol=1e-10, atol=1e-11)
    chex.assert_trees_all_close(reverse, truth, rtol=1e-10, atol=1e-11)
