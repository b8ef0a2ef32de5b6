"""A constant rate after the warmup, whatever `optim.decay_iters` is."""

from __future__ import annotations

from mtrain.config.schema.schedule import Run, Schedule


def factor(step: int, run: Run) -> float:
    """Return 1 at every step."""
    return 1.0


# `of_lr`: lowest + (highest - lowest) rounds, and would miss `optim.lr` by its last bit
SCHEDULE = Schedule(
    factor=factor, megatron_name="constant", of_lr=True, never_ends=True, unchanged_until=None
)
