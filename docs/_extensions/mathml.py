"""Formulas as MathML, which browsers draw by themselves: pages can be read offline and run no script for them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def _written(translator: Any, node: nodes.Element, *, block: bool) -> None:
    try:
        formula = tex2mathml(node.astext().strip(), as_block=block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        formula = f"<code>{translator.encode(node.astext())}</code>"
    number = f'<span class="eqno">({node["number"]})</span>' if block and node.get("number") else ""
    translator.body.append(f'<div class="math">{number}{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the renderer ``mathml``."""
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(lambda translator, node: _written(translator, node, block=False), None),
        block_renderers=(lambda translator, node: _written(translator, node, block=True), None),
    )
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
