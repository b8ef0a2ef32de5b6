"""The judgement of a server: a POST of JSON for each answer, which replies with one number."""

from __future__ import annotations

import time
import uuid
from typing import Any

from mtrain.train.rewards import Sampled
from mtrain.train.rollouts.http_json import Endpoint, ServerFault

VARIABLE = "MTRAIN_REWARD_KEY"
"""The environment variable with the key of the server, which no message, file or event has."""
MOST_BYTES = 1 << 20
"""The largest reply that is read."""
WAIT_S = 0.2
"""Seconds before the first repetition; each further wait is twice as long."""
PROMPTS = ("prompt", "messages", "conversations")
"""Keys of a line of data.path, of which one has the prompt."""


def reward(sampled: Sampled) -> float:
    """Return the number that the server at `rollout.reward_url` gives an answer.

    The request is `{"id", "prompt", "answer", "columns"}`, and the reply `{"id", "reward"}`. A
    server that may answer later gets the same request with the same id, also as the header
    Idempotency-Key, until the time of the reward is over.

    Raises:
        ServerFault: there was no such reply.
        ValueError: the address is none.
    """
    seconds = sampled.settings["reward_seconds"]
    until = time.monotonic() + seconds
    url = sampled.settings["reward_url"]
    endpoint = Endpoint(url, seconds, VARIABLE, end="", most_bytes=MOST_BYTES)
    number = uuid.uuid4().hex
    columns = dict(sampled.record)
    prompt = next((columns.pop(key) for key in PROMPTS if key in columns), None)
    body = {"id": number, "prompt": prompt, "answer": sampled.text, "columns": columns}
    wait = WAIT_S
    while True:
        left = until - time.monotonic()
        try:
            found = endpoint.call("POST", "", body, left, headers={"Idempotency-Key": number})
            return _number(found, number)
        except ServerFault as fault:
            # Another wait would only end in the limit of the process, which hides the reason.
            if not fault.again or time.monotonic() + 2 * wait > until:
                raise
        time.sleep(wait)
        wait *= 2


def _number(found: dict[str, Any], number: str) -> float:
    if found.get("id") != number:
        raise ServerFault("the reply has the id of another request", again=True)
    value = found.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ServerFault(f"the reply has no number as reward: {value!r:.80}", again=False)
    return float(value)


REWARD = reward
