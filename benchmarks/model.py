"""Whole models folded, beside themselves: times, XLA's own counts, reductions and parameters, from one process.

    python -m benchmarks.model [--quick] [--markdown] [--rounds N] [--models NAME ...]

gpt2          12 layers of 768, 12 heads, 50,257 tokens, tied table, learned positions, batch 1: a prompt of 128 tokens;
              and one token more, with a key-value cache of 128 that goes in and comes out as it would of any pure
              function, so it is copied. Logits are of the last position only: of all 128 they would be a third of the
              FLOPs, the same before and after.
vit_b16       ViT-B/16 on one image of 224 by 224, 1,000 classes from the class token
encoder       6 layers of 256, 4 heads, 8 times 64 tokens, final LayerNorm, mean over the tokens, 10 classes

Pre-LN in stock Flax Linen, GPT-2's attention by hand; all float32, jitted, parameters as an argument, on the default
device. Parameters are random, those of the norms too. FLOPs, bytes accessed and transcendentals are XLA's own count of
what it compiled, as far as it counts on that device. Reductions are the reduce_sum equations of the jaxpr, times the
length of a scan that they are in: two for a LayerNorm, one for an RMSNorm or a softmax. The largest difference is over
all outputs, each relative to its largest entry. The ratio of times is that of the medians; in brackets the quartiles of
the ratios round by round. Absolute times mean nothing on a shared machine.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxfold
from benchmarks.tables import show
from benchmarks.timing import interleaved, ratio
from jaxfold._extend import ClosedJaxpr, Jaxpr

COLUMNS = ("", "original", "folded", "original / folded")
COUNTS = {"FLOPs": "flops", "bytes accessed": "bytes accessed", "transcendentals": "transcendentals"}
PROMPT, VOCABULARY, POSITIONS = 128, 50_257, 1_024
QUICK = ("encoder", "gpt2")

Cache = tuple[jax.Array, jax.Array]


class Attention(nn.Module):
    """GPT-2's, of tokens from position ``index`` on; with a cache, over what that holds too."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, index: Any, cache: Cache | None) -> tuple[jax.Array, Cache]:
        batch, length, width = x.shape
        parts = jnp.split(nn.Dense(3 * width)(x), 3, axis=-1)
        query, key, value = (part.reshape(batch, length, self.heads, -1) for part in parts)
        if cache is not None:
            key, value = (
                lax.dynamic_update_slice_in_dim(old, new, index, axis=1)
                for old, new in zip(cache, (key, value), strict=True)
            )
        earlier = (index + jnp.arange(length))[:, None] >= jnp.arange(key.shape[1])
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / math.sqrt(query.shape[-1])
        weights = nn.softmax(jnp.where(earlier, scores, jnp.finfo(x.dtype).min))
        heads = jnp.einsum("bhts,bshd->bthd", weights, value)
        return nn.Dense(width)(heads.reshape(batch, length, width)), (key, value)


class GPT2(nn.Module):
    """Logits after the last token, and the keys and values of every layer."""

    layers: int = 12
    width: int = 768
    heads: int = 12

    @nn.compact
    def __call__(self, tokens: jax.Array, index: Any, cache: list[Cache] | None) -> tuple[jax.Array, list[Cache]]:
        table = nn.Embed(VOCABULARY, self.width)
        x = table(tokens) + nn.Embed(POSITIONS, self.width)(index + jnp.arange(tokens.shape[1]))
        kept = []
        for layer in range(self.layers):
            own = None if cache is None else cache[layer]
            h, own = Attention(self.heads)(nn.LayerNorm(epsilon=1e-5)(x), index, own)
            x = x + h
            x = x + MLP(self.width)(nn.LayerNorm(epsilon=1e-5)(x))
            kept.append(own)
        return table.attend(nn.LayerNorm(epsilon=1e-5)(x)[:, -1]), kept


class MLP(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(x)))


class Layers(nn.Module):
    """Pre-LN with Flax's own attention, and the final norm."""

    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.param("positions", nn.initializers.normal(1.0), x.shape[1:])
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
            x = x + MLP(self.width)(nn.LayerNorm()(x))
        return nn.LayerNorm()(x)


class ViT(nn.Module):
    """ViT-B/16."""

    width: int = 768

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        patches = nn.Conv(self.width, (16, 16), strides=(16, 16), padding="VALID")(image)
        x = patches.reshape(image.shape[0], -1, self.width)
        token = self.param("token", nn.initializers.normal(1.0), (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (image.shape[0], 1, self.width)), x], axis=1)
        return nn.Dense(1_000)(Layers(12, self.width, 12)(x)[:, 0])


class Encoder(nn.Module):
    width: int = 256

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(8_192, self.width)(tokens)
        return nn.Dense(10)(Layers(6, self.width, 4)(x).mean(axis=1))


class Case(NamedTuple):
    """A function of parameters and inputs."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]


def gpt2() -> tuple[Any, list[Case]]:
    rng = np.random.default_rng(0)
    model = GPT2()
    tokens = jnp.asarray(rng.integers(VOCABULARY, size=(1, PROMPT)), jnp.int32)
    shape = (1, PROMPT, model.heads, model.width // model.heads)
    cache = [(_normal(rng, shape), _normal(rng, shape)) for _ in range(model.layers)]

    def prompt(params: Any, tokens: jax.Array) -> jax.Array:
        return model.apply(params, tokens, 0, None)[0]  # pyright: ignore[reportReturnType]

    def decode(params: Any, token: jax.Array, index: jax.Array, cache: list[Cache]) -> Any:
        return model.apply(params, token, index, cache)

    shapes = jax.eval_shape(lambda key, tokens: model.init(key, tokens, 0, None), jax.random.key(0), tokens)
    last = jnp.asarray(PROMPT - 1, jnp.int32)
    return shapes, [
        Case(f"gpt2, prompt of {PROMPT} tokens", prompt, (tokens,)),
        Case(f"gpt2, one token, cache of {PROMPT}", decode, (tokens[:, -1:], last, cache)),
    ]


def vit_b16() -> tuple[Any, list[Case]]:
    model, image = ViT(), _normal(np.random.default_rng(0), (1, 224, 224, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)
    return shapes, [Case("vit_b16, batch 1", model.apply, (image,))]


def encoder() -> tuple[Any, list[Case]]:
    model, tokens = Encoder(), jnp.asarray(np.random.default_rng(0).integers(8_192, size=(8, 64)), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return shapes, [Case("encoder, batch 8 of 64 tokens", model.apply, (tokens,))]


MODELS: dict[str, Callable[[], tuple[Any, list[Case]]]] = {"encoder": encoder, "gpt2": gpt2, "vit_b16": vit_b16}


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def parameters(shapes: Any) -> Any:
    """Random ones, for outputs near size 1 of every layer. What enters the residual stream has a mean to be removed."""
    rng = np.random.default_rng(1)

    def draw(path: Any, leaf: Any) -> jax.Array:
        *_, owner, name = (key.key for key in path)
        array = rng.standard_normal(leaf.shape, np.float32)
        if name == "kernel":
            inputs = leaf.shape[:1] if owner in ("query", "key", "value") else leaf.shape[:-1]
            array *= 1 / math.sqrt(math.prod(inputs))
        elif name in ("scale", "bias"):
            array *= 0.2
            array += name == "scale"
        else:
            array += 0.3
        return jnp.asarray(array)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def main() -> None:
    options = _options()
    for name in options.models:
        shapes, cases = MODELS[name]()
        params = parameters(shapes)
        for case in cases:
            title, rows = _compare(case, params, options.rounds, 10.0 if options.quick else 60.0)
            show(title, COLUMNS, rows, markdown=options.markdown)
            gc.collect()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"shorter; {' and '.join(QUICK)}, unless others are given")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--rounds", type=int, default=40, help="at most, for each table (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)}")
    options = parser.parse_args()
    options.models = options.models or (QUICK if options.quick else tuple(MODELS))
    return options


def _compare(case: Case, params: Any, rounds: int, seconds: float) -> tuple[str, list[list[str]]]:
    """The title and the rows; what was folded is dropped before the timing, but for what is compiled."""
    folded = jaxfold.fold(case.function, params, *case.inputs)
    contracted, report = folded.contract(params), folded.report
    arguments = {"original": (params, *case.inputs), "folded": (contracted, *case.inputs)}
    functions = {"original": case.function, "folded": folded.apply}
    reductions = [_reductions(jax.make_jaxpr(functions[name])(*arguments[name]).jaxpr) for name in functions]
    compiled = {name: jax.jit(functions[name]).lower(*arguments[name]).compile() for name in functions}
    del folded, contracted, functions
    gc.collect()
    counts = [_counts(compiled[name]) for name in compiled]
    difference = _difference(*(compiled[name](*arguments[name]) for name in compiled))
    times = interleaved(
        {name: lambda name=name: compiled[name](*arguments[name]) for name in compiled}, rounds=rounds, seconds=seconds
    )
    rows = [_row("parameters", *report.parameters), _row("reductions", *reductions)]
    counted = {name: key for name, key in COUNTS.items() if all(key in count for count in counts)}
    rows += [_row(name, *(count[key] for count in counts)) for name, key in counted.items()]
    rows.append(["largest difference", "", f"{difference:.1e}", ""])
    milliseconds = (f"{np.median(times[name]) * 1e3:,.1f}" for name in times)
    rows.append([f"ms, indicative, {len(times['folded'])} rounds", *milliseconds, ratio(times, "original", "folded")])
    decisions: Counter[str] = Counter()
    for row in report.rows:
        decisions[row.decision] += row.stack or 1
    found = ", ".join(f"{count} {decision}" for decision, count in decisions.most_common())
    return f"{case.name}: {decisions.total()} norms, {found}", rows


def _row(name: str, before: float, after: float) -> list[str]:
    return [name, f"{before:,.0f}", f"{after:,.0f}", f"{before / after:.3f}" if after else ""]


def _reductions(jaxpr: Jaxpr) -> int:
    """How many sums over an axis are taken in one call."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == "reduce_sum"
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(_reductions(inner) for inner in _inside(equation.params))
    return total


def _inside(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, (Jaxpr, ClosedJaxpr)):
                yield item if isinstance(item, Jaxpr) else item.jaxpr


def _counts(compiled: Any) -> dict[str, float]:
    cost = compiled.cost_analysis()
    return cost[0] if isinstance(cost, list) else cost


def _difference(before: Any, after: Any) -> float:
    """The largest over all outputs, each relative to its largest entry; NaN if anything is not finite."""
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return float(np.max([jnp.abs(ours - theirs).max() / jnp.abs(ours).max() for ours, theirs in leaves]))


if __name__ == "__main__":
    main()
