"""Experts that servers report: read in both formats, and refused where they are another model's."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from mtrain.train.generate.request import Sampling
from mtrain.train.rollouts.client import Client
from mtrain.train.rollouts.http_json import ServerFault
from mtrain.train.rollouts.reported import BadRoutes, Expected
from tests.support.rollout_server import ENDS, VOCABULARY, FakeServer, serving

EXPECTED = Expected(layers=(1, 2, 3), every=4, experts=8, topk=2)
TOKENS = 7


def routes(tokens: int, layers: int = 3) -> np.ndarray:
    dice = np.random.default_rng(tokens)
    draws = dice.random((tokens, layers, 8)).argsort(-1)
    return draws[..., :2].astype(np.int32)


def raw(found: np.ndarray) -> str:
    return base64.b64encode(found.astype("<i4").tobytes()).decode()


def saved(found: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, found)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("write", [raw, saved])
@pytest.mark.parametrize("layers", [3, 4])
def test_reported_routes_are_of_layers_with_experts(write: Any, layers: int) -> None:
    found = routes(TOKENS, layers)
    read = EXPECTED.read(write(found), TOKENS)
    assert read.dtype == np.int16
    assert (read == found[:, -3:]).all()


def _above() -> np.ndarray:
    found = routes(TOKENS)
    found[2, 1, 0] = 8
    return found


def _twice() -> np.ndarray:
    found = routes(TOKENS)
    found[2, 1, 0] = found[2, 1, 1]
    return found


BAD = {
    "none": (lambda: None, "names no experts"),
    "a token less": (lambda: saved(routes(TOKENS - 1)), r"\(6, 3, 2\), not integers \(7, 3, 2\)"),
    "a layer less": (lambda: saved(routes(TOKENS, 2)), r"\(7, 2, 2\), not integers"),
    "a token less, as bytes": (lambda: raw(routes(TOKENS - 1)), r"\(36,\), not integers"),
    "another model": (lambda: raw(_above()), "0 to 8, not 0 to 7"),
    "one expert twice": (lambda: raw(_twice()), "less than 2 experts"),
    "no numbers": (lambda: saved(routes(TOKENS).astype(float)), "float64"),
}


@pytest.mark.parametrize("case", BAD)
def test_reported_routes_of_others_are_refused(case: str) -> None:
    make, says = BAD[case]
    with pytest.raises(BadRoutes, match=says) as caught:
        EXPECTED.read(make(), TOKENS)
    assert "rollout.replay_routes=false" in str(caught.value)


@pytest.mark.parametrize("dialect", ["openai", "sglang"])
def test_reported_routes_arrive_with_answers(dialect: str, monkeypatch: Any) -> None:
    real = FakeServer.sample
    given = []

    def sample(self: FakeServer, body: dict[str, Any], fault: str) -> dict[str, Any]:
        answer = real(self, body, fault)
        given.append(body)
        if dialect == "sglang":
            assert body["return_routed_experts"]
            tokens = len(body["input_ids"]) + len(answer["output_ids"]) - 1
            answer["meta_info"]["routed_experts"] = raw(routes(tokens + len(lost), 4))
        else:
            (choice,) = answer["choices"]
            tokens = len(body["prompt"]) + len(choice["token_ids"]) - 1
            choice["routed_experts"] = saved(routes(tokens + len(lost)))
        return answer

    lost: list[int] = []
    monkeypatch.setattr(FakeServer, "sample", sample)
    drawn = Sampling(tokens=6, temperature=1.0)
    with serving(dialect) as server:
        options: dict[str, Any] = {"model": "tiny", "pause_s": 0.01, "tries": 2}
        options["expected"] = EXPECTED
        client = Client(server.url, VOCABULARY, 64, ENDS, dialect, **options)
        texts = client.sampled([((3, 4), 7), ((5, 6, 8), 9)], drawn)
        assert texts is not None
        for prompt, text in zip((2, 3), texts, strict=True):
            tokens = prompt + len(text.ids) - 1
            layers = 4 if dialect == "sglang" else 3
            assert (text.routes == routes(tokens, layers)[:, -3:]).all()
        lost.append(1)
        with pytest.raises(ServerFault, match="not integers"):
            client.sampled([((3, 4), 7)], drawn)
