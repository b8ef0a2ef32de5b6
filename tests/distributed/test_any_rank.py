"""Any rank of any world, built here without memory: what all ranks own adds up to the model."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import pytest

from mtrain.api import load
from mtrain.config.compose.paths import recipes_dir
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid, held_stages
from mtrain.models.count import frozen_parameters
from mtrain.plan.count import adapter_parameters, parameters
from mtrain.plan.states import stage_weights
from tests.support.covering import some
from tests.support.forked import run_alone
from tests.support.patience import patient

BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)


Weight = tuple[str, tuple[int, ...], bool, bool, bool]
"""Name, shape, whether another stage has it too, whether all data-parallel ranks do, and whether it
is trained.
"""


def trained(run: RunConfig) -> int:
    """Return the number of parameters of a run that have a gradient."""
    if run.peft.kind is not None:
        return sum(adapter_parameters(run))
    return parameters(run.model) - frozen_parameters(run.model)


RECIPES = sorted(
    file.relative_to(recipes_dir()).with_suffix("").as_posix()
    for file in recipes_dir().rglob("*.yaml")
)
"""Every axis, experts with and without tensor parallelism of their own, MLA, MTP and stages of
unlike sizes.
"""
LARGE = [
    "model=llama31_405b",
    "parallel=tp8pp16cp2sp",
    "data=mock",
    "data.seq_length=8192",
    "cluster=h100x64",
    "cluster.nodes=1024",
    "model.num_layers=128",
    "trainer.global_batch_size=2048",
]


def _owned(run: RunConfig, ranks: Iterable[int]) -> dict[int, int]:
    """Return for each rank the parameters that it is the first to hold, so that every one counts
    once.
    """
    from mtrain.assembly.model import blank_model
    from mtrain.mcore.state.shard_specs import shard_specs_of
    from mtrain.world.fake_world import fake_world

    found = {}
    for rank in ranks:
        with fake_world(run, rank) as world:
            found[rank] = 0
            for chunk in blank_model(run, world):
                trained = {
                    name for name, parameter in chunk.named_parameters() if parameter.requires_grad
                }
                assert all(parameter.is_meta for parameter in chunk.parameters())
                specs = (
                    spec
                    for name, held in shard_specs_of(chunk).items()
                    if name in trained
                    for spec in held
                )
                found[rank] += sum(spec.numel for spec in specs if spec.primary())
    return found


def _first_holders(run: RunConfig) -> list[int]:
    """Return the ranks that can be the first to hold anything: those with no data- or
    context-parallel sibling before them.
    """
    grid = RankGrid.of(run)
    places = [grid.coords(rank) for rank in range(grid.world)]
    return [
        rank
        for rank, at in enumerate(places)
        if (at["dp"] == 0 and at["cp"] == 0) or (run.model.moe is not None and at["edp"] == 0)
    ]


def _kinds(run: RunConfig) -> list[tuple[tuple[object, ...], ...]]:
    """Return for each pipeline rank a description of its stages, equal for two that hold as much of
    the same.

    The final norm is where the last layer is.
    """
    last = run.model.num_layers - 1
    dense = run.model.num_layers if run.model.moe is None else run.model.moe.first_dense_layers
    return [
        tuple(
            (
                sum(i < dense for i in s.layers),
                len(s.layers),
                last in s.layers,
                s.embedding,
                s.mtp,
                s.loss,
            )
            for s in held
        )
        for held in held_stages(run)
    ]


@pytest.mark.parametrize("name", some(RECIPES, ["gpt_oss/20b_h100x16"]))
def test_any_rank_of_each_stage_kind_owns_its_part(name: str) -> None:
    """Multiply by the number of ranks of its kind: every parameter counts once, whether the rank is
    first of its tensor-parallel group or not.
    """
    run = load([f"recipe={name}"], BIG, {}).run
    grid = RankGrid.of(run)
    stages = _kinds(run)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank in _first_holders(run):
        at = grid.coords(rank)
        place = at["tp"] == 0, at["etp"] == 0, at["dp"] == 0 and at["cp"] == 0, at["edp"] == 0
        kinds.setdefault((stages[at["pp"]], *place), []).append(rank)
    sample = run_alone(lambda: _owned(run, [ranks[-1] for ranks in kinds.values()]))
    assert sum(sample[ranks[-1]] * len(ranks) for ranks in kinds.values()) == trained(run)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name in RECIPES if not re.search("kimi|100x(1024|3072|6144)", name)]
)
def test_any_rank_union_owns_every_parameter_once(name: str) -> None:
    run = load([f"recipe={name}"], BIG, {}).run
    world = RankGrid.of(run).world
    holders = _first_holders(run)
    if world <= 64:
        others = [rank for rank in range(world) if rank not in set(holders)]
        owned = run_alone(lambda: _owned(run, [*holders, *others[:: max(1, len(others) // 4)]]))
        assert sum(owned[rank] for rank in holders) == trained(run)
        assert all(owned[rank] == 0 for rank in set(owned) - set(holders))
        return
    # Of a large world: one rank of each stage and tensor-parallel place, times the ranks that own
    # as much.
    grid = RankGrid.of(run)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank in holders:
        at = grid.coords(rank)
        dense = at["dp"] == 0 and at["cp"] == 0
        kinds.setdefault((at["pp"], at["tp"], at["etp"], dense, at["edp"] == 0), []).append(rank)
    sample = run_alone(lambda: _owned(run, [ranks[-1] for ranks in kinds.values()]))
    assert sum(sample[ranks[-1]] * len(ranks) for ranks in kinds.values()) == trained(run)


def _built(run: RunConfig) -> list[list[Weight]]:
    """Return the weights that the first rank of each pipeline stage builds, by chunk."""
    from mtrain.assembly.model import blank_model
    from mtrain.world.fake_world import fake_world

    grid = RankGrid.of(run)
    out = []
    for stage in range(grid.pp):
        with fake_world(run, grid.rank_of(pp=stage)) as world:
            out.append(
                [
                    [
                        (_as_saved(name), tuple(p.shape), getattr(p, "shared_embedding", False),
                         getattr(p, "allreduce", True), p.requires_grad)
                        for name, p in chunk.named_parameters()
                    ]
                    for chunk in blank_model(run, world)
                ]
            )  # fmt: skip
    return out


def _as_saved(name: str) -> str:
    """Return a weight's name as checkpoints of every release have it: 0.19 has another name for the
    layer of multi-token prediction.
    """
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


LAYOUTS = (
    "model=glm45_tiny parallel=pp2vpp2 model.num_layers=4",
    "model=deepseek_tiny parallel=tp2pp2ep2sp",
    "model=mixtral_tiny parallel=tp2ep2sp parallel.etp=1",
    "model=gemma_tiny parallel=pp2tp2",
    "model=gpt_oss_tiny parallel=tp2 parallel.etp=1",
    "model=gpt_oss_tiny parallel=pp2ep2 model.mtp_num_layers=1",
    "model=bert_tiny parallel=tp2pp2",
    "model=megatron_bert_tiny parallel=tp2pp2",
    "model=nemotron4_tiny parallel=tp2pp2",
    "model=t5_tiny parallel=tp2",
    "model=llava_tiny parallel=tp2 model.llava.freeze=[vision]",
    "parallel=tp2pp2vpp2 model.num_layers=4 peft=dora peft.r=4",
    "model=glm45_tiny parallel=pp2tp2ep2 model.num_layers=4 peft=lora peft.r=4",
    "model=deepseek_tiny parallel=tp2ep2sp parallel.etp=1 peft=lora peft.r=4",
    "model=mixtral_tiny parallel=tp2 parallel.etp=2 peft=lora peft.target=[experts]",
    "model=gpt_oss_tiny parallel=tp2ep2sp parallel.etp=1 peft=lora peft.r=4",
    "model=gpt2 parallel=tp2pp2 model.vocab_size=1000 peft=dora",
)


@pytest.mark.parametrize(
    "words", some([*LAYOUTS, *(f"recipe={name}" for name in RECIPES)], LAYOUTS[:2])
)
def test_any_rank_plan_names_every_weight_of_a_stage(words: str) -> None:
    """Compare order, shape on a rank, and sharing."""
    run = load(
        [*words.split(), *([] if words.startswith("recipe") else ["data=mock"])], BIG, {}
    ).run
    planned = [
        [
            [
                (w.name, w.shape, w.shared, not w.expert, not w.frozen)
                for w in stage_weights(run, chunk)
            ]
            for chunk in stage
        ]
        for stage in held_stages(run)
    ]
    assert planned == run_alone(lambda: _built(run))


@pytest.mark.full
def test_any_rank_of_8192_builds_in_seconds() -> None:
    run = load(LARGE, BIG, {}).run
    grid = RankGrid.of(run)
    assert grid.world == 8192
    begin = time.monotonic()
    places = [grid.rank_of(tp=tp, pp=pp) for pp in (0, 7, 15) for tp in (0, 7)]
    owned = run_alone(lambda: _owned(run, [*places, 8191]))
    assert time.monotonic() - begin < patient(60)
    first, middle, last = (
        owned[a] + 7 * owned[b] for a, b in zip(places[::2], places[1::2], strict=True)
    )
    assert first + 14 * middle + last == trained(run)
    assert owned[8191] == 0
