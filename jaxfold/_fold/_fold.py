"""fold: a function and its parameters as a function of fewer.

The function is traced once. What is known of every array (see ``_affine.py``) tells which of them are affine in
something narrower; those that are cheaper so (``_plan.py``) are computed from there. Of what is left, streams that only
norms read lose their mean (``_centring.py``). Everything else is computed as the function says.

Derivation: docs/maths.md, Beyond one block and The abstract domain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfold._algebra._storage import require_finite, round_to
from jaxfold._block._leaves import read_dtype, require_concrete
from jaxfold._block._shape import flag
from jaxfold._errors import NotFoldedError, OptionError, ShapeError, StructureError, kind_of
from jaxfold._extend import Inconclusive
from jaxfold._fold._certificate import FoldCertificate, certify
from jaxfold._fold._run import require_keys
from jaxfold._fold._trace import Trace, signature_of
from jaxfold._fold._wide import is_ordinary
from jaxfold._tree._fold_report import FoldReport, FoldRow


class Folded:
    """A function whose norms are contracted or cheaper: made by :func:`jaxfold.fold`.

    ``apply(contract(params), *inputs)`` is ``fn(params, *inputs)``, to rounding. All three functions are pure.

    Attributes:
        report: a :class:`jaxfold.FoldReport` with a row for every norm in the function.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxfold
        >>> model = nn.Sequential([nn.Dense(64), nn.LayerNorm(), nn.Dense(8)])
        >>> x = jnp.ones((5, 4))
        >>> params = model.init(jax.random.key(0), x)
        >>> folded = jaxfold.fold(model.apply, params, x)
        >>> contracted = folded.contract(params)
        >>> jnp.allclose(jax.jit(folded.apply)(contracted, x), model.apply(params, x), atol=1e-6).item()
        True
    """

    report: FoldReport

    def __init__(self, trace: Trace, report: FoldReport) -> None:
        self._trace, self.report = trace, report
        self._traces = {trace.signature: trace}

    def contract(self, params: Any) -> dict[str, Any]:
        """The contracted parameters, offline: in float64 on the host, checked, from concrete arrays.

        Args:
            params: a tree like the one that was folded with.

        Returns:
            A plain tree: ``"params"``, the leaves that stay by their path, and ``"blocks"``, the coefficients.

        Raises:
            StructureError, ShapeError, DtypeError: if the tree, a shape or a dtype differs from what was folded.
            ConcretenessError: if a leaf is a tracer; under ``jit`` or ``grad`` use :meth:`contract_traced`.
            CoefficientError: if a leaf that coefficients are made of is not finite, or a coefficient does not fit its
                dtype.
        """
        leaves = self._trace.leaves(params)
        made_from = self._trace.runner.made_from()
        for index, (path, leaf) in enumerate(zip(self._trace.paths, leaves, strict=True)):
            require_concrete(path, leaf, "Folded.contract_traced")
            if index in made_from and jnp.issubdtype(leaf.dtype, np.floating):
                require_finite(path, np.asarray(leaf).astype(np.float64))
        with np.errstate(all="ignore"):
            coefficients = self._trace.runner.contract(leaves, np)

        def store(path: Any, value: np.ndarray, dtype: Any) -> Any:
            name = "blocks" + jax.tree_util.keystr(path)
            dtype = np.dtype(dtype)
            stored = round_to(name, value, dtype, np.asarray(np.finfo(np.float64).eps * np.linalg.norm(value.ravel())))
            return jnp.asarray(stored) if jax.dtypes.canonicalize_dtype(dtype) == dtype else stored

        blocks = jax.tree_util.tree_map_with_path(store, coefficients, self._trace.runner.dtypes(coefficients))
        return {"params": self._trace.kept(leaves), "blocks": blocks}

    def contract_traced(self, params: Any) -> dict[str, Any]:
        """The same in JAX, for training: under ``jit``, ``grad`` and ``vmap``, with the original's derivatives.

        Args:
            params: a tree like the one that was folded with; leaves may be tracers, and values are not checked.

        Returns:
            A tree like that of :meth:`contract`, with the rows that the derivative of each denominator goes to.

        Raises:
            StructureError, ShapeError, DtypeError: if the tree, a shape or a dtype differs from what was folded.
        """
        leaves = self._trace.leaves(params)
        runner = self._trace.runner
        coefficients = runner.contract(leaves, jnp)
        cast = lambda array, dtype: array.astype(jax.dtypes.canonicalize_dtype(dtype))  # noqa: E731
        blocks = jax.tree.map(cast, coefficients, runner.dtypes(coefficients))
        return {"params": self._trace.kept(leaves), "blocks": blocks}

    def apply(self, contracted: Mapping[str, Any], *inputs: Any) -> Any:
        """What the function returns, from contracted parameters; not jitted by itself.

        Args:
            contracted: from :meth:`contract` or :meth:`contract_traced`.
            *inputs: as the function was folded with. For other shapes, dtypes or trees it is traced again, once for
                each; the coefficients must be the same then.

        Returns:
            A tree like the function's own.

        Raises:
            StructureError: if ``contracted`` is not of this function.
            ShapeError: if for these inputs the function would have other coefficients: fold it with such inputs.
        """
        trace = self._at(inputs)
        require_keys("contracted", contracted, {"params", "blocks"})
        return trace.apply(contracted, inputs)

    def _again(self, inputs: tuple[Any, ...], signature: Any) -> Trace:
        """Return a trace for other inputs; raises :class:`ShapeError` where symbols would be compared."""
        try:
            return self._trace.again(inputs)
        except Inconclusive as error:
            raise ShapeError(
                "inputs",
                f"{_shown(signature)}, with sizes that are no numbers, and which decide what is computed",
                "sizes that are numbers",
                "Export jax.vmap(folded.apply, (None, 0)), of which only the mapped axis has a symbolic size.",
            ) from error

    def verify(self, params: Any, *inputs: Any) -> FoldCertificate:
        """Measures the original and the folded function against the function in float64, on these inputs.

        The yardstick is the function's jaxpr with float64 in place of its floats. The certificate names the operations
        for which that cannot be done.

        Args:
            params: a tree like the one that was folded with, of concrete arrays.
            *inputs: as for :meth:`apply`; real ones by preference, since the errors depend on them.

        Returns:
            A :class:`FoldCertificate`.

        Raises:
            StructureError, ShapeError, DtypeError: as :meth:`contract` and :meth:`apply`; StructureError if no output
                is of a floating dtype.
            ConcretenessError, CoefficientError: as :meth:`contract`.
        """
        contracted, trace = self.contract(params), self._at(inputs)
        if not any(is_ordinary(aval.dtype) for aval in trace.closed.out_avals):
            raise StructureError("fn", "no output of a floating dtype", "one that has rounding errors", "")
        parts: dict[str, Callable[..., Any]] = {}
        for kind in ("contract", "centre", "absorb"):
            alone = self._trace.only(kind, inputs)
            if alone.plan.contracts:
                part = Folded(alone, self.report)
                parts[kind] = functools.partial(part.apply, part.contract(params))
        return certify(trace, params, inputs, functools.partial(self.apply, contracted), parts)

    def _at(self, inputs: tuple[Any, ...]) -> Trace:
        signature = signature_of(inputs)
        if signature not in self._traces:
            fresh = self._again(inputs, signature)
            same = fresh.runner.fingerprint == self._trace.runner.fingerprint and fresh.names == self._trace.names
            # For a batch of no rows nothing pays, but nothing has to be computed either.
            if not (same or fresh.empty):
                where = self._trace.differs(fresh) or fresh.differs(self._trace)
                raise ShapeError(
                    "inputs",
                    f"{_shown(signature)}, for which the function folds otherwise",
                    f"inputs like {_shown(self._trace.signature)}",
                    (f"The coefficients of {where} are made of the parameters in another way. " if where else "")
                    + "A batch may have another size or other axes, if fn makes the same of its parameters then. "
                    "Fold it with such inputs.",
                )
            self._traces[signature] = fresh
        return self._traces[signature]


def fold(
    fn: Callable[..., Any],
    params: Any,
    *inputs: Any,
    where: Callable[[FoldRow], bool] | None = None,
    minimum_saving: float = 0.0,
    strict: bool = False,
    dtype: Any = None,
    contract: bool = True,
    centre: bool = True,
    absorb: bool = True,
) -> Folded:
    """Finds every norm in a function and makes it as cheap as it can be without approximation.

    A transform in the family of ``jit`` and ``grad``: it reads the function's jaxpr, so any JAX code will do. Nothing
    is recognised by its spelling. A norm of something narrower is contracted, if that pays. Of other LayerNorms the
    mean is taken out of whatever writes their input, so that they become RMSNorms; scale and bias go into what reads a
    norm. See the report for what was found, and why what was left alone was.

    Args:
        fn: ``fn(params, *inputs)``, pure, of arrays in any trees.
        params: the parameters: what is known when contracting. Arrays or ``jax.ShapeDtypeStruct``.
        *inputs: example inputs, likewise, at least one; their values do not matter.
        where: which norms to change, by their row in the report. By default all.
        minimum_saving: the share of a block's parameters, net of what has to stay, that contracting must save.
        strict: whether a norm that is left alone is an error.
        dtype: storage dtype of every coefficient: float64, float32, bfloat16 or float16. By default each coefficient
            has the dtype of the arithmetic that reads it: float32 for a bfloat16 kernel that ``fn`` casts to float32
            before it multiplies. ``report.bytes`` says what it takes.
        contract: whether norms of something narrower are contracted, and affine maps without a norm between them made
            one.
        centre: whether LayerNorms lose the mean of their input to what writes it.
        absorb: whether scale and bias of norms that stay go into what reads them.

    Returns:
        A :class:`Folded`: ``contract``, ``contract_traced``, ``apply`` and ``report``.

    Raises:
        NotFoldedError: for the first norm that is left alone, if ``strict``; with its line and the reason.
        StructureError: if there is no array in ``params``, or none in ``inputs``.
        OptionError: if an option is not accepted.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxfold
        >>> model = nn.Sequential([nn.Dense(64), nn.LayerNorm(), nn.Dense(8)])
        >>> x = jnp.ones((5, 4))
        >>> params = model.init(jax.random.key(0), x)
        >>> folded = jaxfold.fold(model.apply, params, x)
        >>> folded.report.parameters
        (968, 73)
        >>> folded.apply(folded.contract(params), x).shape
        (5, 8)
    """
    if not callable(fn):
        raise OptionError("fn", kind_of(fn), "a function of params and inputs", "")
    if where is not None and not callable(where):
        raise OptionError("where", kind_of(where), "a function of a row of the report, or None", "")
    if not isinstance(minimum_saving, (int, float)) or isinstance(minimum_saving, bool) or not 0 <= minimum_saving < 1:
        raise OptionError("minimum_saving", repr(minimum_saving), "a share, at least 0 and below 1", "")
    switches = {"contract": contract, "centre": centre, "absorb": absorb}
    kinds = frozenset(name for name, on in switches.items() if flag(name, on))
    _require_arrays(params, inputs)
    options = {"minimum_saving": float(minimum_saving), "storage": read_dtype(dtype), "kinds": kinds}
    trace = Trace(fn, params, inputs, options)
    trace.choose(where)
    rows = tuple(trace.row(norm) for norm in trace.norms)
    if flag("strict", strict):
        for row in rows:
            if row.decision == "skipped":
                raise NotFoldedError(
                    row.source, f"a norm of width {row.width} that is left alone", "one that is not", row.reason
                )
    read = [trace.plan.sizes[index] for index in trace.plan.read]
    kept = [trace.plan.sizes[index] for index in trace.runner.kept]
    added = trace.runner.size()
    report = FoldReport(
        rows=rows,
        unmatched=(),
        parameters=(sum(n for n, _ in read), sum(n for n, _ in kept) + added[0]),
        bytes=(sum(b for _, b in read), sum(b for _, b in kept) + added[1]),
        unread=sum(n for n, _ in trace.plan.sizes) - sum(n for n, _ in read),
        means=trace.centring.means,
        merged=trace.merged,
    )
    return Folded(trace, report)


def _require_arrays(params: Any, inputs: tuple[Any, ...]) -> None:
    """Raises :class:`StructureError` where nothing could be found: without inputs, or with constants as parameters."""
    if not jax.tree.leaves(inputs):
        raise StructureError(
            "inputs",
            "none" if not inputs else "no array in them",
            "at least one array, as in fold(fn, params, x)",
            "fn is called as fn(params, *inputs). For an NNX model: graphdef, state = nnx.split(model), and "
            "fold(lambda state, x: nnx.merge(graphdef, state)(x), state, x).",
        )
    if not jax.tree.leaves(params):
        raise StructureError(
            "params",
            "no array",
            "a tree of at least one",
            "Arrays that fn closes over are constants of it, which fold neither counts nor moves: pass them as params.",
        )


def _shown(signature: Any) -> str:
    """Shapes and dtypes of inputs, the first few."""
    each = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in signature[1]]
    return ", ".join(each[:8]) + (", …" if each[8:] else "")
