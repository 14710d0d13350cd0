"""What the report counts and lists: parameters that are read, norms and no lengths, and true reasons."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.fold.checks import check, decisions, layer_norm, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

X = np.random.default_rng(2).normal(size=(6, 4))
SHAPES = {"A": (4, 64), "a": (64,), "W": (64, 3), "B": (4, 4)}


def test_parameters_that_nothing_reads_are_not_counted() -> None:
    """They are no saving; nor is a function that contracts nothing said to have saved them."""
    params = weights(**SHAPES, unread=(100, 100))
    used = {name: leaf for name, leaf in params.items() if name not in ("unread", "B")}
    fn = lambda p, x: layer_norm(x @ p["A"] + p["a"]) @ p["W"]  # noqa: E731
    report, alone = (jaxfold.fold(fn, tree, X).report for tree in (params, used))
    assert (report.parameters, report.bytes) == (alone.parameters, alone.bytes)
    assert report.parameters[0] == 4 * 64 + 64 + 64 * 3
    assert (report.unread, alone.unread) == (100 * 100 + 16, 0)
    assert "the function never reads 10,016 of the parameters that were passed" in str(report)
    assert "never reads" not in str(alone)
    nothing = jaxfold.fold(lambda p, x: jnp.tanh(x @ p["B"]), params, X).report
    assert nothing.parameters == (16, 16)


LENGTHS = {
    "L2 normalisation": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    "with epsilon": lambda h: h * jax.lax.rsqrt((h * h).sum(-1, keepdims=True) + 1e-6),
    "distances": lambda h: jnp.sqrt(((h[:, None] - h[None]) ** 2).sum(-1) + 1e-9),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_and_distances_are_not_norms(name: str) -> None:
    folded = check(lambda p, x: jnp.tanh(LENGTHS[name](jnp.tanh(x) @ p["B"])), weights(**SHAPES), X, strict=True)
    assert decisions(folded) == []


@pytest.mark.parametrize("width", [64, 63])
def test_means_of_squares_are_norms(width: int) -> None:
    """The control: the same with the mean, over n or n − 1, is listed where it is left alone."""

    def fn(p: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.tanh(x) @ p["A"])
        return jnp.tanh(h * jax.lax.rsqrt((h * h).sum(-1, keepdims=True) / width + 1e-6))

    assert decisions(check(fn, weights(**SHAPES), X)) == ["skipped"]
    with pytest.raises(jaxfold.NotFoldedError):
        jaxfold.fold(fn, weights(**SHAPES), X, strict=True)


def test_an_input_that_is_not_narrow_is_said_to_be_so() -> None:
    params = weights(A=(24, 12), W=(12, 5))
    x = np.random.default_rng(3).normal(size=(6, 24))
    (row,) = check(lambda p, x: jnp.tanh(layer_norm(x @ p["A"])), params, x).report.rows
    assert "numbers make its" not in row.reason


def test_an_absorbed_norm_says_why_its_mean_is_still_taken() -> None:
    params = weights(A=(4, 64), g=(64,), W=(64, 3))

    def fn(p: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.tanh(x) @ p["A"])
        return (layer_norm(h) * p["g"]) @ p["W"]

    folded = check(fn, params, X)
    (row,) = folded.report.rows
    assert row.decision == "absorbed"
    assert row.reason.startswith(("its input keeps its mean", "without its mean"))
    assert f"scale and bias absorbed. {row.reason}" in str(folded.report)
