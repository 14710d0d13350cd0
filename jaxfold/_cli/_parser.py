"""Options of the command line."""

from __future__ import annotations

import argparse
import pathlib

FORMATS = ".npz, .msgpack (Flax), .safetensors, or an Orbax directory"
BLOCK_HELP = (
    "the paths of a block and its epsilon: producer=PATH,norm=PATH,consumer=PATH,epsilon=NUMBER. Several consumers are "
    "consumers.NAME=PATH each. norm=None, or no norm, for one without parameters. norm_type=layernorm or rmsnorm, "
    "which must be given unless the norm has a bias. Also unit_offset, stacked, keep_producer, to=PATH. A * in the "
    "producer's path stands for any part of a key, and for the same in the other paths. May be given several times"
)


STATUS = (
    "exit status: 0 if all is done; 1 if the result was written, but a block was left alone, a pattern matched "
    "nothing, or the report could not be printed or saved; 2 if nothing was written: bad usage, a file that is damaged "
    "or cannot be read, or no block that could be contracted; 129 after SIGHUP, 130 after SIGINT, 143 after SIGTERM."
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="jaxfold", description="Exact contraction of Dense-norm-Dense blocks.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="contract the trained LigandMPNN heads and check the result",
        description="Decides about each of four trained heads, contracts the one that pays, and checks it on "
        "62,500 atom pairs: counts, errors against float64, gradients, speed. Exits with 1 if a check fails.",
    )
    demo.add_argument("--rounds", type=int, default=25, help="timed rounds for the speed ratio (default: %(default)s)")
    _add_inspect(commands)
    _add_contract(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="list the blocks of a checkpoint that could be contracted",
        description="Lists what could be a Dense-norm-Dense block, by paths and shapes; no values are read. What is "
        "below opt_state is passed over.",
        epilog="exit status: 0 if the list was printed, also if it is empty; 2 if not: bad usage, or a file that is "
        "damaged or cannot be read.",
    )
    inspect.add_argument("checkpoint", type=pathlib.Path, help=FORMATS)
    inspect.add_argument("--all", action="store_true", help="list those too that would not become smaller")
    inspect.add_argument("--json", action="store_true", help="print JSON")


def _add_contract(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    contract = commands.add_parser(
        "contract",
        help="contract blocks of a checkpoint into a new one",
        description="Contracts the named blocks. Every other leaf keeps its bytes. Where a block must be left alone or "
        "a pattern matches nothing, the rest is contracted and written all the same, unless --strict.",
        epilog=STATUS,
    )
    contract.add_argument("checkpoint", type=pathlib.Path, help=FORMATS)
    contract.add_argument("--block", action="append", required=True, metavar="KEY=VALUE,…", help=BLOCK_HELP)
    contract.add_argument(
        "--out",
        type=pathlib.Path,
        required=True,
        help="where to write; the suffix names the format: .npz, .msgpack, .flax, .safetensors, .orbax (a directory); "
        "without one it is that of the checkpoint",
    )
    contract.add_argument(
        "--form", choices=("direct", "packed", "standard"), default="direct", help="see jaxfold.contract"
    )
    contract.add_argument("--dtype", help="of the coefficients: float64, float32, bfloat16 or float16")
    contract.add_argument("--allow-growth", action="store_true", help="go on where a block becomes larger")
    contract.add_argument("--strict", action="store_true", help="write nothing unless every block can be contracted")
    contract.add_argument("--overwrite", action="store_true", help="replace what is at --out and --report")
    contract.add_argument("--report", type=pathlib.Path, metavar="FILE.json", help="write the report there as well")
    contract.add_argument(
        "--rows", type=int, default=64, help="random inputs to measure errors on, 0 for none (default: %(default)s)"
    )
