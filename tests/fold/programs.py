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


def norm(b: Builder, i: int | None = None) -> int:
    i = b.pick() if i is None else i
    n = b.shapes[i][-1]
    scale = b.parameter(n) if b.rng.random() < 0.7 else None
    bias = b.parameter(n) if b.rng.random() < 0.7 else None
    kind = int(b.rng.integers(7))
    epsilon = float(b.rng.choice([1e-6, 1e-3]))

    def step(env: list[Any], p: Any) -> Any:
        h = env[i]
        mean = h.mean(-1, keepdims=True)
        if kind == 0:
            y = (h - mean) / jnp.sqrt(h.var(-1, keepdims=True) + epsilon)
        elif kind == 1:
            fast = jnp.maximum(0.0, jnp.mean(h * h, -1, keepdims=True) - mean**2)
            y = (h - mean) * jax.lax.rsqrt(fast + epsilon)
        elif kind == 2:
            y = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + epsilon)
        elif kind == 3:
            y = (h - mean) * (((h - mean) ** 2).sum(-1, keepdims=True) / n + epsilon) ** -0.5
        elif kind == 4:
            y = h / jnp.sqrt(jnp.maximum(jnp.sum(h * h, -1, keepdims=True), epsilon))
        elif kind == 5:
            y = (h - mean) / (jnp.std(h, -1, keepdims=True) + epsilon)
        else:
            y = h * jax.lax.rsqrt(h.var(-1, keepdims=True, ddof=1) + epsilon)
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
