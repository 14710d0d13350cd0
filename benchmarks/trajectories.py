"""How far training through the contraction parts from training the original: 500 steps of Adam on handwritten digits.

    python -m benchmarks.trajectories [--steps N] [--width n] [--learning-rate r] [--seed s] [--markdown]

A Dense(64→n), LayerNorm, Dense(n→256), tanh and a head are trained from one seed on the same batches, with the block as
it is and with the block contracted inside the step. In float64 the two runs follow each other to rounding. In float32
any two runs that round differently part. There are two yardsticks: the original against itself with every input moved
by one unit in the last place, and the distance of each run from the original's in float64, which is the truth for both.
Distances are between all parameters as one vector, relative to its length.

Needs scikit-learn for the digits: pip install -e '.[examples]'.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxfold
from benchmarks.tables import show

COLUMNS = {
    "float64: contracted from original": ("contracted, float64", "original, float64"),
    "float32: contracted from original": ("contracted, float32", "original, float32"),
    "one ulp from original": ("one ulp, float32", "original, float32"),
    "original from float64": ("original, float32", "original, float64"),
    "contracted from float64": ("contracted, float32", "original, float64"),
}
MARKS = (1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 1000, 2000)
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=1024, help="of the norm (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # for the runs in float64; the others keep to their leaves' float32
    images, labels = load_digits(return_X_y=True)
    narrow, wide = ((images / 16).astype(dtype) for dtype in (np.float32, np.float64))
    runs = {
        "original, float64": _train(_original, wide, labels, options),
        "contracted, float64": _train(_contracted, wide, labels, options),
        "original, float32": _train(_original, narrow, labels, options),
        "contracted, float32": _train(_contracted, narrow, labels, options),
        "one ulp, float32": _train(_original, np.nextafter(narrow, np.float32(2)), labels, options),
    }
    # The runs go step by step beside each other, so that no trajectory has to be kept.
    curves = []
    for _ in range(options.steps):
        now = {name: next(run) for name, run in runs.items()}
        size = np.linalg.norm(now["original, float64"])
        curves.append([float(np.linalg.norm(now[one] - now[other]) / size) for one, other in COLUMNS.values()])
    marks = sorted({mark for mark in MARKS if mark <= options.steps} | {options.steps})
    rows = [[f"{step:,}", *(f"{figure:.1e}" for figure in curves[step - 1])] for step in marks]
    rows.append(["largest", *(f"{figure:.1e}" for figure in np.max(curves, axis=0))])
    show(f"d/n/m = 64/{options.width}/256", ("step", *COLUMNS), rows, markdown=options.markdown, width=170)


def _initial(width: int, dtype: Any, seed: int) -> dict[str, Any]:
    """Flax's defaults, kernels at random, zero biases, a scale of ones: the same float32 numbers in either dtype."""
    rng = np.random.default_rng(seed)

    def dense(d: int, n: int) -> dict[str, Any]:
        return {"kernel": rng.normal(size=(d, n)) / np.sqrt(d), "bias": np.zeros(n)}

    norm = {"scale": np.ones(width), "bias": np.zeros(width)}
    layers = {"producer": dense(64, width), "norm": norm, "consumer": dense(width, 256), "head": dense(256, 10)}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(np.float32), dtype), layers)


def _original(*layers: Any) -> Callable[[Any], Any]:
    return jaxfold.Block(*layers, epsilon=1e-6)


def _contracted(*layers: Any) -> Callable[[Any], Any]:
    block = jaxfold.contract_traced(*layers, epsilon=1e-6)
    return lambda x: jaxfold.apply(block, x)


def _train(block: Callable[..., Any], x: np.ndarray, labels: np.ndarray, options: Any) -> Iterator[np.ndarray]:
    """All parameters as one vector, after every step."""
    optimiser = optax.adam(options.learning_rate)

    def loss(params: Any, x: Any, labels: Any) -> Any:
        features = jnp.tanh(block(params["producer"], params["norm"], params["consumer"])(x))
        logits = features @ params["head"]["kernel"] + params["head"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any, labels: Any) -> Any:
        updates, state = optimiser.update(jax.grad(loss)(params, x, labels), state, params)
        return optax.apply_updates(params, updates), state

    params = _initial(options.width, x.dtype, options.seed)
    state = optimiser.init(params)
    rng = np.random.default_rng(options.seed + 1)
    for _ in range(options.steps):
        batch = rng.integers(len(x), size=BATCH)
        params, state = step(params, state, x[batch], labels[batch])
        yield np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)])


if __name__ == "__main__":
    main()
