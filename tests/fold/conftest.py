"""Other people's code is folded here, which relies on JAX's usual promotion."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def usual() -> Iterator[None]:
    """Promotion of dtypes and ranks as JAX has it unless told otherwise."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
