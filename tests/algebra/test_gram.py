"""The batching rules of the Gram product and the quadratic form, for batch axes in every place."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxfold._algebra._gram import gram_product, quadratic_form

RNG = np.random.default_rng(0)
W, ROWS = RNG.normal(size=(4, 3, 5)).astype(np.float32), RNG.normal(size=(4, 5, 9)).astype(np.float32)
UPPER = np.stack([np.linalg.qr(rows.T)[1] for rows in ROWS])


@pytest.mark.parametrize("axes", [(a, b, c) for a in (0, 1, 2, None) for b, c in ((0, 0), (2, 1), (None, None))][:-1])
def test_batch_axes(axes: Any) -> None:
    arrays: list[Any] = [
        np.moveaxis(array, 0, axis) if axis is not None else array[0]
        for array, axis in zip((W, ROWS, UPPER), axes, strict=True)
    ]
    product = jax.vmap(gram_product, axes)(*arrays)
    form = jax.vmap(quadratic_form, axes)(*arrays)
    for i in range(4):
        w, rows = (
            array[0 if axis is None else i].astype(np.float64) for array, axis in zip((W, ROWS), axes, strict=False)
        )
        truth = w @ rows @ rows.T
        # Float32 products of 9 and 5 terms.
        np.testing.assert_allclose(product[i], truth, atol=2e-6 * np.abs(truth).max())
        np.testing.assert_allclose(form[i], np.sum(truth * w, -1), atol=2e-6 * np.abs(np.sum(truth * w, -1)).max())
