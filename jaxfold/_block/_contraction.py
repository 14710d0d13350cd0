"""The contracted block as a pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._algebra._triangle import unpack_triangle
from jaxfold._block._shape import Form, NormType


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Contraction:
    """A contracted Dense-norm-Dense block: a pytree whose leaves are ``params`` and whose other fields are static.

    Made by :func:`jaxfold.contract`, evaluated by :func:`jaxfold.apply`. To restore one from a checkpoint of its
    ``params``, construct it with the same static fields. Compared by identity; compare ``params`` for values.

    Attributes:
        params: a plain tree of arrays, in the layout of Flax. ``d`` features come in, ``p`` is ``d + 1`` with a
            producer bias and ``d`` without, ``k = min(width, p)``, ``t`` the size of R's triangle over x.

            ============ ===================================== ==============================================
            form         ``params["denominator"]``             ``params["consumer"]``
            ============ ===================================== ==============================================
            ``direct``   ``kernel (d, k)``, ``bias (k,)``: R   ``kernel (p + 1, *features)``: D, then c last
            ``packed``   ``kernel (t,)``, ``bias (k,)``        as direct
            ``standard`` ``kernel (d, k)``, ``bias (k,)``: R   ``kernel (k, *features)``, ``bias features``
            ============ ===================================== ==============================================

            ``bias`` in the denominator is there if and only if the producer had one. D and c share one kernel because
            they are one product, ``[x̄ s, 1] @ kernel`` with the inverse scale s. A mapping of consumers makes
            ``params["consumers"]``, a dict of such trees by name. The standard form's trees are those of stock
            ``nn.Dense(k)``, ``nn.RMSNorm(epsilon=rms_epsilon, use_scale=False)`` and ``nn.Dense(features)``.
            :func:`jaxfold.contract_traced` adds ``rows`` to the denominator: T ``(p, width)``, for the derivative.
        width: n, the features of the original activation, which divides the sum of squares.
        epsilon: the original's, in units of the activation squared.
        norm_type: ``"layernorm"`` or ``"rmsnorm"``: what was contracted; evaluation does not depend on it.
        form: ``"direct"``, ``"packed"`` or ``"standard"``.

    Example:
        >>> import numpy as np, jaxfold
        >>> producer = {"kernel": np.eye(2, 8), "bias": np.arange(8.0)}
        >>> block = jaxfold.contract(producer, None, {"kernel": np.ones((8, 4))}, epsilon=1e-6)
        >>> block.params["denominator"]["kernel"].shape, block.params["consumer"]["kernel"].shape
        ((2, 3), (4, 4))
        >>> block.R.shape, block.D.shape, block.c.shape
        ((3, 3), (3, 4), (4,))
    """

    params: Mapping[str, Any]
    width: int = dataclasses.field(metadata={"static": True})
    epsilon: float = dataclasses.field(metadata={"static": True})
    norm_type: NormType = dataclasses.field(metadata={"static": True})
    form: Form = dataclasses.field(metadata={"static": True})

    @property
    def consumers(self) -> dict[str | None, Mapping[str, Any]]:
        """The consumers' trees by name; a single one goes by ``None``."""
        return {None: self.params["consumer"]} if "consumer" in self.params else dict(self.params["consumers"])

    @property
    def has_bias(self) -> bool:
        """Whether the producer had a bias, hence R and D a last column and row for the constant."""
        return "bias" in self.params["denominator"]

    @property
    def rms_epsilon(self) -> float:
        """The epsilon of the stock RMSNorm over k features that the standard form needs, ``epsilon · width / k``."""
        return self.epsilon * self.width / self.rank

    @property
    def rank(self) -> int:
        """k, the rows of R and the number of squares in the denominator."""
        return min(self.width, self._rows) if self.form == "packed" else self.params["denominator"]["kernel"].shape[-1]

    @property
    def features(self) -> int:
        """d, the input features."""
        return self._rows - self.has_bias if self.form == "packed" else self.params["denominator"]["kernel"].shape[-2]

    @property
    def denominator_kernel(self) -> Any:
        """R over x, transposed, ``(..., d, k)`` in every form; unpacked where it is stored packed."""
        kernel = self.params["denominator"]["kernel"]
        return unpack_triangle(kernel, self.features, self.rank) if self.form == "packed" else kernel

    @property
    def R(self) -> Any:
        """The factor ``(..., k, p)`` whose ``‖R x̄‖² / width`` is the activation's variance; an RMSNorm's mean square.

        For one block and rows ``x̄ = [x, 1]`` (``x`` without a producer bias), ``R x̄`` is ``x̄ @ R.T``, and the
        numerator is ``x̄ @ D``. QR leaves the sign of each row of R open: ``contract`` takes the one that makes the
        diagonal nonnegative, ``contract_traced`` whichever comes. Where T has full row rank, that makes R unique: give
        the rows of another QR the same signs before you compare.
        """
        kernel = self.denominator_kernel
        if self.has_bias:
            bias = self.params["denominator"]["bias"][..., None, :]
            kernel = (np if isinstance(kernel, np.ndarray) else jnp).concatenate([kernel, bias], axis=-2)
        return kernel.swapaxes(-1, -2)

    @property
    def D(self) -> Any:
        """The numerator ``(..., p, *features)``, or a dict of such, in ``f(x) = x̄ D / sqrt(‖R x̄‖²/width + ε) + c``."""
        if self.form != "standard":
            return self._each(lambda group: self._row(group["kernel"], slice(None, -1)))
        # With V the stored kernel and z = x̄ Rᵀ, the output is z V / sqrt(‖z‖²/k + ε n/k) + c, so D = sqrt(k/n) Rᵀ V.
        factor, ratio = self.R, float(np.sqrt(self.rank / self.width))

        def numerator(group: Mapping[str, Any]) -> Any:
            kernel = group["kernel"]
            flat = kernel.reshape(*kernel.shape[: self._lead + 1], -1)
            product = factor.swapaxes(-1, -2) @ flat * ratio
            return product.reshape(*product.shape[:-1], *kernel.shape[self._lead + 1 :])

        return self._each(numerator)

    @property
    def c(self) -> Any:
        """The offset ``(..., *features)``, or a dict of such."""
        return self._each(lambda group: group["bias"] if self.form == "standard" else self._row(group["kernel"], -1))

    def __repr__(self) -> str:
        shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), self.params)
        return (
            f"Contraction(params={shapes}, width={self.width}, epsilon={self.epsilon}, "
            f"norm_type={self.norm_type!r}, form={self.form!r})"
        )

    @property
    def _lead(self) -> int:
        """How many axes lead every leaf, 1 for a stack of blocks."""
        return self.params["denominator"]["kernel"].ndim - (1 if self.form == "packed" else 2)

    @property
    def _rows(self) -> int:
        """p of a direct or packed form, whose kernels have a row more, for the offset."""
        return next(iter(self.consumers.values()))["kernel"].shape[self._lead] - 1

    def _row(self, kernel: Any, index: Any) -> Any:
        return kernel[(slice(None),) * self._lead + (index,)]

    def _each(self, function: Any) -> Any:
        results = {name: function(group) for name, group in self.consumers.items()}
        return results.get(None, results)
