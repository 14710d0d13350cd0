"""The verdict of a certificate: on figures, and on blocks that are right, coarse or other functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._block._verdict import EQUAL, OTHER, WORSE, verdict
from tests.factories import make_case
from tests.families import FAMILIES, draw

UNIT = 2.0**-24


@pytest.mark.parametrize(
    ("original", "folded", "expected"),
    [
        (1e-7, 0.0, EQUAL),
        (1e-7, 2e-7, EQUAL),
        (1e-7, 2.1e-7, f"{WORSE}: 2.1 times its typical error"),
        (1e-7, 1.6e-6, f"{WORSE}: 16.0 times its typical error"),
        (1e-7, 1.7e-6, OTHER),
        (0.0, 2 * UNIT, EQUAL),  # an original that happens to be exact
        (0.0, 17 * UNIT, OTHER),
        (1e-3, 1e-7, EQUAL),  # far nearer to the truth than the original
        (1e-7, math.nan, OTHER),
        (1e-7, math.inf, OTHER),
        (math.nan, 1e-7, OTHER),
        (math.inf, 1e-7, OTHER),
    ],
)
def test_figures(original: float, folded: float, expected: str) -> None:
    assert verdict(original, folded, UNIT) == expected


def test_known_reasons() -> None:
    """A coarse storage dtype explains a larger error; nothing explains one of an original that cannot be rounding."""
    assert verdict(1e-7, 1e-3, UNIT) == OTHER
    assert verdict(1e-7, 1e-3, UNIT, expected=2e-3) == f"{WORSE}: 10,000.0 times its typical error"
    assert verdict(1e-7, 1e-3, UNIT, expected=5e-4) == OTHER
    assert verdict(1e-5, 1e-7, UNIT, original_limit=1e-6) == OTHER
    assert verdict(1e-5, 1e-7, UNIT, original_limit=2e-5) == EQUAL


SIZE = (16, 128, 128)
OLD = ("tiny inputs", "zero producer")  # under which epsilon alone decides the scale, and both norms agree


def _swap(norm_type: str) -> str:
    return "rmsnorm" if norm_type == "layernorm" else "layernorm"


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """Right contractions are never called another function, and those by another epsilon or norm type always are."""
    case = draw(name, SIZE, 0, rows=64)
    block = jaxfold.Block(*case.layers, **case.options)
    contracted = jaxfold.contract(*case.layers, **case.options, allow_growth=True)
    right = jaxfold.verify(block, contracted, case.x).verdict
    assert right.startswith(WORSE) if name == "bfloat16 storage, float32 inputs" else right == EQUAL
    other = dataclasses.replace(contracted, epsilon=1e-5)
    assert jaxfold.verify(block, other, case.x).verdict == OTHER
    options = {**case.options, "norm_type": _swap(case.options["norm_type"])}
    wrong = jaxfold.contract(*case.layers, **options, allow_growth=True)
    assert jaxfold.verify(block, wrong, case.x).verdict == (EQUAL if name in OLD else OTHER)


def test_standard_form_of_coarse_storage() -> None:
    case = draw("bfloat16 storage, float32 inputs", SIZE, 0, rows=64)
    block = jaxfold.Block(*case.layers, **case.options)
    standard = jaxfold.contract(*case.layers, **case.options, form="standard")
    assert jaxfold.verify(block, standard, case.x).verdict.startswith(WORSE)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_layers_that_are_not_these(dtype: Any) -> None:
    """A square kernel transposed, and a consumer of the same shape from elsewhere: in every dtype."""
    case = make_case(32, 32, 32, rows=50, dtype=dtype)
    block = jaxfold.Block(*case.layers, **case.options)
    producer = {**case.producer, "kernel": case.producer["kernel"].T}
    consumer = {**case.consumer, "kernel": case.consumer["kernel"].T}
    right = jaxfold.contract(*case.layers, **case.options, allow_growth=True)
    assert jaxfold.verify(block, right, case.x).verdict == EQUAL
    for layers in ((producer, case.norm, case.consumer), (case.producer, case.norm, consumer)):
        contracted = jaxfold.contract(*layers, **case.options, allow_growth=True)
        assert jaxfold.verify(block, contracted, case.x).verdict == OTHER


class Model(nn.Module):
    epsilon: float = 1e-6
    fast: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm(epsilon=self.epsilon, use_fast_variance=self.fast)(nn.Dense(64)(x))
        return nn.Dense(16)(x)


@pytest.mark.parametrize("mean", [0.0, 1e2])
def test_block_that_is_not_the_model(mean: float) -> None:
    """Block and contraction agree with each other; the model, given as it runs, has another epsilon than both.

    Flax's default variance is a difference of squares: its own rounding at a large mean is no other function.
    """
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    params = jax.tree.map(np.asarray, Model().init(jax.random.key(0), x)["params"])
    params["Dense_0"]["bias"] = np.full(64, mean, np.float32)
    layers = params["Dense_0"], params["LayerNorm_0"], params["Dense_1"]
    block = jaxfold.Block(*layers, epsilon=1e-6)
    contracted = jaxfold.contract(*layers, epsilon=1e-6)

    def judged(model: Model) -> str:
        original = functools.partial(model.apply, {"params": params})
        return jaxfold.verify(block, contracted, x, original_fn=original).verdict

    assert judged(Model()) == EQUAL
    assert judged(Model(fast=False)) == EQUAL
    assert judged(Model(epsilon=1e-2)) == OTHER
    if mean == 0:  # at the larger mean the model's own rounding is larger than what this epsilon changes
        assert judged(Model(epsilon=1e-5)) == OTHER


def test_stacks_and_several_consumers() -> None:
    case = make_case(4, 32, (2, 3), rows=6, dtype=np.float32)
    consumers = {"a": case.consumer, "b": make_case(4, 32, 5, seed=1, dtype=np.float32).consumer}
    producer, norm, both = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), (case.producer, case.norm, consumers))
    x = np.stack([case.x, case.x])
    block = jaxfold.Block(producer, norm, both, stacked=True, **case.options)
    for form in ("direct", "packed", "standard"):
        options: Any = {**case.options, "stacked": True, "form": form, "allow_growth": True}
        right = jaxfold.contract(producer, norm, both, **options)
        assert jaxfold.verify(block, right, x).verdict == EQUAL
        turned = jax.tree.map(lambda leaf: leaf[::-1], producer)
        wrong = jaxfold.contract(turned, norm, both, **options)
        assert jaxfold.verify(block, wrong, x).verdict == OTHER


def test_printed() -> None:
    case = make_case(4, 32, 3, rows=6, dtype=np.float32)
    certificate = jaxfold.verify(
        jaxfold.Block(*case.layers, **case.options), jaxfold.contract(*case.layers, **case.options), case.x
    )
    assert EQUAL in str(certificate).splitlines()
    assert OTHER in str(dataclasses.replace(certificate, verdict=OTHER)).splitlines()
