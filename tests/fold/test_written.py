"""Random programs as source code: none comes out wrong, wherever it runs."""

from __future__ import annotations

import collections

import pytest

from benchmarks.programs import judge
from tests.fold.written import write

CHUNKS, EACH = 4, 50

pytestmark = [pytest.mark.maths, pytest.mark.usefixtures("x64", "usual")]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk: int) -> None:
    verdicts = [judge(seed) for seed in range(chunk * EACH, (chunk + 1) * EACH)]
    assert [(v.seed, v.wrong, v.source) for v in verdicts if v.wrong] == []
    # Six of each; derivatives and sizes of batches that a program has none of, or that are refused, are few.
    assert sum(len(v.errors) for v in verdicts) > 5 * EACH
    refused = collections.Counter(name for v in verdicts for name in v.refused)
    assert not set(refused) - {"other batch", "other rank"}
    assert sum(refused.values()) < EACH / 4
    decisions = collections.Counter(name for v in verdicts for name in v.decisions)
    assert decisions["contracted"] > EACH / 20


def test_control() -> None:
    """The comparisons fail where one array of coefficients is off by a millionth."""
    verdicts = [judge(seed, spoil=1e-6) for seed in range(40)]
    folded = [v for v in verdicts if {"contracted", "centred", "absorbed"} & set(v.decisions)]
    assert sum(bool(v.wrong) for v in folded) > len(folded) / 2 > 0


def test_programs_differ() -> None:
    """Every kind of line is drawn, and the same seed draws the same program."""
    sources = [write(seed).source for seed in range(300)]
    assert len(set(sources)) == 300
    words = [
        "einsum",
        "softmax",
        "reverse=True",
        "unroll",
        "switch",
        "cond",
        "sharded",
        "clipped",
        "rounded",
        "nan",
        "inf",
    ]
    words += [
        "take",
        "cumsum",
        "concatenate",
        ".at[",
        "flip",
        "astype('bfloat16')",
        "astype('int8')",
        ".T",
        "checkpoint",
    ]
    text = "\n".join(sources)
    assert [word for word in words if word not in text] == []
    assert write(7).source == sources[7]
