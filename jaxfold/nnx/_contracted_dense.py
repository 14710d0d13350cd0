"""An NNX module that evaluates a contracted block; its state is the contraction's params."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfold._block._apply import apply
from jaxfold._block._contraction import Contraction
from jaxfold._block._shape import Form, NormType
from jaxfold._layers._describe import check_loaded, describe
from jaxfold._layers._initializers import init_consumer, init_denominator
from jaxfold._layers._layer import canonical_dtype
from jaxfold._layers._layout import Layout, group_dtype, read_options
from jaxfold.nnx._read import read

Features = int | Sequence[int]
lecun_normal = nnx.initializers.lecun_normal()


class Group(nnx.Module):
    """The leaves of the denominator, or of one consumer."""

    kernel: nnx.Param
    bias: nnx.Param

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        for name in leaves:  # an absent bias leaves no attribute behind
            setattr(self, name, nnx.Param(leaves[name]))


class ContractedDense(nnx.Module):
    """Linear, norm and Linear as one layer that never makes the wide activation.

    Its state has the paths of ``Contraction.params`` of the same form, with ``nnx.Param`` leaves. Training
    it trains D, R and c, which is another model than the original.

    Args:
        in_features: d, of the input.
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
            Either may be wrapped in ``nnx.with_partitioning``, with names for the axes of the leaf as it is stored.
        rngs: of which the stream ``params`` is used.

    Attributes:
        denominator: the group of variables ``kernel`` and, with ``use_bias``, ``bias``.
        consumer: the same of a single consumer; ``consumers`` holds several by name.

    Raises:
        OptionError: if an argument is not accepted; when called, if ``epsilon`` is out of the range of the arithmetic.
        ShapeError: when called, if ``x`` has another width than ``in_features``, or the variables hold what was loaded
            from a block of other sizes or another form.
        StructureError: when called, if what was loaded has other leaves.
        DtypeError: when called, if ``x`` is not real floating.

    Example:
        >>> from flax import nnx
        >>> import jax, jax.numpy as jnp, jaxfold.nnx
        >>> layer = jaxfold.nnx.ContractedDense(4, 3, width=32, epsilon=1e-6, rngs=nnx.Rngs(0))
        >>> layer.denominator.kernel.shape, layer.consumer.kernel.shape
        ((4, 5), (6, 3))
        >>> layer(jnp.ones((7, 4))).shape
        (7, 3)
    """

    denominator: Any
    consumer: Any
    consumers: Any

    def __init__(
        self,
        in_features: int,
        features: Features | Mapping[str, Features],
        *,
        width: int,
        epsilon: float,
        use_bias: bool = True,
        norm_type: NormType = "layernorm",
        form: Form = "direct",
        dtype: Dtype | None = None,
        param_dtype: Any = jnp.float32,
        precision: PrecisionLike = None,
        denominator_init: Initializer | None = None,
        kernel_init: Initializer = lecun_normal,
        rngs: nnx.Rngs,
    ) -> None:
        layout = read_options(in_features, features, width, epsilon, use_bias, norm_type, form)
        outputs = layout.outputs
        self.in_features = layout.features
        self.features = outputs[None] if None in outputs else FrozenDict(outputs)
        self.width = layout.width
        self.epsilon = float(epsilon)
        self.use_bias = layout.use_bias
        self.norm_type: NormType = norm_type
        self.form: Form = form
        self.dtype = canonical_dtype("module", dtype)
        self.precision = precision
        own = group_dtype(param_dtype, "denominator")
        self.denominator = Group(init_denominator(rngs.params(), layout, denominator_init, own, _on_value))
        groups: dict[Any, Any] = {}
        for name in outputs:
            own = group_dtype(param_dtype, *(("consumer",) if name is None else ("consumers", name)))
            groups[name] = Group(init_consumer(rngs.params(), layout, name, kernel_init, own, _on_value))
        if None in groups:
            self.consumer = groups[None]
        else:
            self.consumers = nnx.Dict(groups)

    def __call__(self, x: Any) -> Any:
        """Evaluates the block, as :func:`jaxfold.apply` does.

        Args:
            x: ``(..., d)``, any number of leading axes, of a floating dtype.

        Returns:
            ``(..., *features)``, or a dict of such by consumer, with its keys sorted.

        Raises:
            OptionError, ShapeError, StructureError, DtypeError: see the class.
        """
        contraction = self.contraction
        self._check_loaded(contraction)
        outputs = apply(contraction, x, precision=self.precision)
        return outputs if self.dtype is None else jax.tree.map(lambda y: y.astype(self.dtype), outputs)

    def _check_loaded(self, contraction: Contraction) -> None:
        """That the variables are what the arguments describe: ``nnx.update`` takes any shapes."""
        outputs: dict[Any, Any] = {None: self.features} if isinstance(self.features, tuple) else {**self.features}
        layout = Layout(self.in_features, outputs, self.width, self.use_bias, self.form)
        # Some versions of Flax keep groups that have no place here beside the module's own.
        loaded = {key: _values(getattr(self, key)) for key in ("denominator", "consumer") if hasattr(self, key)}
        if hasattr(self, "consumers"):
            loaded["consumers"] = {name: _values(self.consumers[name]) for name in self.consumers}
        hint = "Call the module in nnx.scan or nnx.vmap, as the original's layers were."
        check_loaded(loaded, layout, contraction, "in_features", hint)

    @property
    def contraction(self) -> Contraction:
        """The variables' values as a :class:`jaxfold.Contraction`, to convert or certify, say."""
        params: dict[str, Any] = {"denominator": _values(self.denominator)}
        if isinstance(self.features, tuple):
            params["consumer"] = _values(self.consumer)
        else:
            params["consumers"] = {name: _values(self.consumers[name]) for name in self.features}
        return Contraction(params, self.width, self.epsilon, self.norm_type, self.form)

    @classmethod
    def from_contraction(
        cls, contraction: Contraction, *, dtype: Dtype | None = None, precision: PrecisionLike = None
    ) -> Self:
        """The module that evaluates a contraction, loaded with its values.

        Args:
            contraction: of one block, or of a stack; the module then has stacked variables, as ``nnx.vmap`` makes, and
                is called in ``nnx.vmap`` or ``nnx.scan``.
            dtype, precision: of the output, which a contraction does not know.

        Returns:
            A new module.

        Raises:
            StructureError, ShapeError, DtypeError, OptionError: if the contraction does not hang together.
        """
        fields, in_features = describe(contraction)
        module = nnx.eval_shape(lambda: cls(in_features, **fields, dtype=dtype, precision=precision, rngs=nnx.Rngs(0)))
        module.denominator = Group(_placed(contraction.params["denominator"]))
        for name, group in contraction.consumers.items():
            if name is None:
                module.consumer = Group(_placed(group))
            else:
                module.consumers[name] = Group(_placed(group))
        return module

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
    ) -> Self:
        """Reads and contracts NNX layers.

        Args:
            producer, norm, consumers: as for :func:`jaxfold.nnx.block`.
            form, dtype, allow_growth: as for :func:`jaxfold.nnx.contract`; ``dtype`` is that of storage.

        Returns:
            A new module, with the original's output dtype and precision; the layers are not changed.

        Raises:
            JaxfoldError: as :func:`jaxfold.nnx.contract` does.
        """
        found = read(producer, norm, consumers)
        contraction = found.contract(form, dtype, allow_growth)
        return cls.from_contraction(contraction, dtype=found.dtype, precision=found.precision)


def _values(group: Any) -> dict[str, Any]:
    return {name: _value(getattr(group, name)) for name in ("kernel", "bias") if hasattr(group, name)}


def _value(variable: Any) -> Any:
    return variable.get_value() if hasattr(variable, "get_value") else variable.value


def _placed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves as JAX arrays, except where JAX cannot hold their dtype now."""

    def place(leaf: Any) -> Any:
        return jnp.asarray(leaf) if jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype else leaf

    return {name: place(leaf) for name, leaf in group.items()}


def _on_value(function: Callable[[Any], Any], leaf: Any) -> Any:
    """``function`` of an array; of the array that comes with metadata, with that kept."""
    if isinstance(leaf, nnx.VariableMetadata):
        return dataclasses.replace(leaf, raw_value=function(leaf.raw_value))
    return function(leaf)
