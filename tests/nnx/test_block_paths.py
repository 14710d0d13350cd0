"""Blocks of NNX models by path: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import nnx

import jaxfold
from jaxfold.nnx import block_paths
from tests.nnx.structures import List, Rngs

ONES: dict[str, Any] = {"kernel_init": nnx.initializers.ones}  # drawing takes seconds


class Layer(nnx.Module):
    up: Any
    norm: Any
    down: Any

    def __init__(self, rngs: nnx.Rngs, *, epsilon: float = 1e-3) -> None:
        self.up = nnx.Linear(4, 16, **ONES, rngs=rngs)
        self.norm = nnx.LayerNorm(16, epsilon=epsilon, rngs=rngs)
        self.down = nnx.Linear(16, 4, **ONES, rngs=rngs)


@nnx.split_rngs(splits=3)
@nnx.vmap
def create(rngs: nnx.Rngs) -> Layer:
    return Layer(rngs)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = Rngs(0)
        self.layers = List([Layer(rngs), Layer(rngs, epsilon=64.0)])
        self.named = nnx.Dict(first=Layer(rngs))
        self.stack = create(Rngs(0))
        self.attend = Layer(rngs)
        self.attend.norm = nnx.RMSNorm(16, use_scale=False, rngs=rngs)
        self.attend.down = nnx.MultiHeadAttention(2, 16, 6, decode=False, **ONES, rngs=rngs)
        self.axes = Layer(rngs)
        self.axes.norm.reduction_axes = (-2, -1)
        self.lora = Layer(rngs)
        self.lora.up = nnx.LoRALinear(4, 16, lora_rank=2, rngs=rngs)
        self.grouped = Layer(rngs)
        self.grouped.norm = nnx.GroupNorm(16, 2, rngs=rngs)
        self.narrow = Layer(rngs)
        self.narrow.down = nnx.Linear(8, 4, **ONES, rngs=rngs)
        self.tied = Layer(rngs)
        self.head = nnx.Linear(16, 4, **ONES, rngs=rngs)
        self.head.kernel = self.tied.down.kernel
        self.twice = Layer(rngs)
        self.again = self.twice.up
        self.known = self.named
        self.model = self
        self.epsilon = Layer(rngs, epsilon=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def paths(prefix: str = "", **changes: Any) -> dict[str, Any]:
    return {"producer": f"{prefix}up", "norm": f"{prefix}norm", "consumers": f"{prefix}down"} | changes


@pytest.mark.parametrize("abstract", [False, True])
def test_reads(abstract: bool, model: Any) -> None:
    model = nnx.eval_shape(Model) if abstract else model
    found = block_paths(model, **paths("layers/*/", to="layers/*/block"))
    options: dict[str, Any] = {"epsilon": 1e-3, "norm_type": "layernorm"}
    assert found[0] == jaxfold.BlockPaths(**paths("layers/0/"), **options, to="layers/0/block")
    assert (found[1].producer, found[1].epsilon, found[1].to) == ("layers/1/up", 64.0, "layers/1/block")
    (stack,) = block_paths(model, **paths("stack/"), keep_producer=True)
    assert stack == jaxfold.BlockPaths(**paths("stack/"), **options, stacked=True, keep_producer=True)
    assert block_paths(model, **paths("known/*/"))[0].norm == "known/first/norm"
    names = {"producer": ("layers", 0, "up"), "norm": "layers/0/norm", "consumers": {"out": ("layers", 0, "down")}}
    assert block_paths(model, **names)[0].consumers == {"out": "layers/0/down"}


def test_paths_are_those_of_the_state(model: Model) -> None:
    state: Any = nnx.to_pure_dict(nnx.state(model))
    for block in block_paths(model, **paths("layers/*/")):
        for path in block.paths().values():
            node = state
            for key in str(path).split("/"):
                node = node[int(key) if key.isdigit() else key]
            assert all(isinstance(leaf, jax.Array) for leaf in node.values())


def test_attention_and_bare_norm(model: Model) -> None:
    (found,) = block_paths(model, **paths("attend/"))
    assert found.norm is None
    assert found.norm_type == "rmsnorm"
    assert found.consumers == {name: f"attend/down/{name}" for name in ("query", "key", "value")}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "axes": (paths("axes/"), "axes/norm.reduction_axes", "Only a norm over the last axis"),
    "lora": (paths("lora/"), "lora/up", "Merge the low-rank update"),
    "group norm": (paths("grouped/"), "grouped/norm", "a GroupNorm; expected"),
    "width": (paths("narrow/"), "narrow/down['kernel']", "16 is the width"),
    "epsilon": (paths("epsilon/"), "epsilon/norm.epsilon", "above 0"),
    "tied variable": (paths("tied/"), "tied/down.kernel", "holds in several places"),
    "tied module": (
        {"producer": "again", "norm": "twice/norm", "consumers": "twice/down"},
        "again",
        "holds in several places",
    ),
    "alias": (
        paths("twice/"),
        "producer",
        "the path 'twice/up' of a module that the model holds at 'again' too; expected one of its own. Contracting it "
        "here would change it there: give the block layers of its own first.",
    ),
    "alias of one that encloses it": (
        paths("named/first/"),
        "producer",
        "is also at 'known'; expected a path as in the state, which holds it there alone: 'known/first/up'.",
    ),
    "alias of a consumer": (paths("layers/0/", consumers="model/layers/0/down"), "consumers", "also at the root"),
    "pattern below an alias": (paths("named/*/"), "producer", "holds it there alone: 'known/*/up'"),
    "no place": (
        paths("attend/", keep_producer=True),
        "to",
        "None for the block of attend/up, whose norm has no parameters; expected a path for the contracted block",
    ),
    "container": (paths("layers/0/", producer="layers"), "layers", "expected a"),
    "a module that is no layer": (paths("layers/0/", norm="layers/0"), "layers/0", "a Layer; expected"),
    "no match": (paths("blocks/*/"), "producer", "matches nothing"),
    "no such producer": (paths("layers/2/"), "producer", "layers has the keys 0, 1"),
    "no such norm": (paths("layers/*/", norm="layers/*/ln"), "norm", "has the keys 'down', 'norm', 'up'"),
    "wildcards": (paths("layers/0/", norm="layers/*/norm"), "norm", "with 1"),
    "flag": (paths("layers/0/", keep_producer="yes"), "keep_producer", "True or False"),
}


def test_a_place_for_a_block_without_one(model: Model) -> None:
    assert block_paths(model, **paths("attend/", to="attend/block"), keep_producer=True)[0].to == "attend/block"
    assert block_paths(model, **paths("layers/0/"), keep_producer=True)[0].to is None


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, model: Model) -> None:
    names, argument, words = REFUSED[name]
    with pytest.raises(jaxfold.JaxfoldError) as caught:
        block_paths(model, **names)
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_what_is_no_model() -> None:
    with pytest.raises(jaxfold.StructureError, match="model: got a dict"):
        block_paths({"up": nnx.Linear(4, 16, rngs=Rngs(0))}, **paths())
