"""Tokens drawn one after another on the device, with a read of the host every few tokens.

A step reads a token of each text, draws the next one and moves on; everything that changes from one
step to the next is in tensors at fixed addresses. So a device that can capture work issues all of a
step at once, and other devices at least do not wait for the host between two tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mtrain.devices.base import Device
from mtrain.train.generate.request import Sampling
from mtrain.train.generate.sampling import chosen

BLOCK = 16
"""Tokens of each text between two reads of the host; those after the end of a text are dropped."""
LEAST_SPAN = 64


class Decoder:
    """The steps of texts whose keys and values are in one cache."""

    def __init__(
        self,
        chunk: Any,
        cache: Any,
        sampling: Sampling,
        *,
        vocabulary: int,
        positions: int,
        device: Device,
        torch_device: torch.device,
        captures: bool,
    ) -> None:
        """Allocate the tensors of a step.

        Args:
            chunk: the whole model.
            cache: the keys and values that it reads and writes.
            sampling: how tokens are drawn.
            vocabulary: ids that may be drawn.
            positions: positions that the model knows; a later token has the last of them.
            device: the kind of device.
            torch_device: the device of all tensors.
            captures: whether to capture steps, if the device can.
        """
        self.chunk = chunk
        self.cache = cache
        self.sampling = sampling
        self.vocabulary = vocabulary
        self.positions = positions
        self.device = device
        self.captures = captures and device.captured is not None
        self.why_not = ""
        """Why a capture failed."""
        self.steady_tokens = 0
        self.steady_s = 0.0
        """Tokens, and their seconds, of blocks in which nothing was compiled or captured."""
        rows = cache.max_batch_size
        where: dict[str, Any] = {"dtype": torch.int64, "device": torch_device}
        self.ids = torch.zeros((rows, 1), **where)
        self.place = torch.zeros(1, **where)
        self.slot = torch.zeros(1, **where)
        self.drawn = torch.zeros((BLOCK, rows), **where)
        self.noise: torch.Tensor | None = None
        if sampling.temperature > 0:
            self.noise = torch.ones((BLOCK, rows, vocabulary), device=torch_device)
        self._seen: set[int] = set()
        self._replays: dict[int, Callable[[], None]] = {}

    def draw(
        self, last: Sequence[int], count: int, noise: torch.Tensor | None = None
    ) -> list[list[int]]:
        """Return the next `count` ids of each text, a list for each token.

        Args:
            last: the last id of each text, which the cache has not read yet.
            count: at most `BLOCK`.
            noise: random numbers [count, rows, vocabulary], if the temperature is above 0.
        """
        begin = time.perf_counter()
        span = self._span(self.cache.read + count)
        steady = span in self._replays if self.captures else span in self._seen
        self.ids.copy_(torch.tensor(last, dtype=torch.int64)[:, None])
        self.place.fill_(self.cache.read)
        self.slot.zero_()
        if self.noise is not None and noise is not None:
            self.noise[:count].copy_(noise)
        with self.cache.decoding(self.place, span):
            for _ in range(count):
                self._advance(span)
        self.cache.advance(count)
        found: list[list[int]] = self.drawn[:count].tolist()
        if steady:
            self.steady_tokens += count * len(last)
            self.steady_s += time.perf_counter() - begin
        return found

    def _span(self, tokens: int) -> int:
        """Return the part of the cache that is attended to: a power of two, so that few sizes are
        captured.
        """
        power = max(LEAST_SPAN, 1 << (tokens - 1).bit_length())
        return int(min(power, self.cache.max_sequence_length))

    def _advance(self, span: int) -> None:
        """Make a step: replayed, captured if the same was issued before, or else issued."""
        replay = self._replays.get(span)
        if replay is None and self.captures and span in self._seen:
            replay = self._capture(span)
        if replay is not None:
            replay()
            return
        # Libraries and kernels allocate and compile at their first call, outside of any capture.
        self._seen.add(span)
        self.step()

    def _capture(self, span: int) -> Callable[[], None] | None:
        assert self.device.captured is not None
        try:
            self._replays[span] = self.device.captured(self.step)
        except RuntimeError as error:
            self.captures = False
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.why_not = f"a step was not captured: {first}"
            return None
        return self._replays[span]

    def step(self) -> None:
        """Issue the work of one token of each text, the same for every token."""
        self.cache.begin_step()
        positions = self.place.clamp(max=self.positions - 1).expand(self.ids.shape)
        logits = self.chunk(
            self.ids, positions, None, inference_context=self.cache, runtime_gather_output=True
        )[:, -1, : self.vocabulary].float()
        noise = None
        if self.noise is not None:
            noise = self.noise.index_select(0, self.slot)[0]
        ids = chosen(logits, self.sampling, noise)
        self.drawn.index_copy_(0, self.slot, ids[None])
        self.ids.copy_(ids[:, None])
        self.place.add_(1)
        self.slot.add_(1)
