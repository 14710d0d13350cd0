"""The identity itself: in float64 to rounding, and in 50 digits to 45."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import jaxfold
from tests.factories import Case, make_case
from tests.reference import mp_block, mp_centre, mp_matrix, row_errors, two_pass

# Products of at most 100 terms in float64, in a block whose condition is moderate: 100 · 2⁻⁵³ ≈ 1e-14 in the worst
# case, and the errors of the reference on top.
FLOAT64 = 1e-13

CASES = {
    "all biases": make_case(),
    "no producer bias": make_case(producer_bias=False),
    "no norm scale": make_case(scale=False),
    "no norm bias": make_case(offset=False),
    "no consumer bias": make_case(consumer_bias=False),
    "no bias but the norm's": make_case(producer_bias=False, consumer_bias=False),
    "no affine": make_case(scale=False, offset=False),
    "nothing but kernels": make_case(producer_bias=False, scale=False, offset=False, consumer_bias=False),
    "rmsnorm": make_case(norm_type="rmsnorm"),
    "rmsnorm, nothing but kernels": make_case(
        producer_bias=False, scale=False, offset=False, consumer_bias=False, norm_type="rmsnorm"
    ),
    "wide": make_case(20, 8, 3),
    "wide without bias": make_case(20, 8, 3, producer_bias=False),
    "square": make_case(7, 7, 7),
    "n = d + 1": make_case(6, 7, 5),
    "one feature": make_case(1, 4, 2),
    "one wide feature": make_case(3, 1, 2),
    "several output axes": make_case(5, 16, (2, 3)),
    "large epsilon": make_case(epsilon=64.0),
    "small epsilon": make_case(epsilon=1e-12),
}


def _with_producer(case: Case, **leaves: Any) -> Case:
    return dataclasses.replace(case, producer={**case.producer, **leaves})


def _hard_cases() -> dict[str, Case]:
    base = make_case(6, 32, 4)
    d, n = base.producer["kernel"].shape
    rng = np.random.default_rng(1)
    low = rng.normal(size=(d, 2)) @ rng.normal(size=(2, n))
    duplicated = base.producer["kernel"].copy()
    duplicated[:, 1], duplicated[:, 2] = duplicated[:, 0], 0.0
    scales = base.norm["scale"] * 10.0 ** rng.uniform(-3, 3, size=n)
    return {
        "zero producer": _with_producer(base, kernel=np.zeros((d, n)), bias=np.zeros(n)),
        "zero kernel": _with_producer(base, kernel=np.zeros((d, n))),
        "constant producer": _with_producer(base, kernel=rng.normal(size=(d, 1)) * np.ones(n), bias=np.full(n, 0.1)),
        "rank 2": _with_producer(base, kernel=low),
        "rank 2, zero bias": _with_producer(base, kernel=low, bias=np.zeros(n)),
        "duplicated and zero columns": _with_producer(base, kernel=duplicated),
        "wide, rank 3": _with_producer(make_case(20, 8, 3), kernel=rng.normal(size=(20, 3)) @ rng.normal(size=(3, 8))),
        "unequal scales": dataclasses.replace(base, norm={**base.norm, "scale": scales}),
        "zero scale": dataclasses.replace(base, norm={**base.norm, "scale": np.zeros(n)}),
        "zero inputs": dataclasses.replace(base, x=np.zeros_like(base.x)),
        "tiny inputs": dataclasses.replace(base, x=base.x * 1e-30),
        "large inputs": dataclasses.replace(base, x=base.x * 1e15),
    }


CASES |= _hard_cases()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
@pytest.mark.parametrize("name", CASES)
def test_float64_outputs(name: str, form: Any) -> None:
    case = CASES[name]
    block = jaxfold.contract(*case.layers, **case.options, form=form, allow_growth=True)
    truth = two_pass(*case.layers, case.x, **case.options)
    result = jaxfold.apply(block, case.x)
    assert result.dtype == np.float64
    assert row_errors(truth, result, len(truth.shape) - 1).max() < FLOAT64


@pytest.mark.parametrize("name", CASES)
def test_float32_outputs(name: str) -> None:
    """The same in float32, from float32 leaves. 2⁻²⁴ times the terms of the longest product, 33, is 2e-6."""
    case = CASES[name].astype(np.float32)
    block = jaxfold.contract(*case.layers, **case.options, allow_growth=True)
    truth = two_pass(*case.layers, case.x, **case.options)
    result = jaxfold.apply(block, case.x)
    assert result.dtype == np.float32
    assert row_errors(truth, result, len(truth.shape) - 1).max() < 2e-6 * _amplification(name)


def _amplification(name: str) -> float:
    # Where h nearly vanishes for some rows (rank 2 without a bias, one feature) rounding is relative to a small |h|.
    return 10.0 if "rank 2" in name or "one" in name else 1.0


@pytest.mark.parametrize("name", ["constant producer", "zero producer"])
def test_nothing_left_of_a_constant_activation(name: str) -> None:
    """Every feature equal: the deviation is zero exactly, not to rounding, and the output is β W + b."""
    case = make_case(6, 33, 4)  # a mean over 33 features is not exact
    column = case.producer["kernel"][:, :1] * (name == "constant producer")
    case = _with_producer(case, kernel=column * np.ones(33), bias=np.full(33, 0.1) * (name == "constant producer"))
    block = jaxfold.contract(*case.layers, **case.options)
    assert not np.any(block.R)
    assert not np.any(block.D)
    truth = case.norm["bias"] @ case.consumer["kernel"] + case.consumer["bias"]
    chex.assert_trees_all_close(block.c, truth, rtol=1e-14)


def test_common_mode_leaves_no_trace() -> None:
    """A bias of mean 1e8 in float64: its own rounding, 1e-8, is all that the deviations may be off by."""
    case = make_case()
    raised = _with_producer(case, bias=case.producer["bias"] + 1e8)
    exact = _with_producer(case, bias=raised.producer["bias"] - 1e8)  # the subtraction is exact
    before, after = (jaxfold.contract(*c.layers, **c.options) for c in (exact, raised))
    # Means are subtracted twice, so what is left is the rounding of numbers of size 1.
    chex.assert_trees_all_close(after.params, before.params, atol=1e-14, rtol=0)


@pytest.mark.parametrize("shape", [(3, 8, 4), (5, 6, 3), (4, 5, 2)])
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_fifty_digits(shape: tuple[int, int, int], norm_type: str) -> None:
    """The pipeline rebuilt in mpmath at 50 digits agrees with the block as written to 45: exact, not lucky."""
    case = make_case(*shape, rows=4, epsilon=1e-5, norm_type=norm_type)
    with mpmath.workdps(50):
        factor, numerator, offset = _mp_contraction(case)
        inputs = mp_matrix(np.concatenate([case.x, np.ones((4, 1))], axis=1))
        epsilon, n = mpmath.mpf(case.options["epsilon"]), shape[1]
        truth = mp_block(*case.layers, case.x, epsilon=case.options["epsilon"], centred=norm_type == "layernorm")
        z, product = inputs * factor.T, inputs * numerator
        for i in range(truth.rows):
            s = 1 / mpmath.sqrt(mpmath.fsum(entry**2 for entry in z[i, :]) / n + epsilon)
            for j in range(truth.cols):
                assert abs(product[i, j] * s + offset[j] - truth[i, j]) < mpmath.mpf("1e-45")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", [(3, 8, 4), (5, 6, 3)])
def test_coefficients_against_fifty_digits(shape: tuple[int, int, int]) -> None:
    """R, D, c, and the outputs that come of them, are those of the 50-digit pipeline to the rounding of float64."""
    case = make_case(*shape, rows=4)
    block = jaxfold.contract(*case.layers, **case.options)
    with mpmath.workdps(50):
        factor, numerator, offset = _mp_contraction(case)
        truth = np.array(mp_block(*case.layers, case.x, epsilon=case.options["epsilon"]).tolist(), dtype=np.float64)
    chex.assert_trees_all_close(block.R, np.array(factor.tolist(), dtype=np.float64), atol=1e-14, rtol=0)
    chex.assert_trees_all_close(block.D, np.array(numerator.tolist(), dtype=np.float64), atol=1e-14, rtol=0)
    chex.assert_trees_all_close(block.c, np.array(offset, dtype=np.float64), atol=1e-14, rtol=0)
    assert row_errors(truth, jaxfold.apply(block, jnp.asarray(case.x))).max() < FLOAT64


def _mp_contraction(case: Case) -> tuple[mpmath.matrix, mpmath.matrix, list[Any]]:
    """R (by mpmath's own Householder QR, signs as in jaxfold), D and c in the working precision."""
    rows = mp_matrix(np.concatenate([case.producer["kernel"], case.producer["bias"][None]]))
    if case.options["norm_type"] == "layernorm":
        rows = mp_centre(rows)
    _, factor = mpmath.qr(rows.T, mode="skinny")
    for i in range(factor.rows):
        if factor[i, i] < 0:
            for j in range(factor.cols):
                factor[i, j] = -factor[i, j]
    kernel = mp_matrix(case.consumer["kernel"])
    shift = mp_matrix(case.norm["bias"][None]) * kernel
    offset = [shift[0, j] + mpmath.mpf(float(case.consumer["bias"][j])) for j in range(kernel.cols)]
    for i in range(kernel.rows):
        for j in range(kernel.cols):
            kernel[i, j] *= mpmath.mpf(float(case.norm["scale"][i]))
    return factor, rows * kernel, offset


def test_variance_and_effective_epsilon() -> None:
    """‖R x̄‖²/n is the variance; ρ²/n is attained, so it is the least variance over all inputs, not only a bound."""
    case = make_case()
    block = jaxfold.contract(*case.layers, **case.options)
    h = case.x @ case.producer["kernel"] + case.producer["bias"]
    inputs = np.concatenate([case.x, np.ones((len(case.x), 1))], axis=1)
    chex.assert_trees_all_close(np.sum((inputs @ block.R.T) ** 2, axis=1) / 16, h.var(axis=1), rtol=1e-13)
    lowest = np.linalg.solve(block.R[:-1, :-1], -block.R[:-1, -1])
    at_lowest = (lowest @ case.producer["kernel"] + case.producer["bias"]).var()
    assert at_lowest == pytest.approx(block.R[-1, -1] ** 2 / 16, rel=1e-12)
    assert h.var(axis=1).min() > at_lowest


def test_leading_axes_and_empty_batches() -> None:
    case = make_case().astype(np.float32)
    block = jaxfold.contract(*case.layers, **case.options)
    flat = jaxfold.apply(block, case.x[:24])
    for lead in ((24,), (4, 6), (2, 3, 4)):
        chex.assert_trees_all_close(
            jaxfold.apply(block, case.x[:24].reshape(*lead, -1)), flat.reshape(*lead, -1), rtol=1e-5, atol=1e-6
        )
    chex.assert_trees_all_close(jaxfold.apply(block, case.x[0]), flat[0], rtol=1e-5, atol=1e-6)
    assert jaxfold.apply(block, np.zeros((0, 5), np.float32)).shape == (0, 7)
    assert jaxfold.apply(block, np.zeros((3, 0, 5), np.float32)).shape == (3, 0, 7)
    assert jax.grad(lambda x: jaxfold.apply(block, x).sum())(np.zeros((0, 5), np.float32)).shape == (0, 5)
