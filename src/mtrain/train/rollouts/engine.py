"""The interface of rollout engines, which sample answers to prompts with the weights of the policy.

Engines differ in where they run: in the training processes, or on a server that gets the weights
after every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from mtrain.train.generate.request import Sampling


@dataclass(frozen=True)
class Prompt:
    """A prompt of one answer."""

    ids: tuple[int, ...]
    number: int
    """The number of the sample. Together with `Sampling.seed` it seeds the draws of this answer, so
    that an answer does not depend on the others of its batch.
    """


@dataclass(frozen=True)
class Rollout:
    """An answer that was sampled."""

    prompt: Prompt
    ids: tuple[int, ...]
    """Sampled tokens, with the one that ended the text."""
    log_probabilities: tuple[float, ...]
    """Nats of each sampled token, in the distribution that it was drawn from."""
    ended: str
    """Reason for its end, a word of `mtrain.train.generate.request.ENDINGS`."""
    version: int = 0
    """Step after which the sampler's weights were those of the policy."""
    routes: np.ndarray | None = None
    """Experts of the tokens that were read, int16 [tokens, layers, k]; None: not recorded."""


class Engine(Protocol):
    """A sampler of answers; all ranks of a run call its methods together."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout] | None:
        """Return an answer to each prompt in their order, the same on every rank; None as soon as
        a rank has a request to stop.
        """
        ...

    def push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Give the engine the weights after step `version`, by their Hugging Face names.

        An engine that samples from the trained shards themselves reads nothing of `weights`.
        """
        ...

    def pause(self) -> None:
        """Let no request begin until `resume`: the weights are about to change."""
        ...

    def resume(self) -> None:
        """Let requests begin again."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...
