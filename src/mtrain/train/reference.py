"""The model that a policy is compared with: a frozen copy, or the policy without its adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from mtrain.ckpt.state import TrainState
from mtrain.mcore.layers.low_rank import adapters_off
from mtrain.mcore.state.sharding import gathered


@contextmanager
def as_reference(state: TrainState, kind: str | None) -> Iterator[list[Any]]:
    """Yield the chunks of the reference; inside, adapters may be off, and nothing is dropped.

    Without a reference (`none`) they are those of the policy.
    """
    if kind == "frozen":
        yield state.reference
        return
    training = [chunk.training for chunk in state.chunks]
    with gathered(state.chunks), adapters_off() if kind == "adapter_off" else nullcontext():
        for chunk in state.chunks:
            chunk.eval()
        yield state.chunks
    for chunk, before in zip(state.chunks, training, strict=True):
        chunk.train(before)
