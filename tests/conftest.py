"""A strict session: no implicit promotion of dtypes or ranks, and float64 only in the tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import jax
import pytest

from tests.x64 import set_x64

# The same examples in every run, and however long one takes: no test depends on time.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Promotion spelled out everywhere, as in the strictest user's configuration."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """jax_enable_x64 on for one test, and as it was afterwards."""
    with set_x64(True):
        yield


@pytest.fixture(params=[False, True], ids=["x64 off", "x64 on"])
def either_x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The test runs once with jax_enable_x64 off and once with it on."""
    with set_x64(request.param):
        yield request.param
