"""A language model that reads images: their projected patches stand in the places of image tokens.

Not megatron-core's `LLaVAModel`: that one lets every image token grow into many, on the GPU, so
that lengths differ by sample and stage, and wraps a GPTModel whose loss holds all logits. Here a
sample comes with one image token for each patch, as transformers expects it, and the language model
is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from mtrain.mcore.layers.backend import Provider
from mtrain.mcore.models.clip import Projector, VisionTower, projector_config, vision_config
from mtrain.mcore.models.language_model import LanguageModel
from mtrain.models.llava.config import LlavaConfig


class ImageLanguageModel(LanguageModel):
    """`LanguageModel` with the vision tower and the projector on its first pipeline stage.

    Of `own.freeze` the parameters have no gradient.
    """

    def __init__(
        self, *args: Any, config: Any, provider: Provider, own: LlavaConfig, **kwargs: Any
    ) -> None:
        # The embedding must not scatter: images are inserted into the whole sequence, for only the
        # tokens say which patches a rank's part needs.
        super().__init__(*args, config=config, scatter_embedding_sequence_parallel=False, **kwargs)
        self._own = own
        language = list(self.parameters())
        if self.pre_process:
            self.vision = VisionTower(vision_config(config, own), provider, own)
            self.projector = Projector(projector_config(config, own), provider, own)
            _freeze("vision" in own.freeze, self.vision.parameters())
            _freeze("projector" in own.freeze, self.projector.parameters())
        _freeze("language" in own.freeze, language)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        *,
        images: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return as `LanguageModel`, for tokens [b, s] and `images` [n, 3, size, size], in the
        order of their tokens.

        Raises:
            ValueError: there are not as many image tokens as patches.
        """
        if self.pre_process and decoder_input is None:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if images is not None:
                decoder_input = self._with_images(decoder_input, input_ids, images)
            # The whole sequence has its images now, so each rank can take its part.
            if self.config.sequence_parallel:
                decoder_input = scatter_to_sequence_parallel_region(decoder_input)
        found: Tensor = super().forward(
            input_ids, position_ids, attention_mask, decoder_input, **kwargs
        )
        return found

    def _with_images(self, embeddings: Tensor, tokens: Tensor, images: Tensor) -> Tensor:
        """Return embeddings [s, b, h] with features in the places of image tokens."""
        if not len(images):
            return self._without_images(embeddings, images)
        features = self._features(images)
        place = tokens == self._own.image_token_id
        # On other devices counting would make the host wait; the data form has counted already.
        if tokens.is_cpu and int(place.sum()) != len(features):
            raise ValueError(
                f"{int(place.sum())} image tokens for {len(features)} patches of {len(images)}"
                " images"
            )
        rows = embeddings.transpose(0, 1)
        mixed = rows.masked_scatter(place.unsqueeze(-1), features.to(rows.dtype))
        return mixed.transpose(0, 1).contiguous()

    def _without_images(self, embeddings: Tensor, images: Tensor) -> Tensor:
        """Return the same embeddings.

        Tower and projector get a gradient of 0: reductions wait for each of their weights.
        """
        if not torch.is_grad_enabled() or {"vision", "projector"} <= set(self._own.freeze):
            return embeddings
        size = self._own.image_size
        blank = self._features(images.new_zeros(1, 3, size, size))
        return embeddings + 0.0 * blank.sum().to(embeddings.dtype)

    def _features(self, images: Tensor) -> Tensor:
        """Return embeddings [n * patches, h] of images, one image after the other."""
        with torch.no_grad() if "vision" in self._own.freeze else nullcontext():
            features = self.vision(images)
        out: Tensor = self.projector(features)
        return out.transpose(0, 1).flatten(0, 1)


def _freeze(frozen: bool, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters if frozen else ():
        parameter.requires_grad_(False)
