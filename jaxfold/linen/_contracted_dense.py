"""A Linen module that evaluates a contracted block; its parameters are the contraction's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from flax.core.meta import AxisMetadata
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfold._block._apply import apply
from jaxfold._block._contraction import Contraction
from jaxfold._block._leaves import require_floating, unbox
from jaxfold._block._shape import Form, NormType
from jaxfold._errors import ShapeError
from jaxfold._layers._describe import check_loaded, describe
from jaxfold._layers._initializers import init_consumer, init_denominator
from jaxfold._layers._layer import canonical_dtype
from jaxfold._layers._layout import Layout, by_consumer, group_dtype, read_features, read_options
from jaxfold.linen._read import read

Features = int | Sequence[int]


class ContractedDense(nn.Module):
    """Dense, norm and Dense as one layer that never makes the wide activation.

    Its ``params`` are ``Contraction.params`` of the same form, so a contraction loads into it and a trained
    one saves like any layer; ``module.apply({"params": contraction.params}, x)`` is ``jaxfold.apply(contraction, x)``.
    Training it trains D, R and c, which is another model than the original.

    Attributes:
        features: of the output: an int, a sequence of ints for several trailing axes, or a mapping of names to either,
            for several consumers; the module then returns a dict.
        width: n, the features of the original's activation, which divides the sum of squares.
        epsilon: the norm's.
        use_bias: whether the original's producer had a bias.
        norm_type: ``"layernorm"`` or ``"rmsnorm"``: what was contracted; evaluation does not depend on it.
        form: ``"direct"``, ``"packed"`` or ``"standard"``.
        dtype: of the output; by default what input and parameters promote to. The arithmetic is never below float32.
        param_dtype: of the parameters: one dtype, or a tree of dtypes like ``params``, by group of leaves.
        precision: of the product that makes the output.
        denominator_init: makes the denominator's kernel ``(d, k)``, of which the packed form keeps the triangle; by
            default ``isometry(width)``, a fresh original's.
        kernel_init: makes the consumers' kernels, as ``(inputs, outputs)``; the constant's row and c start at zero.
            Either may be wrapped in ``nn.with_partitioning``, with names for the axes of the leaf as it is stored.

    Raises:
        OptionError: if an attribute is not accepted, or ``epsilon`` is out of the range of the arithmetic.
        ShapeError: if ``x`` has another width than the parameters that were loaded.
        StructureError: if the parameters do not fit the attributes.
        DtypeError: if ``x`` is not real floating.

    Example:
        >>> import jax, jax.numpy as jnp, jaxfold.linen
        >>> layer = jaxfold.linen.ContractedDense(3, width=32, epsilon=1e-6)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 4)))
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'consumer': {'kernel': (6, 3)}, 'denominator': {'bias': (5,), 'kernel': (4, 5)}}
        >>> layer.apply(variables, jnp.ones((7, 4))).shape
        (7, 3)
    """

    features: Features | Mapping[str, Features]
    width: int = dataclasses.field(kw_only=True)
    epsilon: float = dataclasses.field(kw_only=True)
    use_bias: bool = dataclasses.field(kw_only=True, default=True)
    norm_type: NormType = dataclasses.field(kw_only=True, default="layernorm")
    form: Form = dataclasses.field(kw_only=True, default="direct")
    dtype: Dtype | None = dataclasses.field(kw_only=True, default=None)
    param_dtype: Any = dataclasses.field(kw_only=True, default=jnp.float32)
    precision: PrecisionLike = dataclasses.field(kw_only=True, default=None)
    denominator_init: Initializer | None = dataclasses.field(kw_only=True, default=None)
    kernel_init: Initializer = dataclasses.field(kw_only=True, default=nn.initializers.lecun_normal())

    def __post_init__(self) -> None:
        if isinstance(self.features, Mapping):
            read_features(self.features)  # before Flax looks at the names
        for name in ("features", "param_dtype"):  # a module with a plain dict could not be hashed
            value = getattr(self, name)
            if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
                setattr(self, name, FrozenDict(value))
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Evaluates the block, as :func:`jaxfold.apply` does.

        Args:
            x: ``(..., d)``, any number of leading axes, of a floating dtype.

        Returns:
            ``(..., *features)``, or a dict of such by consumer, with its keys sorted.

        Raises:
            OptionError, ShapeError, StructureError, DtypeError: see the class.
        """
        require_floating("x", x)
        if not x.shape:
            raise ShapeError("x", "shape ()", "shape (..., features)", "")
        layout = read_options(
            x.shape[-1], self.features, self.width, self.epsilon, self.use_bias, self.norm_type, self.form
        )
        dtype = canonical_dtype("module", self.dtype)
        group = "consumer" if None in layout.outputs else "consumers"
        if self.has_variable("params", "denominator") and self.has_variable("params", group):
            loaded = {key: self.get_variable("params", key) for key in ("denominator", group)}
            loaded = jax.tree.map(unbox, loaded, is_leaf=lambda leaf: isinstance(leaf, AxisMetadata))
            hint = "Wrap the module in nn.scan or nn.vmap, as the original's layers were."
            check_loaded(loaded, layout, self._contraction(loaded), "x", hint)
        params = {
            "denominator": self.param("denominator", self._init_denominator, layout),
            group: self.param(group, self._init_consumers, layout),
        }
        outputs = apply(self._contraction(params), x, precision=self.precision)
        return outputs if dtype is None else jax.tree.map(lambda y: y.astype(dtype), outputs)

    def _contraction(self, params: Any) -> Contraction:
        return Contraction(_as_dict(params), self.width, float(self.epsilon), self.norm_type, self.form)

    def _init_denominator(self, key: Any, layout: Layout) -> Any:
        dtype = group_dtype(self.param_dtype, "denominator")
        return init_denominator(key, layout, self.denominator_init, dtype, _on_value)

    def _init_consumers(self, key: Any, layout: Layout) -> Any:
        groups: dict[Any, Any] = {}
        for index, name in enumerate(layout.outputs):
            path = ("consumer",) if name is None else ("consumers", name)
            dtype = group_dtype(self.param_dtype, *path)
            own = key if name is None else jax.random.fold_in(key, index)
            groups[name] = init_consumer(own, layout, name, self.kernel_init, dtype, _on_value)
        (_, tree), *_ = by_consumer(groups).items()
        return tree

    @classmethod
    def from_contraction(
        cls,
        contraction: Contraction,
        dtype: Dtype | None = None,
        precision: PrecisionLike = None,
        name: str | None = None,
    ) -> Self:
        """The definition that ``contraction.params`` load into.

        Args:
            contraction: of one block, or of a stack; the definition is then that of one member, for ``nn.scan`` or
                ``nn.vmap``.
            dtype, precision: attributes of the definition, which a contraction does not know.
            name: of the module.

        Returns:
            A definition; its ``init`` makes the tree, shapes and dtypes of ``contraction.params``.

        Raises:
            StructureError, ShapeError, DtypeError, OptionError: if the contraction does not hang together.
        """
        fields, _ = describe(contraction)
        return cls(**fields, dtype=dtype, precision=precision, name=name)

    @classmethod
    def from_layers(
        cls,
        producer: Any,
        norm: Any,
        consumers: Any | Mapping[str, Any],
        *,
        form: Form = "direct",
        dtype: Any = None,
        allow_growth: bool = False,
        name: str | None = None,
    ) -> tuple[Self, Mapping[str, Any]]:
        """Reads and contracts Linen layers.

        Args:
            producer, norm, consumers: as for :func:`jaxfold.linen.block`.
            form, dtype, allow_growth: as for :func:`jaxfold.linen.contract`; ``dtype`` is that of storage.
            name: of the module.

        Returns:
            The definition, with the original's output dtype and precision, and its ``params``.

        Raises:
            JaxfoldError: as :func:`jaxfold.linen.contract` does.
        """
        found = read(producer, norm, consumers)
        contraction = found.contract(form, dtype, allow_growth)
        return cls.from_contraction(contraction, found.dtype, found.precision, name), contraction.params


def _as_dict(tree: Any) -> Any:
    """Plain dicts throughout, whatever holds the variables, so that one trace serves them all."""
    return {key: _as_dict(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _on_value(function: Callable[[Any], Any], leaf: Any) -> Any:
    """``function`` of an array; of the array in a box, with the box kept."""
    return leaf.replace_boxed(function(unbox(leaf))) if isinstance(leaf, AxisMetadata) else function(leaf)
