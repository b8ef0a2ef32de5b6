"""Answers that a server samples while a step trains: their weights, their age and their end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.train.rollouts.http_json import Endpoint
from tests.distributed.test_answers import (
    counting_runs,
    formed,
    mean_reward,
    prompts_run,
    records,
    rewarded,
)
from tests.distributed.test_endings import End, train
from tests.support.forked import RankFailed, import_engine, run_ranks
from tests.support.rollout_server import ENDS, serving
from tests.support.runs import whole_tensors

HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


LETTERS = {"rewards": ("format",), "pattern": ".*[A-Za-z].*"}
"""A reward that answers of random bytes differ in."""


def served(run: RunConfig, home: Path, ahead: int = 1, **given: Any) -> RunConfig:
    """Return a run whose answers a server samples, next to the step or `ahead` of it."""
    base = home / "base"
    base.mkdir(exist_ok=True)
    more = {"rms_norm_eps": run.model.layernorm_epsilon, "rope_theta": run.model.rotary_base}
    (base / "config.json").write_text(json.dumps(HF | more))
    rollout = {"weights_folder": str(home / "pushed")} | given
    sections = {
        "rollout": run.rollout.model_copy(update=rollout),
        "objective": run.objective.model_copy(update={"max_staleness": ahead}),
        "checkpoint": run.checkpoint.model_copy(update={"init_from": str(base)}),
    }
    return run.model_copy(update=sections)


@pytest.mark.full
@pytest.mark.parametrize("ahead", [0, 1])
def test_ahead_oracle_has_the_probabilities_of_the_trainer(ahead: int, tmp_path: Path) -> None:
    """Sample with transformers from the pushed weights; without staleness both agree."""
    import_engine()
    run = prompts_run(tmp_path, steps=3, optim={"lr": 1e-2, "warmup_iters": 0})
    run = served(run, tmp_path, ahead, engine="transformers", **LETTERS)
    (steps,) = run_ranks(1, records, run, tmp_path, False)
    for made, step in enumerate(steps):
        age = min(made, ahead)
        assert (step["sample_age"], step["sample_age_max"], step["stale_answers"]) == (age, age, 0)
        gap = step["sampler_gap_max"]
        assert gap > 1e-3 if age else 0 < gap < 1e-5


@pytest.mark.full
def test_ahead_count_is_learned_from_a_server(tmp_path: Path) -> None:
    """Learn to count from answers that another process samples one step ahead, from pushed weights:
    the mean reward rises from below 0.2 to above 0.9.
    """
    import_engine()
    form, run = counting_runs(tmp_path)
    (path,) = run_ranks(1, formed, form, tmp_path)
    run = served(run, tmp_path, engine="transformers", rows=64)
    objective = run.objective.model_copy(update={"importance": "truncated"})
    run = run.model_copy(update={"objective": objective})
    (steps,) = run_ranks(1, rewarded, run, path, timeout_s=600)
    assert mean_reward(steps[:5]) < 0.2
    assert mean_reward(steps[-5:]) > 0.9
    assert [step["sample_age"] for step in steps] == [0, *[1] * (len(steps) - 1)]


def with_fakes(job: Any, *given: Any) -> Any:
    """Return the value of a job that knows the ends of the fake server's texts."""
    from mtrain.train.rollouts import client, engines

    client.Client.require_same = lambda *given: None  # type: ignore[method-assign, assignment]
    engines.ends_of = lambda tokenizer: ENDS
    engines.Client = partial(client.Client, tries=4, pause_s=0.01)  # type: ignore[misc, assignment]
    return job(*given)


def by_fake(run: RunConfig, home: Path, url: str, ahead: int = 1) -> RunConfig:
    """Return a run whose answers a fake server of SGLang samples."""
    return served(run, home, ahead, engine="sglang", url=url, server_model="tiny")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_ahead_answers_have_weights_of_the_step_before(ranks: int, tmp_path: Path) -> None:
    """Request the answers of a step before the step before it trains; older ones are replaced."""
    import_engine()
    run = prompts_run(tmp_path, steps=4, ranks=ranks, tp=ranks)
    with serving("sglang") as server:
        # Of the third step: its weights are those after the first.
        server.faults = [""] * 18 + ["older", "", "older"]
        run = by_fake(run, tmp_path, server.url)
        steps, *others = run_ranks(ranks, with_fakes, records, run, tmp_path, False)
    assert others == [steps] * (ranks - 1)
    ages = [0, 1, 1, 1]
    assert [step["sample_age"] for step in steps] == ages
    assert [step["sample_age_max"] for step in steps] == ages
    assert [step["stale_answers"] for step in steps] == [0, 0, 2, 0]
    # Three pushes, and none before the last step, which needs no more answers.
    assert server.routes.count("/update_weights_from_disk") == 3
    taken = ["step 0"] * 16 + ["step 1"] * 8 + ["step 2"] * 8
    assert sorted(server.versions) == sorted([*taken, "step 0", "step 0"])
    assert server.versions[:16] == taken[:16]
    assert server.versions[-8:] == taken[-8:]


@pytest.mark.full
def test_ahead_old_answers_are_not_trained_on(tmp_path: Path) -> None:
    """Replace answers of weights that are too old, whatever made them so."""

    def job() -> list[dict[str, float]]:
        from mtrain.train.rollouts.server import ServerEngine

        real = ServerEngine.generate
        calls = 0

        def late(engine: Any, prompts: Any, sampling: Any) -> Any:
            nonlocal calls
            calls += 1
            found = real(engine, prompts, sampling)
            if calls == 3:
                found[2:4] = [replace(one, version=0) for one in found[2:4]]
            return found

        ServerEngine.generate = late  # type: ignore[method-assign]
        return records(run, tmp_path, False)

    import_engine()
    with serving("sglang") as server:
        run = by_fake(prompts_run(tmp_path, steps=4), tmp_path, server.url)
        (steps,) = run_ranks(1, with_fakes, job)
    assert [step["stale_answers"] for step in steps] == [0, 0, 2, 0]
    assert [step["sample_age_max"] for step in steps] == [0, 1, 1, 1]
    assert steps[2]["sample_age"] == 6 / 8


@pytest.mark.full
def test_ahead_dead_server_ends_the_run_before_the_step(tmp_path: Path) -> None:
    """Make no step whose answers did not come; the run says what it saw, and leaves no thread."""

    def job() -> tuple[End, list[str]]:
        from mtrain.errors import TrainingError
        from mtrain.train.loop import step

        real = step.update
        updates = 0

        def killing(*given: Any) -> Any:
            nonlocal updates
            updates += 1
            if updates == 2:
                with pytest.raises(Exception, match="503"):
                    Endpoint(server.url, 5.0).call("POST", "/die", {})
            return real(*given)

        step.update = killing
        assert TrainingError.exit_code == 5
        end = train(run, tmp_path / "run")
        return end, [one.name for one in threading.enumerate() if "rollouts" in one.name]

    import_engine()
    with serving("sglang") as server:
        run = by_fake(prompts_run(tmp_path, steps=4), tmp_path, server.url)
        ((end, threads),) = run_ranks(1, with_fakes, job)
    assert (end.error, end.lines, threads) == ("TrainingError", 2, [])
    assert "rollout.url" in end.said
    assert "status 503" in end.said


@pytest.mark.full
def test_ahead_close_ends_requests_and_threads(tmp_path: Path) -> None:
    """End a run whose server works on the answers of a next step."""

    def job() -> list[str]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            train_step(context, stop_requested=False)
            began = [one.name for one in threading.enumerate()]
            context.close()
        assert any("rollouts ahead" in name for name in began)
        return [one.name for one in threading.enumerate() if "rollouts" in one.name]

    import_engine()
    with serving("sglang") as server:
        server.faults = [""] * 8 + ["slow"] * 8
        run = by_fake(prompts_run(tmp_path, steps=2), tmp_path, server.url)
        assert run_ranks(1, with_fakes, job) == [[]]


PLACES = ("rollout", "reward", "step", "push", "save")
KILLED_STEPS = 4


@contextmanager
def server_of(kind: str) -> Iterator[str]:
    """Yield the URL of a fake server, or nothing for the trained shards themselves."""
    if kind == "local":
        yield ""
        return
    with serving("sglang") as server:
        yield server.url


def killable(home: Path, url: str) -> RunConfig:
    """Return a run that saves after each step."""
    run = prompts_run(home, steps=KILLED_STEPS, optim={"lr": 1e-2, "warmup_iters": 0})
    saves = run.checkpoint.model_copy(update={"save_interval": 1, "keep": None})
    run = run.model_copy(update={"checkpoint": saves})
    run = run.model_copy(update={"rollout": run.rollout.model_copy(update=LETTERS)})
    return by_fake(run, home, url) if url else run


def trained_until(run: RunConfig, home: Path, place: str, call: int) -> End:
    """Train from the last checkpoint in `home`, and kill this process at a call of a place."""
    from mtrain.ckpt import state
    from mtrain.ckpt.folder import committed
    from mtrain.train.loop import step
    from mtrain.train.rollouts import client, local, weight_folder
    from mtrain.train.rollouts.judges import Judges

    rolls = (client.Client, "_one") if run.rollout.engine != "local" else (local._Rows, "_step")
    owners: dict[str, tuple[Any, str]] = {
        "rollout": rolls,
        "reward": (Judges, "verdicts"),
        "step": (step, "update"),
        "push": (weight_folder, "write"),
        "save": (state, "save"),
    }
    if place:
        owner, name = owners[place]
        real = getattr(owner, name)
        calls = 0

        def deadly(*given: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **more)

        setattr(owner, name, deadly)
    kept = committed(home / "checkpoints") if home.exists() else []
    return train(run, home, kept[-1] if kept else None)


def ages_of(home: Path) -> dict[int, float]:
    """Return the age of the answers of each step."""
    lines = map(json.loads, (home / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["sample_age"] for line in lines if "sample_age" in line}


def ended(kind: str, home: Path, place: str = "", call: int = 0) -> tuple[Any, dict[int, float]]:
    """Return the weights of a run, killed once if a place is given, and the ages of its answers."""
    run_home = home / "run"
    with server_of(kind) as url:
        run = killable(home, url)
        if place:
            with pytest.raises(RankFailed):
                run_ranks(1, with_fakes, trained_until, run, run_home, place, call)
        (end,) = run_ranks(1, with_fakes, trained_until, run, run_home, "", 0)
    assert end.error == "", end.said
    last = run_home / "checkpoints" / f"step_{KILLED_STEPS:08d}"
    return whole_tensors(last), ages_of(run_home)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the end of a run of each kind that nothing disturbs."""
    import_engine()
    home = tmp_path_factory.mktemp("undisturbed")
    found = {}
    for kind in ("local", "ahead"):
        (home / kind).mkdir()
        found[kind] = ended(kind, home / kind)
    return found


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_ahead_killed_run_continues(seed: int, undisturbed: Any, tmp_path: Path) -> None:
    """Kill a run anywhere: it ends with the bits of an undisturbed one, and its answers have the
    same ages, because those that were under way are requested again from the same weights.
    """
    draws = random.Random(seed)
    kind = "ahead" if seed % 2 else "local"
    place = PLACES[seed // 2 % len(PLACES)]
    place = "save" if (kind, place) == ("local", "push") else place
    most = {"rollout": 8 * KILLED_STEPS if kind == "ahead" else 3 * KILLED_STEPS}
    call = draws.randrange(1, most.get(place, 3) + 1)
    weights, ages = ended(kind, tmp_path, place, call)
    expected, same = undisturbed[kind]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert ages == same


@pytest.mark.full
def test_ahead_resume_without_older_weights_samples_anew(undisturbed: Any, tmp_path: Path) -> None:
    """Take the weights of the checkpoint where those before it are gone: other answers, of age 0;
    this is also the fault that the test above would find.
    """
    with serving("sglang") as server:
        run = killable(tmp_path, server.url)
        home = tmp_path / "run"
        with pytest.raises(RankFailed):
            run_ranks(1, with_fakes, trained_until, run, home, "step", 3)
        shutil.rmtree(tmp_path / "pushed")
        (end,) = run_ranks(1, with_fakes, trained_until, run, home, "", 0)
    assert end.error == ""
    expected, ages = undisturbed["ahead"]
    assert ages_of(home) == {**ages, 3: 0.0}
    found = whole_tensors(home / "checkpoints" / f"step_{KILLED_STEPS:08d}")
    assert not all(torch.equal(found[name], expected[name]) for name in expected)
