"""Converting a large checkpoint with one small block, beside copying it.

    python -m benchmarks.checkpoints [--gib 2] [--rounds 5] [--formats npz msgpack safetensors orbax] [--folder DIR]

For each format the reference library writes a checkpoint of the given size in a temporary folder. Copying (``cp -r``)
and converting (``jaxfold contract``) then take turns, each in a process of its own, with the disk's queue drained
before.

copying             seconds of cp, median
conversion / copy   ratio of the medians, with ``--rows 0`` and without what it takes to start Python and import JAX
errors, s           seconds more with ``--rows 64``: JAX compiles what measures errors, the same for any file
process, s          seconds more for the whole process, start and imports included
peak memory         the largest resident set of the converting process, and what of it the imports alone take

Files are 0.25 GiB to a leaf. Both go through the page cache, so a folder on a slow disk measures the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.tables import show

GIB = 2**30
FORMATS = {"npz": ".npz", "msgpack": ".msgpack", "safetensors": ".safetensors", "orbax": ".orbax"}
COLUMNS = ("format", "GiB", "copying, s", "conversion / copy", "errors, s", "process, s", "peak, GiB", "imports, GiB")


def main() -> None:
    options = _options()
    if options.convert:
        path, out, rows = options.convert
        print(json.dumps(_convert(pathlib.Path(path), pathlib.Path(out), int(rows))))
        return
    rows = []
    for format in options.formats:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = pathlib.Path(folder) / f"checkpoint{FORMATS[format]}"
            # In a process of its own, whose memory goes back to the system.
            subprocess.run([*_ME, "--make", format, str(path), "--gib", str(options.gib)], check=True)
            rows.append([format, *_row(path, options.rounds)])
    show(f"{options.gib} GiB, one block 82/512/512", COLUMNS, rows, markdown=options.markdown)


_ME = (sys.executable, "-m", "benchmarks.checkpoints")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of a checkpoint (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of copying and converting (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--folder", help="where the temporary folder is made")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--convert", nargs=3, metavar=("FROM", "TO", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, metavar=("FORMAT", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        _make(options.make[0], pathlib.Path(options.make[1]), options.gib)
        sys.exit()
    return options


def _tree(gib: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    block = {
        "up": {"kernel": draw(82, 512), "bias": draw(512)},
        "norm": {"scale": draw(512), "bias": draw(512)},
        "down": {"kernel": draw(512, 512), "bias": draw(512)},
    }
    rest = {f"layer_{index}": {"kernel": draw(8192, 8192)} for index in range(max(1, round(gib * 4)))}
    return {"head": block, **rest}


def _make(format: str, path: pathlib.Path, gib: float) -> None:
    tree = _tree(gib)
    if format == "orbax":
        import orbax.checkpoint as ocp

        ocp.PyTreeCheckpointer().save(path, tree)
        return
    if format == "msgpack":
        import flax.serialization

        path.write_bytes(flax.serialization.msgpack_serialize(tree, in_place=True))
        return
    import flax.traverse_util

    flat: Any = flax.traverse_util.flatten_dict(tree, sep="/")
    if format == "npz":
        np.savez(path, **flat)
    else:
        import safetensors.numpy

        safetensors.numpy.save_file(flat, path)


def _convert(path: pathlib.Path, out: pathlib.Path, rows: int) -> dict[str, float]:
    """Seconds of the conversion, and bytes of the resident set before it and at its peak."""
    import jaxfold._cli._block_option as block_option
    from jaxfold._files._contract_checkpoint import contract_checkpoint

    if path.is_dir():
        import orbax.checkpoint  # noqa: F401
    block = block_option.parse_block("producer=head/up,norm=head/norm,consumer=head/down,epsilon=1e-6")
    before = _peak()
    start = time.perf_counter()
    report = contract_checkpoint(path, [block], out, rows=rows)
    seconds = time.perf_counter() - start
    if len(report.contracted) != 1:
        raise SystemExit(str(report))
    return {"seconds": seconds, "before": before, "peak": _peak()}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _row(path: pathlib.Path, rounds: int) -> list[str]:
    copy, out = path.with_name("copy"), path.with_name(f"out{path.suffix}")
    size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    commands = {"copy": ["cp", "-r", str(path), str(copy)]}
    commands |= {rows: [*_ME, "--convert", str(path), str(out), rows] for rows in ("0", "64")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    peak, before = 0.0, 0.0
    for index in range(rounds + 1):
        for name, command in commands.items():
            os.sync()
            start = time.perf_counter()
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            total = time.perf_counter() - start
            measured = {} if name == "copy" else json.loads(done.stdout.splitlines()[-1])
            _remove(copy if name == "copy" else out)
            peak, before = max(peak, measured.get("peak", 0.0)), max(before, measured.get("before", 0.0))
            if index:  # the first round warms the page cache
                times[name].append((measured.get("seconds", total), total))
    (copied, _), (bare, whole), (checked, _) = (np.median(times[name], axis=0) for name in commands)
    figures = (copied, bare / copied, checked - bare, whole - bare, peak / GIB, before / GIB)
    return [f"{size / GIB:.2f}", *(f"{figure:.2f}" for figure in figures)]


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


if __name__ == "__main__":
    main()
