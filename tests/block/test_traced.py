"""Contraction under differentiation: the derivatives of the original, of every order, in all leaves and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._algebra._gram import gram_product, quadratic_form
from jaxfold._algebra._witness import witness
from tests.block.test_gradients import loss, original
from tests.factories import Case, make_case

pytestmark = pytest.mark.usefixtures("x64")


def _of_rank(case: Case, rank: int, *, zero_bias: bool = False) -> Case:
    d, n = case.producer["kernel"].shape
    rng = np.random.default_rng(5)
    bias = case.producer["bias"] * (0 if zero_bias else 1)
    return dataclasses.replace(
        case, producer={"kernel": rng.normal(size=(d, rank)) @ rng.normal(size=(rank, n)), "bias": bias}
    )


CASES = {
    "tall": make_case(5, 16, 7, rows=9),
    "wide": make_case(20, 8, 3, rows=9),
    "rank 2, zero bias": _of_rank(make_case(6, 32, 4, rows=9), 2, zero_bias=True),
    "one feature": make_case(1, 4, 2, rows=9),
    "width one": make_case(3, 1, 2, rows=9),
    "square, rank 3": _of_rank(make_case(7, 7, 5, rows=9), 3),
    "zero producer": _of_rank(make_case(6, 32, 4, rows=9), 0, zero_bias=True),
    "rmsnorm": make_case(5, 16, 7, rows=9, norm_type="rmsnorm"),
    "kernels alone": make_case(5, 16, 7, rows=9, producer_bias=False, scale=False, offset=False, consumer_bias=False),
}


def contracted(leaves: Any, x: Any, options: dict[str, Any], form: Any = "direct") -> Any:
    return jaxfold.apply(jaxfold.contract_traced(*leaves, **options, form=form, allow_growth=True), x)


def functions(case: Case) -> tuple[Callable[[Any], Any], Callable[[Any], Any], Any]:
    """The losses of both blocks as functions of leaves and inputs together, and these."""
    point = jax.tree.map(jnp.asarray, (case.layers, case.x))

    def of(block: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda point: loss(block(*point, case.options))

    return of(original), of(contracted), point


def direction(point: Any, seed: int) -> Any:
    """A fixed direction in which everything moves, unlike any leaf."""

    def along(leaf: Any) -> Any:
        return jnp.cos((seed + 2) * leaf + jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(along, point)


def forward(f: Callable[[Any], Any], seed: int) -> Callable[[Any], Any]:
    return lambda point: jax.jvp(f, (point,), (direction(jax.lax.stop_gradient(point), seed),))[1]


def reverse(f: Callable[[Any], Any], seed: int) -> Callable[[Any], Any]:
    """The same directional derivative, by way of the whole gradient."""

    def derivative(point: Any) -> Any:
        along = direction(jax.lax.stop_gradient(point), seed)
        return sum(map(jnp.vdot, jax.tree.leaves(jax.grad(f)(point)), jax.tree.leaves(along)))

    return derivative


def agree(case: Case, transform: Callable[[Callable[[Any], Any]], Callable[[Any], Any]], tolerance: float) -> None:
    """Relative to the largest entry over all leaves and inputs."""
    plain, folded, point = functions(case)
    truth, result = (jax.jit(transform(f))(point) for f in (plain, folded))
    chex.assert_tree_all_finite(result)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(truth))
    chex.assert_trees_all_close(result, truth, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    agree(CASES[name], jax.value_and_grad, 1e-12)


@pytest.mark.parametrize("name", ["tall", "wide", "rank 2, zero bias"])
@pytest.mark.parametrize("outer", ["forward", "reverse"])
@pytest.mark.parametrize("inner", ["forward", "reverse"])
def test_second_order(name: str, outer: str, inner: str) -> None:
    """Forward over forward, reverse over forward, forward over reverse, reverse over reverse."""
    first: Any = {"forward": forward, "reverse": reverse}[inner]
    if outer == "reverse":
        agree(CASES[name], lambda f: jax.grad(first(f, 0)), 1e-11)
    else:
        agree(CASES[name], lambda f: forward(first(f, 0), 1), 1e-11)


@pytest.mark.maths
@pytest.mark.parametrize("modes", ["fff", "rff", "frf", "ffr", "rrf", "rfr", "frr", "rrr"])
def test_third_order(modes: str) -> None:
    def transform(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for seed, mode in enumerate(reversed(modes)):
            f = {"f": forward, "r": reverse}[mode](f, seed)
        return f

    agree(CASES["rank 2, zero bias"], transform, 1e-11)


def test_a_lost_term_would_be_noticed() -> None:
    """The control: with R as a plain constant, and no way for derivatives to T, the gradient is another one."""
    case = CASES["tall"]

    def lossy(leaves: Any, x: Any, options: dict[str, Any]) -> Any:
        block = jaxfold.contract_traced(*leaves, **options)
        denominator = {key: leaf for key, leaf in block.params["denominator"].items() if key != "rows"}
        return jaxfold.apply(dataclasses.replace(block, params={**block.params, "denominator": denominator}), x)

    plain, _, point = functions(case)
    of_lossy = jax.grad(lambda point: loss(lossy(point[0], point[1], case.options)))
    truth, result = jax.grad(plain)(point), of_lossy(point)
    chex.assert_trees_all_close(result[1], truth[1], rtol=1e-9, atol=1e-9)  # the gradient in x alone is right
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(result[0], truth[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["direct", "packed"])
def test_the_coefficients_are_those_of_contract(form: Any) -> None:
    case = make_case(5, 16, (2, 3))
    consumers = {"q": case.consumer, "k": {"kernel": case.consumer["kernel"][..., :1]}}
    layers = (case.producer, case.norm, consumers)
    offline = jaxfold.contract(*layers, **case.options, form=form)
    traced = jax.jit(lambda layers: jaxfold.contract_traced(*layers, **case.options, form=form))(layers)
    # R is unique up to the signs of its rows, which contract chooses and LAPACK leaves as they come.
    chex.assert_trees_all_close(np.abs(traced.R), np.abs(offline.R), rtol=1e-12, atol=1e-14)
    chex.assert_trees_all_close(traced.params["consumers"], offline.params["consumers"], rtol=1e-12, atol=1e-14)
    expected = jaxfold.apply(offline, case.x)
    for block in (traced, jaxfold.convert(traced, "standard")):
        chex.assert_trees_all_close(jaxfold.apply(block, case.x), expected, rtol=1e-11, atol=1e-12)


def test_stacks_vmap_scan_and_remat() -> None:
    cases = [make_case(4, 12, 3, seed=seed, rows=5) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(case.layers for case in cases))
    x = jnp.stack([jnp.asarray(case.x) for case in cases])
    options = cases[0].options

    def one(leaves: Any, x: Any) -> Any:
        return contracted(leaves, x, options)

    def total(block: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stack, x: loss(block(stack, x))

    def stacked(stack: Any, x: Any) -> Any:
        return jax.vmap(jaxfold.apply)(jaxfold.contract_traced(*stack, **options, stacked=True), x)

    def scanned(stack: Any, x: Any) -> Any:
        return jax.lax.scan(lambda carry, both: (carry, one(*both)), 0, (stack, x))[1]

    plain = jax.vmap(lambda leaves, x: original(leaves, x, options))
    truth = jax.jit(jax.value_and_grad(total(plain), (0, 1)))(stack, x)
    for block in (jax.vmap(one), stacked, scanned, jax.vmap(jax.checkpoint(one))):
        result = jax.jit(jax.value_and_grad(total(block), (0, 1)))(stack, x)
        chex.assert_trees_all_close(result, truth, rtol=1e-11, atol=1e-11)
    # Gradients row by row: the rows of x are batched, T is not.
    leaves = jax.tree.map(lambda leaf: leaf[0], stack)
    rows = [jax.vmap(jax.grad(lambda leaves, row, f=f: loss(f(leaves, row[None]))), (None, 0))(leaves, x[0])
            for f in (one, lambda leaves, x: original(leaves, x, options))]  # fmt: skip
    chex.assert_trees_all_close(*rows, rtol=1e-11, atol=1e-11)


def test_the_gram_product_alone() -> None:
    """w T Tᵀ and its derivatives in w and T against the product as written, with T of rank 2."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(5, 2)) @ rng.normal(size=(2, 9)))
    w = jnp.asarray(rng.normal(size=(2, 3, 5)))

    def gram(w: Any, rows: Any) -> Any:
        return gram_product(w, rows, witness(rows))

    def written(w: Any, rows: Any) -> Any:
        return jnp.tensordot(w, rows @ rows.T, 1)

    chex.assert_trees_all_close(gram(w, rows), written(w, rows), rtol=1e-12, atol=1e-13)
    for transform in (jax.jacrev, jax.jacfwd, lambda f, argnums: jax.jacfwd(jax.jacrev(f, argnums), argnums)):
        results = [transform(f, argnums=(0, 1))(w, rows) for f in (gram, written)]
        chex.assert_trees_all_close(*results, rtol=1e-11, atol=1e-12)


def test_refusals_and_platforms() -> None:
    case = make_case(5, 16, 7)
    with pytest.raises(jaxfold.OptionError, match=r"form: got 'standard'; expected 'direct' or 'packed'.*contract"):
        jaxfold.contract_traced(*case.layers, **case.options, form="standard")
    with pytest.raises(jaxfold.GrowthError, match="38,272"):
        jax.eval_shape(lambda layers: jaxfold.contract_traced(*layers, epsilon=1e-5).c, make_case(148, 128, 128).layers)
    gradient = jax.grad(lambda layers: loss(contracted(layers, case.x, case.options)))
    for platform in ("cpu", "cuda", "tpu"):
        jax.export.export(jax.jit(gradient), platforms=[platform])(case.layers)


def test_the_wide_activation_never_exists() -> None:
    """n = 256 and a batch of 96: no value of the compiled gradient step has both."""
    case = make_case(5, 256, 7, rows=96).astype(np.float32)
    for block, wide in ((original, True), (contracted, False)):
        step = jax.jit(jax.grad(lambda leaves, x, block=block: loss(block(leaves, x, case.options))))
        text = step.lower(case.layers, case.x).compile().as_text() or ""
        assert ("96,256]" in text) == wide


@pytest.mark.usefixtures("x64")
def test_second_order_inside_a_scan() -> None:
    """Forward over reverse: JAX takes a scan apart, and must not do so with R a constant inside."""
    rng = np.random.default_rng(0)
    rows, x = rng.normal(size=(3, 5, 48)), rng.normal(size=(3, 6, 5))
    tangents = rng.normal(size=rows.shape), rng.normal(size=x.shape)

    def scanned(rows: Any, x: Any) -> Any:
        step = lambda total, own: (total + jnp.sum(jnp.sin(quadratic_form(own[0], own[1], witness(own[1])))), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros(()), (x, rows))[0]

    def written(rows: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.sum(jnp.square(x @ rows), -1)))

    def product(fn: Any) -> Any:
        return jax.jvp(jax.grad(fn, (0, 1)), (rows, x), tangents)[1]

    for ours, theirs in zip(product(scanned), product(written), strict=True):
        # Sums of 48 squares of size 5, to second order: some 1e3 roundings of 1e-16.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * float(np.abs(theirs).max()))
