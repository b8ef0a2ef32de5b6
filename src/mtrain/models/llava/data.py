"""The objective of LLaVA: the next token of a text, from images and the tokens before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.data import ImageTextSamples, Splits
from mtrain.data.batch import Collator, MicroBatch
from mtrain.data.image_text import IMAGE, NOTHING
from mtrain.errors import CorruptData
from mtrain.models.llava.config import LlavaConfig


def collator(run: RunConfig, splits: Splits, part: str) -> Collator:
    """Return the micro-batches of `part` of the splits, with `images` float32 [images, 3, size,
    size].

    The loss counts for text that is learned; never for an image or for padding.
    """
    own = LlavaConfig.of(run.model)
    source = getattr(splits, part)
    if isinstance(source, ImageTextSamples):
        return lambda windows, numbers: _of_records(own, source, windows, numbers)
    return lambda windows, numbers: _synthetic(own, f"{run.trainer.seed}/{part}", windows, numbers)


def _of_records(
    own: LlavaConfig, source: ImageTextSamples, windows: torch.Tensor, numbers: np.ndarray
) -> MicroBatch:
    learned = torch.from_numpy(source.learned(numbers))
    rows = [spread(own, window, known) for window, known in zip(windows, learned, strict=True)]
    for number, window, (tokens, _) in zip(numbers, windows, rows, strict=True):
        if bool((window == own.image_token_id).any()):
            said = f"its text has the token id {own.image_token_id}, which stands for images"
            raise CorruptData(f"{source.place(int(number))}: {said}")
        asked = source.image_count(int(number)) * own.image_tokens
        if int((tokens[:-1] == IMAGE).sum()) != asked:
            said = f"its images take {asked} tokens, and they and the text before them do not fit"
            raise CorruptData(
                f"{source.place(int(number))}: {said} data.seq_length {len(window) - 1}"
            )
    images = torch.from_numpy(source.images(numbers, own.image_size))
    tokens, known = (torch.stack(column) for column in zip(*rows, strict=True))
    return _batch(own, tokens, known, images)


def spread(
    own: LlavaConfig, window: torch.Tensor, learned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a window [s + 1] with an `IMAGE` for each patch, and its learned places."""
    # A record holds one mark for an image; the model reads a token for each patch.
    times = torch.where(window == IMAGE, own.image_tokens, 1)
    return (
        window.repeat_interleave(times)[: len(window)],
        learned.repeat_interleave(times)[: len(window)],
    )


def _synthetic(
    own: LlavaConfig, name: str, windows: torch.Tensor, numbers: np.ndarray
) -> MicroBatch:
    """Return an image of noise in each sample, at a place by its number, before learned text."""
    room = windows.shape[1] - 1 - own.image_tokens
    tokens = torch.where(
        windows == own.image_token_id, (windows + 1) % max(2, own.image_token_id), windows
    )
    learned = torch.ones_like(tokens, dtype=torch.bool)
    images = torch.empty(len(numbers), 3, own.image_size, own.image_size)
    for row, number in enumerate(numbers):
        digest = hashlib.sha256(f"{name}/{number}".encode()).digest()
        # Seven bytes, because seeds of torch have a sign.
        draw = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        images[row].normal_(generator=draw)
        begin = int(torch.randint(0, max(1, room), (), generator=draw))
        tokens[row, begin : begin + own.image_tokens] = IMAGE
    return _batch(own, tokens, learned, images)


def _batch(
    own: LlavaConfig, tokens: torch.Tensor, learned: torch.Tensor, images: torch.Tensor
) -> MicroBatch:
    image = tokens == IMAGE
    nothing = tokens == NOTHING
    padding = 1 if own.image_token_id == 0 else 0  # any id but that of an image
    ids = tokens.masked_fill(image, own.image_token_id).masked_fill(nothing, padding)
    counts = (learned & ~image & ~nothing)[:, 1:]
    inputs = ids[:, :-1].contiguous()
    batch = MicroBatch(
        tokens=inputs,
        labels=ids[:, 1:].contiguous(),
        loss_mask=counts.float().contiguous(),
        position_ids=torch.arange(inputs.shape[1]).expand_as(inputs).contiguous(),
        padding=nothing[:, :-1].contiguous(),
    )
    return cast(MicroBatch, {**batch, "images": images})


def probe(
    model: ModelConfig, ids: Sequence[int]
) -> tuple[list[int], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return an image of noise after the first token, to compare logits with transformers."""
    own = LlavaConfig.of(model)
    text = [i if i != own.image_token_id else (i + 1) % model.vocab_size for i in ids]
    room = max(1, model.max_position_embeddings - own.image_tokens)
    mixed = [text[0], *[own.image_token_id] * own.image_tokens, *text[1:room]]
    image = torch.randn(
        1, 3, own.image_size, own.image_size, generator=torch.Generator().manual_seed(0)
    )
    return mixed, {"images": image}, {"pixel_values": image}
