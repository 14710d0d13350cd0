"""Sharding names: carried over where an axis survives, and said where not."""

from __future__ import annotations

import contextlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta

import jaxfold
from jaxfold import BlockPaths, contract_tree
from tests.factories import make_case

CASE = make_case(5, 16, (3, 4), dtype=np.float32)
PATHS = BlockPaths(producer="up", norm="norm", consumers="down", epsilon=1e-3)
NAMES = {
    "up": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
    "norm": {"scale": ("mlp",), "bias": ("mlp",)},
    "down": {"kernel": ("mlp", "heads", None), "bias": ("heads", None)},
}
TREE = {"up": CASE.producer, "norm": CASE.norm, "down": CASE.consumer}
# What the axes of the coefficients are called: those of D's rows, R's rows and the constant have no name.
EXPECTED = {
    "direct": {
        "denominator": {"kernel": ("embed", None), "bias": (None,)},
        "consumer": {"kernel": (None, "heads", None)},
    },
    "packed": {"denominator": {"kernel": (None,), "bias": (None,)}, "consumer": {"kernel": (None, "heads", None)}},
    "standard": {
        "denominator": {"kernel": ("embed", None), "bias": (None,)},
        "consumer": {"kernel": (None, "heads", None), "bias": ("heads", None)},
    },
}


def boxed(make: Any) -> Any:
    return jax.tree.map(make, jax.tree.map(jnp.asarray, TREE), NAMES, is_leaf=lambda node: isinstance(node, jax.Array))


@pytest.mark.parametrize("form", EXPECTED)
@pytest.mark.parametrize("box", [nn.Partitioned, nn.LogicallyPartitioned])
def test_linen(form: Any, box: Any) -> None:
    new, report = contract_tree(boxed(box), PATHS, form=form, strict=True, allow_growth=True)
    leaves = jax.tree.leaves(new["up"], is_leaf=meta.is_axis_metadata)
    assert {type(leaf) for leaf in leaves} == {box}
    names = jax.tree.map(lambda leaf: leaf.names, new["up"], is_leaf=meta.is_axis_metadata)
    assert names == EXPECTED[form]
    for leaf in leaves:
        assert len(leaf.names) == leaf.value.ndim
    bare = jaxfold.contract(*CASE.layers, epsilon=1e-3, form=form, allow_growth=True)
    for ours, theirs in zip(jax.tree.leaves(meta.unbox(new["up"])), jax.tree.leaves(bare.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    notes = report.rows[0].notes
    lost = [note for note in notes if "no counterpart" in note]
    assert any("axis 1 of up/kernel, named 'mlp'" in note for note in lost)
    assert any("axis 0 of down/kernel, named 'mlp'" in note for note in lost)
    assert any("axis 0 of up/kernel, named 'embed'" in note for note in lost) == (form == "packed")
    assert not any("heads" in note for note in lost)
    assert f"consumer/kernel has the sharding names {(None, 'heads', None)}" in notes
    assert all(note in str(report) for note in notes)


def test_stacks_keep_the_name_of_the_stack() -> None:
    def make(leaf: Any, names: Any) -> Any:
        return nn.Partitioned(jnp.stack([leaf, 2 * leaf]), ("layers", *names))

    paths = BlockPaths(producer="up", norm="norm", consumers="down", epsilon=1e-3, stacked=True)
    new, _ = contract_tree(boxed(make), paths, strict=True)
    names = jax.tree.map(lambda leaf: leaf.names, new["up"], is_leaf=meta.is_axis_metadata)
    expected = jax.tree.map(lambda n: ("layers", *n), EXPECTED["direct"], is_leaf=lambda n: isinstance(n, tuple))
    assert names == expected


def test_each_coefficient_follows_the_box_of_its_own_source() -> None:
    tree = jax.tree.map(jnp.asarray, TREE)
    tree["down"]["kernel"] = nn.Partitioned(tree["down"]["kernel"], NAMES["down"]["kernel"])
    new, _ = contract_tree(tree, PATHS, strict=True)
    assert isinstance(new["up"]["denominator"]["kernel"], jax.Array)
    assert new["up"]["consumer"]["kernel"].names == (None, "heads", None)


def mesh() -> Any:
    """Newer versions of nnx place a variable with names at once, and ask for a mesh that has them."""
    if not hasattr(jax, "set_mesh"):
        return contextlib.nullcontext()
    axes = ("embed", "mlp", "heads")
    return jax.set_mesh(jax.make_mesh((1, 1, 1), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3))


def sharding_of(variable: Any) -> Any:
    metadata = variable.get_metadata()
    return next((metadata[key] for key in ("out_sharding", "sharding_names", "sharding") if metadata.get(key)), None)


@pytest.mark.parametrize("form", EXPECTED)
def test_nnx(form: Any) -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            def partitioned(names: Any) -> Any:
                return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

            self.up = nnx.Linear(5, 16, rngs=rngs, kernel_init=partitioned(("embed", "mlp")))
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.down = nnx.LinearGeneral(16, (3, 4), rngs=rngs, kernel_init=partitioned(("mlp", "heads", None)))

    with mesh():
        state = nnx.state(Model(nnx.Rngs(0)))
        new, report = contract_tree(state, PATHS, form=form, strict=True, allow_growth=True)
    assert type(new) is type(state)
    denominator, consumer = new["up"]["denominator"], new["up"]["consumer"]
    assert type(denominator["kernel"]) is type(state["up"]["kernel"])
    assert sharding_of(denominator["kernel"]) == EXPECTED[form]["denominator"]["kernel"]
    assert sharding_of(consumer["kernel"]) == EXPECTED[form]["consumer"]["kernel"]
    assert sharding_of(state["up"]["kernel"]) == ("embed", "mlp")  # the source's own box is as it was
    assert any("axis 1 of up/kernel, named 'mlp'" in note for note in report.rows[0].notes)


def test_nnx_without_names() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(5, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    state = nnx.state(Model(nnx.Rngs(0)))
    new, report = contract_tree(
        state, BlockPaths(producer="up", norm=None, consumers="down", epsilon=1e-3, norm_type="layernorm")
    )
    assert report.rows[0].notes == ()
    assert sharding_of(new["up"]["consumer"]["kernel"]) is None
