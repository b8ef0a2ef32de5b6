"""Cross entropy of tokens: the next one, or those that a family masks or writes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mtrain.train.objectives import Batch, Metric, Objective

LOSS = Metric("loss", reduce="count")
COUNT = Metric("count")
TOKENS = Metric("tokens")
Z_LOSS = Metric("z_loss", reduce="count")
ACCURACY = Metric("token_accuracy", reduce="tokens")


class NextToken(Objective):
    """The sum of the losses that the model itself computes from its logits.

    `loss_mask` [b, s] weighs the tokens, `loss_counts` [b, s] add up to the count if the batch has
    them, and otherwise `loss_mask` does. Only tokens of weight count as `tokens`.
    """

    def metrics(self) -> tuple[Metric, ...]:
        """Return loss, count and tokens; z_loss and token_accuracy if the run requests them."""
        declared = [LOSS, COUNT, TOKENS]
        if self.run.trainer.z_loss_coeff:
            declared.append(Z_LOSS)
        if self.run.log.token_accuracy:
            declared.append(ACCURACY)
        return tuple(declared)

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the sum of a micro-batch: `output` is a scalar, or [loss, z-loss, hits] of
        `mcore.language_model`, of which only the first has a gradient.
        """
        mask = batch["loss_mask"]
        counts = batch.get("loss_counts")
        count = mask.sum() if counts is None else counts.sum()
        tokens = (mask > 0).sum().to(count)
        if not output.ndim:
            return output, count, (LOSS.of(output.detach()), COUNT.of(count), TOKENS.of(tokens))
        z_loss = output.detach()[1]
        hits = output.detach()[2]
        # A pipeline frees the memory of what it sent on, which it cannot do with a view.
        total = output[0].clone()
        metrics = (
            # z-loss is part of the gradient, but reported separately
            LOSS.of(total.detach() - z_loss),
            COUNT.of(count),
            TOKENS.of(tokens),
            Z_LOSS.of(z_loss),
            ACCURACY.of(hits),
        )
        return total, count, metrics


OBJECTIVE = NextToken
