"""Pipelines of equal stages wait; see benchmarks/bubble.py for how long."""

from __future__ import annotations

import pytest

from benchmarks import bubble


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "pipeline",
    [bubble.Pipeline(2, 2), bubble.Pipeline(2, 4, chunks=2)],
    ids=lambda pipeline: pipeline.name,
)
def test_a_pipeline_is_measured_and_waits_for_a_part_of_its_time(pipeline: bubble.Pipeline) -> None:
    record = bubble.measure(pipeline, forward_seconds=0.05, steps=1)

    # How long exactly is for the benchmark to say, not for a test on a machine with other work.
    assert 0 < record["measured"] < 1


def test_without_interleaving_or_with_it_the_formula_is_the_published_one() -> None:
    assert bubble.Pipeline(4, 8).expected == 3 / 11
    assert bubble.Pipeline(4, 8, chunks=2).expected == 3 / 19
