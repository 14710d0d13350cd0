"""Train a Flax model through the contraction, on scikit-learn's handwritten digits, beside the same model without it.

    pip install -e '.[examples]'
    python notebooks/digits.py [--steps N] [--batch B] [--width n] [--out DIRECTORY]

The model is Dense(64→1024), LayerNorm, Dense(1024→256), tanh and a head. Both runs have its parameters, one optimiser,
one seed and the same batches; one evaluates the three layers as they are, the other contracts them inside its jitted
step. When training is over the block is contracted for good, verified, saved with orbax, restored and served.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import jaxfold

EPSILON = 1e-6


class Classifier(nn.Module):
    """64 pixels to ten classes."""

    width: int
    contracted: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Pixels ``(batch, 64)`` to logits ``(batch, 10)``."""
        layers = [nn.Dense(self.width, name="producer"), nn.LayerNorm(epsilon=EPSILON, name="norm")]
        layers += [nn.Dense(256, name="consumer")]
        if self.contracted and not self.is_initializing():
            params = self.variables["params"]
            leaves = (params[name] for name in ("producer", "norm", "consumer"))
            features = jaxfold.apply(jaxfold.contract_traced(*leaves, epsilon=EPSILON), x)
        else:
            features = nn.Sequential(layers)(x)
        return nn.Dense(10, name="head")(jnp.tanh(features))


class Run:
    """A model with its parameters, the state of its optimiser, and what it has done so far."""

    def __init__(self, model: Classifier, params: Any, x: Any, labels: Any):
        self.model, self.params, self.losses, self.seconds = model, params, [], []
        optimiser = optax.adam(1e-3)
        self.state = optimiser.init(params)

        def loss(params: Any, x: Any, labels: Any) -> Any:
            logits: Any = model.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def step(params: Any, state: Any, x: Any, labels: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(params, x, labels)
            updates, state = optimiser.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        self.compiled = jax.jit(step).lower(params, self.state, x, labels).compile()

    def advance(self, x: Any, labels: Any) -> None:
        """One step of the optimiser."""
        start = time.perf_counter()
        self.params, self.state, loss = jax.block_until_ready(self.compiled(self.params, self.state, x, labels))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def accuracy(self, x: Any, labels: Any) -> float:
        """The share of x that is classified right."""
        logits: Any = self.model.apply({"params": self.params}, x)
        return float(jnp.mean(jnp.argmax(logits, axis=-1) == labels))


def main() -> None:
    """Train, compare, contract, save, restore, serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024, help="of the norm (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where to keep the contracted parameters; else they are thrown away")
    options = parser.parse_args()
    if min(options.steps, options.batch, options.width) < 1:
        parser.error("--steps, --batch and --width must be positive")
    if options.out and options.out.exists():
        parser.error(f"{options.out} exists; name a directory that doesn't")
    console = Console(width=100)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:-360], order[-360:]
    x, y = images[test], labels[test]

    plain = Classifier(options.width)
    params = plain.init(jax.random.key(0), x)["params"]
    example = images[train[:1].repeat(options.batch)], labels[train[:1].repeat(options.batch)]
    runs = {
        "plain": Run(plain, params, *example),
        "contracted": Run(Classifier(options.width, contracted=True), params, *example),
    }
    rng = np.random.default_rng(1)
    for _ in track(range(options.steps), "training both", console=console):
        batch = rng.choice(train, options.batch)
        for run in runs.values():
            run.advance(images[batch], labels[batch])
    console.print(_comparison(runs, x, y))
    layers = [runs["contracted"].params[name] for name in ("producer", "norm", "consumer")]
    console.print(f"planned: a step that contracts pays from batch {jaxfold.plan(*layers).training_batch}\n")

    block = jaxfold.contract(*layers, epsilon=EPSILON)
    console.print(str(jaxfold.verify(jaxfold.Block(*layers, epsilon=EPSILON), block, x)), "\n")
    with tempfile.TemporaryDirectory() as scratch:
        path = (options.out or Path(scratch) / "contracted").resolve()
        served = {"block": block.params, "head": runs["contracted"].params["head"]}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, served)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, served))

    block = jaxfold.Contraction(
        restored["block"], width=options.width, epsilon=EPSILON, norm_type="layernorm", form="direct"
    )

    @jax.jit
    def serve(x: jax.Array) -> jax.Array:
        head = restored["head"]
        return jnp.argmax(jnp.tanh(jaxfold.apply(block, x)) @ head["kernel"] + head["bias"], axis=-1)

    before, after = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, restored))
    console.print(
        f"restored and served: accuracy {float(jnp.mean(serve(x) == y)):.4f} "
        f"with {after:,} parameters instead of {before:,}" + (f", kept in {options.out}" if options.out else "")
    )


def _comparison(runs: dict[str, Run], x: Any, y: Any) -> Table:
    table = Table("", *runs, title="side by side", title_justify="left")
    count = len(next(iter(runs.values())).losses)
    for step in sorted({1, 10, 30, 100, 300, 1000, count}):
        if step <= count:
            table.add_row(f"loss at step {step}", *(f"{run.losses[step - 1]:.6f}" for run in runs.values()))
    table.add_row("accuracy on 360 held out", *(f"{run.accuracy(x, y):.4f}" for run in runs.values()))
    table.add_row("median step, ms", *(f"{np.median(run.seconds) * 1e3:.1f}" for run in runs.values()))
    memory: list[Any] = [run.compiled.memory_analysis() for run in runs.values()]
    table.add_row("temporary memory of a step, MB", *(f"{each.temp_size_in_bytes / 1e6:.1f}" for each in memory))
    plain, folded = (
        np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(run.params)])
        for run in runs.values()
    )
    table.caption = f"parameters apart by {np.linalg.norm(folded - plain) / np.linalg.norm(plain):.1e} of their length"
    return table


if __name__ == "__main__":
    main()
