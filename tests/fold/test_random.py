"""Random programs: none comes out wrong, and enough of their norms are contracted or centred."""

from __future__ import annotations

import jax
import pytest

import jaxfold
from benchmarks.programs import KINDS, Outcome, derivatives, examine, resized
from jaxfold._fold._blind import Axes, Blindness
from jaxfold._fold._program import Value

CHUNKS, EACH = 2, 100
STREAM_CHUNKS, STREAMS_EACH = 4, 40
# Entries are about 1, but a program may multiply arrays and take differences: see the benchmark for a count of these.
FLOAT64 = 1e-9

pytestmark = [pytest.mark.maths, pytest.mark.usefixtures("x64", "usual")]


def wrong(outcomes: list[Outcome]) -> list[tuple[int, float]]:
    return [(o.seed, o.error) for o in outcomes if not o.error < FLOAT64]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk: int) -> None:
    outcomes = [examine(seed) for seed in range(chunk * EACH, (chunk + 1) * EACH)]
    assert wrong(outcomes) == []
    # Two of three over many programs; chunks of 100 hardly differ.
    norms = sum(o.norms for o in outcomes)
    assert norms > EACH // 2
    assert sum(o.count("contracted") for o in outcomes) >= 0.5 * norms


@pytest.mark.parametrize("chunk", range(STREAM_CHUNKS))
def test_random_streams(chunk: int) -> None:
    outcomes = [examine(seed, "streams") for seed in range(chunk * STREAMS_EACH, (chunk + 1) * STREAMS_EACH)]
    assert wrong(outcomes) == []
    # One of three over many programs.
    norms = sum(o.norms for o in outcomes)
    assert norms > 2 * STREAMS_EACH
    assert sum(o.count("centred") for o in outcomes) >= 0.2 * norms
    assert sum(o.weightless for o in outcomes) >= 0.1 * norms


@pytest.mark.parametrize("seed", range(2))
def test_derivatives(seed: int) -> None:
    assert derivatives(seed, "streams") < FLOAT64


def test_other_shapes() -> None:
    """Right, or refused: NaN."""
    errors = [error for seed in range(2) for error in resized(seed, "streams")]
    assert not any(error >= FLOAT64 for error in errors)
    assert any(error < FLOAT64 for error in errors)


def test_control() -> None:
    """The comparison fails where one array of coefficients is off by a millionth."""
    errors = [examine(seed, spoil=1e-6) for seed in range(8)]
    assert sum(o.error > FLOAT64 for o in errors if o.count("contracted")) >= 4


def test_control_of_streams() -> None:
    errors = [examine(seed, "streams", spoil=1e-6) for seed in range(4)]
    assert sum(o.error > FLOAT64 for o in errors if o.count("centred", "absorbed")) >= 2


def test_control_of_blindness(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails where every array is taken for one whose mean nothing sees."""
    of = Blindness.of

    def everywhere(scope: Blindness, value: Value) -> Axes:
        return of(scope, value) | ({len(value.shape) - 1} if value.shape else set())

    monkeypatch.setattr(Blindness, "of", everywhere)
    assert len(wrong([examine(seed, "streams") for seed in range(4)])) >= 1


def test_traced_again_it_is_the_same() -> None:
    """At the same shapes every program has the same coefficients: also where a stream is computed, but not centred."""
    for seed in (41, 86, 116):
        drawn = KINDS["dense"](seed)
        folded = jaxfold.fold(drawn.fn, drawn.params, *drawn.inputs)
        again = folded._trace.again(drawn.inputs)
        assert again.runner.fingerprint == folded._trace.runner.fingerprint


def test_a_tracer_needs_no_other_trace() -> None:
    drawn = KINDS["dense"](0)
    folded = jaxfold.fold(drawn.fn, drawn.params, *drawn.inputs)
    jax.eval_shape(folded.apply, folded.contract(drawn.params), *drawn.inputs)
    assert len(folded._traces) == 1
