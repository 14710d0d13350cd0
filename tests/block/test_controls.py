"""Wrong folds fail the assertion that the right one passes, each by a wide margin."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jaxfold
from tests.factories import Case, make_case
from tests.reference import row_errors, two_pass

# Float32 rounding of products of 33 terms at most; the wrong folds below are off by 1e-3 and more.
FLOAT32 = 4e-6

CASE = make_case(8, 8, 8, epsilon=1e-5).astype(np.float32)  # square throughout: a transposed kernel still fits
TALL = make_case(5, 16, 7).astype(np.float32)
SMALL = dataclasses.replace(CASE, x=CASE.x * np.float32(1e-3), producer={"kernel": CASE.producer["kernel"]})


def error(case: Case, contraction: Any) -> float:
    truth = two_pass(*case.layers, case.x, **case.options)
    return float(row_errors(truth, jaxfold.apply(contraction, case.x)).max())


def contract(case: Case, **changed: Any) -> Any:
    options = {**case.options, **{key: changed.pop(key) for key in ("epsilon", "norm_type") if key in changed}}
    layers = [changed.get(key, getattr(case, key)) for key in ("producer", "norm", "consumer")]
    return jaxfold.contract(*layers, **options, allow_growth=True)


def _edit(contraction: Any, group: str, key: str, function: Any) -> Any:
    edited = {**contraction.params[group], key: function(contraction.params[group][key].copy())}
    return dataclasses.replace(contraction, params={**contraction.params, group: edited})


def _negate_last(array: np.ndarray) -> np.ndarray:
    array[-1] *= -1
    return array


def _swap_last(array: np.ndarray) -> np.ndarray:
    array[[-2, -1]] = array[[-1, -2]]
    return array


def _drop_diagonal(array: np.ndarray) -> np.ndarray:
    array[0, 0] = 0.0
    return array


WRONG = {
    "epsilon of 1e-6 for 1e-5": (SMALL, lambda c: contract(c, epsilon=1e-6)),
    "centring skipped": (CASE, lambda c: contract(c, norm_type="rmsnorm")),
    "centred along the wrong axis": (
        CASE,
        lambda c: contract(c, producer={**c.producer, "kernel": c.producer["kernel"] - c.producer["kernel"].mean(0)}),
    ),
    "norm bias dropped": (CASE, lambda c: contract(c, norm={"scale": c.norm["scale"]})),
    "norm scale dropped": (CASE, lambda c: contract(c, norm={"bias": c.norm["bias"]})),
    "norm scale without its sign": (CASE, lambda c: contract(c, norm={**c.norm, "scale": abs(c.norm["scale"])})),
    "consumer bias dropped": (CASE, lambda c: contract(c, consumer={"kernel": c.consumer["kernel"]})),
    "producer bias dropped": (CASE, lambda c: contract(c, producer={"kernel": c.producer["kernel"]})),
    "consumer kernel transposed": (
        CASE,
        lambda c: contract(c, consumer={**c.consumer, "kernel": c.consumer["kernel"].T}),
    ),
    "producer kernel transposed": (
        CASE,
        lambda c: contract(c, producer={**c.producer, "kernel": c.producer["kernel"].T}),
    ),
    "the squares left for n in the divisor": (TALL, lambda c: dataclasses.replace(contract(c), width=6)),
    "bias of the denominator negated": (CASE, lambda c: _edit(contract(c), "denominator", "bias", lambda a: -a)),
    "bias of the denominator dropped": (CASE, lambda c: _edit(contract(c), "denominator", "bias", lambda a: 0 * a)),
    "factor transposed": (CASE, lambda c: _edit(contract(c), "denominator", "kernel", lambda a: a.T.copy())),
    "factor without an entry": (CASE, lambda c: _edit(contract(c), "denominator", "kernel", _drop_diagonal)),
    "offset negated": (CASE, lambda c: _edit(contract(c), "consumer", "kernel", _negate_last)),
    "offset and constant row swapped": (CASE, lambda c: _edit(contract(c), "consumer", "kernel", _swap_last)),
}


@pytest.mark.parametrize("case", [CASE, TALL, SMALL], ids=["square", "tall", "small activations"])
def test_the_right_fold_passes(case: Case) -> None:
    assert error(case, contract(case)) < FLOAT32


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_fold_fails(name: str) -> None:
    case, fold = WRONG[name]
    assert error(case, fold(case)) > 100 * FLOAT32


def test_a_dropped_offset_is_not_a_rounding_error() -> None:
    """A norm bias of ones and a consumer without a bias: the offset is all there is for zero inputs."""
    case = make_case(producer_bias=False, consumer_bias=False)
    case = dataclasses.replace(case, x=np.zeros((1, 5)), norm={**case.norm, "bias": np.ones(16)})
    truth = case.consumer["kernel"].sum(axis=0)
    block = jaxfold.contract(*case.layers, **case.options)
    assert np.abs(np.asarray(jaxfold.apply(block, case.x))[0] - truth).max() < 1e-6
    assert np.abs(truth).max() > 0.1


def test_rmsnorm_is_not_centred() -> None:
    """An identity producer and the row [1, 2, 3]: RMSNorm keeps the mean, LayerNorm takes it out."""
    producer, consumer = {"kernel": np.eye(3)}, {"kernel": np.eye(3)}
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    options: dict[str, Any] = {"epsilon": 1e-12, "allow_growth": True}
    rms = jaxfold.apply(jaxfold.contract(producer, None, consumer, norm_type="rmsnorm", **options), x)
    layer = jaxfold.apply(jaxfold.contract(producer, None, consumer, norm_type="layernorm", **options), x)
    np.testing.assert_allclose(np.asarray(rms)[0], np.array([1, 2, 3]) / np.sqrt(14 / 3), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(layer)[0], np.array([-1, 0, 1]) / np.sqrt(2 / 3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_a_large_bias_mean_does_no_harm(mean: float) -> None:
    """n = 256, every bias raised by 1e3 or 1e4: the fast variance of float32 errs by 0.07 and by more than 1."""
    case = make_case(5, 256, 7)
    producer = {**case.producer, "bias": case.producer["bias"] + mean}
    case = dataclasses.replace(case, producer=producer).astype(np.float32)
    assert error(case, contract(case)) < FLOAT32
    h = case.x @ case.producer["kernel"] + case.producer["bias"]
    fast = np.maximum(np.mean(h * h, axis=1, dtype=np.float32) - np.mean(h, axis=1, dtype=np.float32) ** 2, 0)
    assert np.abs(fast / h.astype(np.float64).var(axis=1) - 1).max() > 0.01
