"""Layers inside modules of Flax that change what the layers compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flax import nnx

import jaxfold
from jaxfold.nnx import block_paths
from tests.nnx.structures import Rngs


class Nested(nnx.Module):
    """A user's module, which hands on to its layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer


class Model(nnx.Module):
    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        ones: Any = {"kernel_init": nnx.initializers.ones, "rngs": Rngs(0)}  # drawing takes seconds
        self.up = wrap(nnx.Linear(4, 16, **ones))
        self.norm = nnx.LayerNorm(16, rngs=Rngs(0))
        self.down = nnx.Linear(16, 3, **ones)


def read(wrap: Callable[[Any], Any], producer: str) -> Any:
    return block_paths(Model(wrap), producer=producer, norm="norm", consumers="down")


@pytest.mark.parametrize(
    ("wrap", "producer", "kind"),
    [
        (lambda up: nnx.LoRA(4, 2, 16, base_module=up, rngs=Rngs(0)), "up/base_module", "a LoRA"),
        (lambda up: nnx.LoRA(4, 2, 16, base_module=Nested(up), rngs=Rngs(0)), "up/base_module/layer", "a LoRA"),
        *(
            (lambda up, kind=kind: getattr(nnx, kind)(up, rngs=Rngs(0)), "up/layer_instance", f"a {kind}")
            for kind in ("WeightNorm", "SpectralNorm")
            if hasattr(nnx, kind)  # since Flax 0.11
        ),
    ],
)
def test_refused_by_the_name_of_the_holder(wrap: Callable[[Any], Any], producer: str, kind: str) -> None:
    with pytest.raises(jaxfold.StructureError, match=f"a layer inside {kind} \\(up\\)"):
        read(wrap, producer)


@pytest.mark.parametrize(("wrap", "producer"), [(Nested, "up/layer"), (nnx.Sequential, "up/layers/0")])
def test_accepted_where_the_holder_hands_on(wrap: Callable[[Any], Any], producer: str) -> None:
    assert [block.producer for block in read(wrap, producer)] == [producer]
