"""``.. command-help:: contract`` is what ``jaxfold contract --help`` prints."""

from __future__ import annotations

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from jaxfold._cli import main


class CommandHelp(SphinxDirective):
    """The help of the command, or of the subcommand that is named."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Runs it in this process."""
        os.environ["COLUMNS"] = "96"
        text = StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            main([*self.arguments, "--help"])
        return [nodes.literal_block(text.getvalue(), text.getvalue(), language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
