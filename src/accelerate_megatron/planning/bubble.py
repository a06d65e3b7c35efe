"""How much of a pipeline's time is spent waiting. No torch."""

from __future__ import annotations


def bubble_share(pp_size: int, num_micro_batches: int, chunks_per_stage: int = 1) -> float:
    """Return the share of a step that a stage of a 1F1B pipeline waits, with equal stages.

    (p - 1) / (v m + p - 1) for p stages, m micro-batches and v chunks on each stage.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, as a share of the whole
        step instead of the ideal one.
    """
    waiting = pp_size - 1
    return waiting / (chunks_per_stage * num_micro_batches + waiting)
