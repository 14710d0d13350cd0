"""Layers of one nnx.Sequential: only neighbours in their order make a block."""

from __future__ import annotations

from typing import Any

import pytest
from flax import nnx

import jaxfold
from jaxfold.nnx import block_paths
from tests.nnx.structures import Rngs

ONES: dict[str, Any] = {"kernel_init": nnx.initializers.ones}  # drawing takes seconds


def parts() -> tuple[nnx.Linear, nnx.LayerNorm, nnx.Linear]:
    rngs = Rngs(0)
    return nnx.Linear(4, 16, **ONES, rngs=rngs), nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 4, **ONES, rngs=rngs)


def paths(producer: int, norm: int, consumer: int, prefix: str = "layers/") -> dict[str, Any]:
    return {"producer": f"{prefix}{producer}", "norm": f"{prefix}{norm}", "consumers": f"{prefix}{consumer}"}


class Free(nnx.Sequential):
    """Its call need not keep the order."""

    def __call__(self, x: Any) -> Any:
        up, down, norm = self.layers
        return down(norm(up(x)))


class Holder(nnx.Module):
    def __init__(self, member: Any) -> None:
        self.mlp = member


def test_neighbours() -> None:
    up, norm, down = parts()
    assert len(block_paths(nnx.Sequential(up, norm, down), **paths(0, 1, 2))) == 1
    assert len(block_paths(nnx.Sequential(nnx.relu, up, norm, down, nnx.relu), **paths(1, 2, 3))) == 1
    assert len(block_paths(Holder(nnx.Sequential(up, norm, down)), **paths(0, 1, 2, "mlp/layers/"))) == 1
    assert len(block_paths(Free(up, down, norm), **paths(0, 2, 1))) == 1


def test_attention_is_a_member() -> None:
    up, norm, _ = parts()
    attention = nnx.MultiHeadAttention(2, 16, 6, decode=False, **ONES, rngs=Rngs(0))
    assert len(block_paths(nnx.Sequential(up, norm, attention), **paths(0, 1, 2))) == 1
    with pytest.raises(jaxfold.StructureError, match=r"layers/3/query: got relu \(layers/2\) between norm and it"):
        block_paths(nnx.Sequential(up, norm, nnx.relu, attention), **paths(0, 1, 3))


def test_something_between() -> None:
    up, norm, down = parts()
    with pytest.raises(
        jaxfold.StructureError, match=r"layers/2: got relu \(layers/1\) between producer and it; expected"
    ):
        block_paths(nnx.Sequential(up, nnx.relu, norm, down), **paths(0, 2, 3))
    other = nnx.Linear(16, 16, **ONES, rngs=Rngs(0))
    model = Holder(nnx.Sequential(up, norm, other, nnx.gelu, down))
    words = r"mlp/layers/4: got Linear \(mlp/layers/2\) and gelu \(mlp/layers/3\) between norm and it"
    with pytest.raises(jaxfold.StructureError, match=words):
        block_paths(model, **paths(0, 1, 4, "mlp/layers/"))


def test_order() -> None:
    up, norm, down = parts()
    with pytest.raises(jaxfold.StructureError, match="layers/0: got a member before producer: called the other way"):
        block_paths(nnx.Sequential(norm, up, down), **paths(1, 0, 2))
    with pytest.raises(jaxfold.StructureError, match="layers/0: got a member before norm: called the other way"):
        block_paths(nnx.Sequential(down, up, norm), **paths(1, 2, 0))


@pytest.mark.parametrize(
    ("rate", "deterministic", "accepted"), [(0.5, True, True), (0.0, False, True), (0.5, False, False)]
)
def test_dropout(rate: float, deterministic: bool, accepted: bool) -> None:
    """One that returns its input is no obstacle, as in a Linen model."""
    up, norm, down = parts()
    model = nnx.Sequential(up, norm, nnx.Dropout(rate, deterministic=deterministic, rngs=Rngs(0)), down)
    if accepted:
        assert len(block_paths(model, **paths(0, 1, 3))) == 1
        return
    with pytest.raises(jaxfold.StructureError, match=r"Dropout \(layers/2\) between norm and it"):
        block_paths(model, **paths(0, 1, 3))
