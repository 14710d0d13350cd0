"""What the domain says of an array is true: every affine array and every quadratic of a program, entry by entry."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfold._fold import _known as known
from jaxfold._fold._affine import Affine, Quadratic, Square, Sum
from jaxfold._fold._analysis import Analysis
from jaxfold._fold._program import Program, Value
from tests.fold.programs import draw

pytestmark = pytest.mark.maths

# float64, some thirty operations on arrays of entries about 1; sums of at most 100 terms.
FLOAT64 = 1e-11


def values_of(program: Program, arguments: list[Any]) -> dict[Value, Any]:
    """Every array of a program, computed by its own equations."""
    environment = dict(zip(program.inputs, arguments, strict=True))
    for equation in program.equations:
        inputs = [environment.get(v, v.constant) for v in equation.inputs]
        environment |= dict(zip(equation.outputs, equation.evaluate(inputs), strict=True))
    return environment


def affine_value(array: Affine, environment: dict[Value, Any], memo: dict[int, Any]) -> np.ndarray:
    """Σ x T + b by loops over rows, in NumPy."""

    def read(value: Value) -> np.ndarray:
        return np.asarray(environment.get(value, value.constant)).astype(np.float64)

    total = np.zeros(array.shape)
    for source, node in array.terms.items():
        table = known.evaluate(node, np, read, memo)
        assert table.shape == node.shape
        row_shape = source.row_shape
        for row in np.ndindex(*row_shape):
            x = np.ones((1,) * len(array.shape))
            for view in source.views:
                raw = np.asarray(view.source.array(read(view.source.value)))
                index: list[Any] = [0 if size == 1 else slice(None) for size in raw.shape]
                for axis, place in zip(view.rows, row, strict=False):
                    index[axis] = place
                order = [axis for axis in view.axes if axis is not None]
                kept = [axis for axis, part in enumerate(index) if isinstance(part, slice)]
                part = np.transpose(raw[tuple(index)], [kept.index(axis) for axis in order])
                shape = [1 if own is None else raw.shape[own] for own in view.axes]
                x = x * part.reshape(shape)
            total = total + x * table[row]
    if array.bias is not None:
        bias = known.evaluate(array.bias, np, read, memo)
        assert bias.shape == array.bias.shape
        total = total + bias
    return total


def quadratic_value(quadratic: Quadratic, environment: dict[Value, Any], memo: dict[int, Any]) -> np.ndarray:
    base = affine_value(quadratic.base, environment, memo)
    over = quadratic.over
    q = float(quadratic.squares) * (base**2).sum(over) - float(quadratic.sums) * base.sum(over) ** 2 + quadratic.offset
    left = [axis for axis in range(base.ndim) if axis not in over]
    order = [axis for axis in quadratic.axes if axis is not None]
    q = q.reshape([base.shape[axis] for axis in left])
    small = tuple(i for i, axis in enumerate(left) if axis not in order)
    q = np.squeeze(q, small).transpose([[a for a in left if a in order].index(axis) for axis in order])
    return np.broadcast_to(
        q.reshape([1 if axis is None else base.shape[axis] for axis in quadratic.axes]), quadratic.shape
    )


def laid_out(total: Sum, environment: dict[Value, Any], memo: dict[int, Any], shape: tuple[int, ...]) -> np.ndarray:
    """``factor · Σ base``, along the axes that are said to be the sum's."""
    summed = float(total.factor) * affine_value(total.base, environment, memo).sum(total.over, keepdims=True)
    order = [axis for axis in total.axes if axis is not None]
    dropped = tuple(axis for axis in range(summed.ndim) if axis not in order)
    moved = np.squeeze(summed, dropped).transpose([sorted(order).index(axis) for axis in order])
    return np.broadcast_to(moved.reshape([1 if a is None else summed.shape[a] for a in total.axes]), shape)


def remembered(abstract: Any, truth: np.ndarray, environment: dict[Value, Any], memo: dict[int, Any]) -> None:
    """What an array is said to be the sum of, or to have lost the mean of, or to be a part of."""
    size = max(1.0, float(np.abs(truth).max()))
    if isinstance(abstract, Affine) and abstract.sum_of is not None:
        claimed = laid_out(abstract.sum_of, environment, memo, truth.shape)
        assert np.abs(claimed - truth).max() < FLOAT64 * size
    if isinstance(abstract, Affine) and abstract.centred is not None:
        base = affine_value(abstract.centred.base, environment, memo)
        claimed = base - base.mean(abstract.centred.over, keepdims=True)
        assert np.abs(claimed - truth).max() < FLOAT64 * size
    if isinstance(abstract, Square) and abstract.total is not None:
        assert np.abs(quadratic_value(abstract.total, environment, memo) - truth).max() < FLOAT64 * size


def check(function: Any, params: Any, x: Any) -> tuple[int, int]:
    """How many affine and quadratic arrays there were; all are as the domain says."""
    flat = jax.tree.leaves(params)
    program = Program(jax.make_jaxpr(function)(params, x))
    analysis = Analysis(program, [*(1 << index for index in range(len(flat))), None])
    environment = values_of(program, [*map(jnp.asarray, flat), jnp.asarray(x)])
    memo: dict[int, Any] = {}
    counts = [0, 0]
    for equation in program.equations:
        for value in equation.outputs:
            abstract = analysis.of(value)
            truth = np.asarray(environment[value])
            if not np.isfinite(truth).all() or not isinstance(abstract, (Affine, Square, Quadratic)):
                continue
            if isinstance(abstract, Quadratic):
                claimed = quadratic_value(abstract, environment, memo)
            else:
                affine = abstract.base if isinstance(abstract, Square) else abstract
                claimed = affine_value(affine, environment, memo)
                claimed = claimed**2 if isinstance(abstract, Square) else claimed
            remembered(abstract, truth, environment, memo)
            counts[isinstance(abstract, Quadratic)] += 1
            assert claimed.shape == truth.shape, equation.name
            size = max(1.0, float(np.abs(truth).max()))
            assert np.abs(claimed - truth).max() < FLOAT64 * size, equation.name
    return counts[0], counts[1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("block", range(5))
def test_random_programs(block: int) -> None:
    affine = quadratic = 0
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for seed in range(10_000 + 10 * block, 10_000 + 10 * (block + 1)):
            counts = check(*draw(seed))
            affine, quadratic = affine + counts[0], quadratic + counts[1]
    assert affine > 80
    assert quadratic > 8


RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 6))
V = RNG.normal(size=(3, 4, 6))
C = RNG.normal(size=(6,))
CASES = {
    "batched kernels": lambda p, x: jnp.einsum("abd,bdn->abn", x[:, :3], p["V"]) + p["C"],
    "kernel first": lambda p, x: jnp.einsum("nd,abd->anb", p["W"].T, x),
    "heads": lambda p, x: (x @ p["W"] + p["C"]).reshape(3, 5, 2, 3).transpose(0, 2, 1, 3).sum(-1),
    "heads and back": lambda p, x: (x @ p["W"] + p["C"]).reshape(3, 5, 3, 2).reshape(15, 6) @ p["W"].T,
    "batch merged": lambda p, x: ((x @ p["W"]).reshape(15, 6) * p["C"]).reshape(5, 3, 6),
    "token of a scalar": lambda p, x: (x[..., None] * p["W"] + p["C"]) ** 2,
    "two contracted axes": lambda p, x: jnp.einsum("abd,bdn->an", x[:, :3], p["V"]),
    "slices of features": lambda p, x: (x @ p["W"])[..., 1:5:2] + p["C"][:2],
    "slices of the batch": lambda p, x: (x @ p["W"] + p["C"])[1:, ::2],
    "vmapped": lambda p, x: jax.vmap(lambda row: p["W"].T @ row + p["C"], in_axes=1, out_axes=1)(x[0].T),
    "ensemble": lambda p, x: jax.vmap(lambda w: x @ w - (x @ w).mean(-1, keepdims=True))(p["V"]),
    "division": lambda p, x: (x @ p["W"] + p["C"]) / jnp.exp(x[..., :1]) / p["C"] / 3.0,
    "concatenation": lambda p, x: jnp.concatenate([x @ p["W"], jnp.tanh(x) @ p["W"] + p["C"], x @ p["W"]], -1),
    "narrow factor over heads": lambda p, x: (x @ p["W"]).reshape(3, 5, 2, 3) * jnp.tanh(x[..., :2])[..., None],
    "difference of itself": lambda p, x: (x @ p["W"] + p["C"]) - 0.5 * (x @ p["W"]) - p["C"],
    "variance by sums": lambda p, x: ((h := x @ p["W"] + p["C"]) ** 2).sum(-1) / 6 - (h.sum(-1) / 6) ** 2 + 1e-3,
    "negated": lambda p, x: -(-(x @ p["W"]) + p["C"]),
    "constant mask": lambda p, x: (x @ p["W"]) * jnp.array([1.0, 0, 1, 0, 1, 1]),
    "zeros added": lambda p, x: (x @ p["W"]) - jnp.zeros((3, 5, 1)) + jnp.full((3, 5, 6), 2.0),
    "sum over what only repeats": lambda p, x: jnp.repeat((x @ p["W"] + p["C"])[..., None], 5, -1).sum(-1),
    "mean of a source": lambda p, x: (h := jnp.tanh(x)) - h.mean(-1, keepdims=True) + h.sum(0) / 3,
    "mean of another axis": lambda p, x: (h := jnp.tanh(x[:, :4])) - h.mean(-1)[:, None, :],
    "square of a mean of tokens": lambda p, x: (jnp.tanh(x).mean(1) ** 2).sum(-1) - jnp.tanh(x).mean(1).mean(-1) ** 2,
    "scalar from the inputs": lambda p, x: (x @ p["W"] - x.mean()) * jnp.exp(x[0, 0, 0]),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        affine, quadratic = check(CASES[name], {"W": W, "V": V, "C": C}, RNG.normal(size=(3, 5, 4)))
    assert affine + quadratic > 0
