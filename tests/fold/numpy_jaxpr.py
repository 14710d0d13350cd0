"""Jaxprs evaluated with NumPy: nothing is compiled, so that thousands of random programs can be run.

Each primitive is one NumPy function. Calls, loops and branches are evaluated by recursion. A primitive that is not
known here runs in JAX, and is counted. A mesh has to be of one device: a collective over it changes nothing.
"""

from __future__ import annotations

import collections
import contextlib
import math
import operator
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxfold._extend import Literal, bind

FELL_BACK: collections.Counter[str] = collections.Counter()  # how often each unknown primitive ran in JAX


def run(fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The leaves of what a function returns."""
    return traced(fn, *arguments)(*arguments)


def traced(fn: Callable[..., Any], *arguments: Any) -> Callable[..., list[Any]]:
    """A function of other arguments of the same shapes, traced once, with the leaves of what it returns."""
    closed = jax.make_jaxpr(fn)(*arguments)
    return lambda *other: evaluate(closed, jax.tree.leaves(other))


def evaluate(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The outputs of a closed jaxpr."""
    with np.errstate(all="ignore"):
        return _call(closed, arguments)


def evaluate_equation(equation: Any, arguments: Sequence[Any]) -> list[Any]:
    """The outputs of one equation."""
    with np.errstate(all="ignore"):
        return _equation(equation, [_plain(argument) for argument in arguments])


def _call(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    return _jaxpr(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), arguments)


def _jaxpr(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, map(_plain, consts), strict=True))
    for variable, argument in zip(jaxpr.invars, arguments, strict=True):
        values[variable] = _as(variable.aval, argument)

    def read(atom: Any) -> Any:
        return _as(atom.aval, atom.val) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = _equation(equation, [read(atom) for atom in equation.invars])
        for variable, output in zip(equation.outvars, outputs, strict=True):
            values[variable] = output
    return [read(atom) for atom in jaxpr.outvars]


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Within it float64 stands in for float32, float16 and bfloat16."""
    global _widened
    before, _widened = _widened, {np.dtype(name) for name in ("float32", "float16", jax.numpy.bfloat16)}
    try:
        yield
    finally:
        _widened = before


_widened: set[Any] = set()


def _own(dtype: Any) -> Any:
    return np.dtype(np.float64) if dtype in _widened else dtype


def _extended(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)


def _plain(array: Any) -> Any:
    """As a NumPy array, but for keys."""
    return array if hasattr(array, "dtype") and _extended(array) else np.asarray(array)


def _as(aval: Any, array: Any) -> Any:
    return array if _extended(aval) else np.asarray(array).astype(_own(aval.dtype), copy=False)


def _equation(equation: Any, arguments: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    keys = any(_extended(atom.aval) for atom in (*equation.invars, *equation.outvars) if hasattr(atom.aval, "dtype"))
    if name in CALLS:
        return CALLS[name](params, arguments)
    if name in PRIMITIVES and not keys:
        outputs = PRIMITIVES[name](params, equation, *arguments)
        if outputs is not NotImplemented:
            outputs = list(outputs) if equation.primitive.multiple_results else [outputs]
            return [_as(variable.aval, output) for variable, output in zip(equation.outvars, outputs, strict=True)]
    FELL_BACK[name] += 1
    return [_plain(output) for output in bind(equation, arguments)]


# Calls, loops and branches.


def _scan(params: Any, arguments: list[Any]) -> list[Any]:
    consts, carried = params["num_consts"], params["num_carry"]
    fixed, carry = arguments[:consts], arguments[consts : consts + carried]
    rows = arguments[consts + carried :]
    count = params["length"]
    outputs = {}
    for index in reversed(range(count)) if params["reverse"] else range(count):
        results = _call(params["jaxpr"], [*fixed, *carry, *(row[index] for row in rows)])
        carry, outputs[index] = results[:carried], results[carried:]
    avals = params["jaxpr"].out_avals[carried:]
    if not count:
        return [*carry, *(np.zeros((0, *aval.shape), _own(aval.dtype)) for aval in avals)]
    return [*carry, *(np.stack([outputs[i][place] for i in range(count)]) for place in range(len(avals)))]


def _while(params: Any, arguments: list[Any]) -> list[Any]:
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    tested, fixed, carry = arguments[:first], arguments[first:second], arguments[second:]
    while _call(params["cond_jaxpr"], [*tested, *carry])[0]:
        carry = _call(params["body_jaxpr"], [*fixed, *carry])
    return carry


def _cond(params: Any, arguments: list[Any]) -> list[Any]:
    branches = params["branches"]
    return _call(branches[min(max(int(arguments[0]), 0), len(branches) - 1)], arguments[1:])


def _called(*names: str) -> Callable[[Any, list[Any]], list[Any]]:
    def call(params: Any, arguments: list[Any]) -> list[Any]:
        return _call(next(params[name] for name in names if name in params), arguments)

    return call


def _shard_map(params: Any, arguments: list[Any]) -> list[Any]:
    if params["mesh"].size != 1:
        raise NotImplementedError("a mesh of several devices")
    return _call(params["jaxpr"], arguments)


CALLS: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call"),
        _called("jaxpr", "call_jaxpr"),
    ),
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr"), _called("call_jaxpr", "fun_jaxpr")),
}


# Arithmetic.


def _wide(array: Any) -> Any:
    """Half precision in float32, as XLA computes sums and functions of it."""
    small = (
        array.dtype.itemsize < 4 and array.dtype.kind not in "biu" and jax.numpy.issubdtype(array.dtype, np.floating)
    )
    return array.astype(np.float32) if small else array


def _function(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, equation, *arrays: of(*map(_wide, arrays))


def _is_float(array: Any) -> bool:
    return jax.numpy.issubdtype(array.dtype, np.inexact)


def _divide(a: Any, b: Any) -> Any:
    if _is_float(a):
        return a / b
    safe = np.where(b == 0, 1, b)
    quotient = np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe)) if a.dtype.kind == "i" else a // safe
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def _remainder(a: Any, b: Any) -> Any:
    return np.fmod(a, b) if _is_float(a) else np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _round(params: Any, equation: Any, x: Any) -> Any:
    x = _wide(x)
    to_even = "EVEN" in params["rounding_method"].name
    return np.rint(x) if to_even else np.copysign(np.floor(np.abs(x) + 0.5), x)


def _integer_pow(params: Any, equation: Any, x: Any) -> Any:
    x, y = _wide(x), params["y"]
    return x**y if y >= 0 or not _is_float(x) else 1 / x ** (-y)


def _logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _each(function: Callable[[float], float]) -> Callable[[Any], Any]:
    vectorised = np.vectorize(function, otypes=[np.float64])
    return lambda x: vectorised(x) if x.size else x


def _select(params: Any, equation: Any, which: Any, *cases: Any) -> Any:
    index = np.broadcast_to(np.asarray(which).astype(np.int64), cases[0].shape)
    result = cases[0].copy()
    for place, case in enumerate(cases):
        result[index == place] = case[index == place]
    return result


def _convert(params: Any, equation: Any, x: Any) -> Any:
    """As XLA does it: a float beyond the range of an integer becomes the nearest one, NaN 0."""
    dtype = _own(np.dtype(params["new_dtype"]))
    if dtype.kind == "b":
        return x != 0
    if _is_float(x) and not jax.numpy.issubdtype(dtype, np.inexact):
        info, wide = jax.numpy.iinfo(dtype), x.astype(np.float64)
        kept = np.where(np.isnan(wide) | (wide >= float(info.max)) | (wide <= float(info.min)), 0, wide)
        result = np.trunc(kept).astype(np.int64 if int(info.min) < 0 else np.uint64).astype(dtype)
        result = np.where(wide >= float(info.max), np.array(int(info.max), dtype), result)
        return np.where(wide <= float(info.min), np.array(int(info.min), dtype), result)
    return x.real.astype(dtype) if x.dtype.kind == "c" and dtype.kind != "c" else x.astype(dtype)


def _shift(of: Callable[[Any, Any], Any], *, logical: bool = False) -> Callable[..., Any]:
    def shifted(params: Any, equation: Any, x: Any, y: Any) -> Any:
        bits = x.dtype.itemsize * 8
        own = x.view(f"u{x.dtype.itemsize}") if logical else x
        inside = (y >= 0) & (y < bits)
        beyond = (x >> (bits - 1)) if of is np.right_shift and not logical else np.zeros_like(x)
        return np.where(inside, of(own, np.where(inside, y, 0).astype(own.dtype)).view(x.dtype), beyond)

    return shifted


UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "square": np.square,
    "is_finite": np.isfinite,
    "not": np.invert,
    "logistic": _logistic,
    "erf": _each(math.erf),
    "erfc": _each(math.erfc),
    "real": np.real,
    "imag": np.imag,
    "conj": np.conj,
    "stop_gradient": lambda x: x,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "pvary": lambda x: x,
}
BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "pow": np.power,
    "atan2": np.arctan2,
    "max": np.maximum,
    "min": np.minimum,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "complex": lambda a, b: a + 1j * b,
}


# Layout.


def _broadcast(params: Any, equation: Any, x: Any, *dynamic: Any) -> Any:
    shape, own = params["shape"], [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        own[axis] = size
    return np.broadcast_to(x.reshape(own), shape)


def _slice(params: Any, equation: Any, x: Any) -> Any:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _pad(params: Any, equation: Any, x: Any, value: Any) -> Any:
    config = params["padding_config"]
    for axis, (low, high, inside) in enumerate(config):
        size = x.shape[axis]
        spread = size + max(size - 1, 0) * inside
        result = np.full((*x.shape[:axis], max(low, 0) + spread + max(high, 0), *x.shape[axis + 1 :]), value, x.dtype)
        at = [slice(None)] * x.ndim
        at[axis] = slice(max(low, 0), max(low, 0) + spread, inside + 1)
        result[tuple(at)] = x
        at[axis] = slice(max(-low, 0), result.shape[axis] - max(-high, 0))
        x = result[tuple(at)]
    return x


def _split(params: Any, equation: Any, x: Any) -> Any:
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


def _iota(params: Any, equation: Any, *dynamic: Any) -> Any:
    shape, axis = params["shape"], params["dimension"]
    own = [1] * len(shape)
    own[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis]).astype(params["dtype"]).reshape(own), shape)


def _starts(x: Any, sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    begin = [min(max(int(start), 0), own - size) for start, own, size in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(begin, sizes, strict=True))


def _dynamic_slice(params: Any, equation: Any, x: Any, *starts: Any) -> Any:
    return x[_starts(x, params["slice_sizes"], starts)]


def _dynamic_update_slice(params: Any, equation: Any, x: Any, update: Any, *starts: Any) -> Any:
    result = np.array(x)
    result[_starts(x, update.shape, starts)] = update
    return result


def _places(
    shape: Any, indices: Any, sizes: Any, mapped: Any, batched: Any, batched_indices: Any, *, clip: bool
) -> tuple[list[Any], Any]:
    """For each axis of the operand its indices, over the batch axes and then one axis for each of the operand's.

    Also, for each batch index, whether its window lies inside.
    """
    batch = indices.shape[:-1]
    starts: list[Any] = [np.zeros(batch, np.int64) for _ in shape]
    for place, axis in enumerate(mapped):
        starts[axis] = indices[..., place].astype(np.int64)
    for axis, place in zip(batched, batched_indices, strict=True):
        starts[axis] = np.indices(batch)[place]
    inside = np.ones(batch, bool)
    places = []
    for axis, (own, size) in enumerate(zip(shape, sizes, strict=True)):
        inside &= (starts[axis] >= 0) & (starts[axis] <= own - size)
        start = np.clip(starts[axis], 0, max(own - size, 0)) if clip else starts[axis]
        offsets = [1] * len(shape)
        offsets[axis] = size
        places.append(start.reshape(*batch, *[1] * len(shape)) + np.arange(size).reshape(offsets))
    return places, inside


def _drops(mode: Any) -> bool:
    return mode is None or "FILL" in str(mode)


def _gather(params: Any, equation: Any, x: Any, indices: Any) -> Any:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    places, inside = _places(
        x.shape,
        indices,
        sizes,
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        clip=True,
    )
    batch = indices.shape[:-1]
    result = x[tuple(places)] if x.size else np.zeros((*batch, *sizes), x.dtype)
    if _drops(params["mode"]):
        fill = params["fill_value"]
        if fill is None:
            fill = _default_fill(x.dtype)
        result = np.where(inside.reshape(*batch, *[1] * x.ndim), result, np.asarray(fill).astype(x.dtype))
    result = result.reshape(*batch, *(size for axis, size in enumerate(sizes) if axis not in gone))
    return np.moveaxis(result, range(len(batch), result.ndim), numbers.offset_dims) if numbers.offset_dims else result


def _default_fill(dtype: Any) -> Any:
    if jax.numpy.issubdtype(dtype, np.inexact):
        return np.nan
    if dtype.kind == "b":
        return True
    return jax.numpy.iinfo(dtype).min if dtype.kind == "i" else jax.numpy.iinfo(dtype).max


def _scatter(of: Any) -> Callable[..., Any]:
    def scattered(params: Any, equation: Any, x: Any, indices: Any, updates: Any) -> Any:
        numbers = params["dimension_numbers"]
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        windows = numbers.update_window_dims
        updates = np.moveaxis(updates, windows, range(updates.ndim - len(windows), updates.ndim))
        kept = iter(updates.shape[updates.ndim - len(windows) :])
        sizes = [1 if axis in gone else next(kept) for axis in range(x.ndim)]
        batch = indices.shape[:-1]
        places, inside = _places(
            x.shape,
            indices,
            sizes,
            numbers.scatter_dims_to_operand_dims,
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
            clip="CLIP" in str(params["mode"]),
        )
        if "CLIP" in str(params["mode"]):
            inside = np.ones(batch, bool)
        result, chosen = np.array(x), inside.reshape(-1)
        flat = [np.broadcast_to(place, (*batch, *sizes)).reshape(-1, *sizes)[chosen] for place in places]
        values = updates.reshape(-1, *sizes)[chosen]
        if not values.size:
            return result
        if of is None:
            result[tuple(flat)] = values
        else:
            of.at(result, tuple(flat), values)
        return result

    return scattered


# Sums and products.


def _reduction(of: Any) -> Callable[..., Any]:
    def reduced(params: Any, equation: Any, x: Any) -> Any:
        x = _wide(x)
        if of in (np.max, np.min) and x.size == 0:
            return NotImplemented
        return of(x, axis=tuple(params["axes"]))

    return reduced


def _argument(of: Any) -> Callable[..., Any]:
    return lambda params, equation, x: of(_wide(x), axis=params["axes"][0])


def _cumulative(of: Any) -> Callable[..., Any]:
    def along(params: Any, equation: Any, x: Any) -> Any:
        axis, back = params["axis"], params["reverse"]
        x = np.flip(_wide(x), axis) if back else _wide(x)
        result = of(x, axis)
        return np.flip(result, axis) if back else result

    return along


def _dot(params: Any, equation: Any, a: Any, b: Any) -> Any:
    (left, right), (batch_left, batch_right) = params["dimension_numbers"]
    letters = iter(string.ascii_letters)
    names_a = [next(letters) for _ in range(a.ndim)]
    names_b = [next(letters) for _ in range(b.ndim)]
    for i, j in (*zip(left, right, strict=True), *zip(batch_left, batch_right, strict=True)):
        names_b[j] = names_a[i]
    batch = [names_a[i] for i in batch_left]
    own = [n for i, n in enumerate(names_a) if i not in (*left, *batch_left)]
    other = [n for i, n in enumerate(names_b) if i not in (*right, *batch_right)]
    dtype = _own(equation.outvars[0].aval.dtype)
    a, b = (_wide(array) for array in (a, b))
    if (jax.numpy.issubdtype(dtype, np.floating) and np.dtype(dtype).itemsize >= 4) or a.dtype.kind in "iu":
        a, b = a.astype(dtype), b.astype(dtype)
    return np.einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(batch + own + other)}", a, b)


def _convolution(params: Any, equation: Any, x: Any, kernel: Any) -> Any:
    """A sum over the places of the window, each a product of matrices."""
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    numbers = params["dimension_numbers"]
    x, kernel = _wide(np.transpose(x, numbers.lhs_spec)), _wide(np.transpose(kernel, numbers.rhs_spec))
    spread = [
        (low, high, inside - 1) for (low, high), inside in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    x = _pad({"padding_config": [(0, 0, 0), (0, 0, 0), *spread]}, equation, x, 0)
    window, dilation, strides = kernel.shape[2:], params["rhs_dilation"], params["window_strides"]
    counts = [
        max((own - (size - 1) * step - 1) // stride + 1, 0)
        for own, size, step, stride in zip(x.shape[2:], window, dilation, strides, strict=True)
    ]
    features = kernel.shape[0]
    if batch_groups > 1:
        parts = zip(np.split(x, batch_groups, 0), np.split(kernel, batch_groups, 0), strict=True)
    else:
        parts = zip(np.split(x, groups, 1), np.split(kernel, groups, 0), strict=True)
    results = []
    for part, own in parts:
        total = np.zeros((part.shape[0], own.shape[0], *counts), part.dtype)
        for place in np.ndindex(*window):
            at = tuple(
                slice(p * step, p * step + (count - 1) * stride + 1, stride) if count else slice(0, 0)
                for p, step, count, stride in zip(place, dilation, counts, strides, strict=True)
            )
            total += np.einsum(
                "bc...,oc->bo...", part[(slice(None), slice(None), *at)], own[(slice(None), slice(None), *place)]
            )
        results.append(total)
    result = np.concatenate(results, 1)
    assert result.shape[1] == features
    return np.transpose(result, np.argsort(numbers.out_spec))


def _witness(params: Any, equation: Any, rows: Any) -> Any:
    return np.linalg.qr(np.swapaxes(rows, -1, -2), mode="r")


def _sort(params: Any, equation: Any, *arrays: Any) -> Any:
    if params["num_keys"] != 1:
        return NotImplemented
    key = arrays[0]
    order = np.argsort(np.where(key == 0, 0, key), params["dimension"], kind="stable")  # NaN last, −0 beside 0
    return [np.take_along_axis(array, order, params["dimension"]) for array in arrays]


def _same(params: Any, equation: Any, *arrays: Any) -> Any:
    return arrays


def _collective(params: Any, equation: Any, *arrays: Any) -> Any:
    return arrays if equation.primitive.multiple_results else arrays[0]


PRIMITIVES: dict[str, Callable[..., Any]] = {
    **{name: _function(of) for name, of in UNARY.items()},
    **{name: _function(of) for name, of in BINARY.items()},
    "round": _round,
    "integer_pow": _integer_pow,
    "clamp": lambda params, equation, low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": _select,
    "convert_element_type": _convert,
    "shift_left": _shift(np.left_shift),
    "shift_right_logical": _shift(np.right_shift, logical=True),
    "shift_right_arithmetic": _shift(np.right_shift),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, equation, x: x.reshape(params["new_sizes"]),
    "transpose": lambda params, equation, x: np.transpose(x, params["permutation"]),
    "squeeze": lambda params, equation, x: np.squeeze(x, tuple(params["dimensions"])),
    "expand_dims": lambda params, equation, x: np.expand_dims(x, tuple(params["dimensions"])),
    "slice": _slice,
    "pad": _pad,
    "split": _split,
    "concatenate": lambda params, equation, *arrays: np.concatenate(arrays, params["dimension"]),
    "rev": lambda params, equation, x: np.flip(x, tuple(params["dimensions"])),
    "iota": _iota,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter_add": _scatter(np.add),
    "scatter-mul": _scatter(np.multiply),
    "scatter_mul": _scatter(np.multiply),
    "scatter-max": _scatter(np.maximum),
    "scatter_max": _scatter(np.maximum),
    "scatter-min": _scatter(np.minimum),
    "scatter_min": _scatter(np.minimum),
    "reduce_sum": _reduction(np.sum),
    "reduce_prod": _reduction(np.prod),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
    "argmax": _argument(np.argmax),
    "argmin": _argument(np.argmin),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
    "cumlogsumexp": _cumulative(np.logaddexp.accumulate),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "sort": _sort,
    "witness": _witness,
    "optimization_barrier": _same,
    "device_put": _same,
    "psum": _collective,
    "psum2": _collective,
    "psum_invariant": _collective,
    "pmax": _collective,
    "pmin": _collective,
}
