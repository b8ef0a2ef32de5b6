"""Slowdowns of a run on planned GPUs: named first on the page, and priced within 20%."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.plan.time import step_time
from mtrain.plan.tune.space import changed
from mtrain.views.profiles import CLOCK, facts_file, folder_of, trace_file
from tests.support.run_folders import Line, event, folder, lines_of, number_of_page, reported

BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
ON = "data=mock data.seq_length=4096 trainer.global_batch_size=64"
DENSE = f"model=llama3_8b parallel=tp2pp2 cluster=h100x8 trainer.micro_batch_size=1 {ON}"
EXPERTS = f"model=mixtral_8x7b parallel=ep8 cluster=h100x8 trainer.micro_batch_size=2 {ON}"
STEPS = 1000
KERNELS = {"gemm": "nvjet", "attention": "flash_fwd", "memory": "vectorized", "update": "adam"}
GROUPS = {"tp": "TENSOR_MODEL_PARALLEL", "pp": "PIPELINE_MODEL_PARALLEL", "dp": "DATA_PARALLEL"}


@cache
def run_of(words: str) -> RunConfig:
    return load(words.split(), BIG, {}, to_run=False).run


def profile(home: Path, parts: Mapping[str, float], ranks: int) -> None:
    """Write a profile of alike ranks whose device spends so many seconds on each part."""
    home = folder_of(home, 500)
    home.mkdir(parents=True)
    for rank in range(ranks):
        with gzip.open(trace_file(home, rank), "wt") as file:
            json.dump({"traceEvents": [*spans(parts)]}, file)
        own = {"rank": rank, "coords": {"pp": rank * 2 // ranks}, "step_s": sum(parts.values())}
        own |= {"error_ns": 1000, "mark": 0, "clock_ns": 0, "offset_ns": 0}
        facts_file(home, rank).write_text(json.dumps(own))
    facts = {"id": "", "first": 500, "last": 500, "ranks": list(range(ranks)), "content": ["torch"]}
    (home / "profile.json").write_text(json.dumps(facts))


def spans(parts: Mapping[str, float]) -> Iterator[Line]:
    """Yield the kernels of a step, one after the other; the host's part has none."""
    usual = {"ph": "X", "pid": 7, "tid": 1}
    yield usual | {"name": f"{CLOCK} 0", "ts": 0.0, "dur": 0.0}
    yield usual | {"name": "mtrain:step", "ts": 0.0, "dur": 1e6 * sum(parts.values())}
    at = 1e6 * parts["host"]
    # While a stage waits for another, the kernel of the transfer runs.
    parts = {**parts, "pp": parts["pp"] + parts["bubble"]}
    for part, seconds in parts.items():
        group = f"{GROUPS.get(part, '')}_GROUP"
        name = f"ncclDevKernel_SendRecv_{part}" if part in GROUPS else KERNELS.get(part)
        if name is not None:
            event = usual | {"name": name, "cat": "kernel", "ts": at, "dur": 1e6 * seconds}
            yield event | {"args": {"Process Group Description": group, "Process Group Name": part}}
            at += 1e6 * seconds


def slowed(
    home: Path,
    run: RunConfig,
    seconds: Sequence[float],
    events: Sequence[Line] = (),
    traced: Mapping[str, float] | None = None,
) -> list[tuple[str, float]]:
    """Return the causes on the page of a run with steps of `seconds`, with their tokens/s."""
    tokens = run.trainer.batch * run.data.length
    update_s = update_of(run)
    lines = [
        line | {"step_s": one, "forward_backward_s": one - update_s, "tokens_per_s": tokens / one}
        for line, one in zip(lines_of(len(seconds), optimizer_s=update_s), seconds, strict=True)
    ]
    folder(home, lines, events, run)
    if traced is not None:
        profile(home, traced, 8)
    _, page = reported(home)
    head = ["cause", "time", "tokens/s"]
    rows = page.rows[page.rows.index(head) + 1 :] if head in page.rows else []
    return [(row[0], number_of_page(row[2])) for row in rows if len(row) == 3]


def update_of(run: RunConfig) -> float:
    """Return the planned seconds of an update."""
    parts = step_time(run).parts
    return sum(parts[name] for name in ("optimizer", "offload", "dp"))


def lost(run: RunConfig, healthy_s: float, seconds: Sequence[float]) -> float:
    """Return the true loss in tokens/s."""
    tokens = run.trainer.batch * run.data.length
    return tokens / healthy_s - tokens * len(seconds) / sum(seconds)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        pytest.param("tp", "slow links of tp: its communication took", marks=pytest.mark.full),
        ("dp", "slow links of dp: its communication took"),
        pytest.param("host", "host-bound: the device waits for launches", marks=pytest.mark.full),
    ],
)
def test_slowdowns_in_a_profile_are_priced(part: str, words: str, tmp_path: Path) -> None:
    run = run_of(DENSE)
    parts = dict(step_time(run).parts)
    healthy = sum(parts.values())
    parts["update"] = parts.pop("optimizer")
    parts[part] += 0.3 * healthy
    seconds = [1.3 * healthy] * STEPS
    home = tmp_path / "run"
    found = slowed(home, run, seconds, traced=parts)
    assert found[0][0].startswith(words)
    assert found[0][1] == pytest.approx(lost(run, healthy, seconds), rel=0.2)
    # What the cause explains is not reported again as slower than planned.
    assert len(found) == 1


def test_slowdowns_of_a_run_as_planned_are_none(tmp_path: Path) -> None:
    run = run_of(DENSE)
    parts = dict(step_time(run).parts)
    parts["update"] = parts.pop("optimizer")
    even = [event("own_time", step, own_s=[1.0] * 8) for step in range(8, 100, 8)]
    assert slowed(tmp_path / "run", run, [sum(parts.values())] * STEPS, even, parts) == []


def test_slowdowns_uneven_stages_are_priced(tmp_path: Path) -> None:
    """Compare with megatron-core's schedule of two stages, whose time the plan's timeline adds
    up.
    """
    run = run_of(DENSE)
    micro = run.trainer.batch // 2
    forward = 0.01
    # One forward, one backward: each micro-batch takes the slower stage, and the first both.
    seconds = [3 * forward * ((micro - 1) * 1.5 + 1.5 + 0.5)] * STEPS
    healthy = 3 * forward * (micro + 1)
    own = [3 * forward * micro * (0.5 if rank < 4 else 1.5) for rank in range(8)]
    events = [event("own_time", step, own_s=own) for step in range(8, 100, 8)]
    cause, rate = slowed(tmp_path / "run", run, seconds, events)[0]
    assert cause == "uneven stages: stage 1 works 1.50 x the mean"
    assert rate == pytest.approx(lost(run, healthy, seconds), rel=0.2)


def test_slowdowns_skewed_router_is_priced(tmp_path: Path) -> None:
    """Compare with the plan of experts that are twice as wide: rows and columns cost alike."""
    run = run_of(EXPERTS)
    moe = run.model.moe
    assert moe is not None
    wide = moe.model_copy(update={"ffn_hidden_size": 2 * moe.ffn_hidden_size})
    twice = run.model_copy(update={"model": run.model.model_copy(update={"moe": wide})})
    healthy = step_time(run).seconds
    seconds = [step_time(twice).seconds - update_of(twice) + update_of(run)] * STEPS
    loads = {f"decoder.layers.{n}.mlp.router": [200.0, *[600 / 7] * 7] for n in range(4)}
    described = [
        event("statistics", step, of="experts", columns=["x"], rows={}, rank_loads=loads)
        for step in range(100, 1000, 100)
    ]
    cause, rate = slowed(tmp_path / "run", run, seconds, described)[0]
    assert cause == "skewed router: the most loaded rank has 2.00 x the rows of an equal one"
    assert rate == pytest.approx(lost(run, healthy, seconds), rel=0.2)


@pytest.mark.full
def test_slowdowns_unnecessary_recompute_is_priced(tmp_path: Path) -> None:
    words = "model=llama32_1b parallel=single cluster=h100 data=mock data.seq_length=4096"
    full = "parallel.recompute.granularity=full trainer.micro_batch_size=1"
    run = run_of(f"{words} trainer.global_batch_size=8 {full}")
    plain = run_of(f"{words} trainer.global_batch_size=8 {full.replace('full', 'none')}")
    seconds = [1.05 * step_time(run).seconds] * STEPS
    found = dict(slowed(tmp_path / "run", run, seconds))
    (cause,) = [cause for cause in found if cause.startswith("unnecessary recomputation of all")]
    true = lost(run, 1.05 * step_time(plain).seconds, seconds)
    assert found[cause] == pytest.approx(true, rel=0.2)


def test_slowdowns_growing_memory_is_named(tmp_path: Path) -> None:
    run = run_of(DENSE)
    healthy = step_time(run).seconds
    seconds = [healthy * (1 + step / STEPS) for step in range(STEPS)]
    events = [
        event(
            "memory", step, by_rank={"allocated_bytes": [1 << 30, (1 << 30) + (step << 22), None]}
        )
        for step in range(10, STEPS, 10)
    ]
    cause, rate = slowed(tmp_path / "run", run, seconds, events)[0]
    assert cause.startswith("steps that became slower while memory grew: allocated of rank 1, ")
    assert rate == pytest.approx(lost(run, healthy, seconds), rel=0.2)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_slowdowns_small_micro_batch_is_priced(size: int, tmp_path: Path) -> None:
    words = "model=llama32_1b parallel=single cluster=h100 data=mock data.seq_length=256"
    run = run_of(f"{words} trainer.global_batch_size=64 trainer.micro_batch_size={size}")
    seconds = [1.05 * step_time(run).seconds] * STEPS
    cause, rate = slowed(tmp_path / "run", run, seconds)[0]
    assert cause.startswith("small micro-batch: trainer.micro_batch_size=")
    best = int(cause.partition("=")[2].split()[0])
    healthy = 1.05 * step_time(changed(run, {"trainer.micro_batch_size": best})).seconds
    assert rate == pytest.approx(lost(run, healthy, seconds), rel=0.2)
