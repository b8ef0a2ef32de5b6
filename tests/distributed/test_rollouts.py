"""Rollouts of the trained shards: the same in any layout and company, and the trainer's view of
them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.train.generate.request import END, LENGTH, Sampling
from mtrain.train.rollouts.engine import Prompt, Rollout
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run

MOE = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}}
LEARNED = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": ({}, {}),
    "window": ({"window_size": 6}, {}),
    "learned positions tp2sp": (LEARNED, {"ranks": 2, "tp": 2, "sequence_parallel": True}),
    "tp2": ({}, {"ranks": 2, "tp": 2}),
    "tp2sp": ({}, {"ranks": 2, "tp": 2, "sequence_parallel": True}),
    "pp2": ({}, {"ranks": 2, "pp": 2}),
    "pp2vpp2": ({}, {"ranks": 2, "pp": 2, "vpp": 2}),
    "tp2pp2": ({}, {"ranks": 4, "tp": 2, "pp": 2}),
    "dp2": ({}, {"ranks": 2}),
    "cp2": ({}, {"ranks": 2, "cp": 2}),
    "ep2": (MOE, {"ranks": 2, "ep": 2}),
    "ep2pp2": (MOE, {"ranks": 4, "ep": 2, "pp": 2}),
    "fsdp2": ({}, {"ranks": 2, "fsdp": "fsdp2"}),
    "megatron fsdp": ({}, {"ranks": 2, "fsdp": "megatron"}),
}
DRAWN = Sampling(12, temperature=1.0, seed=3)
ROWS = 5


def run_of(model: dict[str, Any], layout: dict[str, Any], **given: Any) -> Any:
    """Return a run whose objective reads log-probabilities."""
    run = tiny_run(model=model, **given, **layout)
    run = run.model_copy(update={"objective": ObjectiveConfig(name="dpo")})
    return resolve(run, Machine(cpu_cores=1, memory_bytes=0))


def prompts_of(count: int, longest: int = 16, answers: int = 3) -> list[Prompt]:
    """Return prompts of unequal length, with so many answers to each."""
    draws = random.Random(count)
    texts = [
        tuple(draws.randrange(300) for _ in range(draws.randrange(1, longest)))
        for _ in range(-(-count // answers))
    ]
    return [Prompt(texts[i // answers], i) for i in range(count)]


def ending(ids: list[int]) -> str:
    """End a text at its first token below 20."""
    return END if ids[-1] < 20 else LENGTH


def lively(chunks: list[Any]) -> None:
    """Set logits apart."""
    with torch.no_grad():
        for parameter in (p for chunk in chunks for p in chunk.parameters() if p.ndim > 1):
            parameter.mul_(3.0)


def sampled(run: Any, prompts: list[Prompt], rows: int = ROWS, grouped: bool = False) -> Any:
    """Return the answers of an engine; `grouped` ones those of `Sampler.continued`."""
    from mtrain.assembly.model import build_model
    from mtrain.train.rollouts.local import LocalEngine
    from mtrain.world.init import joined

    with joined(run) as world:
        chunks = build_model(run, world, wrap=False)
        lively(chunks)
        engine = LocalEngine(run, world, chunks, rows=rows, ending=ending)
        if grouped:
            engine.obstacle = lambda: "tests compare"  # type: ignore[method-assign]
        return engine.generate(prompts, DRAWN)


@pytest.mark.parametrize("name", some(CASES, ["single"]))
def test_rollouts_layout_keeps_answers(name: str) -> None:
    import_engine()
    model, layout = CASES[name]
    prompts = prompts_of(9)
    expected = run_ranks(1, sampled, run_of(model, {}), prompts, ROWS, True)[0]
    assert {answer.ended for answer in expected} == {END, LENGTH}
    run = run_of(model, layout)
    for answers in run_ranks(run.parallel.ranks, sampled, run, prompts):
        assert [(a.ids, a.ended) for a in answers] == [(a.ids, a.ended) for a in expected]
        for answer, same in zip(answers, expected, strict=True):
            assert answer.log_probabilities == pytest.approx(same.log_probabilities, abs=4e-6)


@pytest.mark.full
def test_rollouts_lost_prompt_of_a_row_is_found() -> None:
    import_engine()

    def forgetful(run: Any, prompts: list[Prompt]) -> Any:
        from mtrain.mcore import api as mcore

        mcore.Cache.copy = lambda *args: None  # type: ignore[method-assign]
        return sampled(run, prompts)

    run = run_of({}, {})
    prompts = prompts_of(12)
    whole, spoilt = (run_ranks(1, job, run, prompts)[0] for job in (sampled, forgetful))
    same = [a.ids == b.ids for a, b in zip(whole, spoilt, strict=True)]
    # The first answer to each prompt read it itself.
    assert any(same)
    assert not all(same)


def alone_and_among_others(run: Any, prompts: list[Prompt]) -> tuple[list[Rollout], list[Rollout]]:
    """Return the answers of one call, and those of a call for each prompt; training is left as it
    was.
    """
    from mtrain.ckpt.state import rng_tensors
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.rollouts.local import LocalEngine
    from mtrain.world.init import joined

    with joined(run) as world:
        chunks = assemble(run, world, splits_of(run)).state.chunks
        lively(chunks)
        weights = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        draws = {name: value.clone() for name, value in rng_tensors(world).items()}
        engine = LocalEngine(run, world, chunks, rows=8, ending=ending)
        together = engine.generate(prompts, DRAWN)
        alone = [engine.generate([prompt], DRAWN) for prompt in prompts]
        after = rng_tensors(world)
        assert all(torch.equal(value, after[name]) for name, value in draws.items())
        held = (p for chunk in chunks for p in chunk.parameters())
        assert all(torch.equal(p, kept) for p, kept in zip(held, weights, strict=True))
        assert all(chunk.training for chunk in chunks)
        assert together is not None
        return together, [answers[0] for answers in alone if answers]


ALONE = ["single fp32", "single bf16", "tp2 fp32", "pp2 bf16", "dp2 fp32", "ep2 fp32"]


@pytest.mark.full
@pytest.mark.parametrize("case", ALONE)
def test_rollouts_answer_is_independent_of_others(case: str) -> None:
    """Give a request by itself and among 31 others the same bits.

    Experts compute the tokens of all rows together, so there the last bits may differ.
    """
    import_engine()
    name, dtype = case.rsplit(" ", 1)
    model, layout = CASES[name]
    run = run_of(model, layout, dtype=dtype)
    for together, alone in run_ranks(
        run.parallel.ranks, alone_and_among_others, run, prompts_of(32)
    ):
        if model is MOE:
            assert [answer.ids for answer in together] == [answer.ids for answer in alone]
            for answer, same in zip(together, alone, strict=True):
                assert answer.log_probabilities == pytest.approx(same.log_probabilities, abs=4e-6)
        else:
            assert together == alone


def micro_batches(run: Any, world: Any, answers: list[Rollout]) -> list[dict[str, torch.Tensor]]:
    """Return all answers in micro-batches of training, the same on data-parallel ranks."""
    from mtrain.mcore import api as mcore

    length = run.data.length
    micro = run.trainer.micro
    batches = []
    for first in range(0, len(answers), micro):
        tokens = torch.zeros((micro, length + 1), dtype=torch.int64)
        for row, answer in enumerate(answers[first : first + micro]):
            ids = [*answer.prompt.ids, *answer.ids]
            tokens[row, : len(ids)] = torch.tensor(ids)
        batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        batch["position_ids"] = torch.arange(length).expand(micro, length).contiguous()
        batch["loss_mask"] = torch.ones((micro, length))
        if world.grid.cp > 1:
            batch = mcore.get_batch_on_this_cp_rank(batch)
        batches.append(batch)
    return batches


def seen_by_trainer(run: Any, prompts: list[Prompt]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return log-probabilities of answers: the sampler's, those that a trainer computes before its
    step, and those of the forward of the step itself; the last two [answer, token].
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import forward_step, log_probabilities, run_pipeline
    from mtrain.train.rollouts.local import LocalEngine
    from mtrain.world.init import joined

    def in_training(iterator: Any, model: Any) -> Any:
        output, _ = forward_step(context.objective, iterator, model)
        count = torch.tensor(output.numel(), dtype=torch.int32)
        return output, lambda out: (out.sum(), count, {"metrics": out.detach().clone()})

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        engine = LocalEngine(run, world, context.state.chunks, rows=32)
        answers = engine.generate(prompts, Sampling(16, temperature=1.0, seed=3))
        assert answers is not None
        batches = micro_batches(run, world, answers)
        before = log_probabilities(context, batches, "none")
        during = run_pipeline(context, batches, forward_only=False, forward=in_training)
        own = [answer.log_probabilities for answer in answers]

        def of_answers(found: list[torch.Tensor]) -> list[Any]:
            rows = [row for batch in found for row in batch]
            begins = [len(answer.prompt.ids) - 1 for answer in answers]
            spans = zip(begins, own, strict=True)
            return [
                row[begin : begin + len(values)].tolist()
                for row, (begin, values) in zip(rows, spans, strict=False)
            ]

        return own, of_answers(before), of_answers(during)


RATIOS = {
    f"{name} {dtype}": (answers, most)
    for name in ("single", "tp2", "pp2", "ep2", "tp2pp2")
    for dtype, answers, most in (("fp32", 640, 1e-6), ("bf16", 160, 0.01))
}
"""Answers of 16 tokens, and the largest difference between log-probabilities of about -6."""


@pytest.mark.full
@pytest.mark.parametrize("case", RATIOS)
def test_rollouts_ratio_to_trainer_is_one(case: str) -> None:
    """Give the sampler and the trainer one log-probability for each token.

    The trainer computes the same bits before its step as in it. The sampler reads one token at a
    time, so its products have other shapes, which round differently.
    """
    import_engine()
    name, dtype = case.split()
    model, layout = CASES[name]
    answers, most = RATIOS[case]
    batch = {"micro_batch_size": 8, "global_batch_size": 16}
    run = run_of(model, layout, dtype=dtype, trainer=batch)
    prompts = prompts_of(answers, longest=15)
    found = run_ranks(run.parallel.ranks, seen_by_trainer, run, prompts, timeout_s=240.0)
    own, before, during = found[-1]
    assert before == during
    pairs = [
        pair
        for sampler, trainer in zip(own, before, strict=True)
        for pair in zip(sampler, trainer, strict=True)
    ]
    assert len(pairs) == 16 * answers
    gaps = torch.tensor([abs(a - b) for a, b in pairs], dtype=torch.float64)
    assert gaps.max() < most
