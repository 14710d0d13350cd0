"""contract_tree from a file to a file."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from jaxfold._block._shape import Form
from jaxfold._files._formats import format_to_write, read_checkpoint, write_checkpoint
from jaxfold._files._output import check_output
from jaxfold._tree._block_paths import BlockPaths
from jaxfold._tree._contract_tree import contract_tree
from jaxfold._tree._fold_report import FoldReport


def contract_checkpoint(
    checkpoint: pathlib.Path,
    blocks: Sequence[BlockPaths],
    out: pathlib.Path,
    *,
    form: Form = "direct",
    dtype: Any = None,
    allow_growth: bool = False,
    strict: bool = False,
    rows: int = 64,
    overwrite: bool = False,
) -> FoldReport:
    """Contracts blocks of a checkpoint into another one, in which every other leaf has the bytes that it had.

    Of the arrays, those of the blocks alone are loaded (from Orbax: all of them, once). Nothing is written if no block
    was contracted.

    Args:
        checkpoint: an .npz, .msgpack or .safetensors file, or an Orbax directory.
        blocks, form, dtype, allow_growth, strict, rows: as for :func:`jaxfold.contract_tree`.
        out: where the result goes; its suffix names its format, which is that of the source if there is none.
        overwrite: whether what is at ``out`` may be replaced.

    Returns:
        The report of :func:`jaxfold.contract_tree`.

    Raises:
        OptionError: if there is no checkpoint, or ``out`` cannot be written to or has a suffix that names no format.
        StructureError: if the checkpoint is damaged or of an unknown format.
        JaxfoldError: as :func:`jaxfold.contract_tree` does.
    """
    source = read_checkpoint(checkpoint)
    format = format_to_write(out, source)
    target = check_output(out, source.path, overwrite=overwrite)
    tree, report = contract_tree(
        source.tree, blocks, form=form, dtype=dtype, allow_growth=allow_growth, strict=strict, rows=rows
    )
    if report.contracted:
        write_checkpoint(tree, target, source, format, overwrite=overwrite)
    return report
