"""A process that judges answers: a line of JSON in, a line of JSON out. Without torch."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from typing import Any

from mtrain import strict_json
from mtrain.processes import die_with
from mtrain.train.rewards import Reward, Sampled, reward_named


def main() -> None:
    """Judge answers until the end of standard input; a line without an answer loads its reward.

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
    known: dict[str, Reward] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            name = asked["name"]
            if name not in known:
                known[name] = reward_named(name)
            found = judged(known[name], asked["sampled"]) if "sampled" in asked else {}
        # A reward is code of somebody else: whatever it raises, the run says which it was.
        except BaseException as error:
            found = {"why": f"{type(error).__name__}: {error}"[:500]}
        out.write(strict_json.dumps(found) + "\n")
        out.flush()


def judged(reward: Reward, sampled: dict[str, Any]) -> dict[str, Any]:
    """Return the value of an answer, or why it has none."""
    value = float(reward(Sampled(**sampled)))
    return {"value": value} if math.isfinite(value) else {"why": f"it returned {value}"}


if __name__ == "__main__":
    main()
