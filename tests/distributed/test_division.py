"""Losses of answers in many splits of one global batch: one loss, gradient and set of metrics.

The policy is not its reference, or every ratio would be 0 in any split. Both are in fp32.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
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
from tests.support.objective_steps import MOE, OF_THE_LOOP
from tests.support.runs import tiny_run, whole_tensors

MODEL = {"vocab_size": 320, "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64}
PAIRS = 16
WINDOWS = 8
LENGTH = 40
ROW = 144
"""Tokens of a packed row; a context rank has tokens of every answer, packed or not."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": ["sigmoid", "ipo"], "loss_weights": [0.8, 0.2], "nll_weight": 0.5},
    "kto": {"desirable_weight": 1.3},
    "orpo": {},
    "reward": {"center_weight": 0.1},
}
SPLITS: dict[str, dict[str, Any]] = {
    "micro 2": {"micro": 2},
    "micro 8": {"micro": 8},
    "unequal": {"sizes": (2, 10, 4, 16)},
    "dp2": {"ranks": 2, "distributed_optimizer": True, "micro": 4},
    "cp2 all-gather": {"ranks": 2, "cp": 2, "cp_comm_type": "all_gather"},
    "cp2 ring": {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"},
    "cp2 all-to-all": {"ranks": 2, "cp": 2, "cp_comm_type": "a2a"},
    "packed": {"packed": True, "micro": 2},
    "packed cp2": {"packed": True, "micro": 4, "ranks": 2, "cp": 2},
    "packed dp2": {"packed": True, "micro": 1, "ranks": 2},
    "pp2": {"ranks": 2, "pp": 2, "micro": 8},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2, "micro": 4},
    "pp2dp2": {"ranks": 4, "pp": 2, "micro": 4},
    "tp2sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "ep2": {"ranks": 2, "ep": 2, "micro": 8},
}
SPLIT_OF_EXPERTS = {"micro": 8}
LIMIT = 1e-6
"""Largest relative error of a number, and of the gradient in its norm; the largest measured are
6e-7, of a margin under tp, and 3e-7.
"""


@cache
def home() -> Path:
    """Return a folder with pairs of lengths that differ, which fill `WINDOWS` packed rows."""
    folder = Path(mkdtemp())
    folder_of(folder, "chatml", marked=True)
    dice = random.Random(3)
    rows = []
    for _ in range(PAIRS):
        texts = [
            "".join(dice.choices("0123456789", k=dice.randrange(2, most))) for most in (5, 9, 9)
        ]
        rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
    chats_file(folder / "pairs.jsonl", rows)
    return folder


def run_of(
    objective: str, micro: int = 2 * PAIRS, moe: bool = False, packed: bool = False, **parallel: Any
) -> RunConfig:
    folder = home()
    data = DataConfig(
        kind="preference",
        path=str(folder / "pairs.jsonl"),
        tokenizer=str(folder / "tokenizer.json"),
        cache_dir=str(folder / "cache"),
        seq_length=ROW if packed else LENGTH,
        packed=packed,
        split=(1.0, 0.0, 0.0),
    )
    batch = WINDOWS if packed else 2 * PAIRS
    run = tiny_run(
        model=MODEL | (MOE if moe else {}),
        trainer={"micro_batch_size": micro, "global_batch_size": batch},
        **parallel,
    )
    keys = {"name": objective, **OBJECTIVES[objective]}
    changed = run.model_copy(update={"objective": ObjectiveConfig(**keys), "data": data})
    return resolve(changed, Machine(cpu_cores=1, memory_bytes=0))


def one_step(
    run: RunConfig, folder: Path, sizes: tuple[int, ...] = (), fault: str = ""
) -> dict[str, float]:
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    FAULTS[fault]()
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        assert not run.data.packed or len(context.train_data.samples) == WINDOWS
        source: Any = context.train_data.samples
        assert run.data.packed or not source.describe()["cut"]
        # The reference is surer of its random guesses than the policy: the divergence is above 0.
        with torch.no_grad():
            for chunks, factor in ((context.state.chunks, 1.5), (context.state.reference, 3.0)):
                for weight in (each for chunk in chunks for each in chunk.parameters()):
                    weight.mul_(factor)
        if sizes:
            _cut(context, sizes)
        record_gradients(context, folder)
        metrics = train_step(context, stop_requested=False).metrics
    return {name: value for name, value in metrics.items() if name not in OF_THE_LOOP}


def _cut(context: Any, sizes: tuple[int, ...]) -> None:
    """Cut the only micro-batch of a step into several of unequal sizes."""
    from mtrain.train.loop.prefetch import to_device

    def take(consumed: int, size: int) -> list[Any]:
        (whole,) = context.train_data.microbatches(consumed, size)
        parts = {key: value.split(sizes) for key, value in whole.items()}
        split = [{key: value[i] for key, value in parts.items()} for i in range(len(sizes))]
        return [to_device(batch, context.world) for batch in split]

    context.prefetcher.take = take


def no_fault() -> None:
    pass


def divided_in_each_micro_batch() -> None:
    from mtrain.train.loop import step

    real = step.sum_loss

    def divided(objective: Any, batch: Any, output: torch.Tensor) -> Any:
        total, count, report = real(objective, batch, output)
        return total / count, torch.ones_like(count), report

    step.sum_loss = divided


def left_out_context() -> None:
    from mtrain.train import pairs

    real = pairs._OverRanks.apply
    pairs._OverRanks.apply = lambda value, group: real(value, None)


def gradient_of_each_context_rank() -> None:
    from mtrain.train import pairs

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * gradient, None

    pairs._OverRanks.backward = staticmethod(backward)


def divergence_gathered_twice() -> None:
    from mtrain.train.loop import step

    real = step.mismatch_of

    def twice(*given: Any) -> torch.Tensor:
        found = real(*given)
        return torch.stack([found[0] * step.dist.get_world_size(), found[1]])

    step.mismatch_of = twice


def divergence_of_each_rank() -> None:
    from mtrain.train.loop import step

    real = step._divergence

    def local(context: Any, batches: Any) -> Any:
        reduce = step.dist.all_reduce
        step.dist.all_reduce = lambda value, group=None: None
        try:
            return real(context, batches)
        finally:
            step.dist.all_reduce = reduce

    step._divergence = local


def pairs_cut_apart() -> None:
    from mtrain.data import pairs

    real = pairs.collate

    def shifted(samples: Any, *, packed: bool) -> Any:
        made = real(samples, packed=packed)
        if packed:
            made["cu_seqlens"][1:-1] += 1
        return made

    pairs.collate = shifted


FAULTS = {
    "": no_fault,
    "the loss divided in each micro-batch": divided_in_each_micro_batch,
    "sums without context parallelism": left_out_context,
    "a gradient for each context rank": gradient_of_each_context_rank,
    "a divergence gathered twice": divergence_gathered_twice,
    "a divergence of each rank": divergence_of_each_rank,
    "answers that see each other": pairs_cut_apart,
}


@cache
def alone(objective: str, moe: bool) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    folder = Path(mkdtemp())
    # The loss that balances experts is one of each micro-batch: those are the same.
    run = run_of(objective, moe=moe, **(SPLIT_OF_EXPERTS if moe else {}))
    metrics = run_ranks(1, one_step, run, folder)[0]
    return metrics, whole_tensors(folder / "step_00000000")


def errors(
    objective: str, split: str, folder: Path, fault: str = ""
) -> tuple[dict[str, float], float]:
    """Return the relative error of each metric, and that of the gradient: the norm of the
    difference over the norm.
    """
    import_engine()
    moe = split == "ep2"
    wanted, gradients = alone(objective, moe)
    keys = dict(SPLITS[split])
    sizes = keys.pop("sizes", ())
    run = run_of(objective, moe=moe, **keys)
    found = run_ranks(run.parallel.ranks, one_step, run, folder, sizes, fault)
    assert found[0].keys() == wanted.keys()
    assert all(one == found[0] for one in found)
    here = whole_tensors(folder / "step_00000000")
    apart = sum(
        float((here[name] - value).double().square().sum()) for name, value in gradients.items()
    )
    norm = sum(float(value.double().square().sum()) for value in gradients.values())
    scale = {name: max(abs(value), 1e-9) for name, value in wanted.items()}
    # A margin is a difference, and has the error of both.
    if "reward_margin" in scale:
        scale["reward_margin"] = max(scale["rewards_chosen"], scale["rewards_rejected"])
    return (
        {name: abs(found[0][name] - value) / scale[name] for name, value in wanted.items()},
        (apart / norm) ** 0.5,
    )


CASES = [
    f"{objective}, {split}"
    for objective in OBJECTIVES
    for split in SPLITS
    if objective not in ("kto", "reward") or "packed" not in split
]


@pytest.mark.parametrize("case", some(CASES, ["dpo, packed cp2"]))
def test_division_split_is_the_same_batch(case: str, tmp_path: Path) -> None:
    objective, split = case.split(", ")
    rows, gradient = errors(objective, split, tmp_path)
    assert gradient < LIMIT
    assert {name: error for name, error in rows.items() if error > LIMIT} == {}


CAUGHT = {
    "the loss divided in each micro-batch": ("dpo", "unequal"),
    "sums without context parallelism": ("dpo", "cp2 all-gather"),
    "a gradient for each context rank": ("dpo", "cp2 all-gather"),
    "a divergence gathered twice": ("kto", "dp2"),
    "a divergence of each rank": ("kto", "dp2"),
    "answers that see each other": ("dpo", "packed"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", CAUGHT)
def test_division_fault_of_another_tool_is_seen(fault: str, tmp_path: Path) -> None:
    rows, gradient = errors(*CAUGHT[fault], tmp_path, fault)
    assert max(gradient, *rows.values()) > 100 * LIMIT
