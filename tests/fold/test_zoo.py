"""Whole models of today, small: every number and derivative, every decision, and what a wrong one would look like."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfold
from jaxfold._extend import ClosedJaxpr, Jaxpr
from tests.fold import zoo
from tests.fold.checks import FLOAT64, GRADIENT64, check, decisions, difference

pytestmark = pytest.mark.usefixtures("x64", "usual")

DRAWS = 3


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Nothing here runs more than a few times: what takes longest is to compile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.maths
@pytest.mark.parametrize("name", zoo.MODELS)
def test_outputs(name: str) -> None:
    """Of both flavours of contraction, in float64."""
    case = zoo.case(name)
    params, inputs = case.cast(np.float64)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(case.fn(params, *inputs)))  # the truth itself
    check(case.fn, params, *inputs)


def gradients(fn: Callable[..., Any], params: Any, inputs: tuple[Any, ...]) -> Any:
    """In all parameters and all inputs that are real."""

    def loss(params: Any, *inputs: Any) -> Any:
        leaves = jax.tree.leaves(fn(params, *inputs))
        return sum(jnp.sum(jnp.sin(leaf + 0.3 * index)) for index, leaf in enumerate(leaves, start=1))

    real = [index for index, leaf in enumerate(inputs, start=1) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jax.grad(loss, (0, *real))(params, *inputs)


def quickly(fn: Callable[..., Any], *arguments: Any) -> Any:
    """One program, which compiles faster than its operations one by one, and twice as fast without fusion emitters."""
    lowered = jax.jit(fn).lower(*arguments)
    try:
        compiled = lowered.compile({"xla_cpu_use_fusion_emitters": False})
    except jax.errors.JaxRuntimeError:  # an XLA that has no such option
        compiled = lowered.compile()
    return compiled(*arguments)


def worst(result: Any, truth: Any) -> float:
    """The largest error of a leaf relative to it, or to a thousandth of the largest leaf where that is more.

    The bias of the keys moves all scores of a query alike: its gradient is zero, and what comes out is the rounding of
    sums that cancel.
    """
    leaves = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (result, truth)), strict=True)]
    floor = 1e-3 * max(np.abs(b).max() for _, b in leaves)
    assert all(np.isfinite(a).all() for a, _ in leaves)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), floor)) for a, b in leaves)


@pytest.mark.maths
@pytest.mark.parametrize("name", zoo.MODELS)
def test_gradients(name: str) -> None:
    """Through ``contract_traced``, of each leaf on its own."""
    case = zoo.case(name)
    params, inputs = case.cast(np.float64)
    folded = jaxfold.fold(case.fn, params, *inputs)
    # A step in float32, as NNX's softmax is, rounds alike in both only if operations are compiled one by one.
    mixed = "f32[" in str(jax.make_jaxpr(case.fn)(params, *inputs))
    evaluate = (lambda fn, *arguments: fn(*arguments)) if mixed else quickly
    truth = evaluate(functools.partial(gradients, case.fn), params, inputs)
    ours = evaluate(
        functools.partial(gradients, lambda p, *x: folded.apply(folded.contract_traced(p), *x)), params, inputs
    )
    assert jax.tree.structure(ours) == jax.tree.structure(truth)
    assert worst(ours, truth) < GRADIENT64


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_gradients_are_told_apart(name: str) -> None:
    """A control: at parameters a millionth larger they are others."""
    case = zoo.case(name)
    params, inputs = case.cast(np.float64)
    moved = jax.tree.map(lambda leaf: leaf * (1 + 1e-6), params)
    assert worst(gradients(case.fn, moved, inputs), gradients(case.fn, params, inputs)) > 1e3 * GRADIENT64


@pytest.mark.maths
@pytest.mark.parametrize("name", zoo.MODELS)
def test_float32(name: str) -> None:
    """No worse than the function itself: at most twice its error, root mean square over all outputs of a few draws.

    Both round about as often, at the same places but for the norms, and the coefficients once: from float64. So the two
    errors are draws from distributions of one width. The largest of a few hundred entries may differ by more than twice
    between any two such draws; the mean square does not, except that errors of one token go together, and those of one
    set of parameters: hence several. A mean that is taken of rounded numbers, or a coefficient that is computed in
    float32 from terms that cancel, would show as a multiple. The truth is the function of the same rounded parameters
    and inputs in float64.
    """
    case = zoo.case(name)
    folded = jaxfold.fold(case.fn, *flat(case.cast(np.float32)))
    original, ours = (jax.jit(fn) if scanned(name) else fn for fn in (case.fn, folded.apply))
    squares: dict[str, list[np.ndarray]] = {"original": [], "ours": []}
    for seed in range(1, DRAWS + 1):
        params, inputs = case.redrawn(seed).cast(np.float32)
        truth = jax.tree.leaves(original(*jax.tree.map(wide, (params, *inputs))))
        for key, outputs in (
            ("original", original(params, *inputs)),
            ("ours", ours(folded.contract(params), *inputs)),
        ):
            for leaf, true in zip(jax.tree.leaves(outputs), truth, strict=True):
                assert leaf.dtype == np.float32
                assert true.dtype == np.float64
                error = np.asarray(leaf, np.float64) - np.asarray(true)
                squares[key].append(np.square(error / np.abs(true).max()).ravel())
    rms = {key: float(np.sqrt(np.mean(np.concatenate(each)))) for key, each in squares.items()}
    assert 1e-9 < rms["original"] < 1e-5  # a control: that it is float32 which is compared
    assert rms["ours"] <= 2 * rms["original"]


def flat(arguments: tuple[Any, tuple[Any, ...]]) -> tuple[Any, ...]:
    return arguments[0], *arguments[1]


def wide(leaf: Any) -> Any:
    return leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf


def scanned(name: str) -> bool:
    """Operations on their own are compiled once for all cases; a scan is compiled again at each call."""
    return "scan" in name or "written out" in name


@pytest.mark.maths
@pytest.mark.parametrize("name", zoo.MODELS)
def test_other_batches(name: str) -> None:
    """One set of coefficients serves all sizes of the batch, whether or not the decisions would be the same there."""
    case = zoo.case(name)
    params, inputs = case.cast(np.float64)
    folded = jaxfold.fold(case.fn, params, *inputs)
    contracted = folded.contract(params)
    for batch in (1, 7):
        others = [jnp.resize(leaf, (batch, *leaf.shape[1:])) for leaf in inputs]
        if name == "vit, attention pooling":  # scores of a probe that is repeated for the whole batch are coefficients
            with pytest.raises(jaxfold.ShapeError):
                jax.eval_shape(folded.apply, contracted, *others)
        elif name in ("gpt2", "llama"):
            assert difference(folded.apply(contracted, *others), case.fn(params, *others)) < FLOAT64
        else:
            shapes = jax.eval_shape(folded.apply, contracted, *others)
            assert jax.tree.leaves(shapes)[0].shape[0] == batch


@pytest.mark.parametrize("name", zoo.MODELS)
def test_decisions(name: str) -> None:
    """What the maths says, see zoo.py; and what follows from it for the rest of a row."""
    case = zoo.case(name)
    folded = jaxfold.fold(case.fn, *flat(case.cast(np.float64)))
    assert tuple(decisions(folded)) in case.decisions
    for row in folded.report.rows:
        assert row.decision != "skipped" or row.reason
        assert row.weightless or row.decision != "absorbed"
        assert not row.weightless or row.decision != "skipped"
        assert row.reductions is not None
        before, after = row.reductions
        assert after == before - (row.decision == "centred") or row.decision == "contracted"
        assert row.norm_type == "layernorm" or row.decision != "centred"
    stacks = [row.stack for row in folded.report.rows]
    assert stacks == ([zoo.LAYERS, zoo.LAYERS, None] if scanned(name) else [None] * len(stacks))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr, and of the jaxprs inside it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(item, (ClosedJaxpr, Jaxpr)):
                    yield from equations(item)


def sums(fn: Callable[..., Any], arguments: tuple[Any, ...], widths: set[int]) -> int:
    """How many equations sum over as many entries as a norm has features; those of a scan count once."""
    found = [e for e in equations(jax.make_jaxpr(fn)(*arguments)) if e.primitive.name == "reduce_sum"]
    return sum(int(np.prod([e.invars[0].aval.shape[axis] for axis in e.params["axes"]])) in widths for e in found)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_reductions(name: str) -> None:
    """What the report counts is what the program does: a sum fewer for each norm that is centred.

    Plus those of what can be centred at run time only. A norm that is contracted may have fewer entries to sum over.
    """
    case = zoo.case(name)
    params, inputs = case.cast(np.float64)
    folded = jaxfold.fold(case.fn, params, *inputs)
    widths = {row.width for row in folded.report.rows if row.width is not None}
    before = sums(case.fn, (params, *inputs), widths)
    after = sums(folded.apply, (folded.contract(params), *inputs), widths)
    rows = [(row.decision, *row.reductions) for row in folded.report.rows if row.reductions is not None]
    assert len(rows) == len(folded.report.rows)
    assert before == sum(one for _, one, _ in rows)
    most = sum(other for _, _, other in rows)
    least = sum(other for decision, _, other in rows if decision != "contracted")
    assert least <= after - case.decisions[tuple(decisions(folded))] <= most


@pytest.mark.parametrize(("name", "expected"), [("gpt2", 10), ("gpt2, scan of remat", 6), ("llama", 5), ("bert", 12)])
def test_sums_are_counted(name: str, expected: int) -> None:
    """A control of the counting: two for each LayerNorm and one for each RMSNorm, also within scans and remat."""
    case = zoo.case(name)
    assert sums(case.fn, flat(case.cast(np.float64)), {zoo.WIDTH}) == expected


# What a wrong rule would do, done by hand to the parameters of the function itself, beside what a right one does.

Change = Callable[[Any], Any]


def changed(params: Any, change: Callable[[np.ndarray], np.ndarray], *endings: str) -> Any:
    """With all leaves changed whose path has one of these endings; there must be some for each."""
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = ["/" + jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    for ending in endings:
        assert any(path.endswith("/" + ending) for path in paths), ending
    wanted = [path.endswith(tuple("/" + ending for ending in endings)) for path in paths]
    return structure.unflatten([change(leaf) if hit else leaf for (_, leaf), hit in zip(flat, wanted, strict=True)])


def leaf_at(params: Any, ending: str) -> np.ndarray:
    found: list[np.ndarray] = []
    changed(params, lambda leaf: found.append(leaf) or leaf, ending)
    (only,) = found
    return only


def centred(leaf: np.ndarray, axis: int = -1) -> np.ndarray:
    return leaf - leaf.mean(axis, keepdims=True)


def centre(*endings: str, axis: int = -1) -> Change:
    return lambda params: changed(params, functools.partial(centred, axis=axis), *endings)


def each(*endings: str) -> tuple[str, ...]:
    """In all layers."""
    return tuple(ending.format(index) for ending in endings for index in range(zoo.LAYERS))


OUT = each("layer{}/attention/out/kernel", "layer{}/attention/out/bias")
DOWN = each("layer{}/mlp/down/kernel", "layer{}/mlp/down/bias")
TABLES = ("embed/embedding", "position_table")


def absorb(norm: str, readers: tuple[str, ...], *, offset: bool = True) -> Change:
    """Scale and bias of a norm into Dense layers, or the scale alone, with the bias thrown away."""

    def change(params: Any) -> Any:
        scale, bias = leaf_at(params, f"{norm}/scale"), leaf_at(params, f"{norm}/bias")
        for reader in readers:
            if offset:
                more = np.tensordot(bias, leaf_at(params, f"{reader}/kernel"), 1)
                params = changed(params, lambda leaf, more=more: leaf + more, f"{reader}/bias")
            params = changed(params, lambda leaf: leaf * scale.reshape(-1, *[1] * (leaf.ndim - 1)), f"{reader}/kernel")
        params = changed(params, np.ones_like, f"{norm}/scale")
        return changed(params, np.zeros_like, f"{norm}/bias")

    return change


def absorb_offset(factor: Callable[[np.ndarray], np.ndarray]) -> Change:
    """The scale of the last norm of a Llama into its head."""

    def change(params: Any) -> Any:
        scale = factor(leaf_at(params, "rms/offset"))[:, None]
        return changed(changed(params, lambda leaf: leaf * scale, "head/kernel"), np.zeros_like, "rms/offset")

    return change


def centre_layer_scaled(branch: str, scale: str, *, merged: bool = True) -> Change:
    """The last kernel and bias of a branch with its LayerScale in them, or as if it were not there."""

    def change(params: Any) -> Any:
        if not merged:
            return centre(f"{branch}/kernel", f"{branch}/bias")(params)
        gamma = leaf_at(params, f"{scale}/gamma")
        params = changed(params, lambda leaf: centred(leaf * gamma), f"{branch}/kernel", f"{branch}/bias")
        return changed(params, np.ones_like, f"{scale}/gamma")

    return change


DIT = each("attention{}/out/kernel", "attention{}/out/bias", "mlp{}/down/kernel", "mlp{}/down/bias")
POST = each("attention{}/out/kernel", "mlp{}/down/kernel")
CONTROLS: dict[str, tuple[tuple[str, Change], tuple[str, Change]]] = {
    "a tied table": (
        ("gpt2", centre("position_table", *OUT, *DOWN)),
        ("gpt2", centre(*TABLES, *OUT, *DOWN)),
    ),
    "a table that is also the head's": (
        ("gpt2, untied", centre(*TABLES, *OUT, *DOWN)),
        ("gpt2", centre("embed/embedding")),
    ),
    "RMSNorm": (("gpt2, untied", centre("embed/embedding")), ("llama", centre("embed/embedding"))),
    "RMSNorm, a kernel": (
        ("gpt2, untied", centre("layer0/mlp/down/kernel")),
        ("llama", centre("mlp0/down/kernel")),
    ),
    "a square kernel's other axis": (
        ("gpt2, written out", centre("layers/kernel_o")),
        ("gpt2, written out", centre("layers/kernel_o", axis=-2)),
    ),
    "the axis of the layers": (
        ("gpt2, scan", centre("layers/mlp/down/kernel")),
        ("gpt2, scan", centre("layers/mlp/down/kernel", axis=0)),
    ),
    "a stream that is returned": (
        ("gpt2, untied", centre(*OUT, *DOWN)),
        ("gpt2, stream returned", centre(*OUT, *DOWN)),
    ),
    "a head without a norm": (
        ("vit, mean and norm", centre(*OUT, *DOWN)),
        ("vit, mean without norm", centre(*OUT, *DOWN)),
    ),
    "attention pooling": (
        ("vit, attention pooling", centre("patches/kernel", *OUT, *DOWN)),
        ("vit, attention pooling", centre("pool/out/kernel")),
    ),
    "a norm's own output": (("bert", centre(*TABLES, "type_table", *POST)), ("bert", centre("ln1_0/bias"))),
    "gates": (("dit, no gates", centre(*DIT)), ("dit", centre(*DIT))),
    "experts": (
        ("moe", centre(*each("kernel_down{}"))),
        ("moe", centre(*each("kernel_down{}"), axis=0)),
    ),
    "kernels along the tokens": (
        ("mixer", centre("patches/kernel", *each("mlp{}/down/kernel"))),
        ("mixer", centre(*each("out{}/kernel"))),
    ),
    "filters by channel": (
        ("convnext", centre("stem/kernel", "stem/bias")),
        ("convnext", centre_layer_scaled("mlp0/down", "ls0")),
    ),
    "LayerScale": (
        ("vit, layer scale", centre_layer_scaled("layer0/mlp/down", "layer0/ls2")),
        ("vit, layer scale", centre_layer_scaled("layer0/mlp/down", "layer0/ls2", merged=False)),
    ),
    "the bias of a norm": (
        ("vit", absorb("layer0/ln2", ("layer0/mlp/up",))),
        ("vit", absorb("layer0/ln2", ("layer0/mlp/up",), offset=False)),
    ),
    "one of three readers": (
        ("vit", absorb("layer0/ln1", tuple(f"layer0/attention/{x}" for x in ("query", "key", "value")))),
        ("vit", absorb("layer0/ln1", tuple(f"layer0/attention/{x}" for x in ("query", "key")))),
    ),
    "a residual behind the norm": (
        ("bert", absorb(f"ln2_{zoo.LAYERS - 1}", ("transform",))),
        ("bert", absorb("ln1_0", ("mlp0/up",))),
    ),
    "a scale 1 + offset": (
        ("llama, 1 + offset", absorb_offset(lambda offset: 1.0 + offset)),
        ("llama, 1 + offset", absorb_offset(lambda offset: offset)),
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls(control: str) -> None:
    """The assertion that the right change passes fails by far for the wrong one."""
    for (name, change), right in zip(CONTROLS[control], (True, False), strict=True):
        case = zoo.case(name)
        params, inputs = case.cast(np.float64)
        run = case.fn
        error = difference(run(change(params), *inputs), run(params, *inputs))
        assert error < FLOAT64 if right else error > 1e-3


WRITERS = (
    "token_table",
    "position_table",
    "layers/kernel_o",
    "layers/bias_o",
    "layers/kernel_down",
    "layers/bias_down",
)


def test_rms_norm_in_place_of_layer_norm() -> None:
    """All that centring is, by hand; with a single writer left out it is another function."""
    case = zoo.case("gpt2, written out")
    params, inputs = case.cast(np.float64)
    run = jax.jit(functools.partial(zoo.plain_gpt, norm=zoo.rms_norm))
    truth = jax.jit(zoo.plain_gpt)(params, *inputs)
    assert difference(run(centre(*WRITERS)(params), *inputs), truth) < FLOAT64
    for left_out in WRITERS:
        others = [writer for writer in WRITERS if writer != left_out]
        assert difference(run(centre(*others)(params), *inputs), truth) > 1e-3
