"""A function traced for certain shapes, planned, and ready to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jaxfold._errors import DtypeError, ShapeError, StructureError
from jaxfold._fold._centring import Centring
from jaxfold._fold._components import LEFT_OUT
from jaxfold._fold._norms import Norm, norms
from jaxfold._fold._plan import plan_of
from jaxfold._fold._program import Program
from jaxfold._fold._run import Runner, require_keys
from jaxfold._tree._fold_report import FoldRow, shown

OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl")
MOST_NAMED = 3  # modules that a row of the report names


class Trace:
    """A function traced for certain shapes, planned, and ready to run."""

    def __init__(self, function: Callable[..., Any], params: Any, inputs: tuple[Any, ...], options: Any) -> None:
        self.function, self.signature = function, signature_of(inputs)
        flat, self.structure = jax.tree_util.tree_flatten_with_path(params)
        self.paths = _paths([path for path, _ in flat])
        self.modules = _modules(self.paths)
        self.shapes = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for _, leaf in flat]
        arrays = [leaf for _, leaf in flat]
        self.closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *inputs)
        self.out_structure = jax.tree.structure(shape)
        runtime = len(self.closed.jaxpr.invars) - len(arrays)
        program = Program(self.closed)
        depends: list[int | None] = [*(1 << index for index in range(len(arrays))), *[None] * runtime]
        sizes = [(int(np.prod(s.shape)), _nbytes(s)) for s in self.shapes]
        self.saving, self.wanted = options["minimum_saving"], options.get("wanted")
        self.left, self.storage, self.kinds = options.get("left", ()), options.get("storage"), options["kinds"]
        self.predicate: Callable[[FoldRow], bool] | None = None
        own: dict[str, Any] = {"wanted": self.wanted, "storage": self.storage, "kinds": self.kinds}
        self.plan = plan_of(program, depends, sizes, minimum_saving=self.saving, **own)
        self._finish(set())

    def _finish(self, unwanted: set[Any]) -> None:
        """Streams, norms, and what is to be run, once it is decided what is contracted."""
        self.plan.uncentred()
        self.centring = Centring(self.plan, unwanted, self.wanted, self.left)
        self.norms = norms(self.plan, self.centring)
        self.runner = Runner(self.plan)

    def choose(self, wanted: Callable[[FoldRow], bool] | None) -> None:
        """Leaves alone what the predicate does not want."""
        self.predicate = wanted
        if wanted is None:
            return
        left = [norm for norm in self.norms if norm.decision != "skipped" and not wanted(self.row(norm))]
        for norm in left:
            for component in filter(None, (norm.component, *norm.absorbing)):
                component.refuse(LEFT_OUT)
        self._finish({norm.stream for norm in left if norm.stream is not None})
        unwanted = {(norm.root, norm.quadratic) for norm in left}
        for norm in self.norms:
            if norm.decision == "skipped" and (norm.root, norm.quadratic) in unwanted:
                norm.reason = LEFT_OUT  # that alone: something could have been done about it

    @property
    def empty(self) -> bool:
        """Whether all that it does is to return arrays without entries."""
        avals = self.closed.out_avals
        plain = not any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals)
        return plain and not self.closed.effects and not any(np.prod(aval.shape) for aval in avals)

    @property
    def merged(self) -> int:
        """In how many places affine maps are computed as one without a norm's part in it."""
        normed = {id(c) for norm in self.norms if norm.decision != "skipped" for c in (norm.component, *norm.absorbing)}
        return sum(component.pays and id(component) not in normed for component in self.plan.all_components())

    @property
    def names(self) -> list[str]:
        return [self.paths[index] for index in self.runner.kept]

    def again(self, inputs: tuple[Any, ...]) -> Trace:
        """For other inputs, with the same decisions."""
        params = self.structure.unflatten(self.shapes)
        options = {"minimum_saving": 0.0, "wanted": self.runner.emissions(), "left": self.centring.left}
        options["storage"] = self.storage
        options["kinds"] = self.kinds
        return Trace(self.function, params, inputs, options)

    def differs(self, other: Trace) -> str:
        """The user's lines whose coefficients are others, or not there, in another trace of the same function."""
        there = Counter(fingerprint for fingerprint, _ in other.runner.lines())
        lines = []
        for fingerprint, line in self.runner.lines():
            there[fingerprint] -= 1
            if there[fingerprint] < 0 and line:
                lines.append(shown(line))
        return ", ".join(list(dict.fromkeys(lines))[:MOST_NAMED])

    def only(self, kind: str, inputs: tuple[Any, ...]) -> Trace:
        """The same function with one kind of change alone."""
        params = self.structure.unflatten(self.shapes)
        options = {"minimum_saving": self.saving, "kinds": self.kinds & {kind}, "storage": self.storage}
        trace = Trace(self.function, params, inputs, options)
        trace.choose(self.predicate)
        return trace

    def leaves(self, params: Any) -> list[Any]:
        leaves, structure = jax.tree.flatten(params)
        if structure != self.structure:
            raise self._other_tree(params, structure)
        for path, leaf, expected in zip(self.paths, leaves, self.shapes, strict=True):
            if jnp.shape(leaf) != expected.shape:
                raise ShapeError(path, f"shape {jnp.shape(leaf)}", f"shape {expected.shape}, as it was folded with", "")
            if jnp.result_type(leaf) != expected.dtype:
                hint = "Fold the function with parameters of that dtype."
                got = f"dtype {jnp.result_type(leaf)}"
                raise DtypeError(path, got, f"dtype {expected.dtype}, as it was folded with", hint)
        return leaves

    def _other_tree(self, params: Any, structure: Any) -> StructureError:
        """What to say of parameters in another tree than that which was folded: where they differ first."""
        expected = f"the tree that it was folded with, of {len(self.paths)} leaves such as {self.paths[0]!r}"
        folded = _keys(self.structure.unflatten(self.shapes))
        missing, unknown = _beside(folded, _keys(params)), _beside(_keys(params), folded)
        got = [f"nothing at {missing!r}"] if missing else []
        got += [f"the unknown {unknown!r}"] if unknown else []
        if not got:
            return StructureError("params", _other_container(self.structure, structure), expected, "")
        return StructureError("params", " and ".join(got), expected, "Pass the tree with the same levels.")

    def kept(self, leaves: Sequence[Any]) -> dict[str, Any]:
        return {self.paths[index]: leaves[index] for index in self.runner.kept}

    def apply(self, contracted: Mapping[str, Any], inputs: tuple[Any, ...]) -> Any:
        if self.empty:
            return self.out_structure.unflatten([jnp.zeros(aval.shape, aval.dtype) for aval in self.closed.out_avals])
        require_keys("contracted['params']", contracted["params"], set(self.names), exactly=False)
        kept = [contracted["params"][name] for name in self.names]
        self.runner.check(contracted["blocks"])
        flat = jax.tree.leaves(inputs)
        if self.plan.contracts:
            outputs = self.runner.apply(kept, contracted["blocks"], flat)
        else:
            given = dict(zip(self.runner.kept, kept, strict=True))
            unused = [given[index] if index in given else _nothing(s) for index, s in enumerate(self.shapes)]
            outputs = core.eval_jaxpr(self.closed.jaxpr, self.closed.consts, *unused, *flat)
        return self.out_structure.unflatten(outputs)

    def row(self, norm: Norm) -> FoldRow:
        """The row of one norm in the report."""

        def groups(bits: int) -> str:
            return ", ".join(dict.fromkeys(self.modules[i] for i in range(len(self.paths)) if bits >> i & 1))

        def producer(bits: int) -> str:
            count = len(dict.fromkeys(groups(bits).split(", ")))
            many = f"a stream of {count} writers" if norm.decision == "centred" else f"{count} modules"
            return many if count > MOST_NAMED else groups(bits) or "no parameter"

        component, quadratic = norm.component, norm.quadratic
        centred = quadratic is not None and (quadratic.centring() == 1.0 or quadratic.base.centred)
        return FoldRow(
            producer=producer(norm.before),
            norm=None,
            consumers=groups(norm.behind),
            decision=norm.decision,
            reason=norm.reason,
            epsilon=quadratic.offset if quadratic else 0.0,
            norm_type="layernorm" if centred else "rmsnorm",
            form="direct",
            features=quadratic.base.rows() if quadratic and quadratic.narrow() else None,
            width=norm.width,
            stack=norm.repeat if norm.repeat > 1 else None,
            use_bias=quadratic.base.bias is not None if quadratic else None,
            original=component.before if component else None,
            contracted=component.after if component and norm.decision == "contracted" else None,
            parameters=tuple(p for i, p in enumerate(self.paths) if (norm.before | norm.behind) >> i & 1),
            source=norm.line,
            weightless=norm.weightless,
            reductions=norm.reductions,
        )


def _paths(paths: list[Any]) -> list[str]:
    """Keys joined by slashes, or spelled out where that would be the same for two leaves."""
    joined = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    return joined if len(set(joined)) == len(joined) else [jax.tree_util.keystr(path) for path in paths]


def _keys(tree: Any) -> list[list[str]]:
    """For every leaf, the paths of whatever it is in, from the outermost to its own."""
    found = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [[_shown(path[:end]) for end in range(1, len(path) + 1)] for path in found]


def _shown(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _beside(own: list[list[str]], others: list[list[str]]) -> str | None:
    """The first path, as short as can be, that is in the one tree but not in the other."""
    there = {path for paths in others for path in paths}
    return next((path for paths in own for path in paths if path not in there), None)


def _other_container(expected: Any, got: Any) -> str:
    """Of two trees with the same leaves at the same paths: where their containers differ."""
    own, other = expected.node_data(), got.node_data()
    if own is None or other is None or own[0] is not other[0]:
        kinds = ["a leaf" if data is None else data[0].__name__ for data in (other, own)]
        return f"the same leaves in other containers, {kinds[0]} in place of {kinds[1]}"
    if own[1] == other[1]:
        for pair in zip(expected.children(), got.children(), strict=False):
            if pair[0] != pair[1]:
                return _other_container(*pair)
    return f"the same leaves, but a {own[0].__name__} with other static fields or empty members"


def _modules(paths: list[str]) -> list[str]:
    """The module of each leaf; a leaf beside modules is named itself."""
    parents = [path.rsplit("/", 1)[0] for path in paths]
    above = {ancestor for parent in parents for ancestor in _ancestors(parent)}
    return [path if parent in above else parent for path, parent in zip(paths, parents, strict=True)]


def _ancestors(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def _nothing(shape: Any) -> Any:
    """In place of a parameter that nothing reads."""
    extended = jnp.issubdtype(shape.dtype, jax.dtypes.extended)
    return jax.random.key(0) if extended else np.zeros(shape.shape, shape.dtype)


def signature_of(inputs: tuple[Any, ...]) -> Any:
    """Return what a trace depends on, if params stay the same: structure, shapes and dtypes, and what is around them.

    The jaxpr of a function differs with the mesh and what varies over it, and with options of JAX that are set now.
    """
    leaves, structure = jax.tree.flatten(inputs)
    types = tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
    over = tuple(_placed(leaf) for leaf in leaves)
    return structure, types, over, tuple(str(getattr(jax.config, name, None)) for name in OPTIONS), _mesh()


def _placed(leaf: Any) -> str:
    """Return how a tracer is spread over the axes of a mesh; arrays and shapes have no part in that."""
    aval = getattr(leaf, "aval", None)
    varies, sharding = getattr(aval, "vma", None), getattr(aval, "sharding", None)
    spec = getattr(sharding, "spec", None) or ()
    placed = varies or any(axis is not None for axis in spec)
    return f"{sorted(map(str, varies or ()))} {spec}" if placed else ""  # a tracer without a mesh, as an array


def _mesh() -> str:
    """Return the mesh that is set, or that a shard_map is inside of."""
    current = getattr(jax.sharding, "get_abstract_mesh", None)
    return "" if current is None else str(current())


def _nbytes(shape: Any) -> int:
    if jnp.issubdtype(shape.dtype, jax.dtypes.extended):
        return int(np.prod(shape.shape)) * shape.dtype.itemsize
    return int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize
