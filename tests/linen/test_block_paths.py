"""Blocks of Linen models by path: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxfold
from jaxfold.linen import block_paths

X = jnp.ones((2, 4))


class Layer(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        h = nn.Dense(16, name="up")(x)
        h = nn.Dropout(0.5, deterministic=not self.train)(h)
        return nn.Dense(4, name="down")(nn.LayerNorm(epsilon=1e-3, name="norm")(h)), None


class Model(nn.Module):
    """Blocks of many kinds beside each other."""

    def setup(self) -> None:
        self.shared = nn.Dense(16)
        self.shared_norm = nn.LayerNorm()

    @nn.compact
    def __call__(self, x: Any, mask: Any = None, *, masked: bool = False) -> Any:
        axes: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        y, _ = nn.scan(Layer, **axes, length=3)(name="scanned")(x, None)
        z, _ = nn.vmap(Layer, **axes, in_axes=(None, None), axis_size=2)(name="mapped")(x, None)  # pyright: ignore
        w, _ = nn.remat(Layer)(name="remat")(x)
        v, _ = Layer(name="layer_1")(x)
        u, _ = Layer(train=True, name="training")(x)
        attention = nn.MultiHeadDotProductAttention(2, qkv_features=6, name="attention")
        a = attention(nn.RMSNorm(use_scale=False, name="bare")(nn.DenseGeneral(16, name="into")(x)))
        once = nn.Dense(3)(nn.LayerNorm()(nn.Dense(16)(x)))  # the outer one is Dense_0
        r = nn.Dense(3, name="acted_down")(nn.LayerNorm(name="acted_norm")(nn.relu(nn.Dense(16, name="acted")(x))))
        h = nn.Dense(16, name="residual")(x)
        s = h + nn.Dense(16, name="residual_down")(nn.LayerNorm(name="residual_norm")(h))
        g = nn.Dense(16, name="gated")(x)
        n = nn.LayerNorm(name="gated_norm")(g)
        t = nn.Dense(3, name="gated_down")(n) * nn.Dense(3, name="gate")(n) + nn.Dense(3, name="peek")(g)
        m = nn.LayerNorm(name="masked_norm")(nn.Dense(16, name="into_mask")(x), mask=mask if masked else None)
        m = nn.Dense(3, name="from_mask")(m)
        o = nn.Dense(3, name="shared_down")(self.shared_norm(self.shared(x)))
        o = o + nn.Dense(3, name="aside")(self.shared(x))
        c = nn.MultiHeadDotProductAttention(2, qkv_features=6, name="cross")(
            nn.LayerNorm(name="cross_norm")(nn.Dense(16, name="cross_up")(x)), x
        )
        e = nn.Dense(3, name="grouped_down")(nn.GroupNorm(2, name="grouped")(nn.Dense(16, name="grouped_up")(x)))
        p = nn.LayerNorm(reduction_axes=(0, 1), name="axes")(nn.Dense(16, name="axes_up")(x))
        p = nn.Dense(3, name="axes_down")(p)
        return y, z, w, v, u, a, once, r, s, t, m, o, c, e, p


def paths(prefix: str = "", **changes: Any) -> dict[str, Any]:
    return {"producer": f"{prefix}up", "norm": f"{prefix}norm", "consumers": f"{prefix}down"} | changes


@pytest.mark.parametrize(
    ("name", "stacked"), [("scanned", True), ("mapped", True), ("remat", False), ("layer_1", False)]
)
def test_reads(name: str, stacked: bool) -> None:
    (found,) = block_paths(Model(), X, **paths(f"{name}/"))
    options: dict[str, Any] = {"epsilon": 1e-3, "norm_type": "layernorm", "stacked": stacked}
    assert found == jaxfold.BlockPaths(**paths(f"{name}/"), **options)


def test_wildcards() -> None:
    found = block_paths(Model(), X, **paths("layer_*/", to="layer_*/block"))
    assert [block.to for block in found] == ["layer_1/block"]
    stacks = block_paths(Model(), jax.ShapeDtypeStruct((2, 4), jnp.float32), **paths("*d/"))
    assert [(block.producer, block.stacked) for block in stacks] == [("scanned/up", True), ("mapped/up", True)]


def test_attention_and_bare_norm() -> None:
    (found,) = block_paths(Model(), X, producer="into", norm="bare", consumers="attention")
    assert found.norm is None
    assert found.norm_type == "rmsnorm"
    assert found.consumers == {name: f"attention/{name}" for name in ("query", "key", "value")}


def test_a_place_for_a_block_without_one() -> None:
    names: dict[str, Any] = {"producer": "into", "norm": "bare", "consumers": "attention"}
    (found,) = block_paths(Model(), X, **names, keep_producer=True, to="block")
    assert (found.norm, found.to) == (None, "block")
    assert block_paths(Model(), X, **paths("layer_1/"), keep_producer=True)[0].to is None


def test_outer_layer_is_named_first() -> None:
    (found,) = block_paths(Model(), X, producer="Dense_1", norm="LayerNorm_0", consumers="Dense_0")
    assert (found.producer, found.consumers) == ("Dense_1", "Dense_0")


def test_several_consumers() -> None:
    names: dict[str, Any] = {
        "producer": "gated",
        "norm": "gated_norm",
        "consumers": {"value": "gated_down", "gate": "gate"},
    }
    (found,) = block_paths(Model(), X, **names, keep_producer=True)
    assert found.keep_producer
    assert found.consumers == names["consumers"]


def test_keyword_arguments_reach_the_model() -> None:
    names: dict[str, Any] = {"producer": "into_mask", "norm": "masked_norm", "consumers": "from_mask"}
    assert len(block_paths(Model(), X, **names)) == 1
    with pytest.raises(jaxfold.StructureError, match="masked_norm: got a mask"):
        block_paths(Model(), X, mask=jnp.ones((2, 16), bool), masked=True, **names)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "the other way round": (
        {"producer": "Dense_0", "norm": "LayerNorm_0", "consumers": "Dense_1"},
        "Dense_0",
        "called the other way round",
    ),
    "nonlinearity": (
        {"producer": "acted", "norm": "acted_norm", "consumers": "acted_down"},
        "acted_norm",
        "Something stands between",
    ),
    "dropout": (paths("training/"), "training/norm", "an input from training/Dropout_0 (Dropout)"),
    "read elsewhere": (
        {"producer": "gated", "norm": "gated_norm", "consumers": {"a": "gated_down", "b": "gate"}},
        "gated",
        "peek (Dense) reads too",
    ),
    "norm read elsewhere": (
        {"producer": "gated", "norm": "gated_norm", "consumers": "gate", "keep_producer": True},
        "gated_norm",
        "gated_down (Dense) reads too",
    ),
    "another's norm": (
        {"producer": "into", "norm": "LayerNorm_0", "consumers": "attention"},
        "LayerNorm_0",
        "an input from Dense_1 (Dense); expected the output of producer (into)",
    ),
    "another's consumer": (
        {"producer": "Dense_1", "norm": "LayerNorm_0", "consumers": "peek"},
        "peek",
        "an input from gated (Dense)",
    ),
    "called twice": (
        {"producer": "shared", "norm": "shared_norm", "consumers": "shared_down", "keep_producer": True},
        "shared",
        "called 2 times",
    ),
    "cross attention": (
        {"producer": "cross_up", "norm": "cross_norm", "consumers": "cross"},
        "cross/key",
        "expected the output of norm (cross_norm)",
    ),
    "group norm": (
        {"producer": "grouped_up", "norm": "grouped", "consumers": "grouped_down"},
        "grouped",
        "a GroupNorm; expected",
    ),
    "axes": (
        {"producer": "axes_up", "norm": "axes", "consumers": "axes_down"},
        "axes.reduction_axes",
        "Only a norm over the last axis",
    ),
    "a class that is no layer": (
        paths("layer_1/", consumers="layer_1"),
        "layer_1",
        "a Layer; expected a Dense, DenseGeneral or Einsum.",
    ),
    "no match": (paths("layers_*/"), "producer", "matches nothing; expected one that a module matches"),
    "from the root of the variables": (paths("params/layer_1/"), "producer", "Leave out 'params/'"),
    "a pattern from there": (paths("params/layer_*/"), "producer", "Leave out 'params/'"),
    "only one from there": (paths("layer_1/", consumers=("params", "layer_1", "down")), "consumers", "Leave out"),
    "no place": (
        {"producer": "into", "norm": "bare", "consumers": "attention", "keep_producer": True},
        "to",
        "None for the block of into, whose norm has no parameters; expected a path for the contracted block",
    ),
    "no such producer": (paths("layer_1/", producer="layer_1/in"), "producer", "has the keys 'up'"),
    "no such norm": (paths("layer_1/", norm="layer_1/ln"), "norm", "has the keys 'up'"),
    "wildcards": (paths("layer_1/", norm="*/norm"), "norm", "with 1"),
    "path": (paths("layer_1/", norm=""), "norm", "a path such as"),
    "no consumers": (paths("layer_1/", consumers={}), "consumers", "an empty mapping"),
    "name": (paths("layer_1/", consumers={1: "layer_1/down"}), "consumers", "names that are strings"),
    "flag": (paths("layer_1/", keep_producer=1), "keep_producer", "True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    names, argument, words = REFUSED[name]
    with pytest.raises(jaxfold.JaxfoldError) as caught:
        block_paths(Model(), X, **names)
    assert caught.value.argument == argument
    assert words in str(caught.value)


class Three(nn.Module):
    """A block of any three layers, and a layer after it."""

    up: Any
    norm: Any
    down: Any
    after: Any = nn.relu

    def __call__(self, x: Any) -> Any:
        return self.after(self.down(self.norm(self.up(x))))


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError


ATTENTION = nn.MultiHeadDotProductAttention
# Each of these models cannot be run abstractly, because of the attribute that is named.
STOPPING: dict[str, tuple[dict[str, Any], str]] = {
    "axis name": ({"norm": nn.LayerNorm(axis_name="b")}, "norm.axis_name"),
    "axis name of the other norm": ({"norm": nn.RMSNorm(axis_name="b")}, "norm.axis_name"),
    "axis name of a norm as the consumer": ({"down": nn.LayerNorm(axis_name="b")}, "down"),
    "epsilon": ({"norm": nn.LayerNorm(epsilon="1e-6")}, "norm.epsilon"),  # pyright: ignore[reportArgumentType]
    "norm's dtype": ({"norm": nn.LayerNorm(dtype=jnp.int32)}, "norm.dtype"),
    "dtype": ({"down": nn.Dense(3, dtype=jnp.int32)}, "down.dtype"),
    "product": ({"up": nn.Dense(16, dot_general=broken)}, "up.dot_general"),
    "promotion": ({"down": nn.Dense(3, promote_dtype=broken)}, "down.promote_dtype"),
    "axis": ({"up": nn.DenseGeneral(16, axis=-3)}, "up.axis"),
    "batch": ({"up": nn.DenseGeneral(16, batch_dims=(1,))}, "up.batch_dims"),
    "equation": ({"up": nn.Einsum((4, 16), "bd,nd->bn")}, "up.einsum_str"),
    "batch norm": ({"norm": nn.BatchNorm()}, "norm"),
    "batch norm over a named axis": ({"norm": nn.BatchNorm(axis_name="b", use_running_average=False)}, "norm"),
    "dropout": ({"norm": nn.Dropout(0.5)}, "norm"),
    "groups": ({"norm": nn.GroupNorm(7)}, "norm"),
    "convolution": ({"up": nn.Conv(16, (3, 3, 3))}, "up"),
    "heads": ({"down": ATTENTION(4, qkv_features=6)}, "down.qkv_features"),
    "attention's product": ({"down": ATTENTION(2, qkv_dot_general=broken)}, "down.qkv_dot_general"),
}


@pytest.mark.parametrize("name", STOPPING)
def test_refused_although_the_model_cannot_be_run(name: str) -> None:
    changes, argument = STOPPING[name]
    model = Three(**{"up": nn.Dense(16), "norm": nn.LayerNorm(), "down": nn.Dense(3)} | changes)
    with pytest.raises(jaxfold.JaxfoldError) as caught:
        block_paths(model, X, **paths())
    assert caught.value.argument == argument


def test_a_model_that_cannot_be_run() -> None:
    """For any other reason, its own error. The layers that were called by then are matched by pattern too."""
    layers: dict[str, Any] = {"up": nn.Dense(16), "norm": nn.LayerNorm(), "down": nn.Dense(3)}
    with pytest.raises(NameError, match="axis name"):
        block_paths(Three(**layers, after=nn.LayerNorm(axis_name="b")), X, **paths())
    with pytest.raises(ZeroDivisionError):
        block_paths(Three(**layers, after=broken), X, **paths())
    malformed: dict[str, Any] = paths(norm="")
    with pytest.raises(jaxfold.OptionError, match="norm: got ''"):
        block_paths(Three(**layers, after=broken), X, **malformed)
    named = Three(layers["up"], nn.LayerNorm(axis_name="b"), layers["down"])
    patterns: dict[str, Any] = {"producer": "u*", "norm": "no*m", "consumers": {"out": "down"}}
    with pytest.raises(jaxfold.OptionError, match=r"norm\.axis_name") as caught:
        block_paths(named, X, **patterns)
    assert isinstance(caught.value.__cause__, NameError)  # both are shown


class Returns(nn.Module):
    which: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Dense(16, name="up")(x)
        n = nn.LayerNorm(name="norm")(h)
        return nn.Dense(3, name="down")(n), {"producer": h, "norm": n, "nothing": x}[self.which]


def test_returned_activations() -> None:
    with pytest.raises(jaxfold.StructureError, match="up: got an output that the model returns"):
        block_paths(Returns("producer"), X, **paths())
    with pytest.raises(jaxfold.StructureError, match="norm: got an output that the model returns"):
        block_paths(Returns("norm"), X, **paths(), keep_producer=True)
    assert block_paths(Returns("producer"), X, **paths(), keep_producer=True)[0].keep_producer
    assert len(block_paths(Returns("nothing"), X, **paths())) == 1


class Tied(nn.Module):
    """One block, called twice as a whole."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layer = Layer(name="layer")
        return layer(layer(x)[0])[0]


def test_a_block_that_is_called_twice_as_a_whole() -> None:
    assert len(block_paths(Tied(), X, **paths("layer/"))) == 1


def test_what_is_no_model() -> None:
    with pytest.raises(jaxfold.StructureError, match="model: got a function"):
        block_paths(lambda x: x, X, **paths())  # pyright: ignore[reportArgumentType]
