"""Interleaved timing: what is compared runs in turn in one process, so that a noisy machine is noisy for all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

FEWEST = 3  # rounds, however long they take


def interleaved(
    functions: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float, least: float = 2e-3
) -> dict[str, np.ndarray]:
    """Seconds for one call of each function, one entry a round: ``rounds``, or as many as start within ``seconds``.

    A sample repeats the call until it lasts ``least`` seconds, after one call that is not timed: the memory that the
    function before it gave back to the system would otherwise be charged to this one. Each call is waited for, or
    several would run at once. Each round has its own order.
    """
    names = list(functions)
    repeats = {}
    for name in names:
        jax.block_until_ready(functions[name]())  # compiles
        once = _sample(functions[name], 1)
        if once < least:
            once = min(_sample(functions[name], 1) for _ in range(5))
        repeats[name] = max(1, round(least / once))
    times: dict[str, list[float]] = {name: [] for name in names}
    rng = np.random.default_rng(0)
    end = time.perf_counter() + seconds
    for done in range(max(rounds, FEWEST)):
        if done >= FEWEST and time.perf_counter() > end:
            break
        for name in rng.permutation(names):
            times[name].append(_sample(functions[name], repeats[name]))
    return {name: np.array(values) for name, values in times.items()}


def _sample(function: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(function())
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(function())
    return (time.perf_counter() - start) / repeats


def ratio(times: Mapping[str, np.ndarray], over: str, under: str) -> str:
    """The ratio of the medians, and in brackets the quartiles of the ratios round by round."""
    low, high = np.quantile(times[over] / times[under], [0.25, 0.75])
    return f"{np.median(times[over]) / np.median(times[under]):.2f} ({low:.2f}–{high:.2f})"
