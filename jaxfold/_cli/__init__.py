"""The command line: ``python -m jaxfold demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status: 0, or 1 if a check of it failed."""
    parser = argparse.ArgumentParser(prog="jaxfold", description="Exact contraction of Dense-norm-Dense blocks.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="contract the trained LigandMPNN heads and check the result",
        description="Decides about each of four trained heads, contracts the one that pays, and checks it on "
        "62,500 atom pairs: counts, errors against float64, gradients, speed. Exits with 1 if a check fails.",
    )
    demo.add_argument("--rounds", type=int, default=25, help="timed rounds for the speed ratio (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1:
        parser.error("--rounds must be at least 1")

    from jaxfold._demo import run  # only here, so that --help answers at once

    return 0 if run(rounds=parsed.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
