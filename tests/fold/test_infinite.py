"""Infinities and NaN that parameters have no part in: they stay where they are, and nobody refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.fold.checks import FLOAT64, layer_norm, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

N = 48
RNG = np.random.default_rng(7)
X = RNG.normal(size=(6, 4))
MASK = np.where(np.arange(5) < 3, 0.0, -np.inf)
LARGE = np.where(np.arange(6000) % 3, 0.0, -np.inf)  # more entries than a constant has that is looked at
SHAPES = {"A": (4, N), "a": (N,), "W": (N, 5), "w": (5,), "V": (N, 6000)}


@pytest.fixture
def params(x64: None) -> dict[str, Any]:
    return weights(**SHAPES)


def logits(p: Any, x: Any) -> Any:
    return layer_norm(x @ p["A"] + p["a"]) @ p["W"]


MASKED: dict[str, Callable[[Any, Any], Any]] = {
    "a mask added": lambda p, x: jax.nn.softmax(logits(p, x) + MASK),
    "a mask taken away": lambda p, x: jax.nn.softmax(logits(p, x) - -MASK),
    "a mask with a parameter": lambda p, x: jax.nn.softmax(logits(p, x) + (p["w"] + MASK)),
    "a mask that a parameter chooses": lambda p, x: jax.nn.softmax(
        logits(p, x) + jnp.where(jnp.arange(5) < 3, p["w"], -jnp.inf)
    ),
    "a large mask": lambda p, x: jax.nn.softmax(layer_norm(x @ p["A"] + p["a"]) @ p["V"] + LARGE),
    "a large mask made by the function": lambda p, x: jax.nn.softmax(
        layer_norm(x @ p["A"] + p["a"]) @ p["V"] + jnp.where(jnp.arange(6000) % 3 > 0, 0.0, -jnp.inf)
    ),
    "a mask before another product": lambda p, x: jnp.exp(logits(p, x) + MASK) @ p["W"].T,
    "one infinite row": lambda p, x: jnp.exp(logits(p, x) + jnp.where(jnp.arange(6) < 5, 0.0, -jnp.inf)[:, None]),
    "NaN": lambda p, x: logits(p, x) + np.where(np.arange(5) < 3, 0.0, np.nan),
    "a division by zero": lambda p, x: logits(p, x) / (np.arange(5) - 2.0),
    "an infinite factor": lambda p, x: logits(p, x) * np.where(np.arange(5) < 3, 1.0, np.inf),
}


@pytest.mark.parametrize("name", MASKED)
def test_infinite_constants_stay_a_step_of_their_own(name: str, params: Any) -> None:
    fn = MASKED[name]
    folded = jaxfold.fold(fn, params, X)
    assert [row.decision for row in folded.report.rows] == ["contracted"]
    truth = np.asarray(fn(params, X))
    for contracted in (folded.contract(params), folded.contract_traced(params)):
        result = np.asarray(folded.apply(contracted, X))
        # The same entries are infinite or NaN; the others are right to the roundings of float64.
        np.testing.assert_array_equal(np.isfinite(result), np.isfinite(truth))
        np.testing.assert_array_equal(result[np.isinf(truth)], truth[np.isinf(truth)])
        finite = np.isfinite(truth)
        assert np.abs(result[finite] - truth[finite]).max() < FLOAT64 * np.abs(truth[finite]).max()


def test_finite_masks_go_into_the_coefficients(params: Any) -> None:
    folded = jaxfold.fold(lambda p, x: logits(p, x) + np.maximum(MASK, -1e30), params, X)
    shapes = [block["kernel"].shape for block in folded.contract(params)["blocks"].values()]
    # R of 5 rows of [A; a], and D of the same with the row that is β W plus the mask.
    assert sorted(shapes) == [(5, 5), (6, 5)]


def test_leaves_that_no_coefficient_is_made_of_may_be_infinite(params: Any) -> None:
    tree = params | {"mask": MASK, "unread": np.full(3, np.nan)}
    fn = lambda p, x: jnp.maximum(jax.nn.relu(logits(p, x)), jnp.tanh(p["mask"]))  # noqa: E731
    folded = jaxfold.fold(fn, tree, X)
    contracted = folded.contract(tree)
    assert np.isneginf(np.asarray(contracted["params"]["mask"])[3:]).all()
    np.testing.assert_allclose(folded.apply(contracted, X), fn(tree, X), atol=FLOAT64 * 10)


@pytest.mark.parametrize("leaf", ["A", "a", "W"])
def test_leaves_that_coefficients_are_made_of_may_not(leaf: str, params: Any) -> None:
    folded = jaxfold.fold(logits, params, X)
    spoilt = np.array(params[leaf])
    spoilt.flat[0] = np.inf
    with pytest.raises(jaxfold.CoefficientError, match=f"^{leaf}: "):
        folded.contract(params | {leaf: spoilt})


def test_leaves_inside_a_scan(params: Any) -> None:
    stack = {"A": RNG.normal(size=(2, 4, N)), "W": RNG.normal(size=(2, N, 4)), "mask": np.stack([MASK[:4]] * 2)}

    def fn(p: Any, x: Any) -> Any:
        step = lambda c, l: (jax.nn.softmax(jnp.minimum(jnp.tanh(layer_norm(c @ l["A"]) @ l["W"]), l["mask"])), None)  # noqa: E731, E741
        return jax.lax.scan(step, x, p)[0]

    folded = jaxfold.fold(fn, stack, X)
    assert folded.report.contracted
    np.testing.assert_allclose(folded.apply(folded.contract(stack), X), fn(stack, X), atol=FLOAT64)
    spoilt = stack | {"A": np.where(np.arange(N) == 3, np.nan, stack["A"])}
    with pytest.raises(jaxfold.CoefficientError, match=r"^A: "):
        folded.contract(spoilt)
