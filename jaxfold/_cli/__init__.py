"""The command line: ``jaxfold demo``, ``jaxfold inspect`` and ``jaxfold contract``.

Exit status: 0 if all is done; 1 if the result was written but not everything went as asked (a block was left alone, a
pattern matched nothing, the report could not be printed or saved), or a check of the demo failed; 2 if nothing was
written, because of bad usage, a file that is damaged or cannot be read, or as no block could be contracted; 129, 130
and 143 after SIGHUP, SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxfold._cli._parser import make_parser
from jaxfold._cli._streams import lenient
from jaxfold._errors import JaxfoldError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    with lenient() as output:
        parser = make_parser()
        parsed = parser.parse_args(arguments, argparse.Namespace(written=False))
        if parsed.command == "demo" and parsed.rounds < 1:
            parser.error("--rounds must be at least 1")
        status = _guarded(parsed)
        output.flush()
        if output.error is not None:
            written = f"; {parsed.out} was written" if parsed.written else ""
            print(f"jaxfold: error: standard output: {output.error}{written}", file=sys.stderr)
            status = max(status, 1 if parsed.written else 2)
        return status


def _guarded(parsed: argparse.Namespace) -> int:
    """Runs a subcommand; errors that are the user's to mend, and interrupts, become a message and a status."""
    try:
        with _terminable():
            return _run(parsed)
    except (JaxfoldError, OSError) as error:
        print(f"jaxfold: error: {error}{_what_was_written(parsed)}", file=sys.stderr)
        return 1 if parsed.written else 2
    except Exception as error:  # Python's own exit status, 1, would say that the result was written
        text = (str(error).splitlines() or ["unexpected"])[0]
        print(f"jaxfold: error: {type(error).__name__}: {text}{_what_was_written(parsed)}", file=sys.stderr)
        return 1 if parsed.written else 2
    except KeyboardInterrupt:
        print(f"jaxfold: interrupted{_what_was_written(parsed) or '; nothing was written'}", file=sys.stderr)
        return 128 + signal.SIGINT


def _what_was_written(parsed: argparse.Namespace) -> str:
    return f"; {parsed.out} was written before" if parsed.written else ""


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
    """Signals as an exception for the while, so that what is half-written is removed.

    After the first one the others are ignored, because a second one would interrupt the removal.
    """
    before: dict[int, Any] = {}

    def leave(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    try:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the last is not there on Windows
            number = getattr(signal, name, None)
            # An ignored signal stays ignored, as nohup and background jobs of a shell want it.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
