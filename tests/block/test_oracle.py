"""The yardstick of verify against the chain rule written by other hands, with its sign and without biases."""

from __future__ import annotations

import numpy as np
import pytest

import jaxfold
from jaxfold._block._oracle import oracle, oracle_gradient
from tests.factories import make_case
from tests.reference import two_pass, two_pass_gradients


@pytest.mark.parametrize("consumer_bias", [True, False])
@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_oracle(norm_type: str, consumer_bias: bool) -> None:
    case = make_case(norm_type=norm_type, consumer_bias=consumer_bias)
    block = jaxfold.Block(*case.layers, **case.options)
    cotangents = np.random.default_rng(1).normal(size=(33, 7))
    # Float64 and products of at most 16 terms, as in test_exactness.
    np.testing.assert_allclose(oracle(block, case.x)[None], two_pass(*case.layers, case.x, **case.options), atol=1e-13)
    truth = two_pass_gradients(*case.layers, case.x, cotangents, **case.options)[1]
    np.testing.assert_allclose(oracle_gradient(block, case.x, {None: cotangents}), truth, atol=1e-13)
