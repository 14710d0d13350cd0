"""The main job on real weights: four trained feature heads of LigandMPNN, one of which is worth contracting.

Each head is Linear, LayerNorm, Linear. y_edges is applied to every pair of up to 25 ligand atoms near a residue, so a
protein of 100 residues asks for 62,500 evaluations; its 16 inputs are a Gaussian radial basis of the pair's distance.
Source of the weights: checkpoint ligandmpnn_v_32_010_25 of the package ligandmpnn 0.1.2 (MIT licence, beside the file).
"""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import jaxfold
from jaxfold._report import certificate_table, table

EPSILON = 1e-5  # torch.nn.LayerNorm's default, with which the heads were trained
PAIRS = (1, 100, 25, 25)
HEADS = ("y_edges", "y_nodes", "node_project_down", "edge_embedding")
COUNTS = {"y_edges": (18_816, 2_432), "node_project_down": (35_840, 38_272)}


class Head(NamedTuple):
    """The leaves of one head, float32, in Flax layout."""

    producer: dict[str, np.ndarray]
    norm: dict[str, np.ndarray]
    consumer: dict[str, np.ndarray]


def load_heads() -> dict[str, Head]:
    """The trained heads by name."""
    resource = importlib.resources.files("jaxfold") / "_data" / "ligandmpnn_heads.npz"
    with importlib.resources.as_file(resource) as path, np.load(path) as arrays:
        heads = {}
        for head in HEADS:
            layers: dict[str, dict[str, np.ndarray]] = {"producer": {}, "norm": {}, "consumer": {}}
            for key in arrays.files:
                name, layer, leaf = key.split("/")
                if name == head:
                    layers[layer][leaf] = arrays[key]
            heads[head] = Head(**layers)
    return heads


def radial_basis(distances: np.ndarray) -> np.ndarray:
    """16 Gaussians of a distance in ångström, ``(...,)`` → ``(..., 16)``: centres from 2 to 22, width 1.25."""
    return np.exp(-(((distances[..., None] - np.linspace(2.0, 22.0, 16)) / 1.25) ** 2)).astype(np.float32)


def atom_pairs(seed: int = 0) -> np.ndarray:
    """Inputs of y_edges, ``(1, 100, 25, 25, 16)``: for each residue the pairs of 25 atoms strewn over 30 Å.

    Of a pair with itself, at distance zero, to pairs beyond 25 Å, whose inputs are all but zero.
    """
    atoms = np.random.default_rng(seed).uniform(0.0, 30.0, size=(*PAIRS[:3], 3))
    return radial_basis(np.linalg.norm(atoms[..., :, None, :] - atoms[..., None, :, :], axis=-1))


def run(*, rounds: int = 25, console: Console | None = None) -> bool:
    """Prints decisions, costs, errors and speed; whether every check passed."""
    console = console or Console(highlight=False)
    heads = load_heads()
    checks: dict[str, bool] = {}

    console.print(_decisions(heads, checks), "")
    head = heads["y_edges"]
    costs = jaxfold.plan(*head)
    contracted = jaxfold.contract(*jax.tree.map(jnp.asarray, head), epsilon=EPSILON)
    inputs = atom_pairs()

    comparison = table("y_edges", "original", "contracted", "ratio", title="What it costs")
    for name in ("parameters", "bytes", "flops"):
        before, after = getattr(costs.original, name), getattr(costs.direct, name)
        comparison.add_row(
            {"flops": "FLOPs per pair"}.get(name, name), f"{before:,}", f"{after:,}", f"{before / after:.1f}"
        )
    console.print(comparison, "")

    certificate = jaxfold.verify(jaxfold.Block(*head, epsilon=EPSILON), contracted, inputs)
    errors = certificate_table(certificate)
    errors.title = "Errors on 62,500 atom pairs, against float64 in two passes"
    console.print(errors, "")
    # Rounding errors of float32 sums of 128 terms: 128 · 2⁻²⁴ is 8e-6.
    checks["outputs are within 8e-6 of float64"] = certificate.outputs.contracted_max < 8e-6
    checks["output errors are at most twice the original's"] = certificate.outputs.ratio <= 2
    checks["gradients are within 8e-6 of float64"] = certificate.gradients.contracted_max < 8e-6
    checks["gradient errors are at most twice the original's"] = certificate.gradients.ratio <= 2
    checks["the wrong epsilon is noticed"] = _notices_wrong_epsilon(head, inputs)

    console.print(_speed(head, contracted, inputs, rounds), "")
    for name, passed in checks.items():
        console.print(f"{'ok    ' if passed else 'FAILED'} {name}", style=None if passed else "bold red")
    return all(checks.values())


def _decisions(heads: dict[str, Head], checks: dict[str, bool]) -> Any:
    decisions = table("head", "d/n/m", "parameters", "FLOPs per row", "decision")
    decisions.title = "Four trained heads: contracted where that makes them smaller"
    for name, head in heads.items():
        costs = jaxfold.plan(*head)
        before, after = costs.original, costs.direct
        try:
            jaxfold.contract(*head, epsilon=EPSILON)
            decision = "contract"
        except jaxfold.GrowthError:
            decision = "refuse"
        decisions.add_row(
            name,
            f"{head.producer['kernel'].shape[0]}/{len(head.norm['scale'])}/{head.consumer['kernel'].shape[1]}",
            f"{before.parameters:,}→{after.parameters:,}",
            f"{before.flops:,}→{after.flops:,}",
            decision,
        )
        if name in COUNTS:
            text = f"{name} has {COUNTS[name][0]:,} parameters before and {COUNTS[name][1]:,} after"
            checks[text] = (before.parameters, after.parameters) == COUNTS[name]
        wanted = "contract" if name == "y_edges" else "refuse"
        checks[f"the decision about {name} is to {wanted}"] = decision == wanted
    return decisions


def _notices_wrong_epsilon(head: Head, inputs: np.ndarray) -> bool:
    """The negative control: Flax's default epsilon in the place of the trained one fails the same check."""
    wrong = jaxfold.contract(*head, epsilon=1e-6)
    return jaxfold.verify(jaxfold.Block(*head, epsilon=EPSILON), wrong, inputs).outputs.contracted_max > 1e-3


def _speed(head: Head, contracted: jaxfold.Contraction, inputs: np.ndarray, rounds: int) -> Any:
    def original(head: Head, x: Any) -> Any:
        return jaxfold.Block(*head, epsilon=EPSILON)(x)

    def dense(params: dict[str, Any], x: Any) -> Any:
        return jnp.dot(x, params["kernel"]) + params["bias"]

    x = jnp.asarray(inputs)
    flat = x.reshape(-1, x.shape[-1])  # XLA's products of four leading axes are slow on CPU
    bare = {"kernel": jnp.asarray(contracted.D), "bias": jnp.asarray(contracted.c)}
    head = jax.tree.map(jnp.asarray, head)
    compiled_original, compiled_dense = jax.jit(original), jax.jit(dense)
    medians = _medians(
        {
            "original": lambda: compiled_original(head, x),
            "original, pairs in one axis": lambda: compiled_original(head, flat),
            "contracted": lambda: jaxfold.apply(contracted, x),
            "contracted, pairs in one axis": lambda: jaxfold.apply(contracted, flat),
            "bare Dense(16→128), pairs in one axis": lambda: compiled_dense(bare, flat),
        },
        rounds,
    )
    result = table(f"62,500 pairs, median of {rounds}", "time / contracted", title="Speed, interleaved")
    for name, seconds in medians.items():
        result.add_row(name, f"{seconds / medians['contracted']:.2f}")
    return result


def _medians(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}
