"""The published T5 on megatron-core's: `EncoderDecoder` lists the differences."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.models.T5 import T5Model
from megatron.core.tensor_parallel import ColumnParallelLinear, get_cuda_rng_tracker
from torch import Tensor
from torch.nn import functional as F

from mtrain.mcore import api
from mtrain.mcore.layers.backend import Provider
from mtrain.mcore.layers.embedding import add_in_fp32
from mtrain.mcore.layers.relative_attention import (
    RelativePositions,
    computed_again,
    decoder_layer,
    encoder_layer,
)
from mtrain.mcore.models.language_model import OutputLayer, SummedLosses


class EncoderDecoder(SummedLosses, T5Model):
    """megatron-core's T5 on one pipeline stage, which gives the sum of its losses where there are
    labels.

    It adds to megatron-core's: an output layer without bias, whose logits are made of `logit_scale`
    times the decoder's output; biases by distance that are added up in fp32 and made for a rank's
    own heads only; dropout behind the final norms and inside of the MLPs; padding that is hidden
    from attention by one mask [b, t]; losses as `SummedLosses` makes them.
    """

    def __init__(
        self,
        config: Any,
        provider: Provider,
        *,
        decoder_layers: int,
        vocab_size: int,
        max_sequence_length: int,
        buckets: int,
        max_distance: int,
        tied: bool,
        loss: str,
        loss_vocab_size: int,
        logit_scale: float | None = None,
    ) -> None:
        """Build both stacks; `config` is the encoder's, the decoder's differs in its layers."""
        decoder_config = copy.copy(config)
        decoder_config.num_layers = decoder_layers
        norm = provider.layer_norm(config.normalization == "RMSNorm")
        specs = (
            api.TransformerBlockSubmodules([layer(config, provider)] * count, layer_norm=norm)
            for layer, count in (
                (encoder_layer, config.num_layers),
                (decoder_layer, decoder_layers),
            )
        )
        super().__init__(
            decoder_config,
            config,
            *specs,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="relative",
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=max_distance,
        )
        self.sum_losses_by(loss, loss_vocab_size)
        self._logit_scale = logit_scale
        selective = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        # Either way every attention layer of a stack runs again in the backward; see
        # `computed_again`.
        self._recomputes = selective or config.recompute_granularity == "full"
        add_in_fp32(self.embedding)
        for positions in (self.encoder_relative_pos_emb, self.decoder_relative_pos_emb):
            positions.__class__ = RelativePositions
        del self.lm_head  # it has a bias where embeddings are tied
        self.output_layer: Any = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
            skip_weight_param_allocation=tied,
            tp_group=self.tp_group,
        )
        # `OutputLayer` is put in the place of the class, as in the models that megatron-core
        # builds.
        self.output_layer.__class__ = OutputLayer
        self.setup_embeddings_and_output_layer()

    def forward(  # type: ignore[override]  # called as a GPT is
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        encoder_tokens: Tensor | None = None,
        encoder_mask: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the sum of the losses of `labels` [b, s], each times `loss_mask`, or the logits
        [b, s, vocabulary / tp].

        `tokens` [b, s] are the decoder's. The encoder reads `encoder_tokens` [b, t], where
        `encoder_mask` [b, t] is not False, or the decoder's without any. Positions follow
        from the order only.

        Raises:
            ValueError: packed documents, or a mask of the decoder's.
        """
        if packed_seq_params is not None or attention_mask is not None:
            raise ValueError(
                "an encoder-decoder knows no packed documents, and no mask but that of the"
                " encoder's tokens"
            )
        encoder_tokens = tokens if encoder_tokens is None else encoder_tokens
        # megatron-core's masks are True where a key is hidden.
        hidden = None if encoder_mask is None else ~encoder_mask[:, None, None, :]
        read, biases = self._read(encoder_tokens, self.encoder_relative_pos_emb, hidden)
        context = self._dropped(
            self.encoder(hidden_states=read, attention_mask=None, attention_bias=biases)
        )
        read, biases = self._read(tokens, self.decoder_relative_pos_emb, None)
        given = {"attention_mask": None, "context": context, "context_mask": hidden}
        found = self.decoder(hidden_states=read, attention_bias=biases, **given)
        return self._output(self._dropped(found), labels, loss_mask)

    def _read(
        self, tokens: Tensor, positions: RelativePositions, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the input of a stack and the biases of its attention."""
        embedded = self.embedding(input_ids=tokens, position_ids=None)
        biases = positions.biases(tokens.shape[1], self.tp_group, hidden)
        again = self._recomputes and self.training and torch.is_grad_enabled()
        return computed_again(embedded, biases) if again else (embedded, biases)

    def _dropped(self, hidden: Tensor) -> Tensor:
        """Apply dropout to the output of a stack, after its final norm."""
        p = self.config.hidden_dropout if self.training else 0.0
        if not p:
            return hidden
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            return F.dropout(hidden, p)

    def _output(self, hidden: Tensor, labels: Tensor | None, loss_mask: Tensor | None) -> Tensor:
        if self._logit_scale is not None:
            hidden = hidden * self._logit_scale
        if labels is None:
            if self.share_embeddings_and_output_weights:
                weight = self.shared_embedding_or_output_weight()
            else:
                weight = None
            logits: Tensor = self.output_layer(hidden, weight)[0].transpose(0, 1).contiguous()
            return logits
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        return self.sum_of_losses(hidden, labels, mask)
