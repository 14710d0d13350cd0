"""Which groups of a tree can be a Dense or a norm, by the names and shapes of their leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxfold._tree._paths import Keys, children, join

ATTENTION = ("query", "key", "value")  # read one normed input, and share its denominator
BOX = "value"  # the one key of the mapping that Orbax makes of an nnx.Variable


def unwrapped(tree: Any) -> Any:
    """The tree with each ``{"value": leaf}`` as the leaf itself."""
    if isinstance(tree, Mapping):
        if set(tree) == {BOX} and not isinstance(tree[BOX], (Mapping, list, tuple)):
            return tree[BOX]
        return {key: unwrapped(value) for key, value in tree.items()}
    return [unwrapped(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def torch_weight(tree: Any, path: Keys = ()) -> str | None:
    """The path of the first matrix that has PyTorch's name for one, if any."""
    for key, value in children(tree):
        if key == "weight" and len(getattr(value, "shape", ())) > 1 and "kernel" not in tree:
            return join((*path, key))
        if below := torch_weight(value, (*path, key)):
            return below
    return None


def norm_shapes(group: Any) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a norm's leaves, if it can be one."""
    shapes = _shapes(group, {"scale", "bias"})
    good = shapes and "scale" in shapes and len(shapes["scale"]) in (1, 2) and len(set(shapes.values())) == 1
    return shapes if good else None


def dense_shapes(group: Any) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a Dense's leaves, if it can be one."""
    shapes = _shapes(group, {"kernel", "bias"})
    return shapes if shapes and len(shapes.get("kernel", ())) >= 2 else None


def _shapes(group: Any, keys: set[str]) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the leaves of a layer, if it has none but these."""
    if not isinstance(group, Mapping) or not group or not set(group) <= keys:
        return None
    shapes = {key: getattr(leaf, "shape", None) for key, leaf in group.items()}
    if any(shape is None or not all(shape) for shape in shapes.values()):
        return None
    return {key: tuple(shape) for key, shape in shapes.items() if shape is not None}


def consumers_of(groups: Any, layers: Any, width: int, stack: tuple[int, ...]) -> Iterator[dict[Keys, Any]]:
    """Each consumer by its keys below the parent; query, key and value together."""

    def fits(shapes: Any) -> bool:
        kernel, lead = shapes["kernel"], len(stack)
        return kernel[:lead] == stack and len(kernel) >= lead + 2 and kernel[lead] == width

    for key, shapes in layers.items():
        if fits(shapes):
            yield {(key,): shapes}
    for key, group in groups.items():
        below = {
            (key, name): shapes for name, value in children(group) if (shapes := dense_shapes(value)) and fits(shapes)
        }
        together = {keys: shapes for keys, shapes in below.items() if keys[1] in ATTENTION}
        if len(together) > 1:
            yield together
        for keys, shapes in below.items():
            if len(together) < 2 or keys not in together:
                yield {keys: shapes}
