"""Environments: functions of a conversation, which return what follows the model's last answer.

Every module of this package is one, with its function as `ENVIRONMENT`; other packages add theirs
under the entry point group `mtrain.environments`. `rollout.environment` names one. They run in the
processes of the rewards, with their limits (`mtrain.train.rollouts.judges`), and import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from mtrain.config.machine import installed
from mtrain.errors import BadEnvironment

Message = Mapping[str, Any]
"""A message with `role` and `content`, as chat templates read it."""
Environment = Callable[[Sequence[Message], Mapping[str, Any]], Sequence[Message] | None]
"""A function of all messages, the last of which is the model's, and of the line of data.path with
the prompt. It returns the messages of tools and users that follow, or None to end the answer.
"""


def environment_named(name: str) -> Environment:
    """Return the environment of a name; a shipped one wins.

    Raises:
        BadEnvironment: no installed package has it, or it does not load.
    """
    if name in installed.shipped(__name__):
        found: Environment = import_module(f"{__name__}.{name}").ENVIRONMENT
        return found
    entries = installed.found(installed.ENVIRONMENTS)
    if name not in entries:
        raise BadEnvironment(f"environment {name!r}: no installed package has it")
    return installed.load(entries[name], f"environment {name!r}", Callable)  # type: ignore[arg-type]
