"""Random programs out of Dense layers, norms and what stands between them in real networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class Builder:
    """Draws a program as a list of steps on a growing list of arrays, with the parameters that it reads.

    Attributes:
        rng: what draws.
        params: by name.
        steps: ``(env, params) -> array``; each appends to env.
        shapes: of the arrays in env.
    """

    rng: np.random.Generator
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: list[Callable[[list[Any], Any], Any]] = dataclasses.field(default_factory=list)
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def parameter(self, *shape: int) -> str:
        name = f"p{len(self.params)}"
        self.params[name] = self.rng.normal(size=shape) / np.sqrt(shape[0] if len(shape) > 1 else 4)
        return name

    def pick(self, *, narrow: bool = False) -> int:
        """One of the last arrays, or a narrow one."""
        last = range(max(0, len(self.shapes) - 4), len(self.shapes))
        choices = [i for i in last if not narrow or self.shapes[i][-1] <= 8] or list(last)
        return int(self.rng.choice(choices))

    def add(self, step: Callable[[list[Any], Any], Any], shape: tuple[int, ...]) -> int:
        self.steps.append(step)
        self.shapes.append(shape)
        return len(self.shapes) - 1


def dense(b: Builder, i: int | None = None, width: int | None = None) -> int:
    i = b.pick() if i is None else i
    width = int(b.rng.choice([3, 4, 6, 24, 32])) if width is None else width
    shared = [n for n, a in b.params.items() if a.shape == (b.shapes[i][-1], width)]
    kernel = shared[0] if shared and b.rng.random() < 0.3 else b.parameter(b.shapes[i][-1], width)
    bias = b.parameter(width) if b.rng.random() < 0.7 else None

    def step(env: list[Any], p: Any) -> Any:
        y = env[i] @ p[kernel]
        return y if bias is None else y + p[bias]

    return b.add(step, (*b.shapes[i][:-1], width))


def normalised(h: Any, kind: int, epsilon: float, axis: int = -1) -> Any:
    """A norm without scale and bias, in one of its spellings; the first two and the fourth take the mean away."""
    mean = h.mean(axis, keepdims=True)
    if kind == 0:
        return (h - mean) / jnp.sqrt(h.var(axis, keepdims=True) + epsilon)
    if kind == 1:
        fast = jnp.maximum(0.0, jnp.mean(h * h, axis, keepdims=True) - mean**2)
        return (h - mean) * jax.lax.rsqrt(fast + epsilon)
    if kind == 2:
        return h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis, keepdims=True) + epsilon)
    if kind == 3:
        return (h - mean) * (((h - mean) ** 2).sum(axis, keepdims=True) / h.shape[axis] + epsilon) ** -0.5
    if kind == 4:
        return h / jnp.sqrt(jnp.maximum(jnp.sum(h * h, axis, keepdims=True), epsilon))
    if kind == 5:
        return (h - mean) / (jnp.std(h, axis, keepdims=True) + epsilon)
    ddof = 1 if h.shape[axis] > 1 else 0
    return h * jax.lax.rsqrt(h.var(axis, keepdims=True, ddof=ddof) + epsilon)


def norm(b: Builder, i: int | None = None) -> int:
    i = b.pick() if i is None else i
    n = b.shapes[i][-1]
    scale = b.parameter(n) if b.rng.random() < 0.7 else None
    bias = b.parameter(n) if b.rng.random() < 0.7 else None
    kind = int(b.rng.integers(7))
    epsilon = float(b.rng.choice([1e-6, 1e-3]))

    def step(env: list[Any], p: Any) -> Any:
        y = normalised(env[i], kind, epsilon)
        y = y if scale is None else y * p[scale]
        return y if bias is None else y + p[bias]

    return b.add(step, b.shapes[i])


def nonlinear(b: Builder) -> int:
    i = b.pick()
    function = [jax.nn.gelu, jax.nn.relu, jnp.tanh, jax.nn.silu, jax.nn.softmax][int(b.rng.integers(5))]
    return b.add(lambda env, p: function(env[i]), b.shapes[i])


def residual(b: Builder) -> int:
    i = b.pick()
    same = [j for j in range(len(b.shapes)) if b.shapes[j] == b.shapes[i]]
    j = int(b.rng.choice(same))
    sign = float(b.rng.choice([1.0, -1.0, 0.5]))
    return b.add(lambda env, p: env[i] + sign * env[j], b.shapes[i])


def gate(b: Builder) -> int:
    """A product of two runtime arrays, or with a narrow one."""
    i = b.pick()
    if b.rng.random() < 0.5:
        same = [j for j in range(len(b.shapes)) if b.shapes[j] == b.shapes[i]]
        j = int(b.rng.choice(same))
        return b.add(lambda env, p: env[i] * env[j], b.shapes[i])
    j = b.pick()
    return b.add(lambda env, p: env[i] * jnp.tanh(env[j].mean(-1, keepdims=True)), b.shapes[i])


def choice(b: Builder) -> int:
    """A select on runtime values, however linear its branches are."""
    i = b.pick()
    same = [j for j in range(len(b.shapes)) if b.shapes[j] == b.shapes[i]]
    j = int(b.rng.choice(same))
    return b.add(lambda env, p: jnp.where(env[i] > 0, env[i], 0.25 * env[j]), b.shapes[i])


def concatenate(b: Builder) -> int:
    i, j = b.pick(), b.pick()
    return b.add(
        lambda env, p: jnp.concatenate([env[i], env[j]], -1), (*b.shapes[i][:-1], b.shapes[i][-1] + b.shapes[j][-1])
    )


def cut(b: Builder) -> int:
    i = b.pick()
    stop = max(1, b.shapes[i][-1] // 2)
    return b.add(lambda env, p: env[i][..., :stop], (*b.shapes[i][:-1], stop))


def known_product(b: Builder) -> int:
    i = b.pick()
    name = b.parameter(b.shapes[i][-1])
    return b.add(lambda env, p: env[i] * p[name] - 0.5, b.shapes[i])


def turned(b: Builder) -> int:
    """A detour through another layout."""
    i = b.pick()
    kind = int(b.rng.integers(3))
    shape = b.shapes[i]

    def step(env: list[Any], p: Any) -> Any:
        x = env[i]
        if kind == 0:
            return jnp.swapaxes(jnp.swapaxes(x, -1, -2) * 2.0, -1, -2)
        if kind == 1:
            return (x.reshape(-1, shape[-1]) + 1.0).reshape(shape)
        return jax.vmap(lambda row: row[None] * 3.0)(x).reshape(shape)

    return b.add(step, shape)


def positional(b: Builder) -> int:
    """A bias that varies over the axis of tokens."""
    i = b.pick()
    name = b.parameter(*b.shapes[i][-2:])
    return b.add(lambda env, p: env[i] + p[name], b.shapes[i])


def pooled(b: Builder) -> int:
    i = b.pick()
    return b.add(lambda env, p: env[i] - env[i].mean(-2, keepdims=True), b.shapes[i])


def block(b: Builder) -> int:
    """What is to be found: Dense, norm, Dense."""
    i = norm(b, dense(b, b.pick(narrow=True), int(b.rng.choice([24, 32]))))
    readers = [dense(b, i, int(b.rng.choice([3, 4, 6]))) for _ in range(int(b.rng.integers(1, 3)))]
    return readers[-1]


STEPS = [
    dense,
    norm,
    nonlinear,
    residual,
    gate,
    choice,
    concatenate,
    cut,
    known_product,
    turned,
    positional,
    pooled,
    block,
]
WEIGHTS = np.array([3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 6], float)


def draw(seed: int) -> tuple[Callable[..., Any], dict[str, Any], np.ndarray]:
    """A function of parameters and one input ``(3, 5, 4)``, the parameters, and the input."""
    rng = np.random.default_rng(seed)
    b = Builder(rng, shapes=[(3, 5, 4)])
    for _ in range(int(rng.integers(2, 7))):
        STEPS[int(rng.choice(len(STEPS), p=WEIGHTS / WEIGHTS.sum()))](b)
    extra = b.pick()
    steps, returned = list(b.steps), [len(b.shapes) - 1, *([extra] if rng.random() < 0.3 else [])]
    remat = rng.random() < 0.15

    def body(p: Any, x: Any) -> Any:
        env = [x]
        for step in steps:
            env.append(step(env, p))
        return [env[index] for index in returned]

    if not b.params:
        b.parameter(3)
    return (jax.checkpoint(body) if remat else body), b.params, rng.normal(size=(3, 5, 4))


# Residual streams: tables and kernels that write to them, norms that read them.

Part = Callable[[Any, Any, Any], Any]  # of parameters, an array (..., tokens, features), and a context likewise
CONTEXT = 3
VOCABULARY = 7
MOST_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A random program.

    Attributes:
        fn: of parameters and inputs.
        parts: what it was made of, in words.
        resized: inputs of another batch and of another number of tokens.
    """

    fn: Callable[..., Any]
    params: dict[str, Any]
    inputs: tuple[Any, ...]
    parts: tuple[str, ...] = ()
    resized: tuple[tuple[Any, ...], ...] = ()


@dataclasses.dataclass
class Streams:
    """Draws the parts of a program with residual streams.

    Attributes:
        rng: what draws.
        width, tokens: of the streams.
        params: by name.
        parts: what was drawn, in words.
        odd: how often what is unusual is drawn, of which several in one program leave little to be found.
        layers: while a layer is drawn that stands for several, how many.
        stacked: names of the parameters that hold one array for each of those.
    """

    rng: np.random.Generator
    width: int
    tokens: int
    odd: float = 1.0
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: list[str] = dataclasses.field(default_factory=list)
    layers: int = 0
    stacked: set[str] = dataclasses.field(default_factory=set)

    def parameter(self, *shape: int, shared: float = 0.0) -> str:
        """A new one, or, with that probability, one of this shape that is there already."""
        same = [n for n, array in self.params.items() if array.shape == shape and n not in self.stacked]
        if shared and same and self.rng.random() < shared:
            self.note("shared")
            return self.pick(same)
        name = f"p{len(self.params)}"
        stack = (self.layers,) if self.layers else ()
        self.stacked |= {name} if self.layers else set()
        self.params[name] = self.rng.normal(size=stack + shape) / np.sqrt(shape[0] if len(shape) > 1 else 4)
        return name

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def weighted(self, options: dict[str, float]) -> str:
        """One of these names, noted; those of a weight below 1 are unusual."""
        weights = np.array([often * self.odd if often < 1 else often for often in options.values()])
        return self.note(list(options)[int(self.rng.choice(len(options), p=weights / weights.sum()))])

    def note(self, name: str) -> str:
        self.parts.append(name)
        return name


def projection(s: Streams, features: int, width: int, bias: float = 0.7) -> Part:
    """A Dense layer, spelled in one of several ways."""
    spelling = int(s.rng.integers(4))
    kernel = s.parameter(*((width, features) if spelling == 3 else (features, width)), shared=0.1)
    offset = s.parameter(width, shared=0.05) if s.chance(bias) else None

    def part(p: Any, y: Any, c: Any) -> Any:
        if spelling == 0:
            y = y @ p[kernel]
        elif spelling == 1:
            y = jnp.einsum("...d,de->...e", y, p[kernel])
        elif spelling == 2:
            y = jnp.tensordot(y, p[kernel], 1)
        else:
            y = y @ p[kernel].T
        return y if offset is None else y + p[offset]

    return part


def activation(s: Streams) -> Callable[[Any], Any]:
    return s.pick([jax.nn.gelu, jax.nn.relu, jnp.tanh, jax.nn.silu, jax.nn.softmax, jnp.sin])


def standard(s: Streams, width: int, axis: int = -1) -> Part:
    """A norm, most often LayerNorm, of the features or of another axis of that width."""
    often = np.array([4, 4, 2 * s.odd, 4, s.odd, s.odd, s.odd, 4, 2])
    kind = int(s.rng.choice(len(often), p=often / often.sum()))
    epsilon = float(s.rng.choice([1e-6, 1e-3]))
    scale = s.parameter(width) if s.chance(0.7) else None
    bias = s.parameter(width) if s.chance(0.6) else None
    one_plus = s.chance(0.3)
    spread = (-1, *(1,) * (-1 - axis))
    s.note(f"norm {kind}{' with scale' if scale else ''}{' and bias' if bias else ''}")

    def part(p: Any, h: Any, c: Any) -> Any:
        factor = 1.0 if scale is None else p[scale].reshape(spread) + float(one_plus)
        if kind == 7:  # as in Flax
            mean = h.mean(axis, keepdims=True)
            root = jax.lax.rsqrt(jnp.mean(h * h, axis, keepdims=True) - mean**2 + epsilon)
            y = (h - mean) * (root * factor)
        elif kind == 8:  # over a copy without the mean
            y = h - h.sum(axis, keepdims=True) / width
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis, keepdims=True) + epsilon) * factor
        else:
            y = normalised(h, kind, epsilon, axis)
            y = y if scale is None else y * factor
        return y if bias is None else y + p[bias].reshape(spread)

    return part


def mlp(s: Streams) -> Part:
    hidden = s.pick([6, 8, 24])
    up, down, act = projection(s, s.width, hidden), projection(s, hidden, s.width), activation(s)
    gated = projection(s, s.width, hidden, 0.2) if s.chance(0.2) else None

    def part(p: Any, y: Any, c: Any) -> Any:
        x = act(up(p, y, c))
        return down(p, x if gated is None else x * gated(p, y, c), c)

    return part


def linear(s: Streams) -> Part:
    """A Dense layer, or two with a bottleneck between them."""
    if s.chance(0.5):
        return projection(s, s.width, s.width)
    narrow, wide = projection(s, s.width, 2), projection(s, 2, s.width)
    return lambda p, y, c: wide(p, narrow(p, y, c), c)


def attention(s: Streams) -> Part:
    heads = s.pick([1, 2])
    size = s.width // heads
    query, key, value = (projection(s, s.width, s.width, 0.3) for _ in range(3))
    queries = standard(s, size) if s.chance(0.2) else None
    ending = s.pick(["kernel", "kernel by head", "none"])
    out = projection(s, s.width, s.width) if ending == "kernel" else None
    by_head = s.parameter(heads, size, s.width) if ending == "kernel by head" else None
    causal = s.chance(0.3)

    def split(y: Any) -> Any:
        return y.reshape(*y.shape[:-1], heads, size)

    def part(p: Any, y: Any, c: Any) -> Any:
        q, k, v = split(query(p, y, c)), split(key(p, y, c)), split(value(p, y, c))
        q = q if queries is None else queries(p, q, c)
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k)
        if causal:
            scores = jnp.where(np.tri(y.shape[-2], dtype=bool), scores, -jnp.inf)
        y = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        if by_head is not None:
            return jnp.einsum("...qhd,hde->...qe", y, p[by_head])
        y = y.reshape(*y.shape[:-2], s.width)
        return y if out is None else out(p, y, c)

    return part


def token_mixing(s: Streams) -> Part:
    """Kernels along the tokens."""
    inside = s.parameter(s.tokens, s.tokens)
    outside = s.parameter(s.tokens, s.tokens) if s.chance(0.6) else None
    act = activation(s)

    def part(p: Any, y: Any, c: Any) -> Any:
        y = jnp.einsum("...td,ts->...sd", y, p[inside])
        return y if outside is None else jnp.swapaxes(jnp.swapaxes(act(y), -1, -2) @ p[outside], -1, -2)

    return part


def experts(s: Streams) -> Part:
    """A sum of MLPs, each with a gate for each token."""
    count, hidden = s.pick([2, 3]), 6
    router, act = projection(s, s.width, count, 0.3), activation(s)
    if s.chance(0.5):
        up, down = s.parameter(count, s.width, hidden), s.parameter(count, hidden, s.width)

        def part(p: Any, y: Any, c: Any) -> Any:
            x = act(jnp.einsum("...td,edf->...tef", y, p[up]))
            x = jnp.einsum("...tef,efd->...ted", x, p[down])
            return jnp.einsum("...te,...ted->...td", jax.nn.softmax(router(p, y, c)), x)

        return part
    each = [mlp(s) for _ in range(count)]

    def summed(p: Any, y: Any, c: Any) -> Any:
        gates = jax.nn.softmax(router(p, y, c))
        return sum(gates[..., index, None] * one(p, y, c) for index, one in enumerate(each))

    return summed


def convolution(s: Streams) -> Part:
    """Along the tokens: of all channels, or of each on its own."""
    depthwise = s.chance(0.3)
    kernel = s.parameter(3, 1 if depthwise else s.width, s.width)
    act = activation(s) if s.chance(0.5) else None

    def part(p: Any, y: Any, c: Any) -> Any:
        x = y.reshape(-1, *y.shape[-2:])
        x = x if act is None else act(x)
        options: dict[str, Any] = {"feature_group_count": s.width if depthwise else 1}
        options["dimension_numbers"] = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, p[kernel], (1,), "SAME", **options).reshape(y.shape)

    return part


def conditional(s: Streams) -> Part:
    """From the context; the stream is not read."""
    made, act = projection(s, CONTEXT, s.width), activation(s)
    inside = s.chance(0.5)
    return lambda p, y, c: made(p, act(c) if inside else c, c)


BRANCHES: dict[str, Callable[[Streams], Part]] = {
    "mlp": mlp,
    "linear": linear,
    "attention": attention,
    "token mixing": token_mixing,
    "experts": experts,
    "convolution": convolution,
    "conditional": conditional,
}
OFTEN = {
    "mlp": 5,
    "linear": 1,
    "attention": 3,
    "token mixing": 0.7,
    "experts": 1,
    "convolution": 0.7,
    "conditional": 0.4,
}


def branch(s: Streams) -> Part:
    return BRANCHES[s.weighted(OFTEN)](s)


AFTERWARDS = {
    "as it is": 9,
    "layer scale": 2,
    "scalar": 0.7,
    "gate by token": 1.5,
    "gate by feature": 0.6,
    "dropout": 0.4,
    "chosen by position": 1,
    "or a constant": 0.5,
    "mean of tokens": 0.5,
    "max of tokens": 0.2,
    "less the mean of tokens": 0.3,
    "shifted": 0.5,
    "cumulative": 0.4,
    "reversed": 0.4,
    "features reversed": 0.2,
    "repeated features": 0.2,
    "padded": 0.4,
    "barrier": 0.3,
    "constant along features": 0.3,
}


def afterwards(s: Streams) -> Part:
    """What becomes of the result of a branch before it is added."""
    kind = s.weighted(AFTERWARDS)
    by_feature = s.parameter(s.width) if kind in ("layer scale", "or a constant") else ""
    scalar = s.parameter() if kind == "scalar" else ""
    made = projection(s, CONTEXT, s.width) if kind in ("gate by feature", "dropout") else None
    known = s.chance(0.5)

    def part(p: Any, u: Any, c: Any) -> Any:
        first = jnp.arange(u.shape[-2])[:, None] < 2
        if kind == "layer scale":
            u = u * p[by_feature]
        elif kind == "scalar":
            u = u * p[scalar]
        elif kind == "gate by token":
            u = u * jnp.tanh(c[..., :1]) if known else jnp.einsum("...td,...t->...td", u, jnp.tanh(c[..., 0]))
        elif kind == "gate by feature" and made is not None:
            u = u * jnp.tanh(made(p, c, c))
        elif kind == "dropout" and made is not None:
            u = jnp.where(made(p, c, c) > 0, u / 0.5, 0.0)
        elif kind == "chosen by position":
            u = jnp.where(first if known else c[..., :1] > 0, u, 0.0)
        elif kind == "or a constant":
            u = jnp.where(first, u, p[by_feature] if known else 0.7)
        elif kind == "mean of tokens":
            u = jnp.broadcast_to(u.mean(-2, keepdims=True), u.shape)
        elif kind == "max of tokens":
            u = jnp.broadcast_to(u.max(-2, keepdims=True), u.shape)
        elif kind == "less the mean of tokens":
            u = u - u.mean(-2, keepdims=True)
        elif kind == "shifted":
            u = jnp.concatenate([jnp.zeros_like(u[..., :1, :]) if known else u[..., -1:, :], u[..., :-1, :]], -2)
        elif kind == "cumulative":
            u = jnp.cumsum(u, u.ndim - 2)
        elif kind == "reversed":
            u = jnp.flip(u, -2)
        elif kind == "features reversed":
            u = jnp.flip(u, -1)
        elif kind == "repeated features":
            u = jnp.concatenate([u[..., : u.shape[-1] // 2]] * 2, -1)
        elif kind == "padded":
            u = jnp.pad(
                u[..., 1:, :], [(0, 0)] * (u.ndim - 2) + [(0, 1), (0, 0)], constant_values=0.0 if known else 0.5
            )
        elif kind == "barrier":
            u = jax.lax.optimization_barrier(u)
        elif kind == "constant along features":
            u = u + jnp.sin(c[..., :1]) if known else u + u.sum(-1, keepdims=True)
        return u

    return part


SUMS = {
    "h + u": 10,
    "u + h": 2,
    "h - u": 1,
    "h / 2 + u": 1,
    "h * scalar + u": 0.7,
    "where": 0.7,
    "highway": 0.5,
    "updated": 0.5,
    "h * vector + u": 0.2,
    "tanh": 0.2,
    "h * gate + u": 0.2,
    "carried on": 0.5,
}


def summed(s: Streams) -> Callable[[Any, Any, Any, Any], Any]:
    """The stream and the result of a branch."""
    kind = s.weighted(SUMS)
    scalar = s.parameter() if kind == "h * scalar + u" else ""
    by_feature = s.parameter(s.width) if kind == "h * vector + u" else ""
    made = projection(s, CONTEXT, s.width) if kind == "h * gate + u" else None

    def part(p: Any, h: Any, u: Any, c: Any) -> Any:
        if kind == "u + h":
            return u + h
        if kind == "h - u":
            return h - u
        if kind == "h / 2 + u":
            return h / 2 + u
        if kind == "h * scalar + u":
            return h * p[scalar] + u
        if kind == "where":
            return jnp.where(jnp.arange(h.shape[-2])[:, None] > 0, h + u, h)
        if kind == "highway":
            gate = jax.nn.sigmoid(c[..., 1:2])
            return gate * h + (1 - gate) * u
        if kind == "updated":
            return h.at[..., 1:, :].add(u[..., 1:, :])
        if kind == "h * vector + u":
            return h * p[by_feature] + u
        if kind == "tanh":
            return jnp.tanh(h + u)
        if kind == "h * gate + u" and made is not None:
            return h * made(p, c, c) + u
        if kind == "carried on":
            start = (0,) * h.ndim
            return jax.lax.dynamic_update_slice(h, (h + u)[..., :2, :], start)
        return h + u

    return part


BLOCKS = {
    "pre": 8,
    "parallel": 1,
    "sandwich": 0.5,
    "post": 0.7,
    "without a norm": 0.3,
    "turned": 1,
    "split in two": 0.5,
    "over tokens": 0.3,
    "mean beside": 0.3,
}


def update(s: Streams) -> Part:
    """One update of a stream."""
    kind = s.weighted(BLOCKS)
    before = standard(
        s, s.tokens if kind == "over tokens" else s.width, -2 if kind in ("turned", "over tokens") else -1
    )
    body, more = branch(s), branch(s) if kind == "parallel" else None
    after, add = afterwards(s), summed(s)
    last = standard(s, s.width) if kind == "sandwich" else None

    def part(p: Any, h: Any, c: Any) -> Any:
        if kind == "turned":
            turned = jnp.swapaxes(h, -1, -2)
            y = jnp.swapaxes(before(p, turned, c), -1, -2)
            u = jnp.swapaxes(after(p, body(p, y, c), c), -1, -2)
            return jnp.swapaxes(turned + u, -1, -2)
        if kind == "post":
            return before(p, add(p, h, after(p, body(p, h, c), c), c), c)
        if kind == "split in two":
            y = jnp.concatenate([before(p, part, c) for part in jnp.split(h, [1], -2)], -2)
        elif kind == "without a norm":
            y = h
        else:
            y = before(p, h, c)
        u = body(p, y, c)
        if more is not None:
            u = u + more(p, y, c)
        if kind == "mean beside":
            u = u * jnp.tanh(h.mean(-1, keepdims=True))
        u = after(p, u, c)
        return add(p, h, u if last is None else last(p, u, c), c)

    return part


def wrapped(s: Streams, part: Part, *, batched: bool) -> Part:
    """As it is, or as a function of its own in one of several ways."""
    kind = s.weighted({"inline": 7, "checkpoint": 1, "checkpoint of all": 1, "jit": 0.7, "vmap": 1 if batched else 0})
    if kind == "checkpoint":
        return lambda p, h, c: jax.checkpoint(lambda h, c: part(p, h, c))(h, c)
    if kind == "checkpoint of all":
        return jax.checkpoint(part)
    if kind == "jit":
        return jax.jit(part)
    if kind == "vmap":
        return jax.vmap(part, (None, 0, 0))
    return part


def entrance(s: Streams, *, integer: bool, features: int) -> tuple[Part, str]:
    """What starts a stream, and the name of its table if it has one."""
    table, more = "", Streams.parameter
    if integer:
        kind = s.weighted({"index": 4, "take": 2, "fill": 0.6, "one hot": 0.5, "scaled": 0.7, "transformed": 0.3})
        table = s.parameter(VOCABULARY, s.width)
        fill = float(s.pick([0.0, 1.0]))

        def part(p: Any, x: Any, c: Any) -> Any:
            if kind == "take":
                return jnp.take(p[table], x, axis=0)
            if kind == "fill":
                return jnp.take(p[table], x + 1, axis=0, mode="fill", fill_value=fill)
            if kind == "one hot":
                return jax.nn.one_hot(x, VOCABULARY, dtype=c.dtype) @ p[table]
            if kind == "scaled":
                return p[table][x] * s.width**0.5
            if kind == "transformed":
                return jnp.exp(p[table])[x]
            return p[table][x]

    else:
        kind = s.weighted({"projection": 6, "nonlinear": 2, "raw": 0.5 if features == s.width else 0})
        made, act = projection(s, features, s.width), activation(s)
        again = projection(s, s.width, s.width)

        def part(p: Any, x: Any, c: Any) -> Any:
            if kind == "raw":
                return x
            y = made(p, x, c)
            return y if kind == "projection" else again(p, act(y), c)

    where = s.weighted({"no positions": 3, "sliced": 3, "whole": 1, "taken": 1, "dynamic": 0.5, "sinusoids": 0.7})
    names = {"sliced": MOST_TOKENS, "whole": s.tokens, "taken": MOST_TOKENS, "dynamic": MOST_TOKENS}
    positions = more(s, names[where], s.width) if where in names else ""
    types = more(s, 2, s.width) if s.chance(0.2) else ""
    normed = standard(s, s.width) if s.chance(0.1) else None

    def entered(p: Any, x: Any, c: Any) -> Any:
        h = part(p, x, c)
        count = h.shape[-2]
        if where == "sliced":
            h = h + p[positions][:count]
        elif where == "whole":
            h = h + p[positions]
        elif where == "taken":
            h = h + jnp.take(p[positions], jnp.arange(count), axis=0)
        elif where == "dynamic":
            h = h + jax.lax.dynamic_slice(p[positions], (0, 0), (count, s.width))
        elif where == "sinusoids":
            h = h + np.sin(np.arange(count)[:, None] / np.arange(1, s.width + 1))
        if types:
            h = h + p[types][(c[..., 0] > 0).astype(jnp.int32)]
        return h if normed is None else normed(p, h, c)

    return entered, table


HEADS = {
    "norm, head": 6,
    "norm": 1,
    "norm, mean, head": 1.5,
    "mean, norm, head": 1.5,
    "sum, norm": 1,
    "first, norm, head": 1.5,
    "norm, first, head": 1,
    "norm, max": 1,
    "max, norm": 1,
    "differences, norm, head": 1,
    "split": 1,
    "tied": 3,
    "similarity": 1,
    "two norms": 1,
    "stream": 1,
    "mean of the stream": 1,
    "norm and its mean": 1,
    "mean of another axis": 1,
    "power": 1,
    "head": 1,
    "table beside": 1,
}


def readout(s: Streams, table: str) -> Part:
    """What is returned."""
    kind = s.weighted({name: often for name, often in HEADS.items() if table or name not in ("tied", "table beside")})
    norm, other = standard(s, s.width), standard(s, s.width) if kind in ("two norms", "split") else None
    head = projection(s, s.width, s.pick([1, 3, s.width]))

    def part(p: Any, h: Any, c: Any) -> Any:
        if kind in ("mean, norm, head", "first, norm, head", "sum, norm", "max, norm"):
            h = h[..., 0, :] if kind[0] == "f" else getattr(h, kind.split(",")[0])(-2)
            y = norm(p, h, c)
            return head(p, y, c) if "head" in kind else y
        if kind == "differences, norm, head":
            return head(p, norm(p, h[..., 1:, :] - h[..., :-1, :], c), c)
        if kind == "split" and other is not None:
            a, b = jnp.split(h, [2], -2)
            return norm(p, a, c), head(p, b, c) if s.width % 4 else other(p, b, c)
        if kind == "head":
            return head(p, h, c)
        if kind in ("stream", "mean of the stream"):
            return h if kind == "stream" else (head(p, norm(p, h, c), c), h.mean(-1))
        if kind == "norm and its mean":
            mean = h.mean(-1, keepdims=True)
            read = jax.checkpoint(jnp.tanh)(mean) if s.width % 4 else mean
            return (h - mean) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-3), read
        if kind == "mean of another axis":
            n = min(h.shape[-2:])
            square = h[..., :n, :n]
            return norm(p, h, c), square - square.mean(-1)[..., None, :]
        if kind == "power":
            return norm(p, h, c), jnp.sqrt(jnp.mean(h * h, -1))
        y = norm(p, h, c)
        if kind == "norm, mean, head":
            return head(p, y.mean(-2), c)
        if kind == "norm, first, head":
            return head(p, y[..., 0, :], c)
        if kind == "norm, max":
            return y.max(-2)
        if kind == "tied":
            return y @ p[table].T
        if kind == "table beside":
            return head(p, y, c) + jnp.tanh(p[table]).mean()
        if kind == "similarity":
            return jnp.einsum("...qd,...kd->...qk", y, y)
        if kind == "two norms" and other is not None:
            return head(p, y, c), head(p, other(p, h, c), c)
        return y if kind == "norm" else head(p, y, c)

    return part


def stacked(s: Streams, *, batched: bool) -> Part:
    """Identical layers: one block, or two, of parameters that are stacked; scanned over, or written out."""
    kind = s.weighted(
        {"scan": 3, "scan, mean carried": 0.4, "scan, outputs": 0.5, "scan, backwards": 0.5, "written out": 1}
    )
    s.layers = s.pick([2, 3])
    layers, before = s.layers, set(s.stacked)
    inside = [wrapped(s, update(s), batched=batched) for _ in range(s.pick([1, 1, 2]))]
    names, s.layers = sorted(s.stacked - before), 0

    def layer(p: Any, own: Any, h: Any, c: Any) -> Any:
        for part in inside:
            h = part({**p, **own}, h, c)
        return h

    def part(p: Any, h: Any, c: Any) -> Any:
        rest = {name: array for name, array in p.items() if name not in names}
        stack = {name: p[name] for name in names}
        if kind == "written out":
            for index in range(layers):
                h = layer(rest, {name: array[index] for name, array in stack.items()}, h, c)
            return h

        def step(carry: Any, own: Any) -> Any:
            h, more = carry
            h = layer(rest, own, h, c)
            if kind == "scan, mean carried":
                more = more + jnp.tanh(h.mean(-1, keepdims=True))
            return (h, more), (h * h).sum(-1) if kind == "scan, outputs" else None

        start = (h, jnp.zeros((*h.shape[:-1], 1)))
        (h, more), outputs = jax.lax.scan(step, start, stack, length=layers, reverse=kind == "scan, backwards")
        if kind == "scan, mean carried":
            h = h * (1 + 0.1 * more)
        elif kind == "scan, outputs":
            h = h + jnp.tanh(outputs.sum(0))[..., None]
        return h

    return part


Both = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def crossed(s: Streams) -> Both:
    """Two streams, each updated by what a norm makes of the other or of itself; sometimes they change places."""
    s.note("crossed")
    norms, bodies = [standard(s, s.width) for _ in range(2)], [branch(s) for _ in range(2)]
    add, own, turned = summed(s), s.chance(0.3), s.chance(0.4)

    def part(p: Any, h: Any, g: Any, c: Any) -> tuple[Any, Any]:
        h = add(p, h, bodies[0](p, norms[0](p, g, c), c), c)
        g = g + bodies[1](p, norms[1](p, g if own else h, c), c)
        return (g, h) if turned else (h, g)

    return part


def two_streams(s: Streams) -> Part:
    s.layers = s.pick([0, 0, 2])
    layers, before = s.layers, set(s.stacked)
    both = crossed(s)
    names, s.layers = sorted(s.stacked - before), 0
    ending = s.weighted({"sum": 2, "concatenation": 1, "first": 1, "product": 0.2})
    start = projection(s, s.width, s.width)

    def part(p: Any, h: Any, c: Any) -> Any:
        g = start(p, jnp.sin(h) if ending == "sum" else h, c)
        if layers:
            rest = {name: array for name, array in p.items() if name not in names}

            def step(carry: Any, own: Any) -> Any:
                return both({**rest, **own}, carry[0], carry[1], c), None

            (h, g), _ = jax.lax.scan(step, (h, g), {name: p[name] for name in names})
        else:
            h, g = both(p, h, g, c)
        if ending == "concatenation":
            return jnp.concatenate([h, g], -2)[..., : h.shape[-2], :] if s.width % 4 else jnp.concatenate([h, g], -2)
        return h + g if ending == "sum" else h if ending == "first" else h * g

    return part


def draw_stream(seed: int) -> Drawn:
    """A function with residual streams, of parameters, tokens or features, and a context."""
    rng = np.random.default_rng([seed, 1])
    s = Streams(rng, int(rng.choice([4, 6, 8, 12, 24])), int(rng.choice([3, 4, 6])), float(rng.choice([0.1, 1.0])))
    count, integer, features = s.tokens, s.chance(0.6), s.pick([3, 4, 8])
    mode = s.weighted({"batched": 6, "vmapped": 1, "single": 0.7, "ensemble": 0.7})
    start, table = entrance(s, integer=integer, features=features)
    first = s.parameter(1, s.width) if s.chance(0.25) else ""
    if first:
        s.note("class token")
        s.tokens += 1
    updates: list[Part] = []
    for _ in range(int(rng.integers(1, 4))):
        kind = s.weighted({"block": 6, "layers": 1.5, "streams": 0.6})
        if kind == "block":
            updates.append(wrapped(s, update(s), batched=mode == "batched"))
        else:
            updates.append(stacked(s, batched=mode == "batched") if kind == "layers" else two_streams(s))
        if kind == "streams":
            break  # with more tokens, perhaps, than the context has
    ends = [readout(s, table) for _ in range(2 if s.chance(0.25) else 1)]
    remat = s.chance(0.05)

    def body(p: Any, x: Any, c: Any) -> Any:
        p = jax.tree.map(jnp.asarray, p)
        h = start(p, jnp.asarray(x), jnp.asarray(c))
        if first:
            h = jnp.concatenate([jnp.broadcast_to(p[first], (*h.shape[:-2], 1, s.width)), h], -2)
            c = jnp.concatenate([jnp.full((*c.shape[:-2], 1, CONTEXT), 0.3), c], -2)
        for part in updates:
            h = part(p, h, c)
        return jax.tree.leaves([end(p, h, c) for end in ends])

    fn = jax.checkpoint(body) if remat else body
    params = s.params
    if mode == "ensemble":
        fn = jax.vmap(fn, (0, None, None))
        params = {name: np.stack([array, rng.normal(size=array.shape)]) for name, array in params.items()}
    elif mode == "vmapped":
        fn = jax.vmap(fn, (None, 0, 0))

    def inputs(batch: int, tokens: int) -> tuple[Any, ...]:
        lead = (tokens,) if mode == "single" else (batch, tokens)
        x = rng.integers(0, VOCABULARY, lead) if integer else rng.normal(size=(*lead, features))
        return x, rng.normal(size=(*lead, CONTEXT))

    given = inputs(3, count)
    return Drawn(fn, params, given, tuple(s.parts), (inputs(1, count), inputs(4, count), inputs(3, count - 1)))
