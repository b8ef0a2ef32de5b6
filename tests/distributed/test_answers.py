"""Answers that the policy samples: one step in any split, rewards and advantages of whole batches,
and a run that learns.
"""

from __future__ import annotations

import os
import random
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.rollout import RolloutConfig
from mtrain.config.schema.run import RunConfig
from mtrain.plan.rank import stage_memories
from tests.distributed.test_endings import End, train
from tests.support.chats import chats_file, folder_of, turns
from tests.support.covering import some
from tests.support.forked import RankFailed, import_engine, run_ranks
from tests.support.objective_steps import (
    FEW,
    LAYOUTS,
    MOE,
    OF_THE_LOOP,
    require_same_steps,
    run_of,
    two_steps,
)
from tests.support.rollout_server import ENDS, serving
from tests.support.runs import tiny_run, whole_tensors

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"policy_loss": "grpo", "kl_coef": 0.1},
    "dr_grpo": {"policy_loss": "dr_grpo"},
    "gspo": {"policy_loss": "gspo", "importance": "sequence_masked", "importance_cap": 1e9},
    "rloo": {"kl_coef": 0.1},
    "ppo": {"importance": "truncated"},
}


def mock_run(loss: str, **given: Any) -> RunConfig:
    name = loss if loss in ("rloo", "ppo") else "grpo"
    return run_of(name, keys={**LOSSES[loss], "group_size": 4}, **given)


@cache
def alone(loss: str, moe: bool) -> tuple[list[dict[str, float]], Path]:
    folder = Path(mkdtemp())
    return run_ranks(1, two_steps, mock_run(loss, moe=moe), folder)[0], folder


@pytest.mark.parametrize(
    "case", some([f"{loss} {way}" for way in LAYOUTS for loss in LOSSES], ["gspo cp2"])
)
def test_answers_split_is_the_same_step(case: str, tmp_path: Path) -> None:
    import_engine()
    loss, layout = case.split()
    wanted, folder = alone(loss, "moe" in LAYOUTS[layout])
    run = mock_run(loss, **LAYOUTS[layout])
    require_same_steps(run, tmp_path, wanted, folder)


@pytest.mark.parametrize("faulty", [False, True])
def test_answers_micro_batches_divide_once(faulty: bool, tmp_path: Path) -> None:
    """Divide once; the seeded fault, a mean of means of micro-batches, is another gradient."""

    def job(micro: int, folder: Path) -> list[dict[str, float]]:
        from mtrain.train.loop import step

        real = step.sum_loss

        def divided_early(objective: Any, batch: Any, output: torch.Tensor) -> Any:
            total, count, report = real(objective, batch, output)
            return total / count, torch.ones_like(count), report

        if faulty:
            step.sum_loss = divided_early
        run = run_of("grpo", micro=micro, keys={"policy_loss": "dapo", "group_size": 4})
        return two_steps(run, folder)

    import_engine()
    for micro in (2, 8):
        run_ranks(1, job, micro, tmp_path / str(micro))
    inside = Path("0/step_00000000")
    here, there = (whole_tensors(tmp_path / micro / inside) for micro in ("2", "8"))
    same = all(torch.allclose(here[k], there[k], rtol=1e-4, atol=1e-6) for k in here)
    assert same is not faulty


def prompts_run(home: Path, **given: Any) -> RunConfig:
    """Return a run on prompts of a few letters, whose answer is the number of those that are a."""
    letters = given.pop("letters", 5)
    if not (home / "prompts.jsonl").exists():
        folder_of(home, "chatml", marked=True)
        dice = random.Random(1)
        rows = []
        for _ in range(600):
            count = dice.randrange(letters + 1)
            text = dice.sample("a" * count + "b" * (letters - count), letters)
            rows.append({"prompt": "".join(text), "answer": str(count)})
        chats_file(home / "prompts.jsonl", rows)
    data = DataConfig(
        kind="prompts",
        path=str(home / "prompts.jsonl"),
        tokenizer=str(home / "tokenizer.json"),
        cache_dir=str(home / "cache"),
        seq_length=32,
        split=(1.0, 0.0, 0.0),
    )
    name = given.pop("name", "grpo")
    keys = {"group_size": 4} | ({"scale_rewards": "batch"} if name == "grpo" else {})
    keys |= given.pop("keys", {})
    steps = given.pop("steps", 2)
    batch = {"micro_batch_size": given.pop("micro", 2), "global_batch_size": 8}
    rollout: dict[str, Any] = {"max_tokens": 4, "rewards": ("exact", "length"), "reward_workers": 1}
    rollout |= {name: given.pop(name) for name in ("updates", "resample") if name in given}
    run = tiny_run(
        model=FEW
        | {"vocab_size": 320}
        | (MOE if given.pop("moe", False) else {})
        | given.pop("model", {}),
        trainer=batch | {"train_iters": steps} | given.pop("trainer", {}),
        optim={"warmup_iters": 0} | given.pop("optim", {}),
        **given,
    )
    sections = {
        "data": data,
        "objective": ObjectiveConfig(name=name, **keys),
        "rollout": RolloutConfig(**rollout),
    }
    changed = run.model_copy(update=sections)
    return resolve(changed, Machine(cpu_cores=1, memory_bytes=0))


class Recorded:
    """An engine whose answers are a function of their number, and judges that need no process."""

    def __init__(self, *given: Any, **more: Any) -> None:
        pass

    def generate(self, prompts: Any, sampling: Any) -> Any:
        from mtrain.train.rollouts.engine import Rollout

        found = []
        for prompt in prompts:
            dice = np.random.default_rng(prompt.number)
            ids = dice.integers(3, 300, int(dice.integers(1, 5)))
            logs = -dice.exponential(5.0, len(ids))
            found.append(Rollout(prompt, tuple(ids.tolist()), tuple(logs.tolist()), "length"))
        return found

    def verdicts(self, names: Any, answers: Any) -> Any:
        from mtrain.train.rollouts.judges import Verdict

        return [[Verdict(len(a.text) / 7), Verdict(a.tokens / 4)] for a in answers]

    def close(self) -> None:
        pass


def records(run: RunConfig, folder: Path, recorded: Any) -> list[dict[str, float]]:
    """Return the records of a run's steps without times; `recorded` is an engine and judge in the
    place of those of the run, or False.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.rollouts import engines, feed
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    if recorded:
        engines.LocalEngine = recorded  # type: ignore[misc]
        feed.Judges = recorded  # type: ignore[misc]
    found = []
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        for step in range(run.trainer.steps):
            record_gradients(context, folder / str(step))
            result = train_step(context, stop_requested=False)
            row = dict(result.metrics)
            for measure in context.measures:
                row |= measure(context, result)
            found.append(row)
        context.close()
    left_out = (*OF_THE_LOOP, "rollout_s", "reward_s")
    return [{k: v for k, v in one.items() if k not in left_out} for one in found]


@pytest.mark.parametrize("layout", some(["dp2", "cp2", "tp2pp2", "pp2dp2", "micro8"], ["dp2"]))
def test_answers_recorded_are_the_same_step(layout: str, tmp_path: Path) -> None:
    """Share rewards and advantages of whole batches: a group may be on two ranks."""
    import_engine()
    wanted = run_ranks(1, records, prompts_run(tmp_path), tmp_path / "one", Recorded)[0]
    run = prompts_run(tmp_path, **LAYOUTS[layout])
    for found in run_ranks(run.parallel.ranks, records, run, tmp_path / "two", Recorded):
        for step, same in zip(found, wanted, strict=True):
            assert step == {k: pytest.approx(v, rel=2e-5, abs=2e-6) for k, v in same.items()}
    inside = Path("1/step_00000000")
    here = whole_tensors(tmp_path / "two" / inside)
    for name, value in whole_tensors(tmp_path / "one" / inside).items():
        assert torch.allclose(here[name], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.full
@pytest.mark.parametrize(("times", "left"), [(1, 0.5), (2, 0.0)])
def test_answers_of_equal_groups_are_replaced(times: int, left: float, tmp_path: Path) -> None:
    """Replace the second group twice, at most: its rewards differ in the third attempt."""

    def job() -> tuple[dict[str, float], list[list[int]]]:
        asked: list[list[int]] = []

        class Alike(Recorded):
            def generate(self, prompts: Any, sampling: Any) -> Any:
                asked.append([prompt.number for prompt in prompts])
                return super().generate(prompts, sampling)

            def verdicts(self, names: Any, answers: Any) -> Any:
                from mtrain.train.rollouts.judges import Verdict

                differ = [*range(4), 1, 1, 1, 1] if len(asked) == 1 else [1, 1, 1, len(asked) - 1]
                return [[Verdict(float(one)), Verdict(0.0)] for one in differ]

        (found,) = records(prompts_run(tmp_path, steps=1, resample=times), tmp_path, Alike)
        return found, asked

    import_engine()
    ((found, asked),) = run_ranks(1, job)
    assert asked == [[*range(8)], [*range(12, 16)], [*range(20, 24)]][: times + 1]
    assert (found["equal_groups"], found["resampled_groups"]) == (left, times)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp2", "cp2", "pp2", "micro8"])
def test_answers_of_two_updates_are_clipped(layout: str, tmp_path: Path) -> None:
    """Take ratios to the policy that sampled, of whole answers, in any split."""
    import_engine()
    given: dict[str, Any] = {"steps": 4, "updates": 2, "optim": {"lr": 0.02, "warmup_iters": 0}}
    given["keys"] = {"policy_loss": "gspo", "clip_ratio_low": 0.003, "clip_ratio_high": 0.003}
    wanted = run_ranks(1, records, prompts_run(tmp_path, **given), tmp_path / "one", Recorded)[0]
    clipped = [step["clip_share"] > 0 for step in wanted]
    assert clipped == [False, True, False, True]
    run = prompts_run(tmp_path, **given, **LAYOUTS[layout])
    for found in run_ranks(run.parallel.ranks, records, run, tmp_path / "two", Recorded):
        for step, same in zip(found, wanted, strict=True):
            assert step == {k: pytest.approx(v, rel=1e-3, abs=1e-4) for k, v in same.items()}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2sp", "pp2"])
def test_answers_keys_and_values_are_as_planned(layout: str, tmp_path: Path) -> None:
    def job() -> int:
        from mtrain.mcore import api as mcore

        made = []
        real = mcore.Cache

        def noted(*given: Any, **more: Any) -> Any:
            made.append(real(*given, **more))
            return made[-1]

        mcore.Cache = noted
        records(run, tmp_path, False)
        kept = made[-1].key_value_memory_dict.values()
        return sum(tensor.nbytes for pair in kept for tensor in pair)

    import_engine()
    run = prompts_run(tmp_path, steps=1, **LAYOUTS[layout])
    planned = [stage._sampling["activations"] for stage in stage_memories(run)]
    found = run_ranks(2, job)
    assert found == pytest.approx(planned * (2 // len(planned)), rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2sp", "pp2", "dp2"])
def test_answers_are_sampled_from_the_trained_weights(layout: str, tmp_path: Path) -> None:
    """Sample the same answers in every layout; sampler and trainer agree on each token."""
    import_engine()
    wanted = run_ranks(1, records, prompts_run(tmp_path), tmp_path / "one", False)[0]
    run = prompts_run(tmp_path, **LAYOUTS[layout])
    for found in run_ranks(run.parallel.ranks, records, run, tmp_path / "two", False):
        for step, same in zip(found, wanted, strict=True):
            assert 0 < step["sampler_gap_max"] < 1e-5
            for name in ("loss", "tokens", "reward", "reward_std", "answer_tokens"):
                assert step[name] == pytest.approx(same[name], rel=1e-4, abs=1e-6), name


@pytest.mark.full
def test_answers_resumed_are_bitwise_equal(tmp_path: Path) -> None:
    """Sample after a resume what an undisturbed run samples."""

    def job(resumed: bool) -> list[tuple[float, float]]:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        run = prompts_run(tmp_path, steps=4, optim={"lr": 1e-2, "warmup_iters": 0})
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            state = context.state
            if resumed:
                path = ckpt_state.opened(tmp_path / "step_00000002", run, world)
                ckpt_state.load(path, world, state, seed=run.trainer.seed)
            found = []
            while state.step < 4:
                result = train_step(context, stop_requested=False)
                found.append((result.loss, context.measures[0](context, result)["reward"]))
                if state.step == 2 and not resumed:
                    ckpt_state.save(tmp_path, run, world, state, {})
            ckpt_state.save(tmp_path / str(resumed), run, world, state, {})
            context.close()
        return found

    import_engine()
    whole = run_ranks(1, job, False)[0]
    assert run_ranks(1, job, True)[0] == whole[2:]
    first, second = (
        whole_tensors(tmp_path / str(resumed) / "step_00000004") for resumed in (False, True)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
@pytest.mark.parametrize("moment", ["rollout", "reward", "step", "save", "critic"])
def test_answers_killed_run_resumes_bitwise(moment: str, tmp_path: Path) -> None:
    """Kill a run twice, at a moment of two steps; it ends with the weights of an undisturbed
    one.
    """
    # The moment `critic` is between the updates of policy and critic.
    keys = {"kl_in_reward": 0.1} if moment == "critic" else {}
    given: dict[str, Any] = {"name": "ppo" if moment == "critic" else "grpo", "keys": keys}
    run = prompts_run(tmp_path, steps=4, optim={"lr": 1e-2, "warmup_iters": 0}, **given)
    saves = run.checkpoint.model_copy(update={"save_interval": 1, "keep": None})
    run = run.model_copy(update={"checkpoint": saves})

    def job(home: Path, at: int | None) -> End:
        from mtrain.ckpt import state
        from mtrain.ckpt.folder import committed
        from mtrain.train.critic_model import TrainedCritic
        from mtrain.train.loop import step
        from mtrain.train.rollouts.judges import Judges
        from mtrain.train.rollouts.local import LocalEngine

        owner, name = {
            "rollout": (LocalEngine, "generate"),
            "reward": (Judges, "verdicts"),
            "step": (step, "update"),
            "save": (state, "save"),
            "critic": (TrainedCritic, "learn"),
        }[moment]
        real = getattr(owner, name)
        calls = 0

        def deadly(*given: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            found = real(*given, **more) if name in ("generate", "update") else None
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **more) if found is None else found

        setattr(owner, name, deadly)
        kept = committed(home / "checkpoints") if home.exists() else []
        return train(run, home, kept[-1] if kept else None)

    import_engine()
    run_ranks(1, job, tmp_path / "whole", None)
    for at in (2, 2):
        with pytest.raises(RankFailed):
            run_ranks(1, job, tmp_path / "killed", at)
    (end,) = run_ranks(1, job, tmp_path / "killed", None)
    assert end.error == ""
    first, second = (
        whole_tensors(tmp_path / name / "checkpoints" / "step_00000004")
        for name in ("whole", "killed")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
@pytest.mark.parametrize("dialect", ["openai", "sglang"])
def test_answers_of_a_server_are_of_the_last_weights(dialect: str, tmp_path: Path) -> None:
    """Push the weights before each batch of rollouts but the first, by names of the base folder."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')

    def job(run: RunConfig) -> list[dict[str, float]]:
        from mtrain.train.rollouts import client, engines

        client.Client.require_same = lambda *given: None  # type: ignore[method-assign, assignment]
        engines.ends_of = lambda tokenizer: ENDS
        return records(run, tmp_path, False)

    import_engine()
    run = prompts_run(tmp_path, steps=3, ranks=2, tp=2)
    with serving(dialect) as server:
        served = {"engine": dialect, "url": server.url, "server_model": "tiny"}
        served |= {"weights_folder": str(tmp_path / "pushed")}
        checkpoint = run.checkpoint.model_copy(update={"init_from": str(base)})
        rollout = run.rollout.model_copy(update=served)
        run = run.model_copy(update={"rollout": rollout, "checkpoint": checkpoint})
        steps, other = run_ranks(2, job, run)
    assert other == steps
    pauses = "/pause" if dialect == "openai" else "/pause_generation"
    assert server.routes.count(pauses) == 2
    assert "model.embed_tokens.weight" in server.got
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == ["step_00000002"]
    # The fake policy is another one than that of the trainer: the gap is large, and measured.
    assert all(step["sampler_gap"] > 1 for step in steps)


@pytest.mark.full
def test_answers_stop_between_steps_and_save(tmp_path: Path) -> None:
    """End with the weights of the last whole step where a stop comes while answers are sampled."""

    def job() -> End:
        from mtrain.train.rollouts import engines, feed

        class Stopping(Recorded):
            def generate(self, prompts: Any, sampling: Any) -> Any:
                return None if prompts[0].number >= 16 else super().generate(prompts, sampling)

        engines.LocalEngine = Stopping  # type: ignore[misc, assignment]
        feed.Judges = Recorded  # type: ignore[misc, assignment]
        return train(prompts_run(tmp_path, steps=4), tmp_path / "run")

    import_engine()
    (end,) = run_ranks(1, job)
    assert (end.error, end.steps, end.lines) == ("Preempted", ["step_00000002"], 2)


LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {"group_size": 16, "scale_rewards": "group"},
    "ppo": {"group_size": 4, "critic_lr": 3e-3, "gae_lambda": 1.0},
}


def counting_runs(home: Path, name: str = "grpo") -> tuple[RunConfig, RunConfig]:
    """Return a run that learns the form of an answer, a digit and the end, from chats with random
    digits, and one that learns the number of letters, only from rewards.
    """
    run = prompts_run(
        home,
        steps=600,
        micro=96,
        letters=3,
        name=name,
        keys=LEARNERS[name],
        trainer={"global_batch_size": 192},
        optim={"lr": 1e-3, "warmup_iters": 5, "schedule": "constant"},
    )
    update = {"max_tokens": 2, "rewards": ("exact",), "rows": 192, "reward_workers": 1}
    run = run.model_copy(update={"rollout": run.rollout.model_copy(update=update)})
    dice = random.Random(2)
    chats = []
    for _ in range(1000):
        text = "".join(dice.choice("ab") for _ in range(3))
        chats.append(turns(text, str(dice.randrange(6))))
    data = run.data.model_copy(
        update={"kind": "sft", "path": str(chats_file(home / "chats.jsonl", chats))}
    )
    form = run.model_copy(
        update={
            "data": data,
            "objective": ObjectiveConfig(),
            "trainer": run.trainer.model_copy(
                update={"global_batch_size": 32, "micro_batch_size": 32, "train_iters": 80}
            ),
            "optim": run.optim.model_copy(update={"lr": 3e-3}),
        }
    )
    return form, run


def formed(form: RunConfig, home: Path) -> Path:
    """Return the checkpoint of a run that learned the form of an answer."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(form) as world:
        context = assemble(form, world, splits_of(form))
        for _ in range(80):
            train_step(context, stop_requested=False)
        context.close()
        return ckpt_state.save(home / "form", form, world, context.state, {})


def rewarded(run: RunConfig, path: Path) -> list[dict[str, float]]:
    """Return what is measured of each step until the last five have enough reward."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    found: list[dict[str, float]] = []
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        ckpt_state.load_weights(ckpt_state.opened(path, run, world), context.state)
        while len(found) < 600 and mean_reward(found[-5:]) <= 0.92:
            result = train_step(context, stop_requested=False)
            found.append({})
            for measure in context.measures:
                found[-1] |= measure(context, result)
        context.close()
    return found


def mean_reward(steps: list[dict[str, float]]) -> float:
    """Return the mean reward of steps; of none, 0."""
    return float(np.mean([step["reward"] for step in steps] or [0.0]))


@pytest.mark.full
@pytest.mark.parametrize("name", LEARNERS)
def test_answers_count_is_learned_from_rewards(name: str, tmp_path: Path) -> None:
    """Raise the mean reward from below 0.2 to above 0.9: first the form of an answer, then the
    number of letters.
    """
    import_engine()
    form, run = counting_runs(tmp_path, name)
    (path,) = run_ranks(1, formed, form, tmp_path)
    (steps,) = run_ranks(1, rewarded, run, path, timeout_s=600)
    assert mean_reward(steps[:5]) < 0.2
    assert mean_reward(steps[-5:]) > 0.9
