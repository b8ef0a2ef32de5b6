"""Requests for text and their results; without torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from: logits over `temperature`, of the tokens that
    every limit keeps.
    """

    tokens: int = 64
    """Upper limit of the tokens that are added to a prompt."""
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability, the last of them too."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the probability of the most likely one."""
    reports: bool = False
    """Report the tokens that each one was drawn among: at most `top_k`."""
    seed: int | None = None
    """Seed of each prompt's draws, so that its text does not depend on other prompts; None:
    `trainer.seed`.
    """

    @property
    def limited(self) -> bool:
        """Return whether some tokens are never drawn."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


@dataclass(frozen=True)
class Request:
    """Prompts and how they are continued."""

    prompts: tuple[str, ...]
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    """Texts before which a continuation ends."""
    rows: int = 8
    """Prompts that are computed together."""
    cache: bool = True
    """Keep keys and values, where the model allows it."""


LENGTH = "length"
END = "end of text"
STOP = "stop"
ENDINGS = (LENGTH, END, STOP)
"""Reasons for the end of a continuation: it has all its tokens, an end-of-text token, or a text of
`stop`.
"""


@dataclass
class Continuation:
    """The tokens that were added to one prompt."""

    ids: list[int] = field(default_factory=list)
    ended: str = LENGTH
    log_probabilities: list[float] = field(default_factory=list)
    """Nats of each token, in the distribution that it was drawn from; empty where tokens were drawn
    in blocks.
    """
    among: list[list[int]] = field(default_factory=list)
    """The tokens that each was drawn among, if they were requested."""
    routes: Any = None
    """Experts of all tokens that were read, an array int16 [tokens, layers, k]; None: unknown."""


@dataclass(frozen=True)
class Written:
    """The text that a model wrote after one prompt."""

    prompt: str
    text: str
    """The continuation, up to a text of `stop`."""
    tokens: int
    ended: str
    """A word of `ENDINGS`."""


@dataclass(frozen=True)
class Texts:
    """The texts of a request, in the order of its prompts."""

    texts: tuple[Written, ...]
    seconds: float
    no_cache: str = ""
    """Reason why keys and values were recomputed for every token; empty: they were cached."""
    no_graph: str = ""
    """Reason why the steps of single tokens were not captured, on a device that captures; else
    empty.
    """
    steady_tokens_per_s: float | None = None
    """The speed of single tokens over all prompts once everything is compiled and captured; None:
    there were too few, or the host took part in each.
    """

    @property
    def tokens(self) -> int:
        """Return the number of new tokens."""
        return sum(one.tokens for one in self.texts)

    @property
    def tokens_per_s(self) -> float:
        """Return the speed, over all prompts."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Questions:
    """Tasks of lm-evaluation-harness."""

    tasks: tuple[str, ...]
    limit: int | None = None
    """Upper limit of the requests of each task."""
    shots: int | None = None
    """Examples before each; None: as many as the task sets."""
    rows: int = 8
    """Requests that are computed together."""
