"""A process that judges answers, or continues them: a line of JSON in, a line of JSON out.

It imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from mtrain import strict_json
from mtrain.processes import die_with
from mtrain.train.environments import Environment, environment_named
from mtrain.train.rewards import Reward, Sampled, reward_named

ROLES = ("tool", "user")
"""Roles of the messages of an environment."""
MOST_BYTES = 1 << 20
"""The largest messages of an environment after one turn."""


def main() -> None:
    """Judge answers until the end of standard input; a line without one loads its function.

    The arguments are the process that it ends with, and its limit of memory in bytes.
    """
    die_with(int(sys.argv[1]))
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A process that is killed at its limit would write gigabytes of a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a reward prints must not be taken for its value.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    known: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            named, ask = KINDS[asked["kind"]]
            key = asked["kind"], asked["name"]
            if key not in known:
                known[key] = named(asked["name"])
            found = ask(known[key], asked["given"]) if "given" in asked else {}
        # A function is code of somebody else: whatever it raises, the run says which it was.
        except BaseException as error:
            found = {"why": f"{type(error).__name__}: {error}"[:500]}
        out.write(strict_json.dumps(found) + "\n")
        out.flush()


def judged(reward: Reward, sampled: dict[str, Any]) -> dict[str, Any]:
    """Return the value of an answer, or why it has none."""
    value = float(reward(Sampled(**sampled)))
    return {"value": value} if math.isfinite(value) else {"why": f"it returned {value}"}


def acted(environment: Environment, given: dict[str, Any]) -> dict[str, Any]:
    """Return the messages that follow a conversation, None where it ends, or why there are none."""
    found = environment(given["messages"], given["columns"])
    if not found:
        return {"messages": None}
    messages = [dict(message) for message in found]
    for message in messages:
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            return {"why": f"it returned {str(message)[:80]!r}, no message of {' or '.join(ROLES)}"}
    size = len(strict_json.dumps(messages))
    if size > MOST_BYTES:
        return {"why": f"it returned messages of {size} bytes, above {MOST_BYTES}"}
    return {"messages": messages}


KINDS: dict[str, tuple[Callable[[str], Any], Callable[[Any, dict[str, Any]], dict[str, Any]]]] = {
    "reward": (reward_named, judged),
    "environment": (environment_named, acted),
}
"""Kind of a request -> what finds its function, and what calls it."""


if __name__ == "__main__":
    main()
