"""Whether the layers of a block, as a model calls them, feed each other and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import flax.linen as nn

from jaxfold._block._shape import consumer_path
from jaxfold._errors import StructureError
from jaxfold._layers._resolve import Resolved
from jaxfold.linen._record import Call, Record

Path = tuple[str, ...]


def check_chain(record: Record, found: Resolved, keep_producer: bool) -> None:
    """Producer to norm to every consumer, in every call, with nothing between.

    Raises:
        StructureError: naming the role of the layer at fault.
    """
    roles = {"producer": found.producer, "norm": found.norm}
    roles |= {consumer_path(name): keys for name, keys in found.consumers.items()}
    calls = {role: record.of(path) for role, path in roles.items()}
    for role, own in calls.items():
        if not own:
            raise StructureError(role, "a module that isn't called", "a layer that the model calls", "")
    if any(call.masked for call in calls["norm"]):
        hint = "Statistics over some of the features only cannot be contracted."
        raise StructureError("norm", "a mask", "a norm over all its features", hint)

    produced, normed = (_outputs(calls[role]) for role in ("producer", "norm"))
    fed = any(call.reads(produced) for call in calls["norm"])  # a block called twice as a whole feeds itself too
    for later in [role for role in roles if role != "producer" and not fed]:
        for call in calls["producer"]:
            if call.reads(_outputs(calls[later])):
                got = f"a layer that reads the output of {later} ({_show(roles[later])}): called the other way round"
                hint = "In a compact method the outer layer of a nested call is named first: swap the paths."
                raise StructureError("producer", got, "the layer that the norm reads", hint)
    _require_reader(record, "norm", calls["norm"], produced, "producer", found.producer)
    consumers = {role: own for role, own in calls.items() if role not in ("producer", "norm")}
    for role, own in consumers.items():
        _require_reader(record, role, own, normed, "norm", found.norm)
    _require_read("producer", calls["producer"], {"norm": calls["norm"]})
    _require_read("norm", calls["norm"], consumers)

    allowed = [found.norm, *found.consumers.values()]
    if not keep_producer and (other := _other_reader(record, produced, [found.norm])):
        hint = "Its kernel has to stay then: pass keep_producer=True."
        raise StructureError("producer", f"an output that {other}", "an output that only the norm reads", hint)
    if other := _other_reader(record, normed, allowed):
        hint = "Name every layer that reads it as a consumer; a norm that something else reads has to stay."
        raise StructureError("norm", f"an output that {other}", "an output that only the consumers read", hint)


def check_kernels(record: Record, role: str, path: Path) -> None:
    """That a layer computes with the kernel that it stores.

    Raises:
        StructureError: naming the role, if a wrapper puts another kernel in its place.
    """
    for call in record.calls:
        if not isinstance(call.module, (nn.WeightNorm, nn.SpectralNorm)):
            continue
        inner = tuple(call.module.layer_instance.path)
        if path[: len(inner)] == inner:
            kind = type(call.module).__name__
            got = f"a layer inside a {kind} ({_show(call.path)}), which computes its kernel"
            hint = "Evaluate the kernel that it makes, and use a plain layer with that."
            raise StructureError(role, got, "a layer with a kernel of its own", hint)


def _outputs(calls: Iterable[Call]) -> set[int]:
    return {id(array) for call in calls for array in call.outputs}


def _require_reader(record: Record, role: str, calls: list[Call], sources: set[int], before: str, path: Path) -> None:
    """Every call's first input is one of ``sources``."""
    for call in calls:
        if call.inputs and id(call.inputs[0]) in sources:
            continue
        makers = [other for other in record.calls if other.returns({id(array) for array in call.inputs[:1]})]
        # Whoever encloses the module that computed the array returns it too, later.
        maker = next((other for other in makers if not other.passes_through()), None)
        got = f"an input from {_show(maker.path)} ({type(maker.module).__name__})" if maker else "an input of its own"
        expected = f"the output of {before} ({_show(path)}), and nothing between"
        times = f" in one of {len(calls)} calls" if len(calls) > 1 else ""
        hint = (
            f"Something stands between {before} and {role}: a nonlinearity, a sum, a dropout in training mode, or a "
            "lifted transformation of the layer alone."
        )
        raise StructureError(role, got + times, expected, hint)


def _require_read(role: str, calls: list[Call], readers: dict[str, list[Call]]) -> None:
    for reader, own in readers.items():
        for call in calls:
            if not any(other.reads(_outputs([call])) for other in own):
                got = f"a layer that is called {len(calls)} times, one of them not for {reader}"
                hint = "A layer that is also used elsewhere has to stay as it is."
                raise StructureError(role, got, f"a layer that is called for {reader} alone", hint)


def _other_reader(record: Record, arrays: set[int], readers: list[Path]) -> str | None:
    """Who else reads or returns an array, in words; modules that enclose a reader hand it on."""
    for call in record.calls:
        if not call.path and call.returns(arrays) and not call.passes_through():
            return "the model returns"
        encloses = any(path[: len(call.path)] == call.path for path in readers)
        if call.reads(arrays) and not encloses and not call.passes_through():
            return f"{_show(call.path)} ({type(call.module).__name__}) reads too"
    return None


def _show(path: Path) -> str:
    return "/".join(map(str, path)) or "the model itself"
