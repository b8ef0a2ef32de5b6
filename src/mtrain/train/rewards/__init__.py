"""Rewards: functions of a sampled answer and the columns of its prompt.

Every module of this package is one, with its function as `REWARD`; other packages add theirs under
the entry point group `mtrain.rewards`. `rollout.rewards` names them. They run in processes of their
own (`mtrain.train.rollouts.judges`), and import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mtrain.config.machine import installed
from mtrain.errors import BadEnvironment


@dataclass(frozen=True)
class Sampled:
    """An answer that is to be judged."""

    text: str
    """Its text, without the token that ended it; of several turns, the last one."""
    record: Mapping[str, Any]
    """The line of data.path with its prompt."""
    tokens: int
    """Tokens that the model sampled."""
    most_tokens: int
    """`rollout.max_tokens`."""
    ended: bool
    """True if the model ended it; False where it was cut at the most tokens."""
    settings: Mapping[str, Any]
    """The keys of `rollout` that rewards read: answer_column, pattern, free_tokens, reward_url,
    reward_seconds.
    """
    messages: Sequence[Mapping[str, Any]] = ()
    """The messages of an answer of several turns (`rollout.environment`); empty: it is one text."""

    def answer(self) -> str:
        """Return the right answer.

        Raises:
            KeyError: the line of the prompt has no such column.
        """
        return str(self.record[self.settings["answer_column"]])


Reward = Callable[[Sampled], float]
"""A function that returns a finite number, the larger the better."""


def reward_named(name: str) -> Reward:
    """Return the reward of a name; a shipped one wins.

    Raises:
        BadEnvironment: no installed package has it, or it does not load.
    """
    if name in installed.shipped(__name__):
        found: Reward = import_module(f"{__name__}.{name}").REWARD
        return found
    entries = installed.found(installed.REWARDS)
    if name not in entries:
        raise BadEnvironment(f"reward {name!r}: no installed package has it")
    return installed.load(entries[name], f"reward {name!r}", Callable)  # type: ignore[arg-type]
