"""What the report says of every norm, and the options that act on it."""

from __future__ import annotations

import inspect
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from tests.fold.checks import check, decisions, layer_norm, weights

pytestmark = pytest.mark.usefixtures("x64", "usual")

X = np.random.default_rng(2).normal(size=(6, 4))
SHAPES = {"A": (4, 64), "a": (64,), "g": (64,), "W": (64, 3), "B": (3, 32), "V": (32, 5)}


def first(p: Any, x: Any) -> Any:
    h = x @ p["A"] + p["a"]
    s = jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return ((h - h.mean(-1, keepdims=True)) * s * p["g"]) @ p["W"]


def second(p: Any, x: Any) -> Any:
    h = jnp.tanh(x) @ p["B"]
    s = jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-3)
    return h * s @ p["V"]


def third(p: Any, y: Any) -> Any:
    centred = y - y.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-4)


def three(p: Any, x: Any) -> Any:
    return third(p, jnp.tanh(second(p, first(p, x))))


def line(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, row in enumerate(lines) if text in row)


def test_rows() -> None:
    """All three in their order, with everything that is known of each; counted here by hand."""
    folded = check(three, weights(**SHAPES), X)
    one, two, last = folded.report.rows
    assert decisions(folded) == ["contracted", "contracted", "skipped"]
    assert (one.norm_type, two.norm_type) == ("layernorm", "rmsnorm")
    assert (one.epsilon, two.epsilon) == (pytest.approx(1e-5), pytest.approx(1e-3))
    assert (one.width, two.width, last.width) == (64, 32, 5)
    assert (one.features, two.features) == (4, 3)
    assert (one.use_bias, two.use_bias) == (True, False)
    assert set(one.parameters) == {"A", "a", "g", "W"}
    assert set(two.parameters) == {"B", "V"}
    assert (one.producer, two.producer) == ("A, a", "B")
    assert set(str(two.consumers).split(", ")) == {"V"}
    assert last.reason
    assert one.original is not None
    assert one.contracted is not None
    # R (5, 5) and D (5, 3) of four features and a bias; R (3, 3) and D (3, 5).
    assert one.original.parameters == 4 * 64 + 64 + 64 + 64 * 3
    assert one.contracted.parameters == 5 * 5 + 5 * 3
    assert two.original is not None
    assert two.contracted is not None
    assert (two.original.parameters, two.contracted.parameters) == (3 * 32 + 32 * 5, 3 * 3 + 3 * 5)
    assert one.contracted.flops < one.original.flops
    assert folded.report.parameters == (sum(leaf.size for leaf in weights(**SHAPES).values()), 40 + 24)
    assert folded.report.bytes == (8 * folded.report.parameters[0], 8 * folded.report.parameters[1])
    contracted = folded.contract(weights(**SHAPES))
    assert sum(leaf.size for leaf in jax.tree.leaves(contracted)) == folded.report.parameters[1]


def test_source_lines() -> None:
    """The line of this file where each root is taken."""
    rows = jaxfold.fold(three, weights(**SHAPES), X).report.rows
    for row, function, text in zip(rows, (first, second, third), ("rsqrt", "rsqrt", "sqrt"), strict=True):
        assert f"test_report.py:{line(function, text)} ({function.__name__})" in row.source


def test_source_of_modules() -> None:
    """A module of a library is named, with the line that calls it."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(32, name="up", param_dtype=jnp.float64)(x)
            x = nn.LayerNorm(name="norm", param_dtype=jnp.float64)(x)  # here
            return nn.Dense(3, name="down", param_dtype=jnp.float64)(x)

    params = Model().init(jax.random.key(0), X)
    (row,) = jaxfold.fold(Model().apply, params, X).report.rows
    assert "Model/norm" in row.source
    assert f"test_report.py:{line(Model, '# here')}" in row.source
    assert (row.producer, row.width, row.features) == ("params/up", 32, 4)
    assert set(str(row.consumers).split(", ")) == {"params/norm", "params/down"}


def test_reasons_name_functions_and_files() -> None:
    """What stands in the way is called by its name, and of the file's path no folder is shown; the row has it whole."""
    params = weights(a=(4, 32), w=(32, 3))

    def after_a_nonlinearity(params: Any, x: Any) -> Any:
        return layer_norm(jax.nn.relu(x @ params["a"])) @ params["w"]

    (row,) = jaxfold.fold(after_a_nonlinearity, params, jnp.ones((7, 4))).report.rows
    assert "the result of relu in test_report.py:" in row.reason
    assert row.source.startswith(__file__.removesuffix("test_report.py"))


def test_strict() -> None:
    params = weights(**SHAPES)
    with pytest.raises(jaxfold.NotFoldedError) as caught:
        jaxfold.fold(three, params, X, strict=True)
    error = caught.value
    assert f"test_report.py:{line(third, 'sqrt')}" in error.argument
    assert "width 5" in error.got
    assert jaxfold.fold(three, params, X).report.rows[2].reason in str(error)
    check(first, params, X, strict=True)  # all contracted: no error
    check(lambda p, x: jnp.tanh(x), params, X, strict=True)  # nor where there is no norm


def test_where() -> None:
    """By any column of the report; what is left out says so."""
    params = weights(**SHAPES)
    folded = check(three, params, X, where=lambda row: row.epsilon > 1e-4)
    assert decisions(folded) == ["skipped", "contracted", "skipped"]
    assert folded.report.rows[0].reason == "the predicate left it out"
    assert {"A", "a", "g", "W"} <= set(folded.contract(params)["params"])
    assert decisions(check(three, params, X, where=lambda row: "A" in row.parameters))[:2] == ["contracted", "skipped"]
    nothing = check(three, params, X, where=lambda row: False)
    assert set(decisions(nothing)) == {"skipped"}
    assert nothing.report.parameters[0] == nothing.report.parameters[1]


def stream(p: Any, x: Any) -> Any:
    """A LayerNorm that can be centred, of a stream."""
    h = jnp.tanh(x) @ p["K"] + jnp.sin(x) @ p["K"]
    return jnp.tanh(layer_norm(h))


def kept(p: Any, x: Any) -> Any:
    """A norm whose scale alone can go."""
    h = jnp.tanh(x @ p["A"])
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-3) * p["g"] @ p["W"]


@pytest.mark.parametrize(
    ("function", "decision"),
    [
        (first, "contracted"),
        (lambda p, x: second(p, x[:, :3]), "contracted"),
        (stream, "centred"),
        (kept, "absorbed"),
    ],
)
def test_reason_of_what_is_left_out(function: Any, decision: str) -> None:
    """The predicate alone, whatever would have been done, and once."""
    params = weights(**SHAPES, K=(4, 64))
    assert decisions(check(function, params, X)) == [decision]
    (row,) = check(function, params, X, where=lambda row: False).report.rows
    assert (row.decision, row.reason) == ("skipped", "the predicate left it out")


def test_reason_beside_what_is_left_out() -> None:
    """A norm that nothing could be done about keeps its own reason."""
    params = weights(**SHAPES)
    reasons = [row.reason for row in jaxfold.fold(three, params, X, where=lambda row: False).report.rows]
    assert reasons[:2] == ["the predicate left it out"] * 2
    assert reasons[2] == jaxfold.fold(three, params, X).report.rows[2].reason


NEITHER = "it is neither a mean square nor a variance of its input"
PARTIAL = "its sum of squares is over a part of its input only, or has a mask or weights"
ODD: dict[str, tuple[Any, str]] = {
    "more of the mean than of the squares": (lambda h: 2 * mean(h) ** 2 - mean(h * h) + 100, NEITHER),
    "a difference of itself": (lambda h: mean(h * h) - mean(h * h) + 100, NEITHER),
    "weights": (lambda h: mean(h * h * jnp.arange(64.0)) + 100, PARTIAL),
    "a mask": (lambda h: mean(jnp.where(h > 0, h * h, 0)) + 100, PARTIAL),
    "a mask besides": (lambda h: 2 * mean(h) ** 2 - mean(jnp.where(h > 0, h * h, 0)) + 100, PARTIAL),
}


def mean(h: Any) -> Any:
    return h.mean(-1, keepdims=True)


@pytest.mark.parametrize("name", ODD)
def test_reasons_of_other_roots(name: str) -> None:
    under, reason = ODD[name]

    def fn(p: Any, x: Any) -> Any:
        h = x @ p["A"]
        return jnp.tanh(h * jax.lax.rsqrt(under(h)))

    (row,) = check(fn, weights(**SHAPES), X).report.rows
    assert (row.decision, row.width, row.reason) == ("skipped", 64, reason)


def test_other_powers_are_no_squares() -> None:
    """A mean of fourth powers is no sum of squares with weights; it has no row."""

    def fn(p: Any, x: Any) -> Any:
        h = x @ p["A"]
        return jnp.tanh(h / jnp.sqrt(mean(h**4) + 1))

    assert check(fn, weights(**SHAPES), X).report.rows == ()


def test_where_inside_a_scan() -> None:
    """Also for what a scan holds, and for inputs of other shapes."""
    params = weights(A=(3, 4, 48), V=(3, 48, 4))
    fn = lambda p, x: jax.lax.scan(lambda c, q: (jnp.tanh(layer_norm(c @ q["A"]) @ q["V"]), None), x, p)[0]  # noqa: E731
    assert decisions(check(fn, params, X)) == ["contracted"]
    assert decisions(left := check(fn, params, X, where=lambda row: row.width == 7)) == ["skipped"]
    assert left.apply(left.contract(params), X[:2]).shape == (2, 4)


def test_minimum_saving() -> None:
    """A share of the block's own parameters: 576 and 40 for the first, 256 and 24 for the second."""
    params = weights(**SHAPES)
    assert decisions(check(three, params, X, minimum_saving=0.9))[:2] == ["contracted", "contracted"]
    assert decisions(check(three, params, X, minimum_saving=0.92))[:2] == ["contracted", "skipped"]
    folded = check(three, params, X, minimum_saving=0.99)
    assert decisions(folded)[:2] == ["centred", "skipped"]  # which saves sums, no parameters
    assert folded.report.rows[1].reason


@pytest.mark.parametrize(
    "options",
    [
        {"minimum_saving": 1.0},
        {"minimum_saving": -0.1},
        {"minimum_saving": "much"},
        {"minimum_saving": float("nan")},
        {"minimum_saving": True},
        {"where": "all"},
        {"strict": "yes"},
        {"strict": 1},
    ],
)
def test_options_that_are_refused(options: Any) -> None:
    with pytest.raises(jaxfold.OptionError, match=next(iter(options))):
        jaxfold.fold(three, weights(**SHAPES), X, **options)


def test_not_a_function() -> None:
    with pytest.raises(jaxfold.OptionError, match="fn"):
        jaxfold.fold(weights(**SHAPES), three, X)  # pyright: ignore[reportArgumentType]


def test_text() -> None:
    """For a person who did not write the model: where, what, how much, why not."""
    text = " ".join(str(jaxfold.fold(three, weights(**SHAPES), X).report).split())
    for part in ("left alone", "4/64", "3/32", "576 → 40", "832 → 64", "2 of 3", "test_report.py"):
        assert part in text
    reason = jaxfold.fold(three, weights(**SHAPES), X).report.rows[2].reason
    for word in reason.split()[:4]:
        assert word in text


def test_text_without_norms() -> None:
    assert str(jaxfold.fold(lambda p, x: jnp.tanh(x @ p["A"]), weights(**SHAPES), X).report)


def test_json() -> None:
    report = jaxfold.fold(three, weights(**SHAPES), X).report
    found = json.loads(report.to_json())
    assert [row["decision"] for row in found["rows"]] == ["contracted", "contracted", "skipped"]
    assert found["rows"][0]["original"]["parameters"] == 576
    assert found["rows"][0]["source"] == report.rows[0].source
    assert found["totals"]["parameters"] == {"before": report.parameters[0], "after": report.parameters[1]}


def test_stack_counts_every_layer() -> None:
    params = weights(A=(3, 4, 48), V=(3, 48, 4))
    fn = lambda p, x: jax.lax.scan(lambda c, q: (jnp.tanh(layer_norm(c @ q["A"]) @ q["V"]), None), x, p)[0]  # noqa: E731
    (row,) = jaxfold.fold(fn, params, X).report.rows
    assert row.stack == 3
    assert row.original is not None
    assert row.contracted is not None
    assert row.original.parameters == 3 * 2 * 4 * 48
    assert row.contracted.parameters == 3 * 2 * 4 * 4


def test_norm_over_a_broadcast_statistic() -> None:
    """The statistic spread to the array's own shape before the root, as Haiku's RMSNorm does, is in the report."""

    def fn(p: Any, x: Any) -> Any:
        h = x @ p["A"]
        q = jnp.broadcast_to((h * h).mean(-1, keepdims=True), h.shape)
        return h * jax.lax.rsqrt(q + 1e-5) @ p["W"]

    assert len(check(fn, weights(**SHAPES), X).report.rows) == 1


def test_reason_of_a_norm_whose_input_was_cut() -> None:
    """It is that of the norm by itself, although another norm is cheaper with its input as a source."""

    def beside(p: Any, x: Any) -> Any:
        h = x @ p["A"]
        return jnp.tanh(h), jnp.tanh(third(p, h))

    def both(p: Any, x: Any) -> Any:
        h = x @ p["C"]
        s = jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-3)
        return beside(p, x), jnp.tanh(h), (h * s * p["c"]) @ p["D"]

    params = weights(A=(4, 64), C=(4, 4), c=(4,), D=(4, 3))
    (alone,) = check(beside, {"A": params["A"]}, X).report.rows
    two, one = check(both, params, X).report.rows
    assert (one.decision, two.decision) == ("skipped", "absorbed")
    assert "contracting it would save nothing: 4 numbers make its 64 features" in one.reason
    assert one.reason == alone.reason
    assert (one.producer, one.features, one.original) == ("A", 4, alone.original) == (alone.producer, 4, one.original)
    assert (two.producer, two.features) == ("C", 4)


def by_library(p: Any, x: Any) -> Any:
    h = jnp.tanh(x @ p["A"])
    return jnp.tanh(jax.nn.standardize(h))  # here


@pytest.mark.parametrize(
    "function",
    [by_library, lambda p, x: jax.checkpoint(by_library)(p, x), lambda p, x: jax.jit(by_library)(p, x)],
    ids=["plain", "remat", "jit"],
)
def test_source_of_what_a_jitted_library_function_does(function: Any) -> None:
    """The line that calls it, of which its own equations know nothing."""
    (row,) = jaxfold.fold(function, weights(**SHAPES), X).report.rows
    assert row.source.endswith(f"test_report.py:{line(by_library, '# here')} (by_library)")
    assert f"test_report.py:{line(by_library, '# here')} (by_library): left alone." in str(
        jaxfold.fold(function, weights(**SHAPES), X).report
    )


def test_many_writers_are_a_stream_only_if_centred() -> None:
    """Of a norm that is contracted they are but the modules that make its input."""
    params = weights(**{f"A{index}": (1, 64) for index in range(4)}, W=(64, 3))

    def fn(p: Any, x: Any) -> Any:
        h = sum(x[:, index : index + 1] @ p[f"A{index}"] for index in range(4))
        return layer_norm(h) @ p["W"]

    (row,) = check(fn, params, X).report.rows
    assert (row.decision, row.producer) == ("contracted", "4 modules")


def test_columns_that_are_blank_are_left_out() -> None:
    """fold measures no errors, and what is no contraction has no share that it saves."""
    contracted = str(jaxfold.fold(first, weights(**SHAPES), X).report)
    assert contracted.splitlines()[0].split() == ["block", "d/n/m", "parameters", "saved"]
    params = weights(K=(4, 64))
    text = str(jaxfold.fold(stream, params, X).report)
    assert text.splitlines()[0].split() == ["block", "d/n/m", "parameters"]
    assert "1 norm: 1 centred;" in text


def test_maps_in_a_row_are_named() -> None:
    """Where the parameters shrink for another reason than a norm, the report says which."""
    params = weights(A=(4, 64), W=(64, 3), B=(3, 3))

    def fn(p: Any, x: Any) -> Any:
        return jnp.tanh(third(p, jnp.tanh(x @ p["A"] @ p["W"]) @ p["B"]))

    report = check(fn, params, X, where=lambda row: False).report
    assert (report.parameters[1] < report.parameters[0], report.merged, report.contracted) == (True, 1, ())
    assert "affine maps in a row, with no norm between them, were merged\n" in str(report)
    plain = jaxfold.fold(first, weights(**SHAPES), X).report
    assert plain.merged == 0
    assert "merged" not in str(plain)


def test_constants_are_not_centred_for_nothing() -> None:
    """A mean of weights that the function closes over, in place of one of the stream, saves no mean."""
    kernel = jnp.asarray(weights(K=(4, 64))["K"])
    report = check(lambda p, x: jnp.tanh(layer_norm(jnp.tanh(x) @ kernel)) @ p["W"], weights(W=(64, 3)), X).report
    (row,) = report.rows
    assert row.decision == "skipped"
    assert report.reductions[0] == report.reductions[1]
    assert "would take 1 at run time where 1 would be saved" in row.reason


def test_parameters_are_no_constants() -> None:
    """Beside the above: of parameters that something else reads, the mean is taken at run time, of fewer numbers."""
    params = weights(K=(4, 64), W=(64, 3))

    def fn(p: Any, x: Any) -> Any:
        return jnp.tanh(layer_norm(jnp.tanh(x) @ p["K"])) @ p["W"], jnp.sum(p["K"] ** 2)

    (row,) = check(fn, params, X).report.rows
    assert row.decision == "centred"


@pytest.mark.parametrize("inputs", [(), (None,), ({},)])
def test_without_inputs(inputs: Any) -> None:
    """A function of the inputs alone, and its input as the parameters, is what newcomers try."""
    with pytest.raises(jaxfold.StructureError, match=r"inputs: got no.*fn is called as fn\(params, \*inputs\)"):
        jaxfold.fold(lambda x: x, weights(**SHAPES), *inputs)


@pytest.mark.parametrize("params", [{}, None, ()])
def test_without_parameters(params: Any) -> None:
    with pytest.raises(jaxfold.StructureError, match=r"params: got no array.*Arrays that fn closes over are constants"):
        jaxfold.fold(lambda p, x: first(weights(**SHAPES), x), params, X)
