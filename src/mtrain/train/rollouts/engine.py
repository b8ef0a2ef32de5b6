"""The interface of rollout engines, which sample answers to prompts with the weights of the policy.

Engines differ in where they run: in the training processes, or on a server that gets the weights
after every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The line of data.path with its messages and columns; empty: nobody reads them."""


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
    own: tuple[bool, ...] = ()
    """True for each token that the model sampled, False for those that tools and users wrote, whose
    log-probabilities are 0; empty: it sampled all.
    """
    messages: tuple[Any, ...] = ()
    """The messages of an answer of several turns; empty: it is one text."""
    why: str = ""
    """Reason for which an environment failed."""
    among: tuple[tuple[int, ...], ...] = ()
    """The tokens that each was drawn among; empty: all."""

    @property
    def sampled(self) -> int:
        """Return the tokens that the model sampled."""
        return sum(self.own) if self.own else len(self.ids)


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
