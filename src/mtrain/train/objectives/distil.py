"""Distillation: the divergence of the student's next-token distributions from a teacher's.

Sources: Hinton et al. 2015, arXiv:1503.02531; Gu et al. 2023, arXiv:2306.08543 (MiniLLM); Agarwal
et al. 2023, arXiv:2306.13649 (GKD).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mtrain.train.objectives import Batch, Metric
from mtrain.train.objectives.next_token import COUNT, LOSS, TOKENS, NextToken

DIVERGENCE = Metric("divergence", reduce="count")
CROSS_ENTROPY = Metric("cross_entropy", reduce="count")


class Distil(NextToken):
    """The divergence from a teacher, with a share of the cross entropy of the labels.

    The model computes both from the teacher's `Lesson`; see `mtrain.mcore.models.distillation`.
    """

    def metrics(self) -> tuple[Metric, ...]:
        """Return loss, count and tokens, and both terms of the loss."""
        return LOSS, COUNT, TOKENS, DIVERGENCE, CROSS_ENTROPY

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the sum of losses; `output` holds the sums of `distillation.distil` [3]."""
        if output.shape != (3,):
            raise RuntimeError("the model computed no divergence: the micro-batch has no lesson")
        # A pipeline frees the memory of what it sent on, which it cannot do with a view.
        total, count, (loss, *counts) = super().loss(output[0].clone(), batch)
        _, divergence, entropy = output.detach()
        return (
            total,
            count,
            (loss, *counts, DIVERGENCE.of(divergence), CROSS_ENTROPY.of(entropy)),
        )


OBJECTIVE = Distil
