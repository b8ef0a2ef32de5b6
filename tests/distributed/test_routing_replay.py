"""Experts recorded by a sampler reach their tokens in training, in any layout.

A token keeps its identity up to the experts: attention and experts add nothing to the residual
stream, so the input of an expert points where the embedding of its token does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.run import RunConfig
from mtrain.plan.rank import stage_memories
from mtrain.train.generate.request import Sampling
from tests.distributed.test_answers import prompts_run, records
from tests.distributed.test_rollouts import DRAWN, MOE, ending, lively, prompts_of
from tests.distributed.test_rollouts import run_of as dpo_run
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run, whole_tensors

SAMPLES = 8
LENGTH = 32
EXPERTS = 8
TOPK = 2
LAYERS = 3
"""Layers of experts, after one without."""
VOCABULARY = 320
NOTHING = 300
"""The token of padding."""
ALL_PADDING = 5
"""A sample without tokens."""
TP2 = {"ranks": 2, "tp": 2, "sequence_parallel": True}
CASES: dict[str, dict[str, Any]] = {
    "single": {},
    "recompute": {"recompute": True},
    "tp2": TP2,
    "tp2 recompute": TP2 | {"recompute": True},
    "tp2 etp1": TP2 | {"ep": 2, "etp": 1},
    "ep2": {"ranks": 2, "ep": 2},
    "tp2 ep2 etp2": {"ranks": 4, "tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True},
    "ep2 gathered": {"ranks": 2, "ep": 2, "moe": {"token_dispatcher_type": "allgather"}},
    "cp2 ring": {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"},
    "cp2 all-to-all": {"ranks": 2, "cp": 2, "cp_comm_type": "a2a"},
    "cp2 all-gather": {"ranks": 2, "cp": 2, "cp_comm_type": "all_gather"},
    "pp2": {"ranks": 2, "pp": 2},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "pp2 recompute": {"ranks": 2, "pp": 2, "recompute": True},
    "packed": {"packed": True},
    "packed cp2": {"ranks": 2, "cp": 2, "packed": True},
    "dp2": {"ranks": 2},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
    "groups and bias": {
        "moe": {
            "router_num_groups": 4,
            "router_group_topk": 2,
            "router_score_function": "sigmoid",
            "router_enable_expert_bias": True,
        }
    },
    "softmax before": {"moe": {"router_pre_softmax": True}},
}


def run_of(name: str) -> RunConfig:
    given = dict(CASES[name])
    packed = given.pop("packed", False)
    trainer: dict[str, Any] = {"global_batch_size": SAMPLES, "micro_batch_size": 2}
    if given.pop("recompute", False):
        given["recompute"] = {"granularity": "full"}
    moe = {
        "num_experts": EXPERTS,
        "router_topk": TOPK,
        "ffn_hidden_size": 32,
        "first_dense_layers": 1,
        "router_load_balancing_type": "none",
    } | given.pop("moe", {})
    model = {"vocab_size": VOCABULARY, "num_layers": LAYERS + 1, "moe": MoEConfig(**moe)}
    run = tiny_run(model=model, trainer=trainer, **given)
    return run.model_copy(update={"data": run.data.model_copy(update={"packed": packed})})


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [samples, length], each another one but for padding at the end of samples, and
    their experts [samples, length, layers, k].
    """
    tokens = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    dice = torch.Generator().manual_seed(5)
    draws = torch.rand((SAMPLES, LENGTH, LAYERS, EXPERTS), generator=dice)
    experts = draws.topk(TOPK).indices.to(torch.int16)
    for sample in range(SAMPLES):
        end = 0 if sample == ALL_PADDING else LENGTH - sample
        tokens[sample, end:] = NOTHING
        experts[sample, end:] = -1
    return tokens, experts


def table() -> torch.Tensor:
    """Return an embedding of every token."""
    return torch.randn((VOCABULARY, 64), generator=torch.Generator().manual_seed(1))


def micro_batches(context: Any, layers: Any) -> list[Any]:
    """Return this rank's micro-batches, as a step takes them."""
    from mtrain.train.loop.prefetch import to_device

    tokens, experts = samples()
    found = []
    for numbers in context.train_data.numbers(0, SAMPLES):
        own = tokens[numbers]
        labels = own.roll(-1, 1)
        batch = {
            "tokens": own,
            "labels": labels,
            "loss_mask": (labels != NOTHING).float(),
            "position_ids": torch.arange(LENGTH).repeat(len(numbers), 1),
            "padding": own == NOTHING,
            "routes": experts[numbers][:, :, list(layers.own)],
        }
        if context.run.data.packed:
            batch = {key: value.flatten(0, 1)[None] for key, value in batch.items()}
            bounds = torch.arange(len(numbers) + 1, dtype=torch.int32) * LENGTH
            batch["cu_seqlens"] = bounds
        found.append(to_device(batch, context.world))
    return found


def keep_identity(chunks: list[Any]) -> None:
    """Let hidden states be embeddings of `table` up to the last layer."""
    for chunk in chunks:
        for module in chunk.modules():
            first = getattr(module, "vocab_start_index", None)
            if first is not None and hasattr(module, "num_embeddings_per_partition"):
                rows = table()[first : first + len(module.weight)]
                module.weight.data[: len(rows)] = rows
        for name, weight in chunk.named_parameters():
            if "linear_proj" in name or ("mlp" in name and ("fc2" in name or "weight2" in name)):
                weight.data.zero_()


def watch(chunks: list[Any], seen: set[tuple[int, int, int]]) -> None:
    """Note what arrives at experts: layers, experts and tokens."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    known = torch.nn.functional.normalize(table(), dim=1)

    def watched(layer: Any) -> Callable[..., None]:
        def note(_: Any, args: tuple[Any, ...]) -> None:
            rows, counts = args[0].detach().float(), args[1]
            counts = counts.tolist()
            nearest = (torch.nn.functional.normalize(rows, dim=1) @ known.T).argmax(1).tolist()
            arrived: Iterator[int] = iter(nearest)
            for expert, count in zip(layer.local_expert_indices, counts, strict=True):
                for _ in range(int(count)):
                    seen.add((layer.layer_number - 2, expert, next(arrived)))

        return note

    for chunk in chunks:
        for layer in (m for m in chunk.modules() if isinstance(m, MoELayer)):
            layer.experts.register_forward_pre_hook(watched(layer))


def sent(run: RunConfig, lists: bool, fault: str = "") -> tuple[set[tuple[int, int, int]], Any]:
    """Return what arrived at experts of this rank in a step, and the counts of replaced experts."""
    from mtrain.assembly import model
    from mtrain.mcore.layers.routes import layers_of
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import gradients
    from mtrain.world.init import joined

    model.routes_by_lists = lambda _: lists
    FAULTS[fault]()
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        layers = layers_of(context.state.chunks)
        assert layers.number == LAYERS
        keep_identity(context.state.chunks)
        seen: set[tuple[int, int, int]] = set()
        watch(context.state.chunks, seen)
        gradients(context, micro_batches(context, layers))
        return seen, layers.counted()["routes"].item()


def off_by_one() -> None:
    replace_routes(lambda rows: rows.roll(1, 0))


def shifted_layer() -> None:
    from mtrain.mcore.layers import routes

    real = routes.routes_of
    routes.routes_of = lambda n, group, layer: real(n, group, max(0, layer - 1))


def lost_padding_row() -> None:
    def without_padding(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        there = flat[:, 0] >= 0
        moved = torch.full_like(flat, -1)
        moved[: there.sum()] = flat[there]
        return moved.view_as(rows)

    replace_routes(without_padding)


def forgotten_in_recompute() -> None:
    from mtrain.mcore.layers import padding

    before = padding.padding_is
    known = padding._Known

    def remembering(function: Any) -> Any:
        kept = known.padding

        def run(*args: Any, **more: Any) -> Any:
            with before(kept):
                return function(*args, **more)

        return run

    from mtrain.mcore.patches import recompute

    recompute.remembering = remembering


def replace_routes(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from mtrain.mcore.layers import routes

    real = routes.routes_of

    def changed(*args: Any) -> Any:
        rows = real(*args)
        return None if rows is None else change(rows)

    routes.routes_of = changed


FAULTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "off by one": off_by_one,
    "a shifted layer": shifted_layer,
    "a lost padding row": lost_padding_row,
    "forgotten in a recomputation": forgotten_in_recompute,
}


def wanted() -> set[tuple[int, int, int]]:
    tokens, experts = samples()
    return {
        (layer, int(expert), int(tokens[sample, place]))
        for sample, place, layer, k in torch.ones_like(experts).nonzero().tolist()
        if (expert := experts[sample, place, layer, k]) >= 0
    }


def arrived(name: str, lists: bool, fault: str = "") -> set[tuple[int, int, int]]:
    import_engine()
    run = run_of(name)
    found = run_ranks(run.parallel.ranks, sent, run, lists, fault)
    seen = set().union(*(part for part, _ in found))
    return {one for one in seen if one[2] != NOTHING}


WAYS = [f"{name}, {way}" for name in CASES for way in ("lists", "maps")]


@pytest.mark.parametrize("case", some(WAYS, ["tp2 recompute, lists"]))
def test_replay_sends_each_token_to_its_experts(case: str) -> None:
    name, way = case.rsplit(", ", 1)
    assert arrived(name, way == "lists") == wanted()


@pytest.mark.full
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault])
def test_replay_faulty_routes_are_found(fault: str) -> None:
    for lists in (False, True):
        assert arrived("recompute", lists, fault) != wanted()


def one_gradient(run: RunConfig, lists: bool, folder: Path) -> float:
    """Return the loss of a step, and write its gradients."""
    from mtrain.assembly import model
    from mtrain.mcore.layers.routes import layers_of
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.readings import reduce_report
    from mtrain.train.loop.step import gradients
    from mtrain.train.verify.prove import save_gradients
    from mtrain.world.init import joined

    model.routes_by_lists = lambda _: lists
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        layers = layers_of(context.state.chunks)
        reports = gradients(context, micro_batches(context, layers))
        save_gradients(context, folder)
        return reduce_report(world, context.table, reports, False)["loss"]


@cache
def alone(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the model of a case on one rank, with maps."""
    import_engine()
    single = run_of("single")
    run = run_of(name).model_copy(update={"parallel": single.parallel, "data": single.data})
    folder = Path(mkdtemp())
    loss = run_ranks(1, one_gradient, run, False, folder)[0]
    return loss, whole_tensors(folder / "step_00000000")


@pytest.mark.full
@pytest.mark.parametrize("case", [way for way in WAYS if way != "single, maps"])
def test_replay_split_keeps_loss_and_gradient(case: str, tmp_path: Path) -> None:
    """Give the loss and gradient of one rank, whose routers have maps."""
    name, way = case.rsplit(", ", 1)
    same = name if "moe" in CASES[name] else "single"
    loss, whole = alone(same)
    run = run_of(name)
    found = run_ranks(run.parallel.ranks, one_gradient, run, way == "lists", tmp_path)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    split = whole_tensors(tmp_path / "step_00000000")
    error = sum((split[key].double() - value).square().sum() for key, value in whole.items())
    size = sum(value.double().square().sum() for value in whole.values())
    assert (error / size).sqrt() < 1e-6


ROLLED: dict[str, dict[str, Any]] = {
    "tp2sp": TP2,
    "ep2": {"ranks": 2, "ep": 2},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "dp2": {"ranks": 2},
}


def rolled(run: RunConfig, lists: bool, count: int, grouped: bool = False) -> list[Any]:
    """Return answers with the experts of their tokens."""
    from mtrain.assembly import model
    from mtrain.mcore.layers.routes import layers_of
    from mtrain.train.rollouts.local import LocalEngine
    from mtrain.world.init import joined

    model.routes_by_lists = lambda _: lists
    with joined(run) as world:
        chunks = model.build_model(run, world, wrap=False)
        lively(chunks)
        layers = layers_of(chunks)
        engine = LocalEngine(run, world, chunks, rows=5, ending=ending, layers=layers)
        if grouped:
            engine.obstacle = lambda: "tests compare"  # type: ignore[method-assign]
        answers = engine.generate(prompts_of(count), DRAWN)
        assert answers is not None
        return answers


def rolled_run(**parallel: Any) -> RunConfig:
    return dpo_run(MOE | {"num_layers": 4}, parallel)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "grouped"), [*((name, False) for name in ROLLED), ("tp2sp", True), ("dp2", True)]
)
def test_replay_layout_records_the_same_experts(name: str, grouped: bool) -> None:
    """Record what one rank does; near a tie, rounding may choose another expert."""
    import_engine()
    alone = run_ranks(1, rolled, rolled_run(), True, 9)[0]
    run = rolled_run(**ROLLED[name])
    for answers in run_ranks(run.parallel.ranks, rolled, run, False, 9, grouped):
        differ = total = 0
        for answer, same in zip(answers, alone, strict=True):
            assert answer.ids == same.ids
            tokens = len(answer.prompt.ids) + len(answer.ids) - 1
            assert answer.routes.shape == (tokens, 4, 2)
            differ += (np.sort(answer.routes) != np.sort(same.routes)).sum()
            total += answer.routes.size
        assert differ <= total / 200


def gaps(run: RunConfig, replay: bool) -> tuple[float, float, float]:
    """Return mean and largest |trainer - sampler| of a step's tokens, and the share of experts that
    differ.
    """
    from mtrain.data.answers import Answer, answer_batch
    from mtrain.mcore.layers.routes import layers_of
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.prefetch import to_device
    from mtrain.train.loop.step import forward_step, run_pipeline
    from mtrain.train.rollouts.local import LocalEngine
    from mtrain.world.init import joined

    def in_training(iterator: Any, model: Any) -> Any:
        output, _ = forward_step(context.objective, iterator, model)
        count = torch.tensor(output.numel(), dtype=torch.int32)
        return output, lambda out: (out.sum(), count, {"metrics": out.detach().clone()})

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        lively(context.state.chunks)
        layers = layers_of(context.state.chunks)
        engine = LocalEngine(run, world, context.state.chunks, rows=16, layers=layers)
        answers = engine.generate(prompts_of(64), Sampling(16, temperature=1.0, seed=3))
        assert answers is not None
        batches = []
        for first in range(0, len(answers), run.trainer.micro):
            rows = [
                Answer(
                    np.array(answer.prompt.ids),
                    np.array(answer.ids),
                    np.array(answer.log_probabilities, np.float32),
                    routes=answer.routes if replay else None,
                )
                for answer in answers[first : first + run.trainer.micro]
            ]
            batches.append(to_device(answer_batch(rows, run.data.length, "token", 16), world))
        found = run_pipeline(context, batches, forward_only=False, forward=in_training)
        both = [(batch["sampled_log_probabilities"], batch["loss_mask"]) for batch in batches]
        gap = torch.cat([(a - b)[w > 0] for a, (b, w) in zip(found, both, strict=True)]).abs()
        counts = layers.counted()
        share = counts["routes_differ"] / counts["routes"].clamp(min=1)
        return float(gap.mean()), float(gap.max()), float(share)


@pytest.mark.full
def test_replay_bf16_trainer_is_nearer_to_its_sampler() -> None:
    import_engine()
    run = dpo_run(MOE | {"num_layers": 4}, {}, dtype="bf16")
    own, replayed = (run_ranks(1, gaps, run, replay)[0] for replay in (False, True))
    print(own, replayed)
    assert own[2] == 0
    assert replayed[2] > 0
    assert replayed[0] <= own[0]
    assert replayed[1] <= own[1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp2sp", "ep2", "pp2vpp2", "cp2", "dp2"])
def test_replay_of_rollouts_is_the_same_step(name: str, tmp_path: Path) -> None:
    """Take two updates of a batch of rollouts; the last weights route some tokens elsewhere."""
    import_engine()
    optim = {"lr": 0.02, "warmup_iters": 0}
    model = MOE | {"num_layers": 4}
    given = {"model": model, "steps": 2, "updates": 2, "optim": optim}
    wanted = run_ranks(1, records, prompts_run(tmp_path, **given), tmp_path / "one", False)[0]
    assert wanted[0]["routes"] > 0
    assert wanted[1]["routes_differ"] > wanted[0]["routes_differ"]
    run = prompts_run(tmp_path, **given, **ROLLED[name])
    assert run.rollout.replay_routes
    for found in run_ranks(run.parallel.ranks, records, run, tmp_path / "two", False):
        for step, same in zip(found, wanted, strict=True):
            # Tensor-parallel ranks of sequence parallelism have parts of the tokens, others all.
            assert step.pop("routes") == same["routes"] * (1 if "sp" in name else run.parallel.tp)
            near = {k: pytest.approx(v, rel=1e-3, abs=1e-4) for k, v in same.items()}
            near.pop("routes")
            near["routes_differ"] = pytest.approx(same["routes_differ"], abs=0.005)
            assert step == near


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp2sp", "pp2vpp2", "cp2"])
def test_replay_experts_are_as_planned(name: str, tmp_path: Path) -> None:
    def job() -> tuple[int, int]:
        from mtrain.mcore.layers.routes import Record
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        made = []
        real = Record.expect

        def noted(self: Record, *given: Any) -> None:
            made.append(self.experts.nbytes)
            real(self, *given)

        Record.expect = noted  # type: ignore[method-assign]
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            batches = context.prefetcher.take(0, run.trainer.batch)
            context.close()
        return made[-1], sum(batch["routes"].nbytes for batch in batches)

    import_engine()
    run = prompts_run(tmp_path, model=MOE | {"num_layers": 4}, steps=1, **ROLLED[name])
    free = run.model_copy(
        update={"rollout": run.rollout.model_copy(update={"replay_routes": False})}
    )
    both = zip(stage_memories(run), stage_memories(free), strict=True)
    counted = [
        tuple(
            sum(with_routes._moments[i].values()) - sum(without._moments[i].values())
            for i in (3, 0)
        )
        for with_routes, without in both
    ]
    found = run_ranks(run.parallel.ranks, job)
    assert found == counted * (len(found) // len(counted))
