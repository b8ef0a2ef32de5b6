"""Rollouts from a server: all ranks have the answers, and weights arrive whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.errors import ConfigError, TrainingError
from mtrain.train.generate.request import Sampling
from mtrain.train.rollouts.engine import Prompt
from tests.support.forked import import_engine, run_ranks
from tests.support.rollout_server import ENDS, VOCABULARY, policy, serving
from tests.support.runs import tiny_run

ROUTES = {
    "openai": ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
}


def bodies(dialect: str, folder: Path, step: int) -> list[dict[str, Any]]:
    """Return what each of these routes gets with the weights of a step, as their servers read it.

    vLLM's routes of tensors (/init_weight_transfer_engine, /start_weight_update, /update_weights,
    /finish_weight_update) get nothing: their back ends are NCCL, and one that unpickles.
    """
    path = str(folder / f"step_{step:08d}")
    if dialect == "openai":
        return [{}, {"method": "reload_weights", "kwargs": {"weights_path": path}}, {}, {}]
    given = {"model_path": path, "weight_version": f"step {step}", "flush_cache": True}
    return [{"mode": "abort"}, given, {}]


PROMPTS = [Prompt((3, 4, 5 + i // 4), i) for i in range(8)]
DRAWN = Sampling(tokens=6, temperature=1.0, seed=1)


def weights(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of several formats and shapes."""
    yield "model.norm.weight", torch.arange(6.0) + step
    yield "model.embed.weight", torch.full((3, 4), 0.5 + step, dtype=torch.bfloat16)
    yield "model.scale", torch.tensor(2.0 * step)


def seen(rank_0: str, run: Any, dialect: str, folder: Path) -> Any:
    """Return answers before and after two updates on this rank, and on rank 0 what the server
    saw.
    """
    from mtrain.train.rollouts import weight_folder
    from mtrain.train.rollouts.client import Client
    from mtrain.train.rollouts.exchange import seed_of
    from mtrain.train.rollouts.server import ServerEngine
    from mtrain.world.init import joined

    weight_folder.FILE_BYTES = 24
    with joined(run) as world, serving(dialect) as server:
        # The servers of other ranks get no request.
        client = Client(server.url, VOCABULARY, 64, ENDS, dialect, tries=2, pause_s=0.01)
        text = ("ab", [ord(c) % VOCABULARY for c in "ab"])
        engine = ServerEngine(run, world, client, folder, probe=text)
        first = engine.generate(PROMPTS, DRAWN)
        for step in (1, 2):
            engine.push(weights(step), step)
        later = engine.generate(PROMPTS, DRAWN)
        seeds = [seed_of(run, DRAWN, prompt) for prompt in PROMPTS]
        expected = [
            policy(server.weights, list(prompt.ids), seed, DRAWN.tokens)
            for prompt, seed in zip(PROMPTS, seeds, strict=True)
        ]
        caught = ""
        server.always = rank_0
        try:
            engine.push(weights(3), 3)
            engine.generate(PROMPTS, DRAWN)
        except TrainingError as error:
            caught = str(error)
        with pytest.raises(ConfigError, match="MT335"):
            engine.generate(PROMPTS, Sampling(temperature=1.0, top_k=5))
        calls = (server.routes, server.bodies)
        facts = (calls, server.got, expected, [str(f.name) for f in folder.iterdir()])
        return first, later, caught, facts


@pytest.mark.parametrize("dialect", ["openai", pytest.param("sglang", marks=pytest.mark.full)])
def test_server_engine_ranks_get_answers_of_pushed_weights(dialect: str, tmp_path: Path) -> None:
    import_engine()
    run = tiny_run(ranks=2)
    fault = "refused" if dialect == "sglang" else "abort"
    (first, later, caught, facts), other = run_ranks(2, seen, fault, run, dialect, tmp_path)
    assert (first, later, caught) == other[:3]
    (routes, given), got, expected, folders = facts
    assert "server failed" in caught
    both = 2 * len(ROUTES[dialect])
    assert routes[:both] == 2 * ROUTES[dialect]
    assert given[:both] == [*bodies(dialect, tmp_path, 1), *bodies(dialect, tmp_path, 2)]
    assert [(list(a.ids), list(a.log_probabilities)) for a in later] == expected
    assert [a.ids for a in first] != [a.ids for a in later]
    assert {a.version for a in first} == {0}
    assert {a.version for a in later} == {2}
    assert set(folders) <= {"step_00000002", "step_00000003"}
    step = 3 if dialect == "openai" else 2
    assert got == {
        name: (tuple(tensor.shape), hashlib.sha256(data_of(tensor)).hexdigest())
        for name, tensor in weights(step)
    }


def data_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.flatten().view(torch.uint8).numpy().tobytes()
