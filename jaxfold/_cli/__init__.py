"""The command line: ``jaxfold demo``, ``jaxfold inspect`` and ``jaxfold contract``.

Exit status: 0 if all went well; 1 if a check failed, a block was left alone or a checkpoint is at fault; 2 for bad
usage.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxfold._cli._parser import make_parser
from jaxfold._errors import JaxfoldError, OptionError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command == "demo" and parsed.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        with _terminable():
            return _run(parsed)
    except JaxfoldError as error:
        print(f"jaxfold: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    except OSError as error:
        print(f"jaxfold: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxfold: interrupted, nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(parsed: argparse.Namespace) -> int:
    # Imported only here, so that --help answers at once.
    if parsed.command == "inspect":
        from jaxfold._cli._inspect import inspect

        return inspect(parsed)
    if parsed.command == "contract":
        from jaxfold._cli._contract import contract

        return contract(parsed)
    from jaxfold._demo import run

    return 0 if run(rounds=parsed.rounds) else 1


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception for the while, so that what is half-written is removed."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
