"""megatron-core's GPT with a loss without all logits, as a sum over a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from mtrain_kernels.cross_entropy.reference import capped, first_place, local_labels, wide
from mtrain_kernels.cross_entropy.vocabulary import Vocabulary
from mtrain_kernels.linear_cross_entropy.op import (
    Buffer,
    linear_cross_entropy,
    token_cross_entropy,
)
from torch import Tensor
from torch.nn import functional as F

from mtrain.mcore.layers.embedding import add_in_fp32
from mtrain.mcore.layers.linear import ColumnLinear, add_scaled, adds_to_main_grad, nothing
from mtrain.mcore.layers.residual import join_layers
from mtrain.mcore.layers.rotary import Frequencies, ScaledRotary, TwoBases
from mtrain.mcore.layers.value_head import ValueHead
from mtrain.mcore.models.distillation import Head, Lesson, distil
from mtrain.mcore.models.limited import limited_log_probabilities

AMONG = "drawn_among"
"""Key of a micro-batch: the tokens that each label was drawn among, int64 [b, s, k]; -1: none."""
LESSON = "lesson"
"""Key of a micro-batch: the `Lesson` of a teacher, on the last stage."""
FURTHER_LOSS_SHARES = "further_loss_shares"
"""Attribute of a TransformerConfig, [depths]: the divisor of the step over the number of
predictions of each further token; 1 if unset.
"""


class OutputLayer(ColumnLinear):
    """The layer that makes logits; given labels, it makes their loss instead, a part of the tokens
    at a time.

    The loss belongs inside of this module: whoever gathers its weight (FSDP, overlapped parameter
    gather) does so when the module is called, and frees it afterwards. Logits are multiplied by
    `scale`, and then x becomes c tanh(x / c) where `soft_cap` is c.
    """

    soft_cap: float | None = None
    scale: float | None = None
    on_losses: Callable[[Tensor], None] | None = None
    """A function that gets the loss of each token [b, s], without a gradient, its weight and
    z-loss; None: nobody.
    """

    def _forward_impl(self, *args: Any, **more: Any) -> Tensor:
        """Use megatron-core's product where gradients are on: its loss overwrites the logits."""
        kind = ColumnParallelLinear if torch.is_grad_enabled() else ColumnLinear
        return kind._forward_impl(self, *args, **more)  # type: ignore[no-any-return]

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        vocab_size: int | None = None,
        auxiliary: AuxiliaryOutputs | None = None,
        is_whole_loss: bool = False,
        per_token: bool = False,
        temperature: float = 1.0,
        among: Tensor | None = None,
        lesson: Lesson | None = None,
        impl: str = "reference",
    ) -> Any:
        """Return logits as megatron-core makes them; with `labels` and `token_weights` [b, s], the
        sum of weighted losses, `per_token` losses, or with a `lesson` those of `distil`.

        `input_` is [s, b, h], or this rank's [s / tp, b, h] under sequence parallelism. Ids from
        `vocab_size` on have no part in the losses. With `auxiliary` outputs the result is that of
        `with_auxiliary_outputs`. With `labels` but no weights, it is logits and, in the place of a
        bias, whether each label has the largest one [b, s], before a cap makes large ones equal.
        `is_whole_loss` promises that the gradient of the sum is 1.
        """
        if self.scale is not None:
            input_ = input_ * self.scale
        if labels is None or token_weights is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            beside = bias if labels is None else self._hits(logits.detach(), labels, vocab_size)
            if self.soft_cap is not None:
                logits = capped(wide(logits), self.soft_cap).to(logits.dtype)
            return logits, beside
        hidden = input_.flatten(0, 1)
        weight = self.weight if weight is None else weight
        if self.bias is not None:
            hidden, weight = _with_bias(hidden, weight, self.bias)
        group = self.tp_group if self.tp_group.size() > 1 else None
        if lesson is not None:
            return distil(
                hidden,
                weight,
                labels.t().flatten(),
                token_weights.t().flatten(),
                lesson,
                vocab_size=vocab_size or weight.shape[0] * self.tp_group.size(),
                soft_cap=self.soft_cap,
                group=group,
                sequence_parallel=self.sequence_parallel,
            )
        if per_token:
            return self._token_losses(hidden, weight, labels, vocab_size, temperature, among, impl)
        auxiliary = AuxiliaryOutputs() if auxiliary is None else auxiliary
        # Hidden states are [s, b, h]: labels and weights [b, s] have to follow their order.
        token_weights = token_weights.t().flatten()
        fuses = self.gradient_accumulation_fusion and adds_to_main_grad(weight)
        gradient: Any = add_scaled if fuses else None
        if fuses and is_whole_loss and _adds_at_once(weight):
            gradient = Buffer(weight.main_grad, nothing)  # type: ignore[union-attr]
        found = linear_cross_entropy(
            hidden,
            weight,
            labels.t().flatten(),
            token_weights,
            vocab_size=vocab_size,
            z_loss=auxiliary.z_loss,
            ranked=auxiliary.accuracy,
            logits=auxiliary.logits,
            soft_cap=self.soft_cap,
            group=group,
            sequence_parallel=self.sequence_parallel,
            gradient=gradient,
            impl=impl,
        )
        losses = found.losses - found.z_losses if auxiliary.z_loss else found.losses
        self.report_losses(losses, labels)
        if auxiliary:
            return with_auxiliary_outputs(found.total, found.z_losses, found.hits, token_weights)
        return found.total

    def _token_losses(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int | None,
        temperature: float,
        among: Tensor | None,
        impl: str,
    ) -> Tensor:
        """Return the loss of each token [b, s] without its weight, of logits divided by
        `temperature`: of all tokens, or of those of `among` [b, s, k].
        """
        group = self.tp_group if self.tp_group.size() > 1 else None
        if among is not None:
            losses = -limited_log_probabilities(
                hidden,
                weight,
                labels.t().flatten(),
                among.transpose(0, 1).flatten(0, 1),
                temperature=temperature,
                soft_cap=self.soft_cap,
                group=group,
                sequence_parallel=self.sequence_parallel,
            )
            self.report_losses(losses, labels)
            return losses.view(labels.t().shape).t()
        cap = self.soft_cap
        if temperature != 1:
            # Logits are linear in their operand, and a cap comes before the division.
            hidden = hidden / temperature
            cap = None if cap is None else cap / temperature
        losses = token_cross_entropy(
            hidden,
            weight,
            labels.t().flatten(),
            vocab_size=vocab_size,
            soft_cap=cap,
            group=group,
            sequence_parallel=self.sequence_parallel,
            impl=impl,
        )
        self.report_losses(losses, labels)
        return losses.view(labels.t().shape).t()

    def report_losses(self, losses: Tensor, labels: Tensor) -> None:
        """Report the losses [t] of the tokens of `labels` [b, s], or losses [b, s]."""
        if self.on_losses is not None:
            by_sample = losses if losses.dim() > 1 else losses.view(labels.t().shape).t()
            self.on_losses(by_sample.detach())

    def _hits(self, logits: Tensor, labels: Tensor, vocab_size: int | None) -> Tensor:
        """Return whether each of `labels` [b, s] has the largest of `logits` [s, b, v / tp], of ids
        below `vocab_size`.
        """
        first = self.tp_group.rank() * logits.shape[-1]
        columns = logits.shape[-1]
        real = columns if vocab_size is None else min(columns, max(0, vocab_size - first))
        places = first_place(logits[..., :real].flatten(0, 1), labels.t().flatten(), first)
        vocabulary = Vocabulary(self.tp_group.group_name if self.tp_group.size() > 1 else "")
        return vocabulary.first_of_all(places).view(labels.t().shape).t()


@dataclass(frozen=True)
class AuxiliaryOutputs:
    """The outputs of a loss next to cross entropy, and the most logits that exist at once."""

    z_loss: float = 0.0
    """The coefficient of z-loss (arXiv:2204.02311, section 5), which is added to losses."""
    accuracy: bool = False
    """True if labels with the largest logit are counted."""
    logits: int | None = None
    """Most logits at once in a loss in parts; None: `linear_cross_entropy`'s default."""

    def __bool__(self) -> bool:
        return self.z_loss > 0 or self.accuracy


def with_auxiliary_outputs(
    total: Tensor, z_losses: Tensor, hits: Tensor | None, token_weights: Tensor
) -> Tensor:
    """Return [3]: the sum of weighted losses, its share of z-loss, and how many labels that count
    have the largest logit.

    Of tokens in any one shape. Only the first has a gradient.
    """
    found = torch.zeros_like(total) if hits is None else (hits * (token_weights > 0)).sum()
    return torch.stack(
        [total, (z_losses * token_weights).sum().detach(), found.detach().to(total.dtype)]
    )


def _adds_at_once(weight: Tensor) -> bool:
    """Return whether chunks of a loss add their gradients of the weight to its buffer.

    A buffer of less precision would round each of them.
    """
    buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return buffer.dtype == wide and buffer.is_contiguous()


def _with_bias(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return operands whose product is hidden weight^T + bias, with eight columns more."""
    # matrix units want multiples of eight
    ones = hidden.new_zeros(hidden.shape[0], 8)
    ones[:, 0] = 1
    return torch.cat([hidden, ones], dim=1), torch.cat(
        [weight, F.pad(bias[:, None], (0, 7))], dim=1
    )


class SummedLosses:
    """A mixin of language models: the sum of their losses over the first `loss_vocab_size` ids.

    `loss` says who makes them: `megatron` from all logits at once, any other word is the `impl` of
    `mtrain_kernels.linear_cross_entropy`.
    """

    loss: str
    loss_vocab_size: int
    auxiliary = AuxiliaryOutputs()
    """Further outputs; with any of them, the sum is that of `with_auxiliary_outputs`."""
    keeps_hidden = False
    """True of a teacher: the output is the output layer's input, which its student's loss reads."""
    _lesson: Lesson | None = None
    """A teacher's view of the micro-batch that runs."""
    _among: Tensor | None = None
    """Tokens that the labels of the micro-batch that runs were drawn among; None: all."""
    per_token = False
    """True if an objective reads the log-probability of each label, instead of a sum of losses."""
    temperature = 1.0
    """Divisor of the logits that `per_token` log-probabilities are of."""
    is_whole_loss = False
    """The promise to minimise the sum of `sum_of_losses` as it is, with a gradient of 1."""

    def sum_losses_by(self, loss: str, loss_vocab_size: int) -> None:
        """Say how losses are made."""
        self.loss = loss
        self.loss_vocab_size = loss_vocab_size

    def complete(
        self: Any,
        loss: str,
        loss_vocab_size: int,
        *,
        soft_cap: float | None = None,
        logit_scale: float | None = None,
        output_init_std: float | None = None,
        embedding_scale: float | None = None,
        rotary_base_local: float | None = None,
        repeats_mtp: bool = False,
        frequencies: Frequencies | None = None,
    ) -> None:
        """Complete a language model that megatron-core built of classes of its own choice.

        `soft_cap` bounds logits as `OutputLayer` says, and `logit_scale` multiplies them; an output
        layer of its own starts with the deviation `output_init_std`, where that is given. The
        embeddings of tokens are multiplied by `embedding_scale`. `frequencies` are those of the
        rotary positions where megatron-core's are not; layers with a window have rotary positions
        by `rotary_base_local`. With `repeats_mtp` the first MTP layer stands in the place of all.
        """
        self.sum_losses_by(loss, loss_vocab_size)
        if repeats_mtp and self.mtp_process:
            # One module in several places: its parameters exist, and are saved, once.
            self.mtp.layers = torch.nn.ModuleList([self.mtp.layers[0]] * len(self.mtp.layers))
        if hasattr(self, "embedding"):
            add_in_fp32(self.embedding, embedding_scale)
        if self.post_process:
            self.output_layer.__class__ = OutputLayer
            self.output_layer.soft_cap = soft_cap
            self.output_layer.scale = logit_scale
            if output_init_std is not None and self.output_layer.weight is not None:
                self.output_layer.weight.mtrain_init_std = output_init_std
        if frequencies is not None:
            self.rotary_pos_emb.__class__ = ScaledRotary
            self.rotary_pos_emb.frequencies = frequencies
        if rotary_base_local is not None:
            self.rotary_pos_emb = TwoBases(self.rotary_pos_emb, rotary_base_local)

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        """Return megatron-core's loss of each token [b, s]; padded logits are overwritten."""
        self._hide_padding(logits)
        losses: Tensor = super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
        return losses

    def _hide_padding(self: Any, logits: Tensor) -> None:
        real = max(0, self.loss_vocab_size - self.pg_collection.tp.rank() * logits.shape[-1])
        if real < logits.shape[-1]:
            # The loss gives a probability of 0 a gradient of 0, so that autograd need not know. It
            # must not: FSDP hands on a view, and autograd forgets how a view was made when it is
            # written to.
            logits.data[..., real:] = -torch.inf

    def sum_of_losses(
        self: Any,
        hidden: Tensor,
        labels: Tensor,
        mask: Tensor,
        *,
        detached: bool = False,
        auxiliary: AuxiliaryOutputs | None = None,
        is_part: bool = False,
    ) -> Tensor:
        """Return the sum of each token's loss times `mask` [b, s], for the output layer's input [s,
        b, h] or this rank's part; `per_token` the log-probability of each label [b, s] in fp32.

        `detached`: the weight of the output layer learns nothing from it. `auxiliary` stands
            for `self.auxiliary`. `is_part`: a factor multiplies the sum afterwards.
        """
        if self.keeps_hidden:
            return hidden
        auxiliary = self.auxiliary if auxiliary is None else auxiliary
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = None
        if detached:
            weight = (self.output_layer.weight if weight is None else weight).detach()
        if self._lesson is not None:
            given = {"labels": labels, "token_weights": mask, "vocab_size": self.loss_vocab_size}
            return self.output_layer(hidden, weight, **given, lesson=self._lesson)  # type: ignore[no-any-return]
        if self.per_token and (self.loss != "megatron" or self._among is not None):
            given = {"labels": labels, "token_weights": mask, "vocab_size": self.loss_vocab_size}
            losses = self.output_layer(
                hidden,
                weight,
                **given,
                per_token=True,
                temperature=self.temperature,
                among=self._among,
                impl=self.loss,
            )
            return -losses.float()  # type: ignore[no-any-return]
        if self.per_token:
            logits, _ = self.output_layer(hidden, weight)
            if self.temperature != 1:
                logits = logits / self.temperature
            losses = self.compute_language_model_loss(labels, logits).float()
            self.output_layer.report_losses(losses, labels)
            return -losses  # type: ignore[no-any-return]
        if self.loss == "megatron":
            ranked = labels if auxiliary.accuracy else None
            logits, hits = self.output_layer(
                hidden, weight, labels=ranked, vocab_size=self.loss_vocab_size
            )
            if auxiliary:
                found: Tensor = self._auxiliary_by_megatron(logits, hits, labels, mask, auxiliary)
                return found
            losses = self.compute_language_model_loss(labels, logits).float()
            self.output_layer.report_losses(losses, labels)
            return (losses * mask).sum()
        given = {
            "labels": labels,
            "token_weights": mask,
            "vocab_size": self.loss_vocab_size,
            "auxiliary": auxiliary,
            "is_whole_loss": self.is_whole_loss and not is_part,
        }
        total: Tensor = self.output_layer(hidden, weight, **given, impl=self.loss)
        return total

    @contextmanager
    def taught(self, lesson: Lesson | None) -> Iterator[None]:
        """Let losses inside be the divergence from a teacher."""
        self._lesson = lesson
        try:
            yield
        finally:
            self._lesson = None

    def output_head(self: Any) -> Head:
        """Return the output layer of a last stage, for the loss of a student."""
        layer = self.output_layer
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else layer.weight
        bias = None if layer.bias is None else layer.bias.detach()
        return Head(weight.detach(), bias, layer.scale, layer.soft_cap)

    def _auxiliary_by_megatron(
        self: Any,
        logits: Tensor,
        hits: Tensor | None,
        labels: Tensor,
        mask: Tensor,
        auxiliary: AuxiliaryOutputs,
    ) -> Tensor:
        """Return `with_auxiliary_outputs` of logits [s, b, v / tp], which megatron-core's loss
        overwrites.

        The log-sum-exp, with its gradient, is the loss and the label's logit.
        """
        # Read before the loss overwrites the logits. A label's logit is on the rank that has its
        # column; the sum over the ranks brings it to all.
        if auxiliary.z_loss:
            group = self.pg_collection.tp
            label = labels.t().flatten()
            flat = logits.flatten(0, 1)
            here, column = local_labels(label, group.rank() * flat.shape[1], flat.shape[1])
            place = torch.arange(len(label), device=label.device) * flat.shape[1] + column
            target = flat.flatten().index_select(0, place).float().where(here, 0)
            target = (
                reduce_from_tensor_model_parallel_region(target, group=group)
                .view(labels.t().shape)
                .t()
            )
        losses = self.compute_language_model_loss(labels, logits).float()
        self.output_layer.report_losses(losses, labels)
        z_losses = torch.zeros_like(losses)
        if auxiliary.z_loss:
            z_losses = auxiliary.z_loss * (losses + target).square()
        return with_auxiliary_outputs(((losses + z_losses) * mask).sum(), z_losses, hits, mask)


class LanguageModel(SummedLosses, GPTModel):
    """A GPT that gives the sum of its losses where there are labels: a scalar, each token's loss
    times `loss_mask`.

    `loss` says who makes them, as `SummedLosses` does. The loss of each MTP layer is added to the
    gradient as a sum too, weighted by `further_masks` and the share of its own count: megatron-core
    0.16.1 divides it by the tokens of the main loss, and 0.19 by those of a micro-batch, so that
    another micro-batch size is another gradient. Every loss is over the first `loss_vocab_size`
    ids; logits without labels have all of the padded vocabulary. `features` are
    the arguments of `complete` apart from the loss. With `value_head_std`, the deviation of its
    initial weights, the model gives one number of each position, [b, s], and [b, s, 1] where there
    are no labels.
    """

    post_process: bool

    def __init__(
        self,
        *args: Any,
        loss: str,
        loss_vocab_size: int,
        features: Mapping[str, Any] = {},
        value_head_std: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        join_layers(self.decoder)
        self.complete(loss, loss_vocab_size, **features)
        self._further_masks: Tensor | None = None
        if value_head_std is not None and self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config, self.pg_collection.tp, value_head_std)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return megatron-core's, which looks for an output layer on the last stage."""
        behind = self.post_process
        self.post_process = hasattr(self, "output_layer")
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            self.post_process = behind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run megatron-core's forward with `further_masks` [b, s, depths], a `loss_mask` for each
        MTP layer's loss, a teacher's `lesson`, and the tokens that labels were `drawn_among`.
        """
        self._further_masks = kwargs.pop("further_masks", None)
        self._among = kwargs.pop(AMONG, None)
        with self.taught(kwargs.pop(LESSON, None)):
            return super().forward(*args, **kwargs)

    def _postprocess(
        self,
        hidden_states: Tensor,
        *args: Any,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        if hasattr(self, "value_head"):
            values: Tensor = self.value_head(hidden_states)
            return values.unsqueeze(-1) if labels is None else values
        if labels is None or not self.post_process:
            cache = context.get("inference_context")
            if self.post_process and cache is not None and cache.materialize_only_last_token_logits:
                # 0.19 does not read this attribute of the context.
                hidden_states = hidden_states[-1:]
            return super()._postprocess(
                hidden_states, *args, labels=labels, loss_mask=loss_mask, **context
            )
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        if context.pop("mtp_in_postprocess", False):
            hidden_states = self._further_hidden(hidden_states, context)
        # megatron-core's MTP block returns the hidden states of all depths in a row.
        head, *further = hidden_states.chunk(1 + (self.config.mtp_num_layers or 0))
        packed = context.get("packed_seq_params")
        rolled = labels
        masks = self._further_masks
        detached = getattr(self.config, "mtp_detach_heads", False)
        shares = getattr(self.config, FURTHER_LOSS_SHARES, None)
        # These losses only train: an evaluation reports the main one.
        for depth, hidden in enumerate(further if torch.is_grad_enabled() else ()):
            rolled, _ = self._rolled(rolled, packed)
            mask_there = (
                self._rolled(mask, packed, depth + 1)[0] if masks is None else masks[..., depth]
            )
            scale = self.config.mtp_loss_scaling_factor / len(further)
            if not self.config.calculate_per_token_loss:
                scale = scale / mask_there.sum()
            elif shares is not None:
                scale = scale * shares[depth]
            none = AuxiliaryOutputs(logits=self.auxiliary.logits)
            loss = self.sum_of_losses(
                hidden, rolled, mask_there, detached=detached, auxiliary=none, is_part=True
            )
            # Adds the gradient of this loss in the backward; the value of the result stays that of
            # `head`.
            head = MTPLossAutoScaler.apply(head, scale * loss)
        return self.sum_of_losses(head, labels, mask)

    def _further_hidden(self, hidden_states: Tensor, context: dict[str, Any]) -> Tensor:
        """Return the hidden states of the stack and, behind them, those of each MTP layer."""
        names = (
            "input_ids",
            "position_ids",
            "attention_mask",
            "inference_params",
            "rotary_pos_emb",
            "rotary_pos_cos",
            "rotary_pos_sin",
            "packed_seq_params",
            "sequence_len_offset",
        )
        given = {name: context.get(name) for name in names} | (
            context.get("extra_block_kwargs") or {}
        )
        found: Tensor = self.mtp(hidden_states=hidden_states, embedding=self.embedding, **given)
        return found

    def _rolled(self, x: Tensor, packed: Any, times: int = 1) -> tuple[Tensor, Any]:
        """Return `x` [b, s] shifted left, over context-parallel ranks too, and its sum."""
        found = x, None
        for _ in range(times):
            found = roll_tensor(
                found[0], shifts=-1, dims=-1, cp_group=self.cp_group, packed_seq_params=packed
            )
        return found
