"""Distillation: a global batch has one loss and gradient in any split, and the teacher stays."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.errors import CorruptData
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import FEW, LORA, MOE, require_same_steps, two_steps
from tests.support.runs import tiny_run, whole_tensors

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "tp2": {"ranks": 2, "tp": 2, "sequence_parallel": False},
    "pp2": {"ranks": 2, "pp": 2},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "dp2": {"ranks": 2, "distributed_optimizer": True},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "ep2": {"ranks": 2, "ep": 2},
    "micro4": {"micro": 4},
    "micro8": {"micro": 8},
}
KEYS: dict[str, dict[str, Any]] = {
    "jsd": {"divergence": "jsd", "temperature": 2.0, "ce_weight": 0.3},
    "top": {"distil_top_k": 5},
    "reverse": {"divergence": "reverse_kl"},
}


STEPS = 600


def run_of(
    keys: dict[str, Any], micro: int = 2, peft: PeftConfig | None = None, **given: Any
) -> RunConfig:
    experts = MOE if given.get("ep") or given.pop("moe", False) else {}
    model = FEW | {"num_layers": 4, "init_method_std": 0.2} | experts | given.pop("model", {})
    trainer = {"micro_batch_size": micro, "global_batch_size": 8} | given.pop("trainer", {})
    run = tiny_run(model=model, trainer=trainer, **given)
    objective = ObjectiveConfig(name="distil", **({"teacher": "drawn"} | keys))
    changed = run.model_copy(update={"objective": objective, "peft": peft or PeftConfig()})
    return resolve(changed, Machine(cpu_cores=1, memory_bytes=0))


@cache
def alone(kind: str, moe: bool) -> tuple[list[dict[str, float]], Path]:
    folder = Path(mkdtemp())
    return run_ranks(1, two_steps, run_of(KEYS[kind], moe=moe), folder)[0], folder


@pytest.mark.parametrize(
    "case",
    some([f"{kind} {way}" for way in LAYOUTS for kind in KEYS], ["jsd tp2sp", "top pp2"]),
)
def test_distil_split_is_the_same_step(case: str, tmp_path: Path) -> None:
    import_engine()
    kind, layout = case.split()
    wanted, folder = alone(kind, "ep" in LAYOUTS[layout])
    assert wanted[0]["divergence"] > 0.05
    run = run_of(KEYS[kind], **LAYOUTS[layout])
    require_same_steps(run, tmp_path, wanted, folder)


@pytest.mark.full
@pytest.mark.parametrize("faulty", [False, True])
def test_distil_only_the_trainer_divides(faulty: bool) -> None:
    """Divide once; the seeded fault, a mean of each micro-batch, is another gradient."""

    def job() -> tuple[torch.Tensor, torch.Tensor]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop import step
        from mtrain.train.loop.prefetch import to_device
        from mtrain.world.init import joined

        real = step.sum_loss

        def divided_early(objective: Any, batch: Any, output: torch.Tensor) -> Any:
            total, count, report = real(objective, batch, output)
            return total / count, torch.ones_like(count), report

        if faulty:
            step.sum_loss = divided_early
        run = run_of(KEYS["jsd"], micro=4)
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            weights = [p for chunk in context.state.chunks for p in chunk.parameters()]
            data = context.train_data
            data.micro_batch_size = 8
            data._stride = 8
            (whole,) = data.microbatches(0, 8)
            found = []
            for sizes in ((2, 6), (4, 4)):
                parts = {key: torch.as_tensor(value).split(sizes) for key, value in whole.items()}
                split = [{key: value[i] for key, value in parts.items()} for i in range(2)]
                step.gradients(context, [to_device(batch, world) for batch in split])
                found.append(torch.cat([p.main_grad.flatten() for p in weights]).clone())
        return found[0], found[1]

    import_engine()
    unequal, equal = run_ranks(1, job)[0]
    assert torch.allclose(unequal, equal, rtol=1e-4, atol=1e-6) is not faulty


@pytest.mark.full
@pytest.mark.parametrize("peft", [None, LORA])
def test_distil_teacher_stays_and_is_read_again(peft: PeftConfig | None, tmp_path: Path) -> None:
    """Keep every bit of a teacher that is a run, without state; resume with the same losses."""

    def save_teacher() -> None:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        run = tiny_run(model=FEW | {"num_layers": 3, "hidden_size": 64, "init_method_std": 0.2})
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            ckpt_state.save(tmp_path / "checkpoints", run, world, context.state, {})

    def job(first: bool) -> tuple[list[float], bool, int]:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.train.teacher import same_teacher
        from mtrain.world.init import joined

        keys = {"teacher": str(tmp_path / "checkpoints/step_00000000")}
        run = run_of(keys, ranks=2, pp=2, peft=peft, optim={"lr": 1e-2, "warmup_iters": 0})
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            state = context.state
            kept = [p for chunk in state.teacher for p in chunk.parameters()]
            begun = [p.clone() for p in kept]
            losses = []
            if not first:
                path = ckpt_state.opened(tmp_path / "saved/step_00000002", run, world)
                ckpt_state.load(path, world, state, seed=run.trainer.seed)
            while state.step < 4:
                losses.append(train_step(context, stop_requested=False).loss)
                if first and state.step == 2:
                    ckpt_state.save(tmp_path / "saved", run, world, state, {})
            facts = ckpt_state.opened(tmp_path / "saved/step_00000002", run, world).state
            same_teacher(facts, state)
            with pytest.raises(CorruptData, match="learned from a teacher"):
                same_teacher(facts, dataclasses.replace(state, teacher_digest="0"))
            optimized = {id(p) for g in state.optimizer.param_groups for p in g["params"]}
            free = all(
                torch.equal(a, b) and b.grad is None and not hasattr(b, "main_grad")
                for a, b in zip(begun, kept, strict=True)
            )
            return losses, free, len(optimized & {id(p) for p in kept})

    import_engine()
    run_ranks(1, save_teacher)
    whole = run_ranks(2, job, True)
    rest = run_ranks(2, job, False)
    assert [losses for losses, _, _ in rest] == [losses[2:] for losses, _, _ in whole]
    assert all(free and not held for _, free, held in (*whole, *rest))
    names = whole_tensors(tmp_path / "saved/step_00000002")
    assert not any("teacher" in name or "reference" in name for name in names)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_distil_student_learns_its_teacher(kind: str) -> None:
    """Lower the divergence on samples that were not learned by at least 80%."""

    def job() -> list[float]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import summed, train_step
        from mtrain.world.init import joined

        run = run_of(
            {"divergence": kind},
            micro=32,
            model={"vocab_size": 48, "num_layers": 1},
            trainer={"train_iters": STEPS, "eval_iters": 4, "global_batch_size": 32},
            optim={"lr": 1e-2, "warmup_iters": 10},
        )
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            assert context.valid_data is not None
            found = [summed(context, context.valid_data, 4)]
            for _ in range(STEPS):
                train_step(context, stop_requested=False)
            found.append(summed(context, context.valid_data, 4))
        return [one["divergence"] for one in found if one is not None]

    import_engine()
    before, after = run_ranks(1, job, timeout_s=280)[0]
    assert after <= 0.2 * before, (before, after)
