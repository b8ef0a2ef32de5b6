"""Answers from servers: right ones, or an error; never those of a fault."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mtrain.train.generate.request import Continuation, Sampling
from mtrain.train.rollouts.client import Client
from mtrain.train.rollouts.http_json import Endpoint, ServerFault
from tests.support.covering import some
from tests.support.rollout_server import ENDS, LATE_S, VOCABULARY, FakeServer, policy, serving

TEXT = "weights"
IDS = [ord(c) % VOCABULARY for c in TEXT]
PROMPTS = [((3, 4, 5 + i // 4), 100 + i) for i in range(12)]
DRAWN = Sampling(tokens=6, temperature=1.0)
PASSING = ["slow", "cut", "half", "busy", "repeated", "prompt", "logprobs", "nan", "vocabulary"]
PASSING += ["short", "after the end", "abort"]
"""Faults after which the same request is sent again."""


def client_of(server: FakeServer, **given: Any) -> Client:
    options: dict[str, Any] = {"model": "tiny", "in_flight": 4, "timeout_s": LATE_S / 2}
    options |= {"pause_s": 0.01, "tries": 3}
    return Client(server.url, VOCABULARY, 64, ENDS, server.dialect, **(options | given))


def right(server: FakeServer, weights: str = "first") -> list[tuple[list[int], list[float]]]:
    return [policy(weights, list(ids), seed, DRAWN.tokens) for ids, seed in PROMPTS]


def of(texts: list[Continuation] | None) -> list[tuple[list[int], list[float]]]:
    assert texts is not None
    return [(text.ids, text.log_probabilities) for text in texts]


@pytest.mark.parametrize("dialect", some(["openai", "sglang"], ["openai"]))
def test_client_passing_faults_keep_answers(dialect: str) -> None:
    with serving(dialect) as server:
        client = client_of(server)
        client.require_same(TEXT, IDS)
        server.faults = [each for fault in PASSING for each in (fault, "")]
        if dialect == "sglang":
            # It repeats no prompt: names and lengths tell answers apart.
            server.faults.remove("prompt")
        client.tries = 12
        assert of(client.sampled(PROMPTS, DRAWN)) == right(server)
        assert not server.faults
        assert 1 < server.busiest <= 4


LASTING = [f"openai {fault}" for fault in PASSING]
# That route reports no version, and this one repeats no prompt.
LASTING += [f"sglang {fault}" for fault in (*PASSING, "version") if fault != "prompt"]


@pytest.mark.parametrize("case", some(LASTING, ["openai prompt", "sglang version"]))
def test_client_lasting_fault_is_an_error(case: str) -> None:
    dialect, fault = case.split(" ", 1)
    with serving(dialect) as server:
        client = client_of(server, tries=2)
        client.has(3, "step 3" if dialect == "sglang" else None)
        server.version = "step 3"
        server.always = fault
        with pytest.raises(ServerFault):
            client.sampled(PROMPTS[:2], DRAWN)


def test_client_restarted_server_is_refused() -> None:
    with serving("openai") as server:
        client = client_of(server)
        client.has(3, None)
        assert of(client.sampled(PROMPTS, DRAWN)) == right(server)
        url = server.url
    with pytest.raises(ServerFault, match="nothing listens"):
        client.sampled(PROMPTS, DRAWN)
    with serving("openai") as server:
        client.endpoint = Endpoint(server.url, 1.0)
        with pytest.raises(ServerFault, match="started anew"):
            client.sampled(PROMPTS, DRAWN)
        client.has(4, None)
        assert of(client.sampled(PROMPTS, DRAWN)) == right(server)
        assert url != server.url


@pytest.mark.parametrize("dialect", some(["openai", "sglang"], ["sglang"]))
def test_client_other_tokenizer_is_refused(dialect: str) -> None:
    with serving(dialect) as server:
        server.tokenizer = 1
        with pytest.raises(ServerFault, match="another tokenizer"):
            client_of(server).require_same(TEXT, IDS)
        with pytest.raises(ServerFault, match="models are"):
            client_of(server, model="other").require_same(TEXT, IDS)


def test_client_stop_ends_requests() -> None:
    with serving("openai") as server:
        server.always = "slow"
        client = client_of(server, timeout_s=30.0, stop=lambda: True)
        assert client.sampled(PROMPTS, DRAWN) is None


@pytest.mark.full
@pytest.mark.parametrize("seed", range(50))
def test_client_faults_give_right_answers_or_none(seed: int) -> None:
    """Inject faults into a third of the requests."""
    draws = random.Random(seed)
    with serving(draws.choice(["openai", "sglang"])) as server:
        kinds = [f for f in PASSING if (server.dialect, f) != ("sglang", "prompt")]
        kinds += ["version"] if server.dialect == "sglang" and seed % 5 == 0 else []
        client = client_of(server)
        client.has(3, "step 3" if server.dialect == "sglang" else None)
        server.version = "step 3"
        server.faults = [draws.choice([*kinds, *[""] * 2 * len(kinds)]) for _ in range(24)]
        try:
            found = of(client.sampled(PROMPTS, DRAWN))
        except ServerFault:
            return
        assert found == right(server)


@pytest.mark.parametrize("url", ["ftp://host", "http://user:secret@host", "host:80", "http://h/?a"])
def test_client_other_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|place") as caught:
        Endpoint(url, 1.0)
    assert "secret" not in str(caught.value)
