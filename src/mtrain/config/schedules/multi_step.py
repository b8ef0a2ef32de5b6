"""Three constant rates: `optim.lr`, its geometric mean with `optim.min_lr`, and `optim.min_lr`.

The rate drops after 80% and after 90% of `optim.decay_iters`. A run that is extended can reuse the
first stage. Source: DeepSeek LLM (2024), arXiv:2401.02954, section 2.2.
"""

from __future__ import annotations

import math

from mtrain.config.schema.schedule import Run, Schedule, end_of_decay, warmup_of

SECOND = 0.8
"""Share of the decay's steps, with the warmup, after which the second rate applies."""
THIRD = 0.9


def factor(step: int, run: Run) -> float:
    """Return 1, the factor of the geometric mean, or 0."""
    end = end_of_decay(run)
    if step <= SECOND * end:
        return 1.0
    if step > THIRD * end:
        return 0.0
    # sqrt(lr * min_lr) as min_lr + factor * (lr - min_lr), in terms of sqrt(min_lr / lr).
    root = math.sqrt(run.optim.min_lr / run.optim.lr)
    return root / (1.0 + root)


def unchanged_until(run: Run, end: int) -> int:
    """Return the last step of the first stage of a run whose decay ends at `end`."""
    return max(warmup_of(run), int(SECOND * end))


SCHEDULE = Schedule(factor=factor, unchanged_until=unchanged_until)
