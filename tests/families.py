"""Families of blocks and inputs on which float32 has a hard time, for the tests and for ``benchmarks.accuracy``.

Each is a function of the sizes, a seed and the number of rows that returns a :class:`tests.factories.Case` in float64,
to be rounded to the family's dtype by :func:`draw`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.factories import Case, make_case

EPSILON = 1e-6


def draw(name: str, size: tuple[int, int, int], seed: int, rows: int = 256) -> Case:
    """A case of the family ``name``, leaves and inputs rounded to what the family stores."""
    rng = np.random.default_rng([seed, *size])
    family = FAMILIES[name]
    norm_type = "rmsnorm" if name == "RMSNorm" else "layernorm"
    case = make_case(*size, seed=seed, rows=rows, epsilon=EPSILON, norm_type=norm_type)
    case = family(case, rng).astype(DTYPES.get(name, np.float32))
    return dataclasses.replace(case, x=case.x.astype(np.float32)) if name in WIDE_INPUTS else case


def _producer(case: Case, *, kernel: Any = None, bias: Any = None, x: Any = None) -> Case:
    leaves = {
        "kernel": case.producer["kernel"] if kernel is None else kernel,
        "bias": case.producer["bias"] if bias is None else bias * np.ones(case.producer["bias"].shape),
    }
    return dataclasses.replace(case, producer=leaves, x=case.x if x is None else x)


def _kernel(case: Case) -> np.ndarray:
    return case.producer["kernel"]


def _cancelling(case: Case, rng: np.random.Generator) -> Case:
    """Inputs within a thousandth of one that cancels the bias but for a thousandth of its size."""
    centre = rng.normal(size=_kernel(case).shape[0])
    bias = -centre @ _kernel(case) + 1e-3 * case.producer["bias"]
    return _producer(case, bias=bias, x=centre * (1 + 1e-3 * case.x))


def _condition(case: Case, exponent: float, along_small: bool = False) -> Case:
    """Singular values that fall to 10^-exponent; inputs at random, or such that all directions count alike."""
    left, values, right = np.linalg.svd(_kernel(case), full_matrices=False)
    spread = np.logspace(0, -exponent, len(values))
    if not along_small:
        return _producer(case, kernel=(left * spread) @ right)
    x = (case.x[:, : len(values)] / spread * 10**-exponent) @ left.T
    return _producer(case, kernel=(left * spread) @ right, bias=case.producer["bias"] * 10**-exponent, x=x)


def _rank_two(case: Case, rng: np.random.Generator, *, bias: Any = None) -> Case:
    d, n = _kernel(case).shape
    return _producer(case, kernel=rng.normal(size=(d, 2)) @ rng.normal(size=(2, n)) / np.sqrt(d), bias=bias)


def _scales(case: Case, rng: np.random.Generator) -> Case:
    scale = case.norm["scale"] * 10.0 ** rng.uniform(-3, 3, size=case.norm["scale"].shape)
    return dataclasses.replace(case, norm={**case.norm, "scale": scale})


def _no_bias(case: Case) -> Case:
    return dataclasses.replace(case, producer={"kernel": _kernel(case)})


FAMILIES: dict[str, Callable[[Case, np.random.Generator], Case]] = {
    "plain": lambda case, rng: case,
    "RMSNorm": lambda case, rng: case,
    "no producer bias": lambda case, rng: _no_bias(case),
    "common-mode kernel, ×100": lambda case, rng: _producer(
        case, kernel=_kernel(case) + 100 * rng.normal(size=(_kernel(case).shape[0], 1))
    ),
    "bias mean 1e3": lambda case, rng: _producer(case, bias=case.producer["bias"] + 1e3),
    "bias mean 1e4": lambda case, rng: _producer(case, bias=case.producer["bias"] + 1e4),
    "inputs cancelling the bias": _cancelling,
    "tiny inputs": lambda case, rng: _producer(case, bias=0.0, x=1e-12 * case.x),
    "tiny kernel and bias": lambda case, rng: _producer(
        case, kernel=1e-6 * _kernel(case), bias=1e-6 * case.producer["bias"]
    ),
    "large inputs": lambda case, rng: _producer(case, x=1e8 * case.x),
    "κ = 1e6 kernel": lambda case, rng: _condition(case, 6),
    "κ = 1e6 kernel, inputs along its small directions": lambda case, rng: _condition(case, 6, along_small=True),
    "rank 2": _rank_two,
    "rank 2, zero bias": lambda case, rng: _rank_two(case, rng, bias=0.0),
    "every second input zero, constant bias": lambda case, rng: _producer(
        case, bias=0.7, x=case.x * (np.arange(len(case.x)) % 2)[:, None]
    ),
    "constant producer": lambda case, rng: _producer(
        case, kernel=rng.normal(size=(_kernel(case).shape[0], 1)) * np.ones(_kernel(case).shape), bias=2.0
    ),
    "zero producer": lambda case, rng: _producer(case, kernel=0 * _kernel(case), bias=0.0),
    "signed scales 1e-3 … 1e3": _scales,
    "bfloat16 storage and inputs": lambda case, rng: case,
    "float16 storage and inputs": lambda case, rng: case,
    "bfloat16 storage, float32 inputs": lambda case, rng: case,
}
DTYPES = {
    "bfloat16 storage and inputs": jnp.bfloat16,
    "float16 storage and inputs": np.float16,
    "bfloat16 storage, float32 inputs": jnp.bfloat16,
}
WIDE_INPUTS = ("bfloat16 storage, float32 inputs",)
