"""Random programs: none comes out wrong, and enough of their norms are contracted."""

from __future__ import annotations

import pytest

from benchmarks.programs import examine

CHUNKS, EACH = 5, 16
# Entries are about 1, but a program may multiply arrays and take differences: see the benchmark for a count of these.
FLOAT64 = 1e-9


@pytest.mark.usefixtures("x64", "usual")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk: int) -> None:
    outcomes = [examine(seed) for seed in range(chunk * EACH, (chunk + 1) * EACH)]
    assert [(o.seed, o.error) for o in outcomes if not o.error < FLOAT64] == []
    # Two of three over many programs; chunks of 20 differ.
    norms, contracted = sum(o.norms for o in outcomes), sum(o.contracted for o in outcomes)
    assert norms > 8
    assert contracted >= 0.5 * norms


@pytest.mark.usefixtures("x64", "usual")
def test_control() -> None:
    """The comparison fails where one coefficient is off by a millionth."""
    errors = [examine(seed, spoil=1e-6) for seed in range(12)]
    assert sum(o.error > FLOAT64 for o in errors if o.contracted) >= 4
