"""The part of JAX that is for those who extend it, and that changes with its versions: imported here, nowhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["ClosedJaxpr", "Jaxpr", "Literal", "Primitive", "ad", "batching", "bind", "enable_x64", "line_of", "mlir"]


def enable_x64() -> Any:
    """A context in which functions traced by this thread may use float64, whatever ``jax_enable_x64`` says."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # before JAX 0.8

    return enable_x64()


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


LIBRARIES = re.compile(r"[/\\\\](jax|jaxlib|flax|haiku|equinox|jaxfold)[/\\\\](?!.*[/\\\\]site-packages[/\\\\])")


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
    return next((frame for frame in frames if not LIBRARIES.search(frame.file_name)), None)
