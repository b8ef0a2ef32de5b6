"""Training on answers: references, labels, evaluations and what a model learns; `test_division`
splits a batch.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.run import RunConfig
from tests.support.chats import chats_file, folder_of
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import FEW, LORA, OF_THE_LOOP, run_of
from tests.support.runs import tiny_run

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"ranks": 2, "pp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "dp2": {"ranks": 2, "distributed_optimizer": True},
}


def metrics_of_steps(run: RunConfig) -> list[dict[str, float]]:
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        results = [train_step(context, stop_requested=False) for _ in range(2)]
    return [
        {name: value for name, value in r.metrics.items() if name not in OF_THE_LOOP}
        for r in results
    ]


@pytest.mark.full
def test_pairs_reference_stays_and_is_resumed(tmp_path: Path) -> None:
    """Keep every bit of the reference, save it, and read it back in a run that resumes."""

    def job(first: bool) -> tuple[list[float], bool]:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        run = run_of(ranks=2, pp=2, optim={"lr": 1e-2, "warmup_iters": 0})
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            state = context.state
            begun = [p.clone() for chunk in state.reference for p in chunk.parameters()]
            held = {p for group in state.optimizer.param_groups for p in group["params"]}
            for p in (p for chunk in state.reference for p in chunk.parameters()):
                assert not p.requires_grad
                assert not hasattr(p, "main_grad")
                assert p not in held
            losses = []
            if not first:
                path = ckpt_state.opened(tmp_path / "step_00000002", run, world)
                ckpt_state.load(path, world, state, seed=run.trainer.seed)
            while state.step < 4:
                losses.append(train_step(context, stop_requested=False).loss)
                if first and state.step == 2:
                    ckpt_state.save(tmp_path, run, world, state, {})
            after = [p for chunk in state.reference for p in chunk.parameters()]
            same = all(torch.equal(a, b) for a, b in zip(begun, after, strict=True))
            moved = any(
                not torch.equal(a, b)
                for chunk in state.chunks
                for a, b in zip(begun, chunk.parameters(), strict=False)
            )
        return losses, same and moved

    import_engine()
    whole = run_ranks(2, job, True)
    rest = run_ranks(2, job, False)
    assert [value[0] for value in rest] == [value[0][2:] for value in whole]
    assert all(value[1] for value in (*whole, *rest))


@pytest.mark.full
def test_pairs_adapters_off_equal_a_frozen_copy() -> None:
    import_engine()
    off, frozen = (
        run_ranks(1, metrics_of_steps, run_of(peft=LORA, keys={"reference": kind}))[0]
        for kind in ("adapter_off", "frozen")
    )
    assert off == frozen
    assert off[1]["reference_kl"] != 0


@pytest.mark.full
def test_pairs_evaluation_counts_each_pair_once() -> None:
    """Count nothing for pairs that only fill the last step of an evaluation."""

    def job(micro: int, limit: int) -> dict[str, float]:
        from mtrain.train.assemble import assemble, batches, splits_of
        from mtrain.train.loop.step import summed
        from mtrain.world.init import joined

        run = run_of("simpo", micro=micro)
        with joined(run) as world:
            splits = splits_of(run)
            context = assemble(run, world, splits)
            data = batches(run, world, splits, "train", limit)
            means = summed(context, data, 9)
        assert means is not None
        return {name: value for name, value in means.items() if name not in OF_THE_LOOP}

    import_engine()
    six, ten, again = (run_ranks(1, job, *way)[0] for way in ((2, 6), (8, 10), (4, 10)))
    assert (six["count"], ten["count"]) == (3, 5)
    assert again == {k: pytest.approx(v, rel=1e-5) for k, v in ten.items()}
    assert six["chosen_tokens"] != pytest.approx(ten["chosen_tokens"], rel=1e-3)


def order_run(
    home: Path, steps: int, objective: str = "dpo", batch: int = 32, **parallel: Any
) -> RunConfig:
    """Return a run on pairs whose chosen answers count up, and rejected ones down; of kto, on the
    same answers with labels.
    """
    folder_of(home, "chatml", marked=True)
    dice = random.Random(3)
    rows = []
    for _ in range(600):
        digits = sorted(dice.sample("0123456789", 4))
        up = "".join(digits)
        prompt = "".join(dice.sample(digits, 4))
        row = {"prompt": prompt, "chosen": up, "rejected": up[::-1]}
        if objective == "kto":
            label = dice.random() < 0.7
            row = {"prompt": prompt, "completion": up if label else up[::-1], "label": label}
        rows.append(row)
    path = home / f"{objective}.jsonl"
    data = DataConfig(
        kind="preference",
        path=str(path if path.exists() else chats_file(path, rows)),
        tokenizer=str(home / "tokenizer.json"),
        cache_dir=str(home / "cache"),
        seq_length=32,
        split=(0.8, 0.2, 0.0),
    )
    keys = {"reference": parallel.pop("reference", None)}
    run = tiny_run(
        model=FEW | {"vocab_size": 320},
        trainer={
            "micro_batch_size": parallel.pop("micro", 16),
            "global_batch_size": batch,
            "eval_iters": 9,
            "train_iters": steps,
        },
        optim={"lr": 5e-3, "warmup_iters": 2},
        **parallel,
    )
    changed = run.model_copy(
        update={"objective": ObjectiveConfig(name=objective, **keys), "data": data}
    )
    return resolve(changed, Machine(cpu_cores=1, memory_bytes=0))


@pytest.mark.full
@pytest.mark.parametrize("objective", ["dpo", "kto", "reward"])
def test_pairs_objective_learns_an_order(objective: str, tmp_path: Path) -> None:
    """Reach 95% on held-out pairs, or answers with labels, from half of them."""
    run = order_run(tmp_path, 60, objective)

    def job() -> list[dict[str, float]]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import summed, train_step
        from mtrain.world.init import joined

        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            assert context.valid_data is not None
            found = [summed(context, context.valid_data, 9)]
            for _ in range(60):
                train_step(context, stop_requested=False)
            found.append(summed(context, context.valid_data, 9))
        return [one for one in found if one is not None]

    before, after = run_ranks(1, job)[0]
    assert before["count"] == after["count"] == 120
    assert before["reward_accuracy"] == pytest.approx(0.5, abs=0.15 * (objective == "reward"))
    if objective != "reward":
        assert before["loss"] == pytest.approx(math.log(2) if objective == "dpo" else 0.5)
    assert after["reward_accuracy"] >= 0.95
    assert after["loss"] < 0.3 < before["loss"]


@pytest.mark.parametrize("layout", some(dict.fromkeys(("micro1", "dp2", "cp2", "pp2")), ["micro1"]))
def test_pairs_labels_of_any_mix_are_one_batch(layout: str, tmp_path: Path) -> None:
    """Compare a step of single answers with labels in micro-batches of one, and over ranks."""
    import_engine()
    given = {"micro": 1, "ranks": 1} | LAYOUTS.get(layout, {})
    whole, split = (
        order_run(tmp_path, 3, objective="kto", batch=8, **keys)
        for keys in ({"micro": 8, "ranks": 1}, given)
    )
    (wanted,) = run_ranks(1, metrics_of_steps, whole)
    assert 0.5 < wanted[0]["chosen_share"] < 1
    assert wanted[0]["rewards_chosen"] == wanted[0]["rewards_rejected"] == 0
    assert wanted[1]["rewards_chosen"] != wanted[1]["rewards_rejected"]
    for steps in run_ranks(split.parallel.ranks, metrics_of_steps, split):
        for step, same in zip(steps, wanted, strict=True):
            assert step == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in same.items()}


@pytest.mark.parametrize("loss", [pytest.param("megatron", marks=pytest.mark.full), "reference"])
def test_pairs_log_probabilities_are_those_of_logits(loss: str) -> None:
    """Compare values and gradients with log-softmax of all logits, on two tensor-parallel ranks."""

    def job(whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
        from mtrain.assembly.model import build_model
        from mtrain.mcore import api as mcore
        from mtrain.world.init import joined

        run = run_of(ranks=2, tp=2)
        kernels = run.kernels.model_copy(update={"loss": loss})
        model = run.model.model_copy(update={"final_logit_softcapping": 3.0})
        run = run.model_copy(update={"kernels": kernels, "model": model})
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 140, (2, 33), generator=generator)
        weights = torch.rand((2, 32), generator=generator)
        given = tokens[:, :-1], torch.arange(32).expand(2, 32), None
        labels = tokens[:, 1:].contiguous()
        with joined(run) as world:
            (chunk,) = build_model(run, world, wrap=False)
            if whole:
                logits = mcore.gather_from_tensor_model_parallel_region(chunk(*given))
                found = logits[..., :140].float().log_softmax(-1)
                found = found.gather(-1, labels[..., None]).squeeze(-1)
            else:
                found = chunk(*given, labels=labels)
            (found * weights).sum().backward()
            gradients = [p.grad.flatten() for p in chunk.parameters()]
        return found.detach(), torch.cat(gradients)

    import_engine()
    wanted = run_ranks(2, job, True)
    for (values, gradient), (same, slope) in zip(run_ranks(2, job, False), wanted, strict=True):
        assert torch.allclose(values, same, atol=1e-5)
        assert torch.allclose(gradient, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "cp2", "dp2"])
def test_pairs_precomputed_equals_frozen(layout: str, tmp_path: Path) -> None:
    """Compare steps and an evaluation with those of a frozen copy, and after a resume."""

    def job(run: RunConfig, resumed: bool) -> list[dict[str, float]]:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import summed, train_step
        from mtrain.world.init import joined

        folder = tmp_path / "saved"
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            state = context.state
            found = []
            if resumed:
                path = ckpt_state.opened(folder / "step_00000002", run, world)
                ckpt_state.load(path, world, state, seed=run.trainer.seed)
            while state.step < 3:
                found.append(dict(train_step(context, stop_requested=False).metrics))
                if state.step == 2 and run.objective.reference == "precomputed":
                    ckpt_state.save(folder, run, world, state, {})
            assert context.valid_data is not None
            found.append(summed(context, context.valid_data, 2) or {})
        return [{k: v for k, v in one.items() if k not in OF_THE_LOOP} for one in found]

    import_engine()
    frozen, precomputed = (
        order_run(tmp_path, 3, reference=kind, micro=4, **LAYOUTS[layout])
        for kind in ("frozen", "precomputed")
    )
    wanted = run_ranks(2, job, frozen, False)[0]
    known = run_ranks(2, job, precomputed, False)[0]
    again = run_ranks(2, job, precomputed, True)[0]
    for one, same in zip(wanted, known, strict=True):
        assert same == {k: pytest.approx(v, rel=1e-5, abs=1e-5) for k, v in one.items()}
    assert again == known[2:]
