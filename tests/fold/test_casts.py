"""Casts: exact ones are none, the arithmetic's own rounding is left out, and any other is a step of the program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._fold._roundings import digits, is_exact
from tests.fold.checks import check, decisions, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SMALL = [dtype for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn") if (dtype := getattr(jnp, name, None))]
DTYPES = [np.dtype(dtype) for dtype in (*SMALL, F16, BF16, F32, np.float64)]
X = np.random.default_rng(3).normal(size=(7, 6)).astype(np.float32)
SHAPES = {"A": (6, 64), "a": (64,), "g": (64,), "b": (64,), "W": (64, 5), "S": (64, 64)}
# float32: some thirty roundings of 6e-8, of sums of at most 64 terms.
FLOAT32 = 2e-6


def params(dtype: Any = F32) -> dict[str, jax.Array]:
    return {name: array.astype(dtype) for name, array in weights(**SHAPES).items()}


def norm(h: Any) -> Any:
    """A LayerNorm in float32, as Flax has it in models of any dtype."""
    h = h.astype(F32)
    centred = h - h.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)


def numbers(dtype: np.dtype) -> np.ndarray:
    """Every finite number of a dtype of at most 16 bits; of others, those whose bits are what decides."""
    bits = jnp.finfo(dtype).bits
    if bits < 8:
        found = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    elif bits <= 16:
        found = np.arange(1 << bits, dtype=f"uint{bits}").view(dtype)
        found = found[np.isfinite(found)].astype(np.float64)
    else:
        info = np.finfo(dtype)
        found = np.array([1 + info.eps, info.max, info.tiny, info.smallest_subnormal], dtype).astype(np.float64)
    return found


@pytest.mark.parametrize("after", DTYPES, ids=str)
@pytest.mark.parametrize("before", DTYPES, ids=str)
def test_exact_is_what_keeps_every_number(before: np.dtype, after: np.dtype) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of NaN, or where a number is beyond the range
        found = numbers(before)
        kept = found.astype(after).astype(np.float64)
    assert is_exact(before, after) == bool((kept == found).all())
    assert digits(after).hold(digits(after))


@pytest.mark.parametrize("kind", [*SMALL, BF16, F16], ids=lambda kind: np.dtype(kind).name)
@pytest.mark.parametrize("inner", [lambda h, dtype: h @ dtype, None], ids=["affine", "stream"])
def test_what_a_finer_reader_sees_stays_rounded(kind: Any, inner: Any) -> None:
    def made(p: Any, x: Any) -> Any:
        return x @ p["A"] if inner else jnp.tanh(x @ p["A"]) @ p["S"]

    def rounded(p: Any, x: Any) -> Any:
        return norm(made(p, x).astype(kind).astype(F32)) @ p["W"]

    folded = check(rounded, params(), X, tolerance=FLOAT32)
    assert decisions(folded) == ["skipped"]
    # Without the cast it is another function, further away than rounding, and is folded.
    plain = lambda p, x: norm(made(p, x)) @ p["W"]  # noqa: E731
    assert np.abs(plain(params(), X) - rounded(params(), X)).max() > 50 * FLOAT32
    assert decisions(check(plain, params(), X, tolerance=FLOAT32)) == ["contracted" if inner else "centred"]


def test_between_half_precisions_neither_of_which_holds_the_other() -> None:
    """What bfloat16 computes fits in float16 by its digits, not by its range."""
    half = params(BF16)
    fn = lambda p, x: norm((x @ p["A"]).astype(F16)) @ p["W"].astype(F32)  # noqa: E731
    x = jnp.asarray(X * 3e4, BF16)  # beyond what float16 has
    folded = jaxfold.fold(fn, half, x)
    assert np.isnan(fn(half, x)).any()
    np.testing.assert_array_equal(np.isnan(folded.apply(folded.contract(half), x)), np.isnan(fn(half, x)))
    back = lambda p, x: norm((x @ p["A"]).astype(F32).astype(BF16)) @ p["W"].astype(F32)  # noqa: E731
    assert decisions(jaxfold.fold(back, half, x)) == ["contracted"]


@pytest.mark.parametrize(
    ("bits", "decision"),
    [((8, 23), "contracted"), ((11, 30), "contracted"), ((8, 22), "skipped"), ((7, 23), "skipped")],
)
def test_reduce_precision(bits: tuple[int, int], decision: str) -> None:
    fn = lambda p, x: norm(jax.lax.reduce_precision(x @ p["A"], *bits)) @ p["W"]  # noqa: E731
    assert decisions(check(fn, params(), X, tolerance=FLOAT32)) == [decision]


def test_wider_dtypes_are_no_exception() -> None:
    """float64 rounded to float32 and back, where float64 reads it."""
    fn = lambda p, x: layered((x @ p["A"]).astype(F32).astype(np.float64)) @ p["W"]  # noqa: E731
    layered = lambda h: (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)  # noqa: E731
    assert decisions(check(fn, params(np.float64), X.astype(np.float64))) == ["skipped"]


MIXED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "all in bfloat16": (lambda p, x: (norm(x @ p["A"]).astype(BF16) * p["g"] + p["b"]) @ p["W"], BF16, "contracted"),
    "all in float16": (lambda p, x: (norm(x @ p["A"]) * p["g"] + p["b"]).astype(F16) @ p["W"], F16, "contracted"),
    "a product in bfloat16 at the end": (
        lambda p, x: (norm(x @ p["A"]) * p["g"]).astype(BF16) @ p["W"].astype(BF16), F32, "contracted",
    ),
    "a residual stream in bfloat16": (
        lambda p, x: (norm(jnp.tanh(x @ p["A"])) * p["g"] + p["b"]).astype(BF16) @ p["W"], BF16, "absorbed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_rounding_that_a_product_does_anyhow(name: str) -> None:
    """Models in half precision fold as ever: no reader has more digits than what is rounded."""
    fn, dtype, decision = MIXED[name]
    own = float(jnp.finfo(fn(params(dtype), X.astype(dtype)).dtype).eps)
    folded = check(fn, params(dtype), X.astype(dtype), tolerance=6 * own)  # some ten roundings of half a unit
    assert decisions(folded) == [decision]


def test_a_product_that_keeps_more_digits_sees_the_rounding() -> None:
    def fn(p: Any, x: Any) -> Any:
        y = (norm(x @ p["A"]) * p["g"]).astype(BF16)
        return jax.lax.dot_general(y, p["W"].astype(BF16), (((1,), (0,)), ((), ())), preferred_element_type=F32)

    folded = jaxfold.fold(fn, params(), X)
    ours, theirs = folded.apply(folded.contract(params()), X), fn(params(), X)
    # A tie may round either way, which moves a row by 2⁻⁹ of itself; without the cast every row would be so far off.
    error = np.abs(ours - theirs).max(-1) / np.abs(theirs).max()
    assert np.median(error) < FLOAT32


def test_a_cast_at_the_end_is_the_last_step() -> None:
    """It is the float32 of the function itself that is rounded: the same numbers, but for ties."""
    fn = lambda p, x: (norm(x @ p["A"] + p["a"]) @ p["W"]).astype(BF16)  # noqa: E731
    exact = jaxfold.fold(lambda p, x: norm(x @ p["A"] + p["a"]) @ p["W"], params(), X)
    folded = jaxfold.fold(fn, params(), X)
    assert decisions(folded) == ["contracted"]
    contracted = folded.contract(params())
    np.testing.assert_array_equal(folded.apply(contracted, X), exact.apply(exact.contract(params()), X).astype(BF16))


@pytest.mark.parametrize("kind", [*SMALL, jnp.int4], ids=lambda kind: np.dtype(kind).name)
def test_dtypes_of_few_bits_are_opaque(kind: Any) -> None:
    """As input, as output, and between."""

    def fn(p: Any, x: Any) -> Any:
        h = jnp.tanh(2 * x.astype(F32)).astype(kind).astype(F32) @ p["A"] + p["a"]
        return (norm(h) @ p["W"]).astype(kind)

    x = jnp.asarray(X).astype(kind)
    folded = jaxfold.fold(fn, params(), x)
    assert decisions(folded) == ["contracted"]
    ours, theirs = (
        np.asarray(z).astype(np.float64) for z in (folded.apply(folded.contract(params()), x), fn(params(), x))
    )
    # Only where the float32 before the cast lies at a tie may they differ: by one step, of at most half the number.
    assert (np.abs(ours - theirs) <= 0.5 * np.maximum(np.abs(theirs), 1)).all()
    assert (ours == theirs).mean() > 0.9


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
def test_flax_fp8_operations() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.Dense(64, dot_general_cls=nn.Fp8DotGeneralOp)(x)
            return nn.Dense(5)(nn.LayerNorm()(nn.Dense(64)(nn.tanh(h)[:, :4])))

    model = Model()
    variables = model.init(jax.random.key(0), X)
    folded = check(model.apply, variables, X, tolerance=FLOAT32)
    assert decisions(folded) == ["contracted"]
