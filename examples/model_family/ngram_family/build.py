"""This rank's chunk: mtrain's language model with tables of n-grams on its first stage."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from mtrain.config.schema.run import RunConfig
from mtrain.mcore.models.language_model import LanguageModel
from mtrain.models.gpt.build import chunk as gpt_chunk
from ngram_family.config import NgramConfig
from ngram_family.layers import Ngrams


class NgramLanguageModel(LanguageModel):
    """`LanguageModel` with `Ngrams` next to its embedding."""

    def __init__(self, *args: Any, config: Any, own: NgramConfig, **kwargs: Any) -> None:
        # The embedding must not scatter: a token's n-gram may begin in another rank's part.
        super().__init__(*args, config=config, scatter_embedding_sequence_parallel=False, **kwargs)
        if self.pre_process:
            self.ngrams = Ngrams(config, own)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return as `LanguageModel` for tokens [b, s]."""
        if self.pre_process and decoder_input is None:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            decoder_input = embedded + self.ngrams(input_ids)
            if self.config.sequence_parallel:
                decoder_input = scatter_to_sequence_parallel_region(decoder_input)
        return super().forward(input_ids, position_ids, attention_mask, decoder_input, **kwargs)


def chunk(run: RunConfig, config: Any, stage: int | None) -> Any:
    """Build one virtual pipeline stage of this rank."""
    own = {"own": NgramConfig.of(run.model)}
    return gpt_chunk(run, config, stage, kind=NgramLanguageModel, more=own)
