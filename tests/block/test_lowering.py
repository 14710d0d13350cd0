"""What is handed to the compilers: traces, precision, platforms, devices."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._block import _apply
from tests.factories import make_case

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def _block(form: Any = "direct", seed: int = 0, **options: Any) -> Any:
    case = make_case(seed=seed).astype(np.float32)
    return jaxfold.contract(*case.layers, **{**case.options, **options}, form=form)


@pytest.mark.parametrize("form", ["direct", "packed", "standard"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_lowers_for_every_platform_with_a_symbolic_batch(form: Any, platform: str) -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 5), jnp.float32)
    exported = jax.export.export(jax.jit(jaxfold.apply), platforms=[platform])(_block(form), x)
    dots = [line for line in exported.mlir_module().splitlines() if "stablehlo.dot_general" in line]
    # The denominator's product, and the output's: once, or in both branches of the choice by platform in older JAX.
    assert len(dots) in ((2,) if form == "standard" else (2, 3))
    assert sum("precision = [HIGHEST, HIGHEST]" in line for line in dots) == 1
    assert sum("precision" not in line or "[DEFAULT, DEFAULT]" in line for line in dots) == len(dots) - 1


def test_one_artefact_for_all_platforms_runs_here() -> None:
    """Serialised as a function of plain arrays, for what restores it knows no Contraction."""
    block, data = _block(), np.ones((2, 3, 5), np.float32)
    leaves, treedef = jax.tree.flatten(block)

    def call(leaves: list[Any], x: Any) -> Any:
        return jaxfold.apply(jax.tree.unflatten(treedef, leaves), x)

    x = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("batch, time"), 5), jnp.float32)
    exported = jax.export.export(jax.jit(call), platforms=PLATFORMS)(leaves, x)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.platforms == PLATFORMS
    np.testing.assert_allclose(restored.call(leaves, data), jaxfold.apply(block, data), rtol=1e-6)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGH, None])
def test_the_caller_chooses_the_precision_of_the_numerator(precision: Any) -> None:
    text = jax.jit(lambda block, x: jaxfold.apply(block, x, precision=precision)).lower(
        _block(), np.ones((3, 5), "float32")
    )
    dots = [line for line in text.as_text().splitlines() if "stablehlo.dot_general" in line]
    highest = sum("[HIGHEST, HIGHEST]" in line for line in dots)
    assert highest == (len(dots) if precision == "highest" else 1)
    if precision == jax.lax.Precision.HIGH:
        assert any("[HIGH, HIGH]" in line for line in dots)


def test_the_offset_is_added_outside_the_product_off_cpu() -> None:
    """The product of the other platforms has no row for the offset, which default precision would round."""
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    rows = {"cpu": "tensor<3x7xf32>, tensor<7x7xf32>", "cuda": "tensor<3x6xf32>, tensor<6x7xf32>"}
    for platform, operands in rows.items():
        text = jax.export.export(jax.jit(jaxfold.apply), platforms=[platform])(_block(), x).mlir_module()
        assert operands in text


def test_one_trace_for_all_contractions_of_a_kind() -> None:
    x = np.ones((3, 5), np.float32)
    jaxfold.apply(_block(seed=1), x)
    traces = _apply._apply._cache_size()  # type: ignore[attr-defined]
    for seed in (2, 3):
        jaxfold.apply(_block(seed=seed), x)
    assert _apply._apply._cache_size() == traces  # type: ignore[attr-defined]
    jaxfold.apply(_block(epsilon=1e-2), x)
    jaxfold.apply(_block(), np.ones((4, 5), np.float32))
    assert _apply._apply._cache_size() == traces + 2  # type: ignore[attr-defined]


def test_no_wide_activation_is_left() -> None:
    """n = 64 appears in no shape of the compiled function: neither the kernel nor the activation of that width."""
    case = make_case(5, 64, 7, rows=33).astype(np.float32)
    block = jaxfold.contract(*case.layers, **case.options)
    text = jax.jit(jaxfold.apply).lower(block, case.x).compile().as_text()
    assert text
    assert "33,7]" in text
    assert "64]" not in text
    assert "64," not in text.split("HloModule", 1)[1].split("entry_computation_layout", 1)[1].split("\n", 1)[0]


def test_half_storage_computes_in_float32() -> None:
    case = make_case().astype(jnp.bfloat16)
    block = jaxfold.contract(*case.layers, **case.options)
    text = jax.jit(jaxfold.apply).lower(block, case.x).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert dots
    assert all("bf16" not in line for line in dots)
    assert jaxfold.apply(block, case.x).dtype == jnp.bfloat16


@pytest.mark.parametrize("sharded", ["batch", "features"])
def test_on_several_devices(sharded: str) -> None:
    """Eight virtual devices in a process of their own, since their number is fixed when JAX starts."""
    code = f"""
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, jaxfold
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert len(jax.devices()) == 8
rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype("float32")
block = jaxfold.contract({{"kernel": draw(5, 32), "bias": draw(32)}}, None, {{"kernel": draw(32, 16)}}, epsilon=1e-6)
x = draw(24, 5)
mesh = Mesh(np.array(jax.devices()), ("i",))
put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
features = {sharded!r} == "features"
placed = jax.tree.map(lambda leaf: put(leaf, P()), block)
if features:
    placed.params["consumer"]["kernel"] = put(block.params["consumer"]["kernel"], P(None, "i"))
result = jax.jit(jaxfold.apply)(placed, put(x, P() if features else P("i")))
assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "i") if features else P("i")), 2), result.sharding
np.testing.assert_allclose(result, jaxfold.apply(block, x), rtol=2e-5, atol=2e-6)
print("agreed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "agreed", done.stderr
