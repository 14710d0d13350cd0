"""Small models with the structure of real ones, and what the maths says of each of their norms.

What a norm's decision must be follows from three statements:

* LayerNorm(x + m 1) = LayerNorm(x) for every number m, one for each token. So where LayerNorms are all that reads a
  stream, no writer's mean along the features matters: the means can go, and each LayerNorm is an RMSNorm: "centred".
  Writers that are parameters, or end in a product with a kernel along the features, are centred offline; for any other
  (a tied table, a product of two runtime arrays) a mean has to be taken at run time, in place of the LayerNorms' own,
  which pays only where there are fewer of them.
* RMSNorm(x + m 1) differs from RMSNorm(x), and so does any other reader, a head without a norm or a convolution: one
  such reader, and the stream has to stay as it is.
* (g y + b) W = y (g W) + b W: scale and bias go into the kernels if products with kernels along the features are all
  that reads the norm: "absorbed". A residual that starts behind the norm, a kernel along the tokens, or a product of
  two runtime arrays reads the scale and the bias themselves: "skipped".

No norm here has fewer features before it than it has itself, so nothing is "contracted", except in the actor. The
models share their sizes, so that there is little to compile; and no axis but that of the features has as many entries
as a norm sums over, so that sums over features can be told from others by their size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH, HEADS, HIDDEN, LAYERS = 24, 2, 40, 2
HEAD = WIDTH // HEADS
BATCH, TOKENS, VOCABULARY, CLASSES = 2, 6, 31, 5
IMAGE, NARROW, PATCH = (8, 12, 3), (4, 20, 3), (4, 4)  # 6 patches of 48 numbers each, and 5: one less
CONDITION, EXPERTS = 8, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with parameters, inputs, and what is known of it.

    Attributes:
        name: of the case.
        fn: ``fn(params, *inputs)``.
        params: random, all of them, in float64; with as much common mode as there is of everything else.
        inputs: tokens as integers, everything else in float64.
        decisions: of all norms, in their order, and with how many means that are taken at run time; several such lists
            where the maths leaves it open.
    """

    name: str
    fn: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]
    decisions: dict[tuple[str, ...], int]

    def redrawn(self, seed: int) -> Case:
        """Other parameters and inputs of the same shapes."""
        rng = np.random.default_rng(seed)
        params = draw(self.params, rng)
        return dataclasses.replace(self, params=params, inputs=tuple(_input(leaf, rng) for leaf in self.inputs))

    def cast(self, dtype: Any) -> tuple[Any, tuple[Any, ...]]:
        """Parameters and inputs, real numbers in this dtype."""
        return jax.tree.map(lambda leaf: _cast(leaf, dtype), (self.params, self.inputs))


def _cast(leaf: Any, dtype: Any) -> Any:
    return jnp.asarray(leaf, dtype if np.issubdtype(leaf.dtype, np.floating) else leaf.dtype)


def _input(like: Any, rng: np.random.Generator) -> np.ndarray:
    if np.issubdtype(like.dtype, np.floating):
        return rng.normal(size=like.shape)
    return rng.integers(VOCABULARY, size=like.shape, dtype=np.int32)


def draw(shapes: Any, rng: np.random.Generator) -> Any:
    """Random leaves for a tree of shapes, of a size that their names say; none has a mean of zero, or 1 for a scale."""

    def leaf(path: Any, shape: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        normal = rng.normal(size=shape.shape)
        if "kernel" in name:
            return (normal + 0.3) / np.sqrt(np.prod(shape.shape[:-1]))
        if "scale" in name:
            return 1.0 + 0.3 * normal
        if "gamma" in name:  # of LayerScale
            return 0.5 + 0.3 * normal
        if "bias" in name or "offset" in name:  # that of a scale 1 + offset
            return 0.1 + 0.3 * normal
        assert "table" in name or "embedding" in name, name
        return 0.5 + normal

    return jax.tree_util.tree_map_with_path(leaf, shapes)


TEXT = (np.zeros((BATCH, TOKENS), np.int32),)
PICTURE = (np.zeros((BATCH, *IMAGE)),)
NARROW_PICTURE = (np.zeros((BATCH, *NARROW)),)
PATCHES = (np.zeros((BATCH, TOKENS, 32)), np.zeros((BATCH, CONDITION)))  # what DiT reads
SEQUENCE = (np.zeros((BATCH, TOKENS, WIDTH)), np.zeros((BATCH, CONDITION)))
OBSERVATION = (np.zeros((BATCH, 5)),)


Decisions = tuple[str, ...] | dict[tuple[str, ...], int]  # by themselves: without means at run time


def _case(fn: Callable[..., Any], shapes: Any, inputs: tuple[Any, ...], decisions: Decisions) -> Case:
    return Case("", fn, shapes, inputs, decisions if isinstance(decisions, dict) else {decisions: 0}).redrawn(0)


def _linen(model: nn.Module, inputs: tuple[Any, ...], decisions: Decisions) -> Case:
    return _case(model.apply, jax.eval_shape(model.init, jax.random.key(0), *inputs), inputs, decisions)


def table(module: nn.Module, name: str, *shape: int) -> Any:
    return module.param(name, nn.initializers.normal(1.0), shape)


# What the models are made of.


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(HIDDEN, name="up")(x)))


class SwiGlu(nn.Module):
    """Without biases."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        gate, up = (nn.Dense(HIDDEN, use_bias=False, name=name)(x) for name in ("gate", "up"))
        return nn.Dense(WIDTH, use_bias=False, name="down")(nn.silu(gate) * up)


class Gamma(nn.Module):
    """LayerScale: one learned factor a feature."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("gamma", nn.initializers.ones, (WIDTH,))


class Block(nn.Module):
    """A layer of a pre-LN transformer."""

    causal: bool = False
    layer_scale: bool = False
    normalize_qk: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
        attention = nn.MultiHeadDotProductAttention(HEADS, normalize_qk=self.normalize_qk, name="attention")
        y = attention(nn.LayerNorm(name="ln1")(x), mask=mask)
        x = x + (Gamma(name="ls1")(y) if self.layer_scale else y)
        y = Mlp(name="mlp")(nn.LayerNorm(name="ln2")(x))
        return x + (Gamma(name="ls2")(y) if self.layer_scale else y)


class Blocks(nn.Module):
    """All layers: one after the other, or scanned over, rematerialised or not."""

    causal: bool = False
    layer_scale: bool = False
    normalize_qk: bool = False
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kind = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        make = functools.partial(kind, self.causal, self.layer_scale, self.normalize_qk)
        if not self.scan:
            for index in range(LAYERS):
                x = make(name=f"layer{index}")(x)
            return x
        scanned = nn.scan(
            lambda block, carry: (block(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return cast(Any, scanned)(make(name="layers"), x)[0]


# Language models with LayerNorm.


class Gpt2(nn.Module):
    tied: bool = True
    scan: bool = False
    remat: bool = False
    returns_stream: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens) + table(self, "position_table", TOKENS, WIDTH)
        x = Blocks(causal=True, scan=self.scan, remat=self.remat, name="blocks")(x)
        y = nn.LayerNorm(name="ln")(x)
        logits = embed.attend(y) if self.tied else nn.Dense(VOCABULARY, use_bias=False, name="head")(y)
        return (logits, x) if self.returns_stream else logits


class GptNnx(nnx.Module):
    """The same once more, with the other half of Flax."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        cast(Any, self.embed).dtype = None  # that of its table, also where this is another than it was made with
        self.position_table = nnx.Param(jnp.zeros((TOKENS, WIDTH)))
        self.blocks = getattr(nnx, "List", list)([BlockNnx(rngs) for _ in range(LAYERS)])
        self.ln = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.position_table[...]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.ln(x))


class BlockNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.ln1, self.ln2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.ln1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


def _gpt_nnx(decisions: Decisions) -> Case:
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: GptNnx(nnx.Rngs(0))), nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    return _case(lambda params, tokens: nnx.merge(graph, params, rest)(tokens), params, TEXT, decisions)


def layer_norm(x: Any, epsilon: float = 1e-5) -> Any:
    """In two passes."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)


def rms_norm(x: Any, epsilon: float = 1e-5) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


def plain_gpt(params: Any, tokens: Any, norm: Callable[[Any], Any] = layer_norm) -> Any:
    """Written out: square kernels, one for q, k and v together, and a scan over all layers."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        y = norm(x) * p["scale1"] + p["bias1"]
        qkv = (y @ p["kernel_qkv"] + p["bias_qkv"]).reshape(*y.shape[:-1], 3, HEADS, HEAD)
        q, k, v = (qkv[..., index, :, :] for index in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
        weights = jax.nn.softmax(jnp.where(np.tri(TOKENS, dtype=bool), scores, -1e30))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(y.shape) @ p["kernel_o"] + p["bias_o"]
        y = norm(x) * p["scale2"] + p["bias2"]
        return x + nn.gelu(y @ p["kernel_up"] + p["bias_up"]) @ p["kernel_down"] + p["bias_down"], None

    x = params["token_table"][tokens] + params["position_table"]
    x = jax.lax.scan(layer, x, params["layers"])[0]
    return (norm(x) * params["scale"] + params["bias"]) @ params["kernel_head"]


def _plain_gpt(decisions: Decisions) -> Case:
    layers = {
        **{f"{kind}{index}": (WIDTH,) for kind in ("scale", "bias") for index in (1, 2)},
        **{"kernel_qkv": (WIDTH, 3 * WIDTH), "bias_qkv": (3 * WIDTH,), "kernel_o": (WIDTH, WIDTH), "bias_o": (WIDTH,)},
        **{"kernel_up": (WIDTH, HIDDEN), "bias_up": (HIDDEN,), "kernel_down": (HIDDEN, WIDTH), "bias_down": (WIDTH,)},
    }
    whole = {"token_table": (VOCABULARY, WIDTH), "position_table": (TOKENS, WIDTH), "scale": (WIDTH,), "bias": (WIDTH,)}
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float64) for name, shape in whole.items()}
    shapes["kernel_head"] = jax.ShapeDtypeStruct((WIDTH, VOCABULARY), np.float64)
    stacked = {name: jax.ShapeDtypeStruct((LAYERS, *shape), np.float64) for name, shape in layers.items()}
    return _case(plain_gpt, {**shapes, "layers": stacked}, TEXT, decisions)


class OneNorm(nn.Module):
    """A tied table with a single norm behind it."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        return embed.attend(Mlp(name="mlp")(nn.LayerNorm(name="ln")(embed(tokens))))


class Parallel(nn.Module):
    """GPT-J and PaLM: attention and MLP side by side, behind one norm."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        for index in range(LAYERS):
            y = nn.LayerNorm(name=f"ln{index}")(x)
            attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name=f"attention{index}")
            x = x + attention(y, mask=nn.make_causal_mask(tokens)) + Mlp(name=f"mlp{index}")(y)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="ln")(x))


class Moe(nn.Module):
    """Two of four experts for each token, all of them computed; the router reads the norm as well."""

    einsum: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        for index in range(LAYERS):
            attention = nn.MultiHeadDotProductAttention(HEADS, name=f"attention{index}")
            x = x + attention(nn.LayerNorm(name=f"ln1_{index}")(x))
            x = x + self.experts(nn.LayerNorm(name=f"ln2_{index}")(x), index)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="ln")(x))

    def experts(self, x: Any, index: int) -> Any:
        probabilities = nn.softmax(nn.Dense(EXPERTS, use_bias=False, name=f"router{index}")(x))
        least = jax.lax.top_k(probabilities, 2)[0][..., -1:]
        gates = jnp.where(probabilities >= least, probabilities, 0.0)
        kernel = lambda name, *shape: table(self, f"kernel_{name}{index}", EXPERTS, *shape)  # noqa: E731
        h = nn.silu(jnp.einsum("btd,edf->btef", x, kernel("gate", WIDTH, HIDDEN)))
        h = h * jnp.einsum("btd,edf->btef", x, kernel("up", WIDTH, HIDDEN))
        y = jnp.einsum("btef,efd->bted", h, kernel("down", HIDDEN, WIDTH))
        if self.einsum:
            return jnp.einsum("bte,bted->btd", gates, y)
        return (gates[..., None] * y).sum(-2)


class Bert(nn.Module):
    """Post-LN: the stream is what a norm returns."""

    tied: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens) + table(self, "position_table", TOKENS, WIDTH) + table(self, "type_table", 1, WIDTH)
        x = nn.LayerNorm(name="ln")(x)
        for index in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS, name=f"attention{index}")(x)
            x = nn.LayerNorm(name=f"ln1_{index}")(x)
            x = nn.LayerNorm(name=f"ln2_{index}")(x + Mlp(name=f"mlp{index}")(x))
        x = nn.LayerNorm(name="ln_head")(nn.gelu(nn.Dense(WIDTH, name="transform")(x)))
        return embed.attend(x) if self.tied else nn.Dense(VOCABULARY, name="head")(x)


# Language models with RMSNorm.


class Rms(nn.Module):
    """With a scale, or with 1 + offset as Gemma stores it."""

    one_plus: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.one_plus:
            return rms_norm(x) * (1.0 + self.param("offset", nn.initializers.zeros, (WIDTH,)))
        return rms_norm(x) * self.param("scale", nn.initializers.ones, (WIDTH,))


def rotated(x: Any) -> Any:
    """Rotary positions, ``(batch, tokens, heads, features)``."""
    angles = np.arange(TOKENS)[:, None] * 100.0 ** (-np.arange(HEAD // 2) / (HEAD // 2))
    cos, sin = (jnp.asarray(f(angles)[:, None, :], x.dtype) for f in (np.cos, np.sin))
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Rotary(nn.Module):
    """Causal multi-query attention without biases."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        make = functools.partial(nn.DenseGeneral, use_bias=False)
        q = rotated(make((HEADS, HEAD), name="query")(x))
        k, v = (make((1, HEAD), name=name)(x) for name in ("key", "value"))
        scores = jnp.einsum("bqhd,bkd->bhqk", q, rotated(k)[:, :, 0]) / HEAD**0.5
        weights = nn.softmax(jnp.where(np.tri(TOKENS, dtype=bool), scores, -1e30))
        y = jnp.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])
        return make(WIDTH, axis=(-2, -1), name="out")(y)


class Llama(nn.Module):
    """Or Gemma 2, with a norm at either end of each branch."""

    tied: bool = False
    one_plus: bool = False
    sandwich: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens)
        x = x * WIDTH**0.5 if self.sandwich else x
        for index in range(LAYERS):
            for name, branch in (("attention", Rotary), ("mlp", SwiGlu)):
                y = branch(name=f"{name}{index}")(Rms(self.one_plus, name=f"before_{name}{index}")(x))
                x = x + (Rms(self.one_plus, name=f"behind_{name}{index}")(y) if self.sandwich else y)
        y = Rms(self.one_plus, name="rms")(x)
        return embed.attend(y) if self.tied else nn.Dense(VOCABULARY, use_bias=False, name="head")(y)


class T5(nn.Module):
    """The encoder: positions in the scores, a tied head that scales what it reads, Flax's own RMSNorm."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens)
        distance = np.arange(TOKENS)[None] - np.arange(TOKENS)[:, None] + TOKENS
        position = jnp.transpose(table(self, "position_table", 2 * TOKENS, HEADS)[distance], (2, 0, 1))
        for index in range(LAYERS):
            y = nn.RMSNorm(name=f"rms1_{index}")(x)
            q, k, v = (
                nn.DenseGeneral((HEADS, HEAD), use_bias=False, name=f"{name}{index}")(y)
                for name in ("query", "key", "value")
            )
            weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + position)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name=f"out{index}")(y)
            y = nn.Dense(HIDDEN, use_bias=False, name=f"up{index}")(nn.RMSNorm(name=f"rms2_{index}")(x))
            x = x + nn.Dense(WIDTH, use_bias=False, name=f"down{index}")(nn.relu(y))
        return embed.attend(nn.RMSNorm(name="rms")(x) * WIDTH**-0.5)


# Vision.


def patches(x: Any) -> Any:
    """``(batch, patches, WIDTH)``."""
    y = nn.Conv(WIDTH, PATCH, PATCH, "VALID", name="patches")(x)
    return y.reshape(y.shape[0], -1, WIDTH)


class Vit(nn.Module):
    head: str = "class token"
    layer_scale: bool = False
    normalize_qk: bool = False
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = patches(x)
        if self.head == "class token":
            first = jnp.broadcast_to(table(self, "class_table", 1, 1, WIDTH), (x.shape[0], 1, WIDTH))
            x = jnp.concatenate([first, x], axis=1)
        x = x + table(self, "position_table", TOKENS, WIDTH)
        x = Blocks(False, self.layer_scale, self.normalize_qk, self.scan, self.remat, name="blocks")(x)
        return nn.Dense(CLASSES, name="head")(self.pooled(x))

    def pooled(self, x: Any) -> Any:
        norm = nn.LayerNorm(name="ln")
        if self.head == "class token":
            return norm(x)[:, 0]
        if self.head == "mean, norm":
            return norm(x.mean(axis=1))
        if self.head == "mean":
            return x.mean(axis=1)
        assert self.head == "attention"
        x = norm(x)
        probe = jnp.broadcast_to(table(self, "probe_table", 1, 1, WIDTH), (x.shape[0], 1, WIDTH))
        y = nn.MultiHeadDotProductAttention(HEADS, name="pool")(probe, x)
        return (y + Mlp(name="mlp")(nn.LayerNorm(name="ln_pool")(y)))[:, 0]


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = patches(x)
        for index in range(LAYERS):
            y = jnp.swapaxes(nn.LayerNorm(name=f"ln1_{index}")(x), 1, 2)
            y = nn.Dense(TOKENS, name=f"out{index}")(nn.gelu(nn.Dense(2 * TOKENS, name=f"in{index}")(y)))
            x = x + jnp.swapaxes(y, 1, 2)
            x = x + Mlp(name=f"mlp{index}")(nn.LayerNorm(name=f"ln2_{index}")(x))
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="ln")(x).mean(axis=1))


class ConvNext(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm(name="ln_stem")(nn.Conv(WIDTH, PATCH, PATCH, "VALID", name="stem")(x))
        for index in range(LAYERS):
            y = nn.Conv(WIDTH, (3, 3), feature_group_count=WIDTH, name=f"depthwise{index}")(x)
            y = Mlp(name=f"mlp{index}")(nn.LayerNorm(name=f"ln{index}")(y))
            x = x + Gamma(name=f"ls{index}")(y)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="ln")(x.mean(axis=(1, 2))))


# Diffusion and control.


class Dit(nn.Module):
    """adaLN: what a norm's scale and bias are, and the gates, are made from a condition."""

    gates: bool = False
    embeds: bool = True

    @nn.compact
    def __call__(self, x: Any, condition: Any) -> Any:
        x = nn.Dense(WIDTH, name="embed")(x) + table(self, "position_table", TOKENS, WIDTH) if self.embeds else x
        c = nn.silu(condition)
        for index in range(LAYERS):
            for name in ("attention", "mlp"):
                made = nn.Dense((3 if self.gates else 2) * WIDTH, name=f"modulation_{name}{index}")(c)
                y = self.modulated(x, made)
                if name == "attention":
                    y = nn.MultiHeadDotProductAttention(HEADS, name=f"{name}{index}")(y)
                else:
                    y = Mlp(name=f"{name}{index}")(y)
                x = x + (made[:, None, 2 * WIDTH :] * y if self.gates else y)
        return nn.Dense(CLASSES, name="head")(self.modulated(x, nn.Dense(2 * WIDTH, name="modulation")(c)))

    def modulated(self, x: Any, made: Any) -> Any:
        y = nn.LayerNorm(use_scale=False, use_bias=False)(x)
        return y * (1.0 + made[:, None, :WIDTH]) + made[:, None, WIDTH : 2 * WIDTH]


class Simba(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(WIDTH, name="embed")(x)
        for index in range(LAYERS):
            h = nn.relu(nn.Dense(HIDDEN, name=f"up{index}")(nn.LayerNorm(name=f"ln{index}")(x)))
            x = x + nn.Dense(WIDTH, name=f"down{index}")(h)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="ln")(x))


# What is to be decided.

NORMS = 2 * LAYERS + 1  # of a pre-LN model: two in each layer, and the last
C, A, S = "centred", "absorbed", "skipped"
ALL = (C,) * NORMS
SCANNED = (C, C, C)  # a row stands for its norm in all layers

MODELS: dict[str, Callable[[], Case]] = {
    # Writers: table, positions, and two kernels with their biases in each layer; readers: the norms alone. Tied, the
    # table is also the head's, which reads its mean: that of each row has to be taken behind the lookup, 1 for 5 norms.
    "gpt2": lambda: _linen(Gpt2(), TEXT, {ALL: 1}),
    "gpt2, untied": lambda: _linen(Gpt2(tied=False), TEXT, ALL),
    "gpt2, nnx": lambda: _gpt_nnx({ALL: 1}),
    "gpt2, scan": lambda: _linen(Gpt2(scan=True), TEXT, {SCANNED: 1}),
    "gpt2, remat": lambda: _linen(Gpt2(remat=True), TEXT, {ALL: 1}),
    "gpt2, scan of remat": lambda: _linen(Gpt2(scan=True, remat=True), TEXT, {SCANNED: 1}),
    "gpt2, written out": lambda: _plain_gpt(SCANNED),
    # An output of the function is a reader like any other. Dense layers are all that reads the norms.
    "gpt2, stream returned": lambda: _linen(Gpt2(tied=False, returns_stream=True), TEXT, (A,) * NORMS),
    # One mean at run time for the one that is saved: left alone, but for scale and bias, which the MLP takes.
    "tied, one norm": lambda: _linen(OneNorm(), TEXT, (A,)),
    # Both branches end in a kernel; that they share a norm changes nothing.
    "parallel": lambda: _linen(Parallel(), TEXT, (C,) * (LAYERS + 1)),
    # A gate is one number for all features of an expert: the mean of g y is g times that of y, and kernels are centred.
    "moe": lambda: _linen(Moe(), TEXT, ALL),
    "moe, einsum": lambda: _linen(Moe(einsum=True), TEXT, ALL),
    # Tables are all that writes to the first norm. From there on the stream starts behind a norm: it is read by the
    # attention and by the residual, so its mean stays; and its scale and bias are read by the residual, so they stay,
    # but for the last ones: a Dense layer is all that reads these. The head's norm reads a gelu: 1 mean for 1. Tied,
    # that of the tables is 1 for 1 as well, and with scale and bias in the head there would be two copies of the table:
    # either way.
    "bert": lambda: _linen(Bert(), TEXT, (C, *(S,) * (2 * LAYERS - 1), A, A)),
    "bert, tied": lambda: _linen(Bert(tied=True), TEXT, {((S,) * (2 * LAYERS) + (A, last)): 0 for last in (A, S)}),
    # RMSNorm depends on the mean; Dense layers are all that reads the norms, but for a tied head, as above.
    "llama": lambda: _linen(Llama(), TEXT, (A,) * NORMS),
    "llama, 1 + offset": lambda: _linen(Llama(one_plus=True), TEXT, (A,) * NORMS),
    "llama, tied": lambda: _linen(Llama(tied=True), TEXT, {(A,) * (NORMS - 1) + (last,): 0 for last in (A, S)}),
    "t5": lambda: _linen(T5(), TEXT, {(A,) * (NORMS - 1) + (last,): 0 for last in (A, S)}),
    # A norm at the end of a branch is read by the stream itself.
    "gemma2": lambda: _linen(Llama(one_plus=True, sandwich=True), TEXT, (A, S) * (NORMS - 1) + (A,)),
    # The class token, the patches' kernel and the positions are writers like a table.
    "vit": lambda: _linen(Vit(), NARROW_PICTURE, ALL),
    "vit, scan of remat": lambda: _linen(Vit(scan=True, remat=True), NARROW_PICTURE, SCANNED),
    # The mean over tokens is linear and leaves the features alone.
    "vit, mean and norm": lambda: _linen(Vit("mean, norm"), PICTURE, ALL),
    # The head reads the stream without a norm, and with it its mean.
    "vit, mean without norm": lambda: _linen(Vit("mean"), PICTURE, (A,) * (NORMS - 1)),
    # What the probe finds is read by the head, without a norm, as well as by its own: that one stays.
    "vit, attention pooling": lambda: _linen(Vit("attention"), PICTURE, (*ALL, A)),
    # γ (h W + b) = h (W γ) + b γ, and W γ is centred.
    "vit, layer scale": lambda: _linen(Vit(layer_scale=True), NARROW_PICTURE, ALL),
    # The norms of queries and keys read one kernel each, by head, and nothing else does: the columns of each head are
    # centred. The scores are no product with a parameter.
    "vit, normalised queries and keys": lambda: _linen(Vit(normalize_qk=True), NARROW_PICTURE, (C,) * (4 * LAYERS + 1)),
    # Kernels along the tokens leave the features' mean as it is: 2 means at run time, of what they write, for 5.
    "mixer": lambda: _linen(Mixer(), PICTURE, {ALL: LAYERS}),
    # The stem's kernel and bias are all that its norm reads. From there on each channel has a filter of its own, which
    # the mean goes through; the norm behind it, and the last, are read by Dense layers alone.
    "convnext": lambda: _linen(ConvNext(), PICTURE, (C, *(A,) * (LAYERS + 1))),
    # No norm has a scale or bias of its own, and what stands in for them is none of the stream's business.
    "dit, no gates": lambda: _linen(Dit(), PATCHES, ALL),
    # Gates that differ by feature: what passes one has a mean that no kernel knows. The first norm costs nothing, and
    # each one after it, in their order, as much as it saves: up to which is all the same ...
    "dit": lambda: _linen(
        Dit(gates=True), PATCHES, {(C,) * n + (S,) * (NORMS - n): n - 1 for n in range(1, NORMS + 1)}
    ),
    # ... and with tokens that come as they are, 5 for 5.
    "dit, no embedding": lambda: _linen(Dit(gates=True, embeds=False), SEQUENCE, (S,) * NORMS),
    # Five observations make the input of the first norm, so that it may be contracted: its readers need its kernel when
    # contracting only, and where it writes to the stream it can be centred all the same.
    "simba": lambda: _linen(Simba(), OBSERVATION, {(first, *(C,) * LAYERS): 0 for first in ("contracted", C)}),
}


@functools.cache
def case(name: str) -> Case:
    return dataclasses.replace(MODELS[name](), name=name)
