"""What hands a mean on, what sees it, and what is never stored twice; whole models are in test_zoo.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.fold.checks import FLOAT64, check, decisions, difference, layer_norm, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

TOKENS, WIDTH = 6, 8
RNG = np.random.default_rng(11)
INPUTS = 12  # more than WIDTH, so that nothing is contracted
X = RNG.normal(size=(2, TOKENS, INPUTS))
SHAPES = {
    "A": (INPUTS, WIDTH), "a": (WIDTH,), "W": (WIDTH, 3), "S": (WIDTH, WIDTH), "T": (9, WIDTH), "P": (10, WIDTH),
    "c": (1, 1, WIDTH), "g": (WIDTH,), "C": (2, INPUTS, WIDTH), "D": (2, 1, WIDTH), "M": (TOKENS, TOKENS),
    "U": (INPUTS, 20), "u": (20,), "V": (20, WIDTH), "E": (INPUTS, WIDTH), "B": (INPUTS, 16),
    "h": (INPUTS, 4), "H": (INPUTS, 4),
}  # fmt: skip
Function = Callable[[Any, Any], Any]


def writer(p: Any, x: Any) -> Any:
    """A nonlinear branch and the Dense that writes it to the stream: its mean can go, it cannot be contracted."""
    return jnp.tanh(x) @ p["A"] + p["a"]


def ids(x: Any) -> Any:
    """Whole numbers below 9, one for each token."""
    return (10 * jnp.abs(x[..., 0])).astype(int) % 9


def norm_of(make: Function) -> Function:
    """A norm over a stream, and what reads it."""
    return lambda p, x: jnp.tanh(layer_norm(make(p, x)) @ p["W"])


def window(h: Any, size: int, axis: int) -> Any:
    """Sums of neighbours along an axis."""
    sizes = tuple(size if axis == own else 1 for own in range(3))
    return jax.lax.reduce_window(h, 0.0, jax.lax.add, sizes, (1, 1, 1), "valid")


def convolved(x: Any, kernel: Any, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
    )


def position(h: Any) -> Any:
    return jnp.arange(h.shape[1])[None, :, None]


HANDED_ON: dict[str, Function] = {
    "sum": lambda p, x: writer(p, x) - writer(p, 2 * x),
    "sum with a number": lambda p, x: writer(p, x) + 1.5,
    "sum with a scalar for each token": lambda p, x: writer(p, x) + x[..., :1],
    "scalar for each token": lambda p, x: -writer(p, x) * jnp.exp(x[..., :1]),
    "divided by a scalar for each token": lambda p, x: writer(p, x) / (2 + jnp.tanh(x[..., :1])),
    "by position": lambda p, x: (lambda h: jnp.where(position(h) < 3, h, writer(p, 3 * x)))(writer(p, x)),
    "number by position": lambda p, x: (lambda h: jnp.where(position(h) < 3, h, 7.0))(writer(p, x)),
    "by a runtime choice of tokens": lambda p, x: jnp.where(x[..., :1] > 0, writer(p, x), writer(p, -x)),
    "transposed": lambda p, x: jnp.swapaxes(jnp.swapaxes(writer(p, x), 1, 2) * 2.0, 1, 2),
    "reshaped": lambda p, x: writer(p, x).reshape(-1, WIDTH)[None],
    "slice": lambda p, x: writer(p, x)[:, 1::2],
    "one token": lambda p, x: writer(p, x)[:, 2],
    "token of a runtime index": lambda p, x: jax.lax.dynamic_slice_in_dim(
        writer(p, x), jnp.argmax(x[0, :, 0]), 2, axis=1
    ),
    "tokens in place": lambda p, x: jax.lax.dynamic_update_slice(writer(p, x), writer(p, 2 * x)[:, :2], (0, 1, 0)),
    "zeros in place": lambda p, x: jax.lax.dynamic_update_slice(writer(p, x), jnp.zeros((2, 2, WIDTH)), (0, 1, 0)),
    "class token": lambda p, x: jnp.concatenate(
        [jnp.broadcast_to(p["c"], (2, 1, WIDTH)), writer(p, x), jnp.ones((2, 1, WIDTH))], axis=1
    ),
    "padded": lambda p, x: jnp.pad(writer(p, x), ((0, 0), (2, 1), (0, 0)), constant_values=3.0),
    "tokens turned": lambda p, x: jnp.flip(writer(p, x), 1),
    "tokens summed up": lambda p, x: jnp.cumsum(writer(p, x), 1),
    "split": lambda p, x: sum(jnp.split(writer(p, x), 2, axis=1)),
    "mean over tokens": lambda p, x: writer(p, x).mean(1),
    "windows of tokens": lambda p, x: window(writer(p, x), 2, 1),
    "attention": lambda p, x: jax.nn.softmax(x @ jnp.swapaxes(x, 1, 2)) @ writer(p, x),
    "weights for each feature alike": lambda p, x: jnp.einsum(
        "btf,btf->bf", writer(p, x), x[..., :1] + jnp.zeros(WIDTH)
    ),
    "tokens mixed": lambda p, x: jnp.einsum("btf,ts->bsf", writer(p, x), p["M"]),
    "convolution": lambda p, x: convolved(jnp.tanh(x), p["C"]) + p["a"],
    "position table": lambda p, x: writer(p, x) + p["P"][:TOKENS],
    "position table, runtime index": lambda p, x: writer(p, x) + jax.lax.dynamic_slice_in_dim(
        p["P"], jnp.argmax(x[0, :, 0]), TOKENS
    ),
    "sinusoids": lambda p, x: writer(p, x) + writer(p, -x) + jnp.sin(jnp.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH)),
    "lookup": lambda p, x: p["T"][ids(x)],
    "lookup, filled": lambda p, x: jnp.take(p["T"], ids(x), axis=0, mode="fill", fill_value=0),
    "lookup, vmapped": lambda p, x: jax.vmap(jax.vmap(lambda i: jax.lax.dynamic_slice(p["T"], (i, 0), (1, WIDTH))[0]))(
        ids(x)
    ),
    "one hot": lambda p, x: jax.nn.one_hot(ids(x), 9) @ p["T"],
    "layer scale": lambda p, x: p["g"] * writer(p, x),
    "layer scale behind a narrowing product": lambda p, x: p["g"] * (jnp.tanh(x @ p["U"] + p["u"]) @ p["V"]),
    "low rank": lambda p, x: jnp.tanh(x) @ (p["A"] + p["U"] @ p["V"]),
    "remat": lambda p, x: jax.checkpoint(lambda h: 2 * h)(writer(p, x)),
    "vmap": lambda p, x: jax.vmap(jax.vmap(lambda row: jnp.tanh(row) @ p["A"] + p["a"]))(x),
    "carried": lambda p, x: jax.lax.scan(
        lambda h, s: (h + s * jnp.tanh(x) @ p["E"], None), writer(p, x), jnp.arange(3.0)
    )[0],
    "an input": lambda p, x: x[..., :WIDTH],
}  # fmt: skip
AT_RUN_TIME = {"an input": 1, "sinusoids": 1}


@pytest.mark.parametrize("name", HANDED_ON)
def test_handed_on(name: str) -> None:
    """LayerNorm becomes RMSNorm, and no mean is taken over the features but where nothing can be done beforehand."""
    make, params = HANDED_ON[name], weights(**SHAPES)
    folded = check((both if name in AT_RUN_TIME else norm_of)(make), params, X)
    assert set(decisions(folded)) == {"centred"}
    assert folded.report.means == AT_RUN_TIME.get(name, 0)
    assert {row.reductions for row in folded.report.rows} == {(3, 1)}


def both(make: Function) -> Function:
    """Two norms over one stream, so that a mean at run time pays."""

    def fn(p: Any, x: Any) -> Any:
        h = make(p, x)
        return jnp.tanh(layer_norm(h) @ p["W"]) + jnp.tanh(layer_norm(2.0 * h) @ p["W"])

    return fn


SEEN: dict[str, Function] = {
    "nonlinearity": lambda p, x: jax.nn.relu(writer(p, x)),
    "gate for each feature": lambda p, x: writer(p, x) * jnp.exp(x @ p["E"]),
    "divided by features": lambda p, x: writer(p, x) / (1.1 + jnp.tanh(x @ p["E"])),
    "weights for each feature": lambda p, x: jnp.einsum("btf,btf->bf", writer(p, x), jnp.tanh(x @ p["E"])),
    "features split": lambda p, x: jnp.split(jnp.tanh(x) @ p["B"], 2, axis=2)[0],
    "features joined": lambda p, x: jnp.concatenate([jnp.tanh(x) @ p["h"], jnp.tanh(-x) @ p["H"]], -1),
    "mask of features": lambda p, x: jnp.where(x[..., :1] * p["g"] > 0, writer(p, x), 0.0),
    "features turned and joined": lambda p, x: jnp.concatenate([writer(p, x)[..., :4], writer(p, 2 * x)[..., :4]], -1),
    "features padded": lambda p, x: jnp.pad(writer(p, x)[..., :6], ((0, 0), (0, 0), (1, 1))),
    "features summed up": lambda p, x: jnp.cumsum(writer(p, x), 2),
    "windows of features": lambda p, x: window(jnp.concatenate([writer(p, x), x], -1), 13, 2),
    "maximum over tokens": lambda p, x: writer(p, x).max(1),
    "depthwise convolution": lambda p, x: convolved(writer(p, x), p["D"], groups=WIDTH),
    "lookup, filled with a number": lambda p, x: jnp.take(p["T"], ids(x) + 4, axis=0, mode="fill", fill_value=3.0),
    "features of runtime indices": lambda p, x: jnp.take(writer(p, x), jnp.argsort(x[0, 0, :8]) % 3, axis=2),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_seen(name: str) -> None:
    """What comes before is not centred; where the norm's own input is, it is not for less than it saves."""
    params = weights(**SHAPES)
    folded = check(norm_of(SEEN[name]), params, X)
    assert decisions(folded) == ["skipped"]
    assert folded.report.rows[0].reason
    assert folded.report.means == 0


READ: dict[str, Function] = {
    "mean": lambda p, h: h.mean(-1),
    "mean in a remat": lambda p, h: jax.checkpoint(jnp.tanh)(h.mean(-1, keepdims=True)),
    "mean in a scan": lambda p, h: jax.lax.scan(lambda c, s: (c + s * h.mean(-1), None), h[..., 0] * 0, jnp.ones(2))[0],
    "mean in a cond": lambda p, h: jax.lax.cond(True, jnp.sin, jnp.cos, h.mean(-1)),
    "square": lambda p, h: h * h,
    "mean square": lambda p, h: jnp.mean(h * h, -1, keepdims=True),
    "head": lambda p, h: h @ p["W"],
    "half of it": lambda p, h: jnp.split(h, 2, 1)[0] @ p["W"],
    "stacked by a scan": lambda p, h: jax.lax.scan(lambda c, s: (c * s, c), h, jnp.ones(2))[1],
    "max": lambda p, h: jnp.max(h, -1),
}


SAID = {
    "mean": "returns",
    "mean in a scan": "slice",
    "mean in a cond": "cond",
    "square": "returns",
    "mean square": "returns",
    "head": "dot_general",
    "half of it": "dot_general",
    "max": "reduce_max",
}


def fast_norm(h: Any) -> Any:
    """The spelling whose moments are those that others may read as well."""
    mean, square = h.mean(-1, keepdims=True), jnp.mean(h * h, -1, keepdims=True)
    return (h - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5)


@pytest.mark.parametrize("name", READ)
def test_read_elsewhere(name: str) -> None:
    """Whoever else reads the stream, or a moment of it, gets it as it was; the reason says who."""

    def fn(p: Any, x: Any) -> Any:
        h = writer(p, x)
        return fast_norm(h) @ p["S"], READ[name](p, h)

    folded = check(fn, weights(**SHAPES), X)
    assert decisions(folded) == ["skipped"]
    assert "keeps its mean" in folded.report.rows[0].reason
    assert SAID.get(name, "") in folded.report.rows[0].reason.split(";")[1]


def test_mean_of_another_axis() -> None:
    """The means of the rows of a square array, taken from its columns, centre nothing."""

    def shifted(p: Any, x: Any) -> Any:
        h = writer(p, x[:, [0, 1, 2, 3, 4, 5, 0, 1]])
        return h - h.mean(-1)[:, None, :]

    check(shifted, weights(**SHAPES), X)
    check(lambda p, x: fast_norm(shifted(p, x)) @ p["S"], weights(**SHAPES), X)


def exchanged(p: Any, x: Any) -> Any:
    """Two streams that change places in every step: of one the mean is seen afterwards."""
    step = lambda c, s: ((c[1] + s * writer(p, x), c[0]), None)  # noqa: E731
    (g, h), _ = jax.lax.scan(step, (writer(p, x), writer(p, -x)), jnp.arange(3.0))
    return layer_norm(g) @ p["W"], jnp.tanh(h)


def replaced(p: Any, x: Any) -> Any:
    """What comes around again is something else, with a mean."""
    step = lambda h, s: (jnp.tanh(layer_norm(h) * s), layer_norm(h))  # noqa: E731
    return jax.lax.scan(step, writer(p, x), jnp.arange(1.0, 4.0))[1]


def to_a_constant(p: Any, x: Any) -> Any:
    step = lambda h, s: (jnp.asarray(X[:, :, :1] * np.arange(WIDTH)), layer_norm(h) * s)  # noqa: E731
    return jax.lax.scan(step, writer(p, x), jnp.arange(1.0, 4.0))[1]


@pytest.mark.parametrize("fn", [exchanged, replaced, to_a_constant])
def test_loops(fn: Function) -> None:
    check(fn, weights(**SHAPES), X)


def in_scan(p: Any, x: Any) -> Any:
    """One kernel for all layers."""
    step = lambda h, s: (h + jnp.tanh(layer_norm(h) * s) @ p["S"], None)  # noqa: E731
    return layer_norm(jax.lax.scan(step, writer(p, x), jnp.arange(5.0))[0])


def two_tables(p: Any, x: Any) -> Any:
    return layer_norm(jnp.exp(p["T"])[ids(x)]) @ p["W"] + layer_norm(jnp.sin(p["T"])[ids(x)]) @ p["W"]


def beside_a_remat(p: Any, x: Any) -> Any:
    """It is handed all parameters, and reads one."""
    y = jax.checkpoint(lambda p, h: jnp.tanh(h) @ p["S"])(p, writer(p, x))
    return jnp.tanh(layer_norm(jnp.tanh(y) @ p["S"] + jnp.tanh(y) @ p["M"][0, 0].reshape(1, 1).repeat(8, 0)))


def tied(p: Any, x: Any) -> Any:
    h = p["T"][ids(x)]
    h = h + jnp.tanh(layer_norm(h)) @ p["S"]
    return layer_norm(h) @ p["T"].T


@pytest.mark.parametrize(("fn", "read"), [(in_scan, "AaS"), (two_tables, "TW"), (beside_a_remat, "AaSM"), (tied, "TS")])
def test_nothing_is_stored_twice(fn: Function, read: str) -> None:
    """There are no other parameters, whose absence would make up for it."""
    params = {name: leaf for name, leaf in weights(**SHAPES).items() if name in read}
    folded = check(fn, params, X)
    before, after = folded.report.parameters
    assert after <= before
    contracted = folded.contract(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(contracted)) == after
    if fn is tied:
        np.testing.assert_array_equal(contracted["params"]["T"], params["T"])
        assert decisions(folded) == ["centred", "centred"]
        assert folded.report.means == 1


def test_wanted_norms_only() -> None:
    """A predicate may leave out every norm of a stream, or one; what it leaves out is computed as it was."""
    make = both(HANDED_ON["sum"])
    params = weights(**SHAPES)
    none = check(make, params, X, where=lambda row: False)
    assert decisions(none) == ["skipped", "skipped"]
    assert "predicate" in none.report.rows[0].reason
    assert difference(none.apply(none.contract(params), X), make(params, X)) == 0.0
    left = iter([True, False])
    one = check(make, params, X, where=lambda row: next(left))
    assert decisions(one) == ["centred", "skipped"]


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_half_precision(kind: Any) -> None:
    """The stream in half precision, the norm in float32: as near to the truth as the original."""
    params = {key: leaf.astype(np.float32) for key, leaf in weights(**SHAPES).items()}

    def fn(p: Any, x: Any) -> Any:
        low = jax.tree.map(lambda leaf: leaf.astype(kind), p)
        h = low["T"][ids(x)] + low["P"][:TOKENS]
        for scale in (1.0, 2.0):
            y = layer_norm(h.astype(np.float32)) * p["g"] * scale + p["a"]
            h = h + jnp.tanh(y).astype(kind) @ low["S"]
        return (layer_norm(h.astype(np.float32)) * p["g"]).astype(kind) @ low["W"]

    folded = jaxfold.fold(fn, params, X)
    assert {row.decision for row in folded.report.rows} == {"centred"}
    result, original = folded.apply(folded.contract(params), X), fn(params, X)
    assert result.dtype == original.dtype == kind
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)

    def truth(p: Any) -> Any:
        h = p["T"][ids(X)] + p["P"][:TOKENS]
        for scale in (1.0, 2.0):
            h = h + jnp.tanh(layer_norm(h) * p["g"] * scale + p["a"]) @ p["S"]
        return layer_norm(h) * p["g"] @ p["W"]

    exact = np.asarray(truth(wide))
    errors = [np.sqrt(np.mean((np.asarray(y, np.float64) - exact) ** 2)) for y in (result, original)]
    # Fewer than 40 outputs: their typical errors differ by chance, by a third or so.
    assert errors[0] < 2 * errors[1]


def test_control() -> None:
    """A writer that keeps its mean under an RMSNorm is noticed by the comparison."""
    params = weights(**SHAPES)
    fn = norm_of(HANDED_ON["sum"])
    folded = jaxfold.fold(fn, params, X)
    contracted = folded.contract(params)
    name = next(key for key, block in contracted["blocks"].items() if block["kernel"].shape == (INPUTS, WIDTH))
    contracted["blocks"][name]["kernel"] = params["A"]
    assert difference(folded.apply(contracted, X), fn(params, X)) > 1e3 * FLOAT64


@pytest.mark.parametrize("centring", [False, True])
def test_other_parameters_for_other_sizes(centring: bool) -> None:
    """A function may read another parameter for another batch: then the coefficients are not those that it needs."""
    params = weights(A=(4, 64), a=(64,), W=(64, 3), V=(64, 3), **{"wide": (12, 8), "other": (12, 8)})

    def fn(p: Any, x: Any) -> Any:
        many = x.shape[0] > 3
        if centring:
            return jnp.tanh(layer_norm(jnp.tanh(x) @ (p["wide"] if many else p["other"])))
        return layer_norm(x[:, :4] @ p["A"] + p["a"]) @ (p["W"] if many else p["V"])

    x = RNG.normal(size=(7, 12))
    folded = check(fn, params, x)
    contracted = folded.contract(params)
    assert decisions(folded) == ["centred" if centring else "contracted"]
    assert folded.apply(contracted, x[:5]).shape[0] == 5
    with pytest.raises(jaxfold.ShapeError, match="folds otherwise"):
        folded.apply(contracted, x[:2])


def test_epsilon_of_a_fast_variance() -> None:
    """``E[h²] − E[h]² + ε`` becomes ``E[h²] + ε``: a large ε, so that it would be missed."""

    def fn(p: Any, x: Any) -> Any:
        h = writer(p, x)
        mean, square = h.mean(-1, keepdims=True), jnp.mean(h * h, -1, keepdims=True)
        return jnp.tanh((h - mean) * jax.lax.rsqrt(square - mean * mean + 0.5) @ p["W"])

    folded = check(fn, weights(**SHAPES), X)
    assert [(row.decision, row.epsilon, row.reductions) for row in folded.report.rows] == [("centred", 0.5, (2, 1))]


def test_carry_that_others_read() -> None:
    """What enters a loop of layers is returned as well, with its mean: the loop gets it without."""

    def fn(p: Any, x: Any) -> Any:
        h = writer(p, x)
        step = lambda h, s: (h + jnp.tanh(layer_norm(h) * s) @ p["S"], None)  # noqa: E731
        return jnp.tanh(layer_norm(jax.lax.scan(step, h, jnp.arange(1.0, 4.0))[0]) @ p["W"]), h

    folded = check(fn, weights(**SHAPES), X)
    assert decisions(folded) == ["centred", "centred"]
    assert folded.report.means == 1
