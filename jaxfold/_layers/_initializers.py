"""How a contracted block starts when it is not loaded: as a freshly initialised original, in the limit of a wide norm.

With producer kernel entries of variance 1/d, ``T Tᵀ → (n/d) I`` as n → ∞, hence R = sqrt(n/d) I. With consumer kernel
entries of variance 1/n, those of ``D = T W`` have variance n · 1/d · 1/n = 1/d: lecun_normal over the d features. In
the same way the entries of ``V = sqrt(n/k) Uᵀ W`` have variance 1/k. Biases start at zero, hence their row in D, and c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfold._algebra._triangle import pack_triangle
from jaxfold._errors import OptionError
from jaxfold._layers._layout import Layout

Initializer = Callable[..., Any]


def isometry(width: int) -> Initializer:
    """The initialiser of the denominator's kernel: ``sqrt(width / d)`` times the identity, ``(d, k)``.

    Args:
        width: n, the features of the original's activation.

    Returns:
        An initialiser ``(key, shape, dtype)``; it ignores the key.

    Raises:
        OptionError: if ``width`` is no integer above 0.

    Example:
        >>> import jax, jaxfold.linen
        >>> jaxfold.linen.isometry(8)(jax.random.key(0), (2, 3))
        Array([[2., 0., 0.], [0., 2., 0.]], dtype=float32)
    """
    if not isinstance(width, (int, np.integer)) or isinstance(width, bool) or width < 1:
        raise OptionError("width", repr(width), "the original's width, an integer above 0", "")

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return math.sqrt(width / shape[0]) * jnp.eye(*shape, dtype=dtype)

    return init


def init_denominator(
    key: Any, layout: Layout, kernel_init: Initializer | None, dtype: Any, on_value: Callable[..., Any]
) -> dict[str, Any]:
    """``{"kernel"[, "bias"]}``. ``on_value(f, leaf)`` applies f to an array, in its box if it has one."""
    init = kernel_init or isometry(layout.width)
    kernel = init(key, (layout.features, layout.rank), dtype)
    if layout.form == "packed":
        kernel = on_value(pack_triangle, kernel)
    return {"kernel": kernel} | ({"bias": jnp.zeros(layout.rank, dtype)} if layout.use_bias else {})


def init_consumer(
    key: Any, layout: Layout, name: str | None, kernel_init: Initializer, dtype: Any, on_value: Callable[..., Any]
) -> dict[str, Any]:
    """``{"kernel"[, "bias"]}``; the initialiser sees two axes, inputs and outputs, whatever the features."""
    features = layout.outputs[name]
    rows = layout.rank if layout.form == "standard" else layout.features
    kernel = kernel_init(key, (rows, math.prod(features)), dtype)
    if layout.form == "standard":
        return {
            "kernel": on_value(lambda value: value.reshape(rows, *features), kernel),
            "bias": jnp.zeros(features, dtype),
        }
    constants = 1 + layout.use_bias  # the rows of the producer's bias and of c

    def extend(value: Any) -> Any:
        value = value.reshape(rows, *features)
        return jnp.concatenate([value, jnp.zeros((constants, *features), value.dtype)])

    return {"kernel": on_value(extend, kernel)}
