"""A policy and its critic: one global batch of recorded answers in any split, resumes, and bytes.

Policy and reference differ, or the divergence in the reward would be 0 in any split.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from tests.distributed.test_answers import Recorded, prompts_run
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import LAYOUTS, OF_THE_LOOP
from tests.support.objective_steps import run_of as objective_run
from tests.support.runs import whole_tensors

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"gamma": 0.95, "gae_lambda": 0.9, "kl_in_reward": 0.5},
    "reinforce_pp": {"gamma": 0.95, "kl_in_reward": 0.5, "group_size": 1},
    "rloo": {"kl_in_reward": 0.5},
}
SPLITS: dict[str, dict[str, Any]] = {
    "micro 2": {"micro": 2},
    "dp2": {"ranks": 2, "distributed_optimizer": True, "micro": 2},
    "cp2 all-gather": {"ranks": 2, "cp": 2, "cp_comm_type": "all_gather"},
    "cp2 ring": {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"},
    "cp2 all-to-all": {"ranks": 2, "cp": 2, "cp_comm_type": "a2a"},
    "pp2": {"ranks": 2, "pp": 2, "micro": 2},
    "pp2dp2": {"ranks": 4, "pp": 2, "micro": 2},
    "tp2sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "ep2": {"ranks": 2, "ep": 2, "moe": True, "micro": 4},
}
LIMIT = 1e-6
"""Largest relative error of a number, and of a gradient in its norm."""
TIMES = ("rollout_s", "reward_s")


def run_of(name: str, home: Path, micro: int = 8, **given: Any) -> RunConfig:
    keys = OBJECTIVES[name] | given.pop("keys", {})
    return prompts_run(home, name=name, micro=micro, steps=1, keys=keys, **given)


def one_step(run: RunConfig, folder: Path, fault: str = "") -> dict[str, float]:
    """Return the numbers of the first step from recorded answers, and write the gradients of policy
    and critic below `folder`.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.rollouts import engines, feed
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    engines.LocalEngine = Recorded  # type: ignore[misc, assignment]
    feed.Judges = Recorded  # type: ignore[misc, assignment]
    FAULTS[fault]()
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        with torch.no_grad():
            for chunks, factor in ((context.state.trained, 1.5), (context.state.reference, 3.0)):
                for weight in (each for chunk in chunks for each in chunk.parameters()):
                    weight.mul_(factor)
        record_gradients(context, folder / "policy")
        if context.critic is not None:
            record_gradients(context.critic, folder / "critic")
        result = train_step(context, stop_requested=False)
        found = dict(result.metrics)
        for measure in context.measures:
            found |= measure(context, result)
        context.close()
    return {name: value for name, value in found.items() if name not in (*OF_THE_LOOP, *TIMES)}


def no_fault() -> None:
    pass


def whitened_by_each_rank() -> None:
    """Whiten the answers of each data-parallel rank by themselves."""
    from mtrain.train.rollouts import credit

    real = credit.whitened

    def apart(advantages: Any, weights: Any) -> Any:
        parts = zip(advantages.chunk(2), weights.chunk(2), strict=True)
        return torch.cat([real(*part) for part in parts])

    credit.whitened = apart


def values_without_context() -> None:
    """Take the values of the other part of a sequence to be 0."""
    from mtrain.train.rollouts import token_scores

    class Silent:
        all_reduce = staticmethod(lambda value: None)

    token_scores.dist = Silent  # type: ignore[assignment]


def divergence_from_itself() -> None:
    """Score the policy in the place of the reference: the coefficient never reaches the update."""
    from mtrain.train.rollouts import token_scores

    real = token_scores.log_probabilities
    token_scores.log_probabilities = lambda context, batches, kind: real(context, batches, "none")


def values_divided_in_each_micro_batch() -> None:
    from mtrain.train.critic_model import ValueObjective

    real = ValueObjective.loss

    def divided(self: Any, output: Any, batch: Any) -> Any:
        total, count, metrics = real(self, output, batch)
        return total / count, torch.ones_like(count), metrics

    ValueObjective.loss = divided  # type: ignore[method-assign]


FAULTS = {
    "": no_fault,
    "whitened by each rank": whitened_by_each_rank,
    "values without context": values_without_context,
    "divergence from itself": divergence_from_itself,
    "values divided in each micro-batch": values_divided_in_each_micro_batch,
}


@cache
def alone(name: str, moe: bool) -> tuple[dict[str, float], Path]:
    folder = Path(mkdtemp())
    # The loss that balances experts is one of each micro-batch: those are the same.
    run = run_of(name, folder, **({"moe": True, "micro": 4} if moe else {}))
    return run_ranks(1, one_step, run, folder)[0], folder


def apart(one: Path, other: Path) -> float:
    """Return the norm of the difference of two gradients over the norm of the first."""
    wanted, found = (whole_tensors(folder / "step_00000000") for folder in (one, other))
    squares = [
        ((found[key] - value).double().square().sum(), value.double().square().sum())
        for key, value in wanted.items()
    ]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)  # type: ignore[arg-type]


def errors(name: str, split: str, folder: Path, fault: str = "") -> dict[str, float]:
    """Return the relative errors of a split: of each number, and of the gradients."""
    import_engine()
    wanted, whole = alone(name, split == "ep2")
    run = run_of(name, folder, **SPLITS[split])
    found = run_ranks(run.parallel.ranks, one_step, run, folder, fault)
    assert fault or all(one == found[0] for one in found)
    assert found[0].keys() == wanted.keys()
    # The loss of whitened advantages is a difference, about 0.
    scale = {key: max(abs(value), 1.0 if key == "loss" else 1e-9) for key, value in wanted.items()}
    rows = {key: abs(found[0][key] - value) / scale[key] for key, value in wanted.items()}
    models = ["policy", "critic"] if name == "ppo" else ["policy"]
    return rows | {f"gradient of {each}": apart(whole / each, folder / each) for each in models}


CASES = [f"{name}, {split}" for name in OBJECTIVES for split in SPLITS if name != "rloo"]


@pytest.mark.parametrize("case", some([*CASES, "rloo, cp2 ring"], ["ppo, cp2 all-gather"]))
def test_critics_split_is_the_same_batch(case: str, tmp_path: Path) -> None:
    """Bring together what models say of tokens: whitening and returns are of the whole batch."""
    name, split = case.split(", ")
    found = errors(name, split, tmp_path)
    assert {key: error for key, error in found.items() if error > LIMIT} == {}


CAUGHT = {
    "whitened by each rank": "dp2",
    "values without context": "cp2 all-gather",
    "divergence from itself": "micro 2",
    "values divided in each micro-batch": "micro 2",
}


@pytest.mark.full
@pytest.mark.parametrize("fault", CAUGHT)
def test_critics_fault_of_another_tool_is_seen(fault: str, tmp_path: Path) -> None:
    run = errors("ppo", CAUGHT[fault], tmp_path, fault)
    assert max(run.values()) > 100 * LIMIT


@pytest.mark.full
def test_critics_divergence_reaches_the_update(tmp_path: Path) -> None:
    """Change the gradient by nothing but the coefficient (labs-molt 130)."""
    import_engine()
    for coefficient in (0.0, 0.5):
        run = run_of("ppo", tmp_path, keys={"kl_in_reward": coefficient})
        run_ranks(1, one_step, run, tmp_path / str(coefficient))
    assert apart(tmp_path / "0.0" / "policy", tmp_path / "0.5" / "policy") > 0.01


def restored(run: RunConfig, folder: Path, path: Path | None) -> list[dict[str, float]]:
    """Return the numbers of the rest of a run, which goes on from a checkpoint, if there is one;
    save its end below `folder`.
    """
    from mtrain.ckpt import state as ckpt_state
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.rollouts import engines, feed
    from mtrain.world.init import joined

    engines.LocalEngine = Recorded  # type: ignore[misc, assignment]
    feed.Judges = Recorded  # type: ignore[misc, assignment]
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        state = context.state
        if path is not None:
            ckpt_state.load(ckpt_state.opened(path, run, world), world, state, seed=1)
            # What was read is written again before a step: the same bits, in this layout.
            ckpt_state.save(folder / "read", run, world, state, {})
        found = []
        while state.step < run.trainer.steps:
            result = train_step(context, stop_requested=False)
            row = dict(result.metrics)
            for measure in context.measures:
                row |= measure(context, result)
            left_out = (*OF_THE_LOOP, *TIMES)
            found.append({name: value for name, value in row.items() if name not in left_out})
            ckpt_state.save(folder, run, world, state, {})
        context.close()
    return found


@pytest.mark.full
def test_critics_resume_is_bitwise_in_any_layout(tmp_path: Path) -> None:
    """Restore critic, optimizer, schedule and reference; in another layout the same bits are
    read.
    """
    import_engine()
    given: dict[str, Any] = {"keys": OBJECTIVES["ppo"], "name": "ppo", "steps": 3}
    given["optim"] = {"lr": 1e-2, "warmup_iters": 0}
    run = prompts_run(tmp_path, **given, **SPLITS["dp2"])
    whole = run_ranks(2, restored, run, tmp_path / "whole", None)
    middle = tmp_path / "whole" / "step_00000002"
    assert [rows[2:] for rows in whole] == run_ranks(2, restored, run, tmp_path / "again", middle)
    ends = [whole_tensors(tmp_path / each / "step_00000003") for each in ("whole", "again")]
    kinds = {key.split("/")[1] for key in ends[0] if key.startswith("critic/")}
    assert kinds == {"model", "optim"}
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
    for layout in ("tp2sp", "pp2"):
        other = prompts_run(tmp_path, **given, **SPLITS[layout])
        rows = run_ranks(2, restored, other, tmp_path / layout, middle)[0]
        assert rows[0] == {
            key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in whole[0][2].items()
        }
        kept, read = (
            whole_tensors(at) for at in (middle, tmp_path / layout / "read" / middle.name)
        )
        assert kept.keys() == read.keys()
        assert all(torch.equal(value, read[key]) for key, value in kept.items())


@pytest.mark.full
def test_critics_lost_state_is_no_resume(tmp_path: Path) -> None:
    """Refuse a checkpoint that should have a critic's optimizer and does not (labs-molt 130)."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.errors import CorruptData

    def job() -> str:
        real = ckpt_state.critic_shards
        run = prompts_run(tmp_path, name="ppo", keys=OBJECTIVES["ppo"], steps=1)
        ckpt_state.critic_shards = lambda state, what: real(state, what) if what == "model" else []
        restored(run, tmp_path / "lost", None)
        ckpt_state.critic_shards = real
        try:
            restored(run, tmp_path / "again", tmp_path / "lost" / "step_00000001")
        except CorruptData as error:
            return str(error)
        return ""

    import_engine()
    assert "critic/optim/" in run_ranks(1, job)[0]


def bytes_held(run: RunConfig) -> dict[str, int]:
    """Return the bytes of the weights, gradients and optimizer state that a rank holds after a
    step.
    """
    from mtrain.mcore.state.optimizer_state import inner_optimizers
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        train_step(context, stop_requested=False)
        states = [context.state, *filter(None, [context.state.critic])]
        found = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
        for state in states:
            parameters = [p for chunk in state.chunks for p in chunk.parameters()]
            found["weights"] += sum(p.nbytes for p in parameters)
            found["gradients"] += sum(p.main_grad.nbytes for p in parameters)
            known = {p.untyped_storage().data_ptr() for p in parameters}
            for inner in inner_optimizers(state.optimizer):
                mains = [p for group in inner.param_groups for p in group["params"]]
                held = [t for kept in inner.state.values() for t in kept.values()]
                own = [t for t in (*mains, *held) if t.untyped_storage().data_ptr() not in known]
                found["optimizer"] += sum(t.nbytes for t in own if t.numel() > 1)
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", ["dp2 fp32", "tp2sp bf16", "pp2 fp32"])
def test_critics_bytes_are_as_planned(case: str) -> None:
    """Plan weights, gradients and optimizer state of policy and critic, within 3%."""
    from mtrain.plan.rank import stage_memories

    layout, dtype = case.split()
    import_engine()
    run = objective_run("ppo", dtype=dtype, **LAYOUTS[layout])
    stages = stage_memories(run)
    ranks = run_ranks(2, bytes_held, run)
    for rank, found in enumerate(ranks):
        planned = stages[rank if layout == "pp2" else 0].parts
        assert found == {name: pytest.approx(planned[name], rel=0.03) for name in found}


@pytest.mark.full
def test_critics_peak_is_that_of_its_trace() -> None:
    """Count the state of the critic once, and its step after that of the policy."""
    from mtrain.plan.rank import stage_memories
    from tests.distributed.test_plan_trace import traced

    found = traced(objective_run("ppo", dtype="bf16"), 0)
    assert found["peak"]["bytes"] == pytest.approx(found["plan"]["bytes"], rel=0.03)
    plain = stage_memories(objective_run("grpo", dtype="bf16"))[0].parts
    ours = stage_memories(objective_run("ppo", dtype="bf16"))[0].parts
    assert all(ours[part] > 1.5 * plain[part] for part in ("weights", "gradients", "optimizer"))
