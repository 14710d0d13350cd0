"""Properties of blocks drawn at random: exact, as large as planned, of the original's dtype, and invariant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.factories import make_case
from tests.reference import two_pass
from tests.x64 import set_x64

# Few shapes, because each new one is compiled.
settings = hypothesis.settings(max_examples=40)

FORMS = ("direct", "packed", "standard")
FEATURES = st.sampled_from([(3,), (2, 3)])
EPSILON = st.sampled_from([1e-12, 1e-6, 1e-3, 64.0])


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A block of float64 leaves, and how it is to be contracted. A single consumer goes by the name None."""

    producer: dict[str, np.ndarray]
    norm: dict[str, np.ndarray] | None
    consumers: dict[str | None, dict[str, np.ndarray]]
    x: np.ndarray
    options: dict[str, Any]
    stack: int | None

    def contract(self, **options: Any) -> jaxfold.Contraction:
        consumers: Any = self.consumers.get(None, self.consumers)
        options = {**self.options, "allow_growth": True, **options}
        return jaxfold.contract(self.producer, self.norm, consumers, **options, stacked=self.stack is not None)

    @property
    def leaves(self) -> Any:
        return self.producer, self.norm, self.consumers


@st.composite
def blocks(draw: Any, *, stacks: bool = True) -> Drawn:
    d, n = draw(st.sampled_from([(1, 2), (4, 12), (6, 7), (9, 5)]))
    seed = draw(st.integers(0, 2**32 - 1))
    keys = ("producer_bias", "scale", "offset", "consumer_bias")
    present = {key: draw(st.booleans()) for key in keys}
    names: list[str | None] = draw(st.sampled_from([[None], ["q"], ["q", "k"]]))
    stack = draw(st.sampled_from([None, None, 3])) if stacks else None
    norm_type = draw(st.sampled_from(["layernorm", "rmsnorm"]))
    features = [draw(FEATURES) for _ in names]
    members = []
    for i in range(stack or 1):
        cases = [
            make_case(d, n, f, seed=(seed + 10 * i + j) % 2**32, rows=5, **present) for j, f in enumerate(features)
        ]
        consumers = {name: case.consumer for name, case in zip(names, cases, strict=True)}
        members.append((cases[0].producer, cases[0].norm, consumers, cases[0].x))
    leaves = members[0] if stack is None else jax.tree.map(lambda *leaves: np.stack(leaves), *members)
    options = {"epsilon": draw(EPSILON), "norm_type": norm_type, "unit_offset": draw(st.booleans())}
    producer, norm, consumers, x = leaves
    return Drawn(producer, norm or draw(st.sampled_from([None, {}])), consumers, x, options, stack)


def _tolerance(producer: Any, norm: Any, consumer: Any, x: np.ndarray, options: Any) -> np.ndarray:
    """What rounding in float64 may do to a row of outputs, as an absolute error.

    f = s · x̄ D + c with ‖s P h‖ ≤ √n. To first order the products of at most t = n + d + 1 terms err by t·u of the
    product of their operands' norms. For x̄ D that is ‖x̄‖ ‖T‖ s against a ‖P h‖ s ≤ √n that x̄ T may have cancelled
    down to, times ‖diag(γ) W‖; for s the same quotient, relative to s, once more; for c, ‖β‖ ‖W‖ + ‖b‖. Centring
    starts from [A; a], so its norm stands in for T's. The reference rounds as often again: all of it twice.
    """
    n = producer["kernel"].shape[1]
    bias, shift = producer.get("bias", np.zeros(n)), (norm or {}).get("bias", np.zeros(n))
    rows = np.concatenate([producer["kernel"], bias[None]])
    h = x @ producer["kernel"] + bias
    if options["norm_type"] == "layernorm":
        h = h - h.mean(axis=-1, keepdims=True)
    s = 1 / np.sqrt((h**2).mean(axis=-1) + options["epsilon"])
    gain = (norm or {}).get("scale", np.zeros(n) if options["unit_offset"] else np.ones(n)) + options["unit_offset"]
    kernel = consumer["kernel"].reshape(n, -1)
    spread = np.linalg.norm(rows) * np.sqrt(1 + np.sum(x**2, axis=-1)) * s
    size = 2 * spread * np.linalg.norm(gain[:, None] * kernel)
    size = size + np.linalg.norm(shift) * np.linalg.norm(kernel) + np.linalg.norm(consumer.get("bias", 0.0))
    return 2 * (n + len(rows)) * 2.0**-53 * size


def _assert_exact(block: Drawn, outputs: Any) -> None:
    for i in range(block.stack or 1):
        producer, norm, consumers, x, results = jax.tree.map(
            lambda leaf, i=i: leaf if block.stack is None else leaf[i], (*block.leaves, block.x, outputs)
        )
        for name, group in consumers.items():
            truth = two_pass(producer, norm, group, x, **block.options).reshape(len(x), -1)
            result = np.asarray(results[name] if isinstance(results, dict) else results).reshape(len(x), -1)
            errors = np.abs(result - truth).max(axis=-1)
            assert (errors <= _tolerance(producer, norm, group, x, block.options)).all()


@settings
@hypothesis.given(blocks(), st.sampled_from(FORMS))
def test_equals_two_passes_in_float64(block: Drawn, form: Any) -> None:
    with set_x64(True):
        evaluate = jaxfold.apply if block.stack is None else jax.vmap(jaxfold.apply)
        _assert_exact(block, evaluate(block.contract(form=form), block.x))


@hypothesis.settings(settings, max_examples=200)
@hypothesis.given(blocks(), st.sampled_from([None, np.float64, np.float32, np.float16]))
def test_is_as_large_as_planned(block: Drawn, dtype: Any) -> None:
    consumers: Any = block.consumers.get(None, block.consumers)
    options = {"norm_type": block.options["norm_type"], "stacked": block.stack is not None, "dtype": dtype}
    plan = jaxfold.plan(block.producer, block.norm, consumers, **options)
    for form in FORMS:
        leaves = jax.tree.leaves(block.contract(form=form, dtype=dtype))
        assert plan.cost(form).parameters == sum(leaf.size for leaf in leaves)
        assert plan.cost(form).bytes == sum(leaf.nbytes for leaf in leaves)
    assert plan.packed.parameters <= plan.direct.parameters
    if plan.direct.parameters > plan.original.parameters:
        with pytest.raises(jaxfold.GrowthError):
            block.contract(allow_growth=False)
    else:
        block.contract(allow_growth=False)


DTYPES = st.sampled_from([np.dtype(t) for t in (np.float64, np.float32, jnp.bfloat16, np.float16)])


@hypothesis.settings(settings, max_examples=80)
@hypothesis.given(
    blocks(stacks=False), st.sampled_from(FORMS), st.lists(DTYPES, min_size=7, max_size=7), st.booleans(), st.booleans()
)
def test_has_the_dtype_that_stock_flax_has(block: Drawn, form: Any, dtypes: Any, x64: bool, as_jax: bool) -> None:
    """Any mixture of dtypes, even within a layer: Flax promotes a layer's leaves with its input, and so on."""
    *dtypes, x_dtype = dtypes
    paths = {"producer": block.producer, "norm": block.norm or {}, "consumer": next(iter(block.consumers.values()))}
    mixed = iter(dtypes)
    with set_x64(x64):

        def cast(leaf: np.ndarray) -> Any:
            dtype = next(mixed)
            return jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(dtype)) if as_jax else leaf.astype(dtype)

        layers: Any = {layer: {key: cast(leaf) for key, leaf in group.items()} for layer, group in paths.items()}
        x = jax.ShapeDtypeStruct(block.x.shape, jax.dtypes.canonicalize_dtype(x_dtype))
        options = {**block.options, "allow_growth": True, "unit_offset": False}
        contracted = jaxfold.contract(layers["producer"], layers["norm"], layers["consumer"], **options, form=form)
        original = jaxfold.Block(*layers.values(), epsilon=1e-3)

        def stock(x: Any) -> Any:
            features = layers["consumer"]["kernel"].shape[1:]
            dense = nn.Dense(layers["producer"]["kernel"].shape[1], use_bias="bias" in layers["producer"])
            h = dense.apply({"params": layers["producer"]}, x)
            affine: dict[str, Any] = {"use_scale": "scale" in layers["norm"], "use_bias": "bias" in layers["norm"]}
            y = nn.LayerNorm(**affine).apply({"params": layers["norm"]}, h)
            last = nn.DenseGeneral(features, use_bias="bias" in layers["consumer"])
            return last.apply({"params": layers["consumer"]}, y)

        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            expected = jax.eval_shape(stock, x)
        assert jax.eval_shape(lambda x: jaxfold.apply(contracted, x), x) == expected
        assert jax.eval_shape(original, x) == expected


# Invariances: each changes the block into another that is the same function, and says what becomes of R, D and c.


def _coefficients(block: Drawn, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """RᵀR, D and c: R itself is unique, and well-conditioned, only as far as T is."""
    contraction = block.contract(**options)
    return contraction.R.T @ contraction.R, contraction.D, contraction.c


def _change(
    block: Drawn, *, rows: Any = None, gain: Any = None, shift: Any = None, last: Any = None, **more: Any
) -> Drawn:
    """The block with functions applied to the leaves: to kernel and bias of the producer, to scale, shift, kernel."""
    producer = {key: rows(leaf) if rows else leaf for key, leaf in block.producer.items()}
    functions: dict[str, Callable[[Any], Any] | None] = {"scale": gain, "bias": shift}
    norm = {key: (functions[key] or (lambda leaf: leaf))(leaf) for key, leaf in (block.norm or {}).items()}
    consumers = {
        name: {**group, "kernel": last(group["kernel"]) if last else group["kernel"]}
        for name, group in block.consumers.items()
    }
    return dataclasses.replace(block, producer=producer, norm=norm, consumers=consumers, **more)


def _single(block: Drawn) -> Drawn:
    group = next(iter(block.consumers.values()))
    return dataclasses.replace(block, consumers={None: group}, options={**block.options, "unit_offset": False})


def _assert_close(found: Any, expected: Any, tolerance: float = 1e-13) -> None:
    """Sums of at most 12 products, one after another, of entries of a few units: 12 · 2⁻⁵³ times their sizes."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1.0, np.abs(other).max()))


SINGLE = blocks(stacks=False).map(_single)


@hypothesis.settings(settings, max_examples=100)
@hypothesis.given(SINGLE, st.floats(-100, 100))
def test_layernorm_ignores_what_all_features_share(block: Drawn, common: float) -> None:
    """A constant on every column of [A; a] changes nothing in LayerNorm, and does change RMSNorm."""
    raised = _change(block, rows=lambda leaf: leaf + common)
    layernorm = {"norm_type": "layernorm"}
    found, expected = _coefficients(raised, **layernorm), _coefficients(block, **layernorm)
    _assert_close(found, expected, 1e-13 * max(1.0, abs(common)))  # the constant's own rounding
    if abs(common) > 0.01:
        rms = _coefficients(raised, norm_type="rmsnorm")[1] - _coefficients(block, norm_type="rmsnorm")[1]
        assert np.abs(rms).max() > 1e-6


@hypothesis.settings(settings, max_examples=100)
@hypothesis.given(SINGLE, st.randoms(use_true_random=False))
def test_the_order_of_the_wide_features_is_immaterial(block: Drawn, random: Any) -> None:
    order = list(range(block.producer["kernel"].shape[1]))
    random.shuffle(order)
    shuffled = _change(
        block,
        rows=lambda leaf: leaf[..., order],
        gain=lambda leaf: leaf[order],
        shift=lambda leaf: leaf[order],
        last=lambda leaf: leaf[order],
    )
    _assert_close(_coefficients(shuffled), _coefficients(block))


@hypothesis.settings(settings, max_examples=100)
@hypothesis.given(SINGLE, st.integers(0, 2**32 - 1))
def test_rmsnorm_without_affine_may_be_rotated(block: Drawn, seed: int) -> None:
    """A → A Q and W → Qᵀ W with Q orthogonal: the norm of h is what it was."""
    n = block.producer["kernel"].shape[1]
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    plain = dataclasses.replace(block, norm=None, options={**block.options, "norm_type": "rmsnorm"})
    turned = _change(plain, rows=lambda leaf: leaf @ rotation, last=lambda leaf: np.tensordot(rotation.T, leaf, 1))
    _assert_close(_coefficients(turned), _coefficients(plain))


@hypothesis.settings(settings, max_examples=60)
@hypothesis.given(SINGLE, st.integers(-20, 20), st.sampled_from(FORMS))
def test_powers_of_two_pass_through(block: Drawn, power: int, form: Any) -> None:
    """The producer times 2^j and epsilon times 4^j: R and D times 2^j, to the bit; the standard form's V unchanged."""
    factor = 2.0**power
    options = {**block.options, "epsilon": block.options["epsilon"] * factor**2}
    scaled = _change(block, rows=lambda leaf: leaf * factor, options=options).contract(form=form)
    base = block.contract(form=form)
    np.testing.assert_array_equal(scaled.R, base.R * factor)
    np.testing.assert_array_equal(scaled.c, base.c)
    if form == "standard":
        np.testing.assert_array_equal(scaled.params["consumer"]["kernel"], base.params["consumer"]["kernel"])
    else:
        np.testing.assert_array_equal(scaled.D, base.D * factor)


@hypothesis.settings(settings, max_examples=60)
@hypothesis.given(SINGLE)
def test_signs_of_the_wide_features_are_immaterial(block: Drawn) -> None:
    """RMSNorm: a feature and its gain negated together are the same function; so is the producer negated as a whole."""
    block = dataclasses.replace(block, options={**block.options, "norm_type": "rmsnorm"})
    signs = np.where(np.arange(block.producer["kernel"].shape[1]) % 2, 1.0, -1.0)
    norm = {"scale": np.ones(len(signs)), **(block.norm or {})}
    block = dataclasses.replace(block, norm=norm)
    flipped = _change(block, rows=lambda leaf: leaf * signs, gain=lambda leaf: leaf * signs)
    _assert_close(_coefficients(flipped), _coefficients(block))
    negated = _change(block, rows=lambda leaf: -leaf, gain=lambda leaf: -leaf)
    _assert_close(_coefficients(negated), _coefficients(block))
