"""Random programs as source code: one line for each operation, on any axis, of sizes that often coincide.

Nothing here knows what a network looks like. Every array has axes of its own at the end, of sizes that the generator
knows; before them stand those of the batch, of which a program accepts any number and size, as far as it can.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PREAMBLE: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "lax": lax}


@jax.custom_jvp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1.0, 1.0)


clipped.defjvp(lambda primals, tangents: (clipped(primals[0]), tangents[0]))


@jax.custom_vjp
def rounded(w: Any) -> Any:
    return jnp.round(w * 8) / 8


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x: Any, factor: float) -> Any:
    return x * factor


scaled.defvjp(lambda x, factor: (x * factor, None), lambda factor, _, g: (g * factor,))


def sharded(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    spec = jax.sharding.PartitionSpec("i")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)


PREAMBLE |= {"clipped": clipped, "rounded": rounded, "scaled": scaled, "sharded": sharded}
HARD = ("int8", "int32", "float8_e4m3fn", "float8_e5m2")  # casts to these are steps
SOFT = ("float32", "float16", "bfloat16")  # casts to these are rounding
LEAST = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Written:
    """A random program.

    Attributes:
        fn: of parameters and inputs.
        second: other parameters.
        inputs: with a batch; others with another batch, and with one more axis before it.
        source: of the function.
        rounding: of the coarsest dtype that is nothing but rounding.
    """

    fn: Callable[..., Any]
    params: dict[str, Any]
    second: dict[str, Any]
    inputs: tuple[Any, ...]
    other_batch: tuple[Any, ...]
    other_rank: tuple[Any, ...]
    source: str
    rounding: float


@dataclasses.dataclass
class Writer:
    """Writes a function, line by line.

    Attributes:
        own: the sizes of each variable's own axes.
        params: their shapes by name.
        depth: of functions inside functions.
    """

    rng: np.random.Generator
    sizes: tuple[int, ...]
    own: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    lines: list[str] = dataclasses.field(default_factory=list)
    params: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    soft: set[str] = dataclasses.field(default_factory=set)
    count: list[int] = dataclasses.field(default_factory=lambda: [0])
    hard: bool = False
    depth: int = 1

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def size(self) -> int:
        return int(self.pick(self.sizes))

    def name(self, prefix: str) -> str:
        self.count[0] += 1
        return f"{prefix}{self.count[0]}"

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def let(self, expression: str, own: tuple[int, ...]) -> str:
        name = self.name("v")
        self.line(f"{name} = {expression}")
        self.own[name] = own
        return name

    def variable(self, least: int = 1, most: int = 3) -> str:
        """One of the last variables with that many axes of its own."""
        last = [v for v, own in self.own.items() if least <= len(own) <= most][-4:]
        if last:
            return self.pick(last)
        v = self.pick(list(self.own))
        return self.let(
            f"{v}[..., None]" if len(self.own[v]) < least else f"{v}[..., 0]", (*self.own[v], 1)[: least or 1]
        )

    def like(self, own: tuple[int, ...]) -> str:
        return self.pick([v for v, other in self.own.items() if other == own])

    def parameter(self, *shape: int) -> str:
        """An expression of parameters of this shape: new, tied, transposed, reshaped, or computed."""
        same = [n for n, other in self.params.items() if other == shape]
        turned = [n for n, other in self.params.items() if len(shape) == 2 and other == shape[::-1]]
        flat = [n for n, other in self.params.items() if np.prod(other) == np.prod(shape) and len(other) != len(shape)]
        if same and self.chance(0.2):
            expression = f"p['{self.pick(same)}']"
        elif turned and self.chance(0.2):
            expression = f"p['{self.pick(turned)}'].T"
        elif flat and self.chance(0.1):
            expression = f"p['{self.pick(flat)}'].reshape({shape})"
        else:
            name = self.name("w")
            self.params[name] = shape
            expression = f"p['{name}']"
        ways = ["rounded({})", "jnp.tanh({})", "({} / jnp.sqrt(1e-3 + ({} ** 2).sum(0)))", "clipped({})"]
        ways += [
            "({} - {}.mean(0))",
            "({} * 0.5 + 0.1)",
            "lax.stop_gradient({})",
            "jnp.flip({}, 0)",
            "jnp.cumsum({}, 0)",
        ]
        return self.pick(ways).replace("{}", expression) if self.chance(0.2) else expression


def axis_of(w: Writer, v: str) -> tuple[int, int]:
    """One of the axes, counted from the end, and its size."""
    axis = int(w.rng.integers(len(w.own[v])))
    return axis - len(w.own[v]), w.own[v][axis]


def dense(w: Writer, v: str = "", axis: int | None = None, width: int = 0) -> int:
    """A kernel over one axis, whose result may lie elsewhere; returns where, counted from the end."""
    v = v or w.variable()
    own, letters = w.own[v], "abcd"[: len(w.own[v])]
    axis = int(w.rng.integers(len(own))) if axis is None else axis % len(own)
    width = width or w.size()
    gone = letters[axis]
    out = [c for c in letters if c != gone]
    place = int(w.rng.integers(len(out) + 1)) if w.chance(0.4) else axis
    out.insert(place, "z")
    sizes = {**dict(zip(letters, own, strict=True)), "z": width}
    kernel, formula = (
        (w.parameter(own[axis], width), f"{gone}z") if w.chance(0.6) else (w.parameter(width, own[axis]), f"z{gone}")
    )
    if w.chance(0.3) and axis == len(own) - 1 and out[-1] == "z" and formula[1] == "z":
        text = f"{v} @ {kernel}"
    elif w.chance(0.3):
        text = f"jnp.einsum('{formula},...{letters}->...{''.join(out)}', {kernel}, {v})"
    else:
        text = f"jnp.einsum('...{letters},{formula}->...{''.join(out)}', {v}, {kernel})"
    if w.chance(0.6):
        text += f" + {w.parameter(width)}.reshape({(width, *(1,) * (len(out) - 1 - out.index('z')))})"
    w.let(text, tuple(sizes[c] for c in out))
    return out.index("z") - len(out)


def contracted(w: Writer) -> None:
    """A kernel over two axes, or one that makes two."""
    v, width = w.variable(1, 2), w.size()
    own = w.own[v]
    if len(own) == 2:
        first = w.chance(0.5)
        kernel = w.parameter(*own, width) if first else w.parameter(width, *own)
        w.let(f"jnp.einsum('...ab,{'abz' if first else 'zab'}->...z', {v}, {kernel})", (width,))
    else:
        other = w.size()
        w.let(
            f"jnp.einsum('...a,azy->...{w.pick(['zy', 'yz'])}', {v}, {w.parameter(own[0], width, width)})", (width,) * 2
        )
        del other


def norm(w: Writer, v: str = "", at: int | None = None) -> None:
    """A norm, nearly one, or something that looks like one, over one axis or several, or a slice of one."""
    v = v or w.variable()
    axis, size = axis_of(w, v)
    own = w.own[v]
    if at is not None:
        axis, size = at, own[at]
    over: Any = axis
    several = len(own) > 1
    if at is None and several and w.chance(0.2):
        over, size = (-1, -2), own[-1] * own[-2]
    elif at is None and w.chance(0.05):
        over = 0  # of the batch
    source = v
    if over == -1 and own[-1] > 2 and w.chance(0.15):
        source = w.let(f"{v}[..., 1:]" if w.chance(0.5) else f"{v}[..., ::2]", own)  # its size is set below
        w.own[source] = (*own[:-1], own[-1] - 1 if "1:" in w.lines[-1] else -(-own[-1] // 2))
        size = w.own[source][-1]
    epsilon = w.pick([1e-6, 1e-3])
    mean, square = w.name("m"), w.name("s")
    w.line(f"{mean} = {source}.mean({over}, keepdims=True)")
    kind = int(w.rng.integers(9))
    kind = 7 - kind if kind > 6 and w.chance(0.5) else kind
    near = w.pick(["", "", "", "", "0.9 * ", "1.001 * "])
    w.line(
        f"{square} = "
        + [
            f"{source}.var({over}, keepdims=True)",
            f"(({source} - {mean}) ** 2).mean({over}, keepdims=True)",
            f"({source} * {source}).mean({over}, keepdims=True) - {mean} ** 2",
            f"jnp.square({source}).mean({over}, keepdims=True)",
            f"({source} ** 2).sum({over}, keepdims=True)",
            f"(({source} - {near}{mean}) ** 2).sum({over}, keepdims=True) / {max(size, 1)}",
            f"jnp.std({source}, {over}, keepdims=True) ** 2",
            f"abs({source}).mean({over}, keepdims=True)",
            f"({source} * {source}).mean({over}, keepdims=True) - 0.9 * {mean} ** 2",
        ][kind]
    )
    top = w.pick([f"({source} - {mean})", f"({source} - {mean})", source, f"({source} - {near}{mean})"])
    root = w.pick(
        [
            f" * lax.rsqrt({square} + {epsilon})",
            f" / jnp.sqrt({square} + {epsilon})",
            f" * ({square} + {epsilon}) ** -0.5",
        ]
    )
    text = top + root
    shape: tuple[int, ...] = tuple(w.own[source])
    along = axis if at is not None and w.chance(0.8) else -1
    spread = f".reshape({(shape[along], *(1,) * (-1 - along))})" if along != -1 else ""
    if w.chance(0.6):
        text = f"({text}) * {w.parameter(shape[along])}{spread}"
    if w.chance(0.5):
        text = f"{text} + {w.parameter(shape[along])}{spread}"
    y = w.let(text, shape)
    if at is not None:
        return
    if w.chance(0.12) and over == -1:
        w.let(w.pick([f"{y} * jnp.tanh({mean})", f"{y} + {mean}", f"{y} * {square}"]), shape)
    elif w.chance(0.06) and over == -1:
        w.let(w.pick([mean, square]), (*shape[:-1], 1))


def block(w: Writer) -> None:
    """A kernel, a norm of what it makes, and kernels that read it; often wide between them."""
    v = w.variable(1, 2) if w.chance(0.5) else "x" if "x" in w.own else w.variable(1, 2)
    axis = dense(w, v, None, w.pick([8, 16, 24, 32]) if w.chance(0.7) else 0)
    h = list(w.own)[-1]
    if w.chance(0.2):
        linear(w, h)
        h = list(w.own)[-1]
    norm(w, h, axis)
    y = list(w.own)[-1]
    axis = axis if w.own[y] == w.own[h] else -1
    for _ in range(int(w.rng.integers(1, 3))):
        dense(w, y, axis, w.pick([*w.sizes, 2]))
    if w.own[y][-1] > 6:
        for name in list(w.own)[1:-1]:
            if max(w.own[name]) > 6 and w.chance(0.8):
                del w.own[name]  # what is wide is read again, but not often


def nonlinear(w: Writer) -> None:
    v = w.variable()
    of = ["jnp.tanh({})", "jax.nn.gelu({})", "jax.nn.softmax({})", "jnp.sin({})", "jax.nn.relu({})", "clipped({})"]
    of += ["{} * abs({})", "jnp.exp(-{} ** 2)", "jax.nn.silu({})", "lax.stop_gradient({})", "jnp.sort({})"]
    w.let(w.pick(of).replace("{}", v), w.own[v])


def linear(w: Writer, v: str = "") -> None:
    v = v or w.variable()
    n = w.own[v][-1]
    of = [
        "scaled({}, 3.0)",
        "-{}",
        "{} / 3",
        "{} * 2 - 1",
        "{}.astype(float)",
        "lax.optimization_barrier({})",
        "({} + {}.mean(-1, keepdims=True))",
    ]
    of += ["{} - 0.9 * {}.mean(-1, keepdims=True)", "{} - {}.sum(-1, keepdims=True)", "jax.vmap(lambda a: a * 2)({})"]
    of += [f"{{}} * {w.parameter(n)}", f"{{}} + {w.parameter(n)}", f"{{}} - {w.parameter(1)}"]
    w.let(w.pick(of).replace("{}", v), w.own[v])


def together(w: Writer) -> None:
    v = w.variable()
    u = w.like(w.own[v])
    of = [f"{v} + {u}", f"{v} - 0.5 * {u}", f"{v} + {u}", f"{v} * {u}", f"jnp.where({v} > 0, {v}, {u})"]
    of += [f"jnp.maximum({v}, {u})", f"{v} * jnp.tanh({u}.mean(-1, keepdims=True))", f"{u} * {v}[..., :1]"]
    of += [f"jnp.einsum('...a,...a->...a', {v}, {u})"]
    w.let(w.pick(of), w.own[v])


def product(w: Writer) -> None:
    """Of two runtime arrays over an axis of theirs."""
    v = w.variable(2, 2)
    u = w.like(w.own[v])
    a, b = w.own[v]
    formula, own = w.pick([("ab,...cb->...ac", (a, a)), ("ab,...ac->...cb", (b, b)), ("ab,...ab->...a", (a,))])
    w.let(f"jnp.einsum('...{formula}', {v}, {u}) / {max(a, b)}", own)


def layout(w: Writer) -> None:
    v = w.variable()
    own = w.own[v]
    axis, n = axis_of(w, v)
    k = len(own)

    def resized(size: int) -> tuple[int, ...]:
        changed = list(own)
        changed[axis] = size
        return tuple(changed)

    order = [int(i) for i in w.rng.permutation(n)]
    repeated = [int(i) for i in w.rng.integers(0, n, w.size())]
    options: list[tuple[str, tuple[int, ...]]] = [
        (f"jnp.flip({v}, {axis})", own),
        (f"jnp.roll({v}, 1, {axis})", own),
        (f"jnp.take({v}, np.array({order}), axis={axis})", own),
        (f"jnp.take({v}, np.array({repeated}), axis={axis})", resized(len(repeated))),
        (f"jnp.cumsum({v}, {axis})", own),
        (f"lax.cumsum({v}, {v}.ndim{axis}, reverse=True)", own),
        (f"jnp.concatenate([{v}, {w.like(own)}], {axis})", resized(2 * n)),
        (f"jnp.repeat({v}, 2, {axis})", resized(2 * n)),
        (f"jnp.flip({v}, 0)", own),
        (f"jnp.cumsum({v}, 0)", own),
        (f"jnp.concatenate([{v}[:1], {v}[:-1]], 0)", own),
        (f"({v}.reshape(-1, {own[-1]}) * 2).reshape({v}.shape)", own),
        (f"({v}.reshape({v}.shape[0], -1) + 1).reshape({v}.shape)", own),
        (f"({v}.T * 0.5).T", own),
        (f"jnp.concatenate(jnp.split({v}, [{n // 2}], {axis})[::-1], {axis})", own),
    ]
    if k > 1:
        merged = (*own[:-2], own[-2] * own[-1])
        options += [
            (f"jnp.swapaxes({v}, -1, -2)", (*own[:-2], own[-1], own[-2])),
            (f"{v}.reshape(*{v}.shape[:-2], {merged[-1]})", merged),
            (f"{v}.reshape(*{v}.shape[:-2], {own[-1]}, {own[-2]})", (*own[:-2], own[-1], own[-2])),
            (f"{v}[..., {int(w.rng.integers(own[-2]))}, :]", (*own[:-2], own[-1])),
            (f"{v}.sum({axis})", tuple(np.delete(own, axis).tolist())),
            (f"{v}.mean({axis})", tuple(np.delete(own, axis).tolist())),
        ] * 2
        if own[-1] == own[-2]:
            options += [(f"jnp.diagonal({v}, axis1=-2, axis2=-1)", own[:-1])]
    if k < 3:
        options += [
            (f"jnp.stack([{v}, {w.like(own)}], -1)", (*own, 2)),
            (f"jnp.broadcast_to({v}[..., None, :], (*{v}.shape[:-1], 2, {own[-1]}))", (*own[:-1], 2, own[-1])),
        ]
        if own[-1] % 2 == 0 and own[-1] > 2:
            options += [(f"{v}.reshape(*{v}.shape[:-1], 2, {own[-1] // 2})", (*own[:-1], 2, own[-1] // 2))] * 2
    if axis == -1 and n > 1:
        place = int(w.rng.integers(n))
        value = w.pick(["0.0", "2.0", w.parameter(1), f"{v}[..., :1]"])
        options += [
            (f"{v}.at[..., {place}:{place + 1}].set({value})", own),
            (f"{v}.at[..., np.array({repeated})].add(0.5)", own),
            (f"{v}.at[..., np.array({order})].multiply({v})", own),
            (f"jnp.zeros_like({v}).at[..., np.array({order})].add({v})", own),
            (f"{v}[..., :-1]", (*own[:-1], n - 1)),
            (
                f"jnp.pad({v}, [(0, 0)] * ({v}.ndim - 1) + [(1, 0)], constant_values={w.pick([0.0, 1.0])})",
                (*own[:-1], n + 1),
            ),
            (f"lax.dynamic_slice_in_dim({v}, (x[..., 0] > 0).sum(), {n - 1}, -1)", (*own[:-1], n - 1)),
            (f"{v}[..., (x.ravel()[:2] > 0).astype(int)]", (*own[:-1], 2)),
            (f"jnp.take_along_axis({v}, jnp.argsort({v}, -1), -1)", own),
        ]
    text, shape = w.pick(options)
    w.let(text, shape)


def masked(w: Writer) -> None:
    v = w.variable()
    n = w.own[v][-1]
    keep = [bool(b) for b in w.rng.random(n) < 0.7]
    value = w.pick(["0.0", "1.5", w.parameter(n), "-jnp.inf", "jnp.nan", "-1e9"])
    mask = w.pick([f"np.array({keep})", f"jnp.arange({n}) < {n // 2 + 1}", "x[..., :1].sum() > 0", f"{v}[..., :1] > 0"])
    text = f"jnp.where({mask}, {v}, {value})"
    w.let(f"jax.nn.softmax({text})" if "inf" in value or "e9" in value else text, w.own[v])


def cast(w: Writer) -> None:
    v = w.variable()
    soft = bool(w.soft) or (not w.hard and w.chance(0.5))
    dtype = w.pick(SOFT if soft else HARD)
    if soft:
        w.soft.add(dtype)
    else:
        w.hard = True
    text = f"({v} * 3).astype('{dtype}')"
    if soft and w.chance(0.5):
        text = f"({text} * {w.pick(['2', '0.5'])} + 1)"
    w.let(f"{text}.astype('float64')", w.own[v])


def of_the_batch(w: Writer) -> None:
    """What a parameter is reshaped to, or repeated to, depends on the size of the batch."""
    v = w.variable()
    n = w.own[v][-1]
    of = [f"{v} + jnp.tile({w.parameter(n)}, ({v}.shape[0], *[1] * ({v}.ndim - 1)))"]
    of += [f"{v} + jnp.broadcast_to({w.parameter(n)}, {v}.shape)", f"{v} + jnp.repeat({w.parameter(1, n)}, {n}, 0)[0]"]
    of += [f"{v} * ({w.parameter(n)} if {v}.shape[0] > 4 else 1.0)", f"{v} * {v}.shape[0]"]
    if len(w.own[v]) > 1 and w.own[v][-2] == n:
        of += [f"{v} * {w.parameter(n)}.reshape(({n}, 1) if {v}.shape[0] > 4 else (1, {n}))"] * 4
    w.let(w.pick(of), w.own[v])


def inside(w: Writer) -> None:
    """A function in a function: a body that keeps the shape, called in one of many ways."""
    v = w.variable()
    own = w.own[v]
    name = w.name("f")
    body = dataclasses.replace(w, own={"h": own}, lines=[], depth=w.depth + 1)
    for _ in range(int(w.rng.integers(1, 4))):
        w.pick([norm, dense, linear, nonlinear, layout, together, block])(body)
    w.hard = body.hard
    last = list(body.own)[-1]
    got: tuple[int, ...] = tuple(body.own[last])
    if got != own:
        axes = len(got)
        if axes > 1:
            last = body.let(f"{last}.sum({tuple(range(-axes, -1))})", got[-1:])
        result = f"({last} @ {body.parameter(got[-1], own[-1])})" + "[..., None, :]" * (len(own) > 1) * 1
        result += "[..., None, :]" * (len(own) > 2)
        result = f"h + {result}"
    else:
        result = last
    w.line(f"def {name}(h):")
    w.lines += body.lines
    body.lines.clear()
    body.line(f"return {result}")
    w.lines += body.lines
    zero = "(x.sum() > 0).astype(int)"
    ways = [
        f"jax.jit({name})({v})",
        f"jax.checkpoint({name})({v})",
        f"{name}({name}({v}))",
        f"lax.scan(lambda h, _: ({name}(h), None), {v}, None, length=2)[0]",
        f"lax.scan(lambda h, _: ({name}(h), None), {v}, None, length=3, unroll=2)[0]",
        f"lax.scan(lambda h, a: (h + {name}(a), {name}(h)), {v}, jnp.stack([{v}, -{v}]), reverse=True)[0]",
        f"lax.scan(lambda h, a: (h * 0.5, {name}(a)), {v}, jnp.stack([{v}, 2 * {v}]))[1].sum(0)",
        f"lax.scan(lambda h, _: (lax.scan(lambda g, _: ({name}(g), None), h, None, 2)[0], None), {v}, None, 2)[0]",
        f"lax.fori_loop(0, 2, lambda i, h: {name}(h), {v})",
        f"lax.cond(x.sum() > 0, {name}, lambda h: h * 2, {v})",
        f"lax.switch({zero}, [lambda h: h, {name}, jnp.sin], {v})",
        f"jax.lax.map({name}, jnp.stack([{v}, {v} + 1]))[1]",
        f"sharded({name})({v})",
    ]
    w.let(w.pick(ways), own)


STEPS: dict[Callable[[Writer], Any], float] = {
    block: 4,
    dense: 3,
    norm: 3,
    contracted: 1,
    nonlinear: 1.5,
    linear: 2,
    together: 2,
    product: 0.4,
    layout: 5,
    masked: 0.8,
    cast: 0.4,
    of_the_batch: 0.5,
    inside: 1.5,
}


def write(seed: int) -> Written:
    """A random program."""
    rng = np.random.default_rng([seed, 2])
    size = int(rng.choice([2, 3, 4, 6]))
    sizes = (size,) if rng.random() < 0.5 else (size, int(rng.choice([1, 2, 3, 5, 8, 16])), int(rng.choice([4, 12])))
    own = (int(rng.choice(sizes)),) if rng.random() < 0.4 else tuple(int(n) for n in rng.choice(sizes, 2))
    w = Writer(rng, sizes, own={"x": own})
    weights = np.array(list(STEPS.values()))
    for _ in range(int(rng.integers(2, 7))):
        list(STEPS)[int(rng.choice(len(STEPS), p=weights / weights.sum()))](w)
    names = list(w.own)
    returned = [names[-1], *([w.pick(names)] if w.chance(0.3) else [])]
    w.line(f"return [{', '.join(returned)}]")
    if not w.params:
        w.parameter(3)
    source = "\n".join(["def fn(p, x):", *w.lines])
    scope = dict(PREAMBLE)
    exec(compile(source, f"<program {seed}>", "exec"), scope)

    def drawn() -> dict[str, Any]:
        return {n: rng.normal(size=shape) / np.sqrt(shape[0] if len(shape) > 1 else 4) for n, shape in w.params.items()}

    batch = size if rng.random() < 0.7 else 3
    other = 6 if batch < 5 else 3
    given, larger, deeper = ((rng.normal(size=(*lead, *own)),) for lead in ((batch,), (other,), (2, batch)))
    rounding = max([LEAST[dtype] for dtype in w.soft], default=0.0)
    return Written(scope["fn"], drawn(), drawn(), given, larger, deeper, source, rounding)
