"""jax_enable_x64 for the length of a with statement; no spelling of JAX's own works in all versions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def set_x64(on: bool) -> Iterator[None]:
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", on)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
