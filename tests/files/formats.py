"""Checkpoints written and read by the libraries that define the formats."""

from __future__ import annotations

import pathlib
from typing import Any

import flax.serialization
import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import safetensors.numpy

from jaxfold import BlockPaths

FORMATS = ("npz", "msgpack", "safetensors", "orbax")
EPSILON = 1e-3
BLOCK = BlockPaths(producer="net/up", norm="net/norm", consumers="net/down", epsilon=EPSILON)
SIZES = (4, 32, 8)  # d, n, m
GONE = ("net/up/kernel", "net/up/bias", "net/norm/scale", "net/norm/bias", "net/down/kernel", "net/down/bias")
NEW = ("net/up/denominator/kernel", "net/up/denominator/bias", "net/up/consumer/kernel")


def make_block(seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    d, n, m = SIZES

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    return {
        "up": {"kernel": draw(d, n), "bias": draw(n)},
        "norm": {"scale": draw(n), "bias": draw(n)},
        "down": {"kernel": draw(n, m), "bias": draw(m)},
    }


def make_tree(format: str) -> dict[str, Any]:
    """A block among leaves of many kinds, all that the format has, in an order that sorting would change."""
    rng = np.random.default_rng(1)
    tree: dict[str, Any] = {
        "zebra": {"table": rng.standard_normal((300, 70), dtype=np.float32)},  # too large for the small ones' way
        "net": make_block(),
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "count": np.arange(7, dtype=np.int32),
        "mask": np.array([True, False, True]),
        "apple": {"double": rng.standard_normal((2, 2)), "step": np.array(12, np.int32)},
    }
    if format != "npz":
        tree["narrow"] = rng.standard_normal((11, 3)).astype(jnp.bfloat16)
    if format != "orbax":
        tree["none"] = np.zeros((0, 3), np.float32)
    if format in ("msgpack", "orbax"):
        tree |= {
            "lists": [np.ones(2, np.float32), {"deep": np.zeros(1)}],
            "name": "a string",
            "number": 2.5,
            "whole": 3,
        }
    if format == "msgpack":
        tree |= {"nothing": None, "yes": True, "raw": b"\x00\xff", "complex": 1 + 2j, "scalar": np.float32(0.1)}
    return tree


def path_of(folder: pathlib.Path, format: str, name: str = "checkpoint") -> pathlib.Path:
    return folder / f"{name}.{format}"


def save(path: pathlib.Path, tree: Any, format: str, *, separator: str = "/", **options: Any) -> None:
    if format == "orbax":
        ocp.PyTreeCheckpointer().save(path, tree)
    elif format == "msgpack":
        path.write_bytes(flax.serialization.msgpack_serialize(tree))
    else:
        flat: Any = flax.traverse_util.flatten_dict(tree, sep=separator)
        if format == "npz":
            np.savez(path, **flat)
        else:
            safetensors.numpy.save_file(flat, path, **options)


def load(path: pathlib.Path, format: str) -> dict[str, Any]:
    """The leaves by their names, in the order of the file."""
    if format == "npz":
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    if format == "safetensors":
        # safetensors.numpy reads no bfloat16, and safetensors.flax no float64 unless jax_enable_x64 is on.
        entries = dict(safetensors.deserialize(path.read_bytes()))
        return {name: _array(entries[name]) for name in _order(path)}
    if format == "msgpack":
        return flatten(flax.serialization.msgpack_restore(path.read_bytes()))
    checkpointer = ocp.PyTreeCheckpointer()
    found: Any = checkpointer.metadata(path).item_metadata
    restore_args = ocp.checkpoint_utils.construct_restore_args(found.tree)
    return flatten(checkpointer.restore(path, restore_args=restore_args))


def _order(path: pathlib.Path) -> list[str]:
    with safetensors.safe_open(path, framework="np") as file:
        return list(file.offset_keys())


def _array(entry: Any) -> np.ndarray:
    dtypes = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
    dtypes |= {"I32": "int32", "I64": "int64"}
    return np.frombuffer(bytearray(entry["data"]), dtypes[entry["dtype"]]).reshape(entry["shape"])


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return {path: tree}
    flat = {}
    for key, value in items:
        flat |= flatten(value, f"{path}/{key}" if path else str(key))
    return flat


def identical(a: Any, b: Any) -> bool:
    """Type, dtype, shape and every bit."""
    if isinstance(a, (np.ndarray, np.generic)) or hasattr(a, "addressable_shards"):
        x, y = np.asarray(a), np.asarray(b)
        return isinstance(a, np.generic) == isinstance(b, np.generic) and (x.dtype, x.shape, x.tobytes()) == (
            y.dtype,
            y.shape,
            y.tobytes(),
        )
    return type(a) is type(b) and a == b
