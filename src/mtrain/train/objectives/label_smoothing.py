"""Cross entropy with smoothed labels: every token of the vocabulary gets a share of each label.

Sources: Szegedy et al. 2016, arXiv:1512.00567, section 7; the share of Vaswani et al. 2017,
arXiv:1706.03762, section 5.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mtrain_kernels.cross_entropy.op import cross_entropy
from torch import Tensor

from mtrain.mcore import api as mcore
from mtrain.train.objectives import Batch, Metric
from mtrain.train.objectives.next_token import COUNT, LOSS, TOKENS, NextToken

SHARE = 0.1
"""Share of a label that the whole vocabulary gets in equal parts, the label included."""
SMOOTHING = Metric("smoothing", reduce="count")


class LabelSmoothing(NextToken):
    """The cross entropy with a distribution of 1 - `SHARE` on the label and the rest on all tokens.

    `loss` stays the cross entropy of labels, so that runs and perplexities compare; the mean that
    smoothing adds to it is reported as `smoothing`.
    """

    reads_logits = True

    def metrics(self) -> tuple[Metric, ...]:
        """Return loss, count, tokens and smoothing."""
        return LOSS, COUNT, TOKENS, SMOOTHING

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the sum of smoothed losses; `output` holds logits [b, s, v / tp]."""
        # megatron-core smooths over the columns of one rank, so its loss would depend on tp.
        total = self._sum(output, batch, SHARE)
        with torch.no_grad():
            plain = self._sum(output, batch, 0.0)
        total, count, (_, *counts) = super().loss(total, batch)
        smoothing = SMOOTHING.of(total.detach() - plain)
        return total, count, (LOSS.of(plain), *counts, smoothing)

    def _sum(self, logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
        group = mcore.parallel_state.get_tensor_model_parallel_group()
        losses = cross_entropy(
            logits,
            batch["labels"],
            vocab_size=self.run.model.loss_vocab_size,
            label_smoothing=smoothing,
            group=group if group.size() > 1 else None,
        )
        return (losses * batch["loss_mask"]).sum()


OBJECTIVE = LabelSmoothing
