"""Layers of a Linen model that do not compute with their own leaves, and stacks on other axes than the first."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import pytest

import jaxfold
import jaxfold.linen
from jaxfold.linen import block_paths

X = jnp.ones((2, 4))
PATHS: dict[str, Any] = {"producer": "up", "norm": "norm", "consumers": "down"}


class Doubling(nn.Dense):
    def __call__(self, inputs: Any) -> Any:
        return 2 * super().__call__(inputs)


class Shifting(nn.LayerNorm):
    def __call__(self, x: Any, **options: Any) -> Any:
        return super().__call__(x, **options) + 1


class Model(nn.Module):
    wrapped: str = ""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        up: Any = (Doubling if self.wrapped == "producer" else nn.Dense)(16, name="up")
        norm = (Shifting if self.wrapped == "norm" else nn.LayerNorm)(name="norm")
        down: Any = (Doubling if self.wrapped == "consumer" else nn.Dense)(4, name="down")
        if self.wrapped == "weights of the producer":
            up = nn.WeightNorm(up)
        if self.wrapped == "weights of the consumer":
            down = nn.WeightNorm(down)
        if self.wrapped == "spectrum":
            up = nn.SpectralNorm(up)
            return down(norm(up(x, update_stats=False))), None
        return down(norm(up(x))), None


@pytest.mark.parametrize(
    ("wrapped", "argument", "words"),
    [
        ("producer", "up", "a Doubling, whose class overrides __call__ of Dense"),
        ("norm", "norm", "a Shifting, whose class overrides __call__ of LayerNorm"),
        ("consumer", "down", "a Doubling, whose class overrides __call__ of Dense"),
        ("weights of the producer", "up", "a layer inside a WeightNorm (WeightNorm_0), which computes its kernel"),
        ("weights of the consumer", "down", "a layer inside a WeightNorm (WeightNorm_0), which computes its kernel"),
        ("spectrum", "up", "a layer inside a SpectralNorm (SpectralNorm_0), which computes its kernel"),
    ],
)
def test_refused_for_what_it_is(wrapped: str, argument: str, words: str) -> None:
    with pytest.raises(jaxfold.StructureError) as caught:
        block_paths(Model(wrapped), X, **PATHS)
    assert caught.value.argument == argument
    assert words in str(caught.value)
    assert "times" not in str(caught.value)


def test_a_wrapped_layer_elsewhere() -> None:
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return Model(name="plain")(nn.WeightNorm(nn.Dense(4, name="other"))(x))

    names: dict[str, Any] = {role: f"plain/{path}" for role, path in PATHS.items()}
    assert len(block_paths(Both(), X, **names)) == 1


def scan(layer: Any, length: int, axis: int = 0) -> Any:
    return nn.scan(layer, variable_axes={"params": axis}, split_rngs={"params": True}, length=length)


def test_stack_axes() -> None:
    (block,) = block_paths(scan(Model, 3)(), X, **PATHS)
    assert block.stacked
    with pytest.raises(jaxfold.ShapeError, match=r"up\['kernel'\]: got shape \(3, 2, 4, 16\).*One stack axis is supp"):
        block_paths(scan(scan(Model, 2), 3)(), X, **PATHS)
    with pytest.raises(jaxfold.ShapeError, match=r"The stack axis has to be axis 0, as variable_axes="):
        block_paths(scan(Model, 3, axis=1)(), X, **PATHS)


def test_no_stack_axis() -> None:
    """A kernel that does not fit its module is not said to be a stack."""
    leaves = {"kernel": jnp.ones((4, 16)), "bias": jnp.ones(16)}
    norm, down = nn.LayerNorm(use_bias=False, use_scale=False), (nn.Dense(3, use_bias=False), {"kernel": X})
    with pytest.raises(jaxfold.ShapeError, match=r"producer\['kernel'\]") as caught:
        jaxfold.linen.block((nn.Dense(5), leaves), norm, down)
    assert caught.value.hint == ""
