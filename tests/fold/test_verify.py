"""The certificate of a whole function, and the switches of what fold does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfold
from jaxfold._block._verdict import EQUAL, OTHER
from jaxfold._extend import enable_x64
from jaxfold._fold._wide import Wide

RNG = np.random.default_rng(0)
SHAPES = {"a": (4, 32), "scale": (1, 32), "bias": (1, 32), "c": (32, 6), "e": (32, 32), "f": (32, 6)}
PARAMS: Any = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
X = RNG.standard_normal((5, 4)).astype(np.float32)
Y = RNG.standard_normal((5, 32)).astype(np.float32)


def function(params: Any, x: Any, y: Any, xp: Any = jnp) -> Any:
    """A norm that can be contracted, and one that can be centred."""

    def norm(h: Any) -> Any:
        h = h - h.mean(-1, keepdims=True)
        return h / xp.sqrt((h * h).mean(-1, keepdims=True) + 1e-2) * params["scale"] + params["bias"]

    return norm(x @ params["a"]) @ params["c"], norm(xp.tanh(y) @ params["e"]) @ params["f"]


FOLDED = jaxfold.fold(function, PARAMS, X, Y)


def test_errors_against_float64() -> None:
    """The original's figures are those that NumPy finds in two passes of float64."""
    wide = {name: leaf.astype(np.float64) for name, leaf in PARAMS.items()}
    # NumPy's epsilon has the digits of float64, the program's those of float32: 1e-2 is off by 2e-8 of itself, and
    # the variances, of some 30 and more, let less than 1e-10 of that through.
    truth = function(wide, X.astype(np.float64), Y.astype(np.float64), np)
    found = function(PARAMS, jnp.asarray(X), jnp.asarray(Y))
    errors = [np.abs(np.asarray(f) - t).ravel() / np.abs(t).max() for f, t in zip(found, truth, strict=True)]
    certificate = FOLDED.verify(PARAMS, X, Y)
    # A float32 error of 1e-8 and more is known to 1e-10.
    assert certificate.outputs.original_typical == pytest.approx(
        np.sqrt(np.mean(np.concatenate(errors) ** 2)), abs=1e-9
    )
    assert certificate.outputs.original_typical > 1e-8
    assert certificate.gradients is not None
    assert 1e-8 < certificate.gradients.original_typical < 1e-6
    assert certificate.verdict == EQUAL
    assert certificate.own_dtype == ()
    assert set(certificate.parts) == {"contract", "centre"}


def test_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs a little off, or right in its outputs and wrong in its gradients."""
    monkeypatch.setattr(FOLDED, "apply", lambda _, x, y: function(PARAMS, x + 0.01, y))
    assert FOLDED.verify(PARAMS, X, Y).verdict == OTHER
    monkeypatch.setattr(FOLDED, "apply", lambda _, x, y: function(PARAMS, lax.stop_gradient(x), y))
    assert FOLDED.verify(PARAMS, X, Y).verdict == OTHER


def test_every_switch() -> None:
    """What each leaves of the two norms, for the traced shapes and for others."""
    expected = {
        ("contract", "centre", "absorb"): ["contracted", "centred"],
        ("centre", "absorb"): ["centred", "centred"],
        ("contract",): ["contracted", "skipped"],
        (): ["skipped", "skipped"],
    }
    for on, decisions in expected.items():
        switches: Any = {kind: kind in on for kind in ("contract", "centre", "absorb")}
        folded = jaxfold.fold(function, PARAMS, X, Y, **switches)
        assert [row.decision for row in folded.report.rows] == decisions, on
        found = folded.apply(folded.contract(PARAMS), X[:3], Y[:3])
        for out, true in zip(found, function(PARAMS, X[:3], Y[:3]), strict=True):
            np.testing.assert_allclose(out, true, atol=1e-4)  # entries of some 10, rounded some 100 times
        if not on:
            assert "contracting is switched off" in folded.report.rows[0].reason
            assert "centring is switched off" in folded.report.rows[1].reason


def test_switches_are_booleans() -> None:
    with pytest.raises(jaxfold.OptionError, match="centre"):
        jaxfold.fold(function, PARAMS, X, Y, centre=1)  # pyright: ignore[reportArgumentType]


def looped(x: Any) -> Any:
    carry, rows = lax.scan(lambda c, row: (jnp.sin(c + row), c * row), x[0], x)
    carry = lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.exp(0.1 * c) + c, carry)
    return lax.cond(x.sum() > 0, jnp.cos, jax.nn.relu, carry), rows.astype(jnp.bfloat16).astype(jnp.float32) + 1e-3


def test_loops_in_float64() -> None:
    """Beside the same function traced in float64, where only the constants have digits of their own."""
    wide = Wide()
    closed = jax.make_jaxpr(looped)(Y)
    with enable_x64():
        found = wide.evaluate(closed, [Y])
        carry, rows = jnp.asarray(Y[0], jnp.float64), []
        for row in Y.astype(np.float64):
            rows.append(carry * row)
            carry = jnp.sin(carry + row)
        while carry.sum() < 9:
            carry = jnp.exp(np.float32(0.1).astype(np.float64) * carry) + carry
        last = jnp.cos(carry) if Y.sum() > 0 else jax.nn.relu(carry)
        # 1e-12: some 100 roundings of 1e-16 on numbers of about 1; in float32 they would be 1e-7.
        np.testing.assert_allclose(found[0], last, atol=1e-12)
        np.testing.assert_allclose(found[1], np.stack(rows) + np.float64(np.float32(1e-3)), atol=1e-12)
    assert not wide.left


def test_what_cannot_be_widened_is_named() -> None:
    def coarse(params: Any, x: Any) -> Any:
        bits = lax.bitcast_convert_type(x[:, :1], jnp.int32)
        return (x @ params).astype(jnp.float8_e4m3fn).astype(jnp.float32) + (bits & 1).astype(jnp.float32)

    certificate = jaxfold.fold(coarse, PARAMS["a"], X).verify(PARAMS["a"], X)
    assert certificate.own_dtype == ("bitcast_convert_type", "convert_element_type")
    assert "in their own dtypes, not in float64: bitcast_convert_type" in str(certificate)


def test_no_floats() -> None:
    folded = jaxfold.fold(lambda p, x: jnp.argmax(x @ p, -1), PARAMS["a"], X)
    with pytest.raises(jaxfold.StructureError, match="floating"):
        folded.verify(PARAMS["a"], X)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_derivative_that_is_not_the_functions(kind: str) -> None:
    """A straight-through quantiser of activations: the gradients are those of its rule, not of its steps."""

    def steps(v: Any) -> Any:
        return jnp.round(v * 4) / 4

    if kind == "jvp":
        quantise: Any = jax.custom_jvp(steps)
        quantise.defjvp(lambda primals, tangents: (steps(primals[0]), tangents[0]))
    else:
        quantise = jax.custom_vjp(steps)
        quantise.defvjp(lambda v: (steps(v), None), lambda _, cotangent: (cotangent,))

    def quantised(params: Any, x: Any, y: Any) -> Any:
        return [quantise(out) + out for out in function(params, x, jax.nn.relu(y))]

    certificate = jaxfold.fold(quantised, PARAMS, X, Y).verify(PARAMS, X, Y)
    (own,) = certificate.own_dtype
    assert own.startswith(f"custom_{kind}_call")  # custom_vjp_call_jaxpr before JAX 0.7
    assert certificate.gradients is not None
    assert certificate.gradients.original_typical < 1e-6  # without its rule, half of the gradient is missing
