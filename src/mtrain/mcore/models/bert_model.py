"""BERT of megatron-core's parts: its transformer layers, embeddings and output layer.

Norms are where Devlin et al. (2018) have them, on the embeddings and on the sums of the residual
stream, or where Shoeybi et al. (2019) and megatron-core's BertModel have them: before attention and
MLP, with one behind the last layer and none on the embeddings. transformers has both, as Bert and
as MegatronBert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.mcore.layers.embedding import PositionEmbedding, add_in_fp32
from mtrain.mcore.layers.portable import gelu_tanh
from mtrain.mcore.layers.residual import join_layers
from mtrain.mcore.models.language_model import OutputLayer, SummedLosses

HEADS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu_tanh": gelu_tanh}
"""Activation of the head for masked tokens -> its function."""


class BertEmbedding(LanguageModelEmbedding):
    """The sum of the embeddings of tokens, positions and kinds of tokens, normed where there is a
    `norm`, and dropped out.

    Where `pad_token` stands, the embedding of tokens has no gradient (transformers' `padding_idx`).
    """

    def __init__(
        self, *args: Any, norm: Callable[..., Any] | None, pad_token: int | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        add_in_fp32(self)
        self.tokentype_embeddings.__class__ = PositionEmbedding
        self.norm = None
        if norm is not None:
            epsilon = self.config.layernorm_epsilon
            self.norm = norm(config=self.config, hidden_size=self.config.hidden_size, eps=epsilon)
        self._pad_token = pad_token

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """Return ids [b, s] to [s, b, h], or to [s / tp, b, h] under sequence parallelism."""
        kinds = torch.zeros_like(input_ids) if tokentype_ids is None else tokentype_ids
        words = self.word_embeddings(input_ids)
        if self._pad_token is not None:
            words = torch.where((input_ids == self._pad_token)[..., None], words.detach(), words)
        # Called in the order in which an overlapped gather delivers the weights.
        places = self.position_embeddings(position_ids)
        total = (words + self.tokentype_embeddings(kinds) + places).transpose(0, 1).contiguous()
        if not self.config.sequence_parallel:
            return self._finished(total)
        # A copy, because the scattered part is a view that would keep the whole tensor alive.
        total = scatter_to_sequence_parallel_region(total, group=self.tp_group).clone()
        with get_cuda_rng_tracker().fork():
            return self._finished(total)

    def _finished(self, total: Tensor) -> Tensor:
        found: Tensor = self.embedding_dropout(total if self.norm is None else self.norm(total))
        return found


class MaskedTokenHead(MegatronModule):
    """Hidden states [s, b, h] to the output layer's: a linear layer, its activation, a norm."""

    def __init__(self, config: Any, norm: Callable[..., Any], activation: str) -> None:
        super().__init__(config=config)
        self._activation = HEADS[activation]
        self.dense = _linear(config, config.hidden_size)
        # Under sequence parallelism a rank sees part of the tokens, so gradients have to be summed.
        for parameter in self.dense.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.norm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the same shape."""
        return self.norm(self._activation(self.dense(hidden)))  # type: ignore[no-any-return]


class BertModel(SummedLosses, LanguageModule):
    """An encoder that gives the sum of its losses where there are labels, as `LanguageModel` does.

    To each chosen token's loss times `loss_mask` is added, with `next_sentence`, the loss of each
    sample's pair of sentences times the number of tokens that were chosen in it: over the tokens of
    a batch, whose samples all have as many, that is the mean of the one and the mean of the other.
    """

    def __init__(
        self,
        config: Any,
        layers: Any,
        norm: Callable[..., Any],
        *,
        vocab_size: int,
        max_sequence_length: int,
        token_types: int,
        norms_embeddings: bool,
        head_activation: str,
        next_sentence: bool,
        pad_token: int | None,
        loss: str,
        loss_vocab_size: int,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config=config)
        self.sum_losses_by(loss, loss_vocab_size)
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = True
        if pre_process:
            self.embedding = BertEmbedding(
                config,
                vocab_size,
                max_sequence_length,
                num_tokentypes=token_types,
                norm=norm if norms_embeddings else None,
                pad_token=pad_token,
            )
        self.encoder = TransformerBlock(
            config=config,
            spec=layers,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        join_layers(self.encoder)
        self.pooler = None
        self.next_sentence = None
        if post_process:
            self.head = MaskedTokenHead(config, norm, head_activation)
            self.output_layer = OutputLayer(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=True,
                skip_bias_add=False,
                gather_output=False,
                # On a stage with both ends the embedding's weight serves here. Otherwise each end
                # has a copy, whose gradients are summed.
                skip_weight_param_allocation=pre_process,
            )
            if next_sentence:
                self.pooler = _linear(config, config.hidden_size)
                self.next_sentence = _linear(config, 2)
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Keep the previous stage's output for the next forward: a tensor, or a list of one."""
        self.encoder.set_input_tensor(
            input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        next_sentence: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the sum of losses of tokens [b, s], or without `labels` the logits [b, s, v / tp];
        of a stage that is not the last its hidden states [s, b, h].

        `token_types` [b, s] are 0 by default; `next_sentence` [b] is 1 where sentence B
        does not follow.

        Raises:
            ValueError: packed documents, or a mask of attention.
        """
        if attention_mask is not None or packed_seq_params is not None:
            raise ValueError(
                "samples of BERT are whole windows: nothing in them is hidden or packed"
            )
        embedded = (
            self.embedding(input_ids, position_ids, token_types) if self.pre_process else None
        )
        hidden = self.encoder(hidden_states=embedded, attention_mask=None)
        if not self.post_process:
            return hidden  # type: ignore[no-any-return]
        said = self.head(hidden)
        if labels is None:
            logits, _ = self.output_layer(said, self.shared_embedding_or_output_weight())
            return logits.transpose(0, 1).contiguous()  # type: ignore[no-any-return]
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        total = self.sum_of_losses(said, labels, mask)
        if next_sentence is not None and self.next_sentence is not None:
            losses = F.cross_entropy(
                self.next_sentence_logits(hidden), next_sentence, reduction="none"
            )
            more = (losses * mask.sum(dim=1)).sum()
            # With auxiliary outputs `total` holds three numbers, of which the loss is the first.
            total = total + (F.pad(more[None], (0, 2)) if total.ndim else more)
        return total

    def next_sentence_logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 [b, 2] from the first token of the encoder's [s, b, h], or of a part."""
        assert self.pooler is not None
        assert self.next_sentence is not None
        if self.config.sequence_parallel:
            # Every rank computes the same loss of the gathered tensor, so the backward splits the
            # gradient and does not sum it.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        logits: Tensor = self.next_sentence(torch.tanh(self.pooler(hidden[0]))).float()
        return logits


def _linear(config: Any, width: int) -> nn.Linear:
    """Return a linear layer from the hidden width that is whole on every rank."""
    made = nn.Linear(config.hidden_size, width, dtype=config.params_dtype)
    config.init_method(made.weight)
    nn.init.zeros_(made.bias)
    return made
