"""Where a checkpoint is written: beside its place first, and moved there when it is whole."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import stat
import time
from collections.abc import Iterator

from jaxfold._errors import OptionError

TRIES = 20
IS_CHECKPOINT = "_METADATA"  # in every directory that Orbax writes a tree to


def check_output(out: pathlib.Path, source: pathlib.Path, *, overwrite: bool) -> pathlib.Path:
    """The place to write to, with symbolic links followed, if it may be written.

    Raises:
        OptionError: if there is something already and ``overwrite`` is not given; or something that must not be
            replaced anyhow: a directory that is no checkpoint, or one that holds the source; or no directory to write
            to.
    """
    target = pathlib.Path(os.path.realpath(out))
    origin = pathlib.Path(os.path.realpath(source))
    if target in origin.parents or origin in target.parents:
        got = f"{out}, which {'holds' if target in origin.parents else 'lies in'} the checkpoint that is read"
        raise OptionError("out", got, "a path beside it", "")
    if not target.parent.is_dir():
        raise OptionError("out", f"{out}", "a path in a directory that is there", f"Make {target.parent} first.")
    if target.exists():
        if not overwrite:
            got = f"{out}, which is {'the checkpoint that is read' if target == origin else 'there already'}"
            raise OptionError("out", got, "a path that is free", "Choose another, or pass --overwrite.")
        check_kind("out", out)
        if target.is_dir() and not (target / IS_CHECKPOINT).exists():
            raise OptionError(
                "out", f"{out}, a directory", "a file or an Orbax directory to overwrite", "Remove it first."
            )
    return target


def check_kind(argument: str, path: pathlib.Path) -> None:
    """Raise an error if ``path`` is a pipe, a socket or a device, because others read and write it."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        got = f"{path}, which is neither a file nor a directory"
        raise OptionError(argument, got, "a file or an Orbax directory to overwrite", "Choose another path.")


@contextlib.contextmanager
def replacing(target: pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
    """A path beside ``target`` to write to. It takes the target's place in the end, or is removed if anything failed.

    Raises:
        OptionError: if something has come to be at ``target`` in the meantime and ``overwrite`` is not given.
    """
    token = secrets.token_hex(4)
    workshop = target.with_name(f".{target.name}.{token}.tmp")  # a directory, for Orbax makes temporary ones of its own
    workshop.mkdir(mode=0o700)  # because what is replaced may be readable by its owner alone
    try:
        beside = workshop / target.name
        yield beside
        if target.exists() and not overwrite:
            raise OptionError("out", f"{target}, which is there by now", "a path that is free", "")
        if target.exists():
            check_kind("out", target)
            _keep_mode(target, beside)
        if beside.is_dir() or target.is_dir():
            _swap(beside, target, target.with_name(f".{target.name}.{token}.old"))
        else:
            beside.replace(target)
    finally:
        _remove(workshop)


def _keep_mode(old: pathlib.Path, new: pathlib.Path) -> None:
    """Give ``new`` the permissions of ``old``. Those who could read a file may enter the directory in its place."""
    mode = stat.S_IMODE(old.stat().st_mode)
    if new.is_dir() != old.is_dir():
        mode = mode | (mode & 0o444) >> 2 if new.is_dir() else mode & 0o666
    new.chmod(mode)


def _swap(new: pathlib.Path, target: pathlib.Path, away: pathlib.Path) -> None:
    """A directory cannot be replaced in one step: the old one is moved away, and back if the new one cannot come in."""
    if target.exists():
        target.rename(away)
    try:
        new.rename(target)
    except BaseException:
        if away.exists():
            away.rename(target)
        raise
    if away.is_dir():
        _remove(away)
    else:
        away.unlink(missing_ok=True)


def _remove(folder: pathlib.Path) -> None:
    """Removes a directory. Threads that are still writing after an interruption may add to it for a moment."""
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
