"""The part of JAX that is for those who extend it, and that changes with its versions: imported here, nowhere else."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from os.path import dirname, isabs, realpath
from pathlib import PurePath
from typing import Any

import jax
from jax import core
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

__all__ = [
    "ClosedJaxpr",
    "Inconclusive",
    "Jaxpr",
    "Literal",
    "Primitive",
    "ad",
    "batching",
    "bind",
    "enable_x64",
    "line_of",
    "mlir",
]

# Raised where symbolic sizes of jax.export would have to be compared; of jax.core in older versions.
Inconclusive: type[Exception] = getattr(jax.errors, "InconclusiveDimensionOperation", None) or vars(core).get(
    "InconclusiveDimensionOperation", NotImplementedError
)


def enable_x64() -> Any:
    """A context in which functions traced by this thread may use float64, whatever ``jax_enable_x64`` says."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # before JAX 0.8

    return enable_x64()


def explicit_spec(array: Any) -> tuple[Any, ...]:
    """Return for each axis of the array the explicit mesh axes that are part of its type, or None."""
    spec = getattr(getattr(getattr(array, "aval", None), "sharding", None), "spec", None)
    return (None,) * array.ndim if spec is None else tuple(spec) + (None,) * (array.ndim - len(spec))


def with_spec(array: Any, like: Any, spec: Sequence[Any]) -> Any:
    """Return the array with its axes on these explicit axes of the mesh of ``like``; a linear map to derivatives."""
    if explicit_spec(array) == tuple(spec):
        return array
    if hasattr(jax.sharding, "reshard"):
        reshard = jax.sharding.reshard
    else:
        from jax.experimental.shard import reshard  # pyright: ignore[reportMissingImports]  # before JAX 0.7

    return reshard(array, NamedSharding(like.aval.sharding.mesh, PartitionSpec(*spec)))


def bind(equation: Any, arguments: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr's equation for other arguments, in the context that it was traced in."""
    primitive = equation.primitive
    given = primitive.get_bind_params(equation.params)
    functions, params = given if isinstance(given, tuple) else ((), given)  # a tuple before JAX 0.10
    context = source_info_util.user_context(
        equation.source_info.traceback,
        name_stack=source_info_util.current_name_stack() + equation.source_info.name_stack,
    )
    with context, equation.ctx.manager:
        outputs = primitive.bind(*functions, *arguments, **params)
    return list(outputs) if primitive.multiple_results else [outputs]


LIBRARIES = ("jax", "jaxlib", "flax", "haiku", "equinox", "jaxfold")


def is_library(file: str) -> bool:
    """Return whether ``file``, the file of a frame, belongs to one of LIBRARIES or to Python's standard library.

    A file belongs to a library if the file lies in the folder of the library's package. The names of other folders mean
    nothing: the home of a user may be named jax.
    """
    packages = (getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES)
    return _is_library(file, tuple(package for package in packages if package))


@functools.lru_cache(4096)
def _is_library(file: str, packages: tuple[str, ...]) -> bool:
    if not isabs(file):  # "<stdin>", "<string>", the cells of some notebooks
        return file.startswith("<frozen ")
    # A path as it is and a path without symbolic links: the files of a package may be links to some other folder.
    paths = [PurePath(path) for path in (file, realpath(file))]
    return any(path.is_relative_to(folder) for path in paths for folder in _folders(packages)) or any(
        _is_standard(path, PurePath(folder)) for path in paths for folder in _standard()
    )


@functools.lru_cache(64)
def _folders(packages: tuple[str, ...]) -> tuple[PurePath, ...]:
    """Return the folders of packages, given the ``__init__`` files of the packages."""
    # A single file of the name of a library is a user's: libraries are packages.
    initial = [file for file in packages if PurePath(file).stem == "__init__"]
    named = {path for file in initial for path in (dirname(file), realpath(dirname(file)), dirname(realpath(file)))}
    return tuple(PurePath(path) for path in sorted(named))


@functools.cache
def _standard() -> tuple[str, ...]:
    """Return the folders of Python's standard library."""
    folder = dirname(str(functools.__file__))
    return folder, realpath(folder)


def _is_standard(file: PurePath, folder: PurePath) -> bool:
    """Return whether ``file`` is a module of the standard library at ``folder``, which may hold site-packages too."""
    return file.is_relative_to(folder) and PurePath(file.relative_to(folder).parts[0]).stem in sys.stdlib_module_names


def line_of(equation: Any, calls: Sequence[Any] = ()) -> str:
    """The user's line that the equation was traced from, as ``file:line (function)``, and the module's name if any.

    What a jitted function holds knows its own lines only. If these are all a library's, the line is that of the
    innermost of the ``calls`` around it, given from the outermost, that has one of the user's.
    """
    frame = _frame(equation)
    for call in reversed(calls):
        if frame is not None:
            break
        frame = _frame(call)
        equation = equation if frame is None else call
    where = (
        source_info_util.summarize(equation.source_info)
        if frame is None
        else f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    )
    name = str(equation.source_info.name_stack)
    return f"{name} at {where}" if name else where


def _frame(equation: Any) -> Any:
    """The innermost frame of the equation's traceback that is the user's, or None."""
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    return next((frame for frame in frames if not is_library(frame.file_name)), None)
