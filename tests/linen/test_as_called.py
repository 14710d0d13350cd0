"""Models that do something else while they are initialised than when they are called."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import pytest

import jaxfold
from jaxfold.linen import block_paths


class Model(nn.Module):
    """With a ReLU behind the producer when it is called, when it is initialised, or never."""

    relu: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Dense(16, name="up")(x)
        if self.relu == ("initialised" if self.is_initializing() else "called"):
            h = nn.relu(h)
        return nn.Dense(3, name="down")(nn.LayerNorm(name="norm")(h))


def read(relu: str) -> Any:
    return block_paths(Model(relu), jnp.ones((2, 4)), producer="up", norm="norm", consumers="down")


def test_what_only_the_call_computes_is_seen() -> None:
    with pytest.raises(jaxfold.StructureError, match="expected the output of producer"):
        read("called")


@pytest.mark.parametrize("relu", ["initialised", "never"])
def test_what_only_initialising_computes_is_no_obstacle(relu: str) -> None:
    assert [block.producer for block in read(relu)] == ["up"]
