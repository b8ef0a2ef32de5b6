"""`report` of runs that were trained with a seeded slowdown: it names each one, and its price is
within 20% of the throughput that the slowdown takes.

Layers sleep, in the forward and twice as long in the backward, so the slowdown is known exactly and
other processes of the machine change little. Where computation itself would have to take longer, a
clock counts the seconds of layers and a fiftieth of those of the machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mtrain.config.compose.dump import run_yaml
from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from mtrain.goodput.meter import Meter
from tests.support.forked import run_ranks
from tests.support.run_folders import number_of_page, reported
from tests.support.runs import tiny_run

pytestmark = pytest.mark.full

STEPS = 12
LAYER_S = 0.02
"""Seconds of the forward of a layer on a micro-batch."""
STALL_S = 0.4


Rest = Callable[[float], None]
"""A function that lets seconds pass."""


@dataclass(frozen=True)
class Slowdown:
    """A seeded slowdown."""

    words: str
    """The beginning of the cause on the page."""
    lost_s: float | None
    """The seconds that it takes from all steps; None: rank 0 counts them."""
    keys: dict[str, Any] = field(default_factory=dict)
    layer: Callable[[int, int], float] = lambda rank, step: LAYER_S
    """Seconds of a layer on a rank, after so many steps."""
    row_s: float = 0.0
    """Seconds of a row of experts, and the router prefers those of rank 0."""
    held: int = 0
    """Bytes that each step keeps."""
    clock: bool = False
    """True if layers move a clock instead of sleeping."""
    data_s: float = 0.0
    """Seconds to read the samples of a step, which nothing hides."""
    save_s: float = 0.0


MANY = 16
"""Steps of a run that becomes slower."""
MULTIPLICATION_S = 1.5e-8
ROWS = 2 * 64
"""Rows of an equal share of experts: two of each token of two samples of 32."""
EACH = 4 * 3 * STEPS
"""Forwards of a micro-batch through four layers of all steps, with backwards of two each."""
CASES = {
    "slow rank": Slowdown(
        "rank 1 on ",
        2 * EACH * 1.5 * LAYER_S,
        {"ranks": 2, "resilience.straggler_interval": 2, "resilience.straggler_reports": 1},
        layer=lambda rank, step: LAYER_S * (2.5 if rank == 1 else 1),
    ),
    "data stall": Slowdown(
        "waiting for data", STEPS * STALL_S, {"data.prefetch": 0}, data_s=STALL_S
    ),
    "checkpoint stall": Slowdown(
        "saves that blocked the loop", 2 * 2.0, {"checkpoint.save_interval": 6}, save_s=2.0
    ),
    "uneven stages": Slowdown(
        "uneven stages: stage 1 works ",
        # Of four micro-batches the first one needs both stages, and the others the slower one.
        STEPS * 3 * 2 * 3 * 0.5 * LAYER_S,
        {"pp": 2, "ranks": 2, "trainer.profile_step": 6, "trainer.profile_ranks": (0, 1)},
        layer=lambda rank, step: LAYER_S * (0.5 + rank),
    ),
    "recompute": Slowdown(
        "unnecessary recomputation of ",
        # four micro-batches, and a forward more of each layer
        4 * EACH / 3 * LAYER_S,
        {
            "recompute": RecomputeConfig(granularity="full", method="uniform", num_layers=1),
            "log.memory_interval": 1,
        },
        clock=True,
    ),
    "growing memory": Slowdown(
        "steps that became slower while memory grew: allocated of rank 0, ",
        4 * 4 * 3 * sum(range(MANY)) * LAYER_S / 10,
        {"trainer.train_iters": MANY, "log.memory_interval": 1},
        layer=lambda rank, step: LAYER_S * (0.5 + step / 10),
        held=8 << 20,
        clock=True,
    ),
    "skewed router": Slowdown(
        "skewed router: the most loaded rank has ",
        None,
        {
            "ranks": 2,
            "ep": 2,
            "model": {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 128}},
            "log.statistics.interval": 1,
            "log.statistics.kinds": ("experts",),
        },
        # Time in proportion to multiplications, of all tokens of a layer and of a row of experts;
        # the output layer counts with those of the four layers.
        layer=lambda rank, step: (
            64 * MULTIPLICATION_S * (64 * (2 * 64 + 64 + 4 + 32) + 64 * 300 / 4)
        ),
        row_s=3 * 64 * 128 * MULTIPLICATION_S,
        clock=True,
    ),
}


def run_with(keys: dict[str, Any]) -> RunConfig:
    """Return a tiny run with keys of `parallel`, and others by their dotted names."""
    own = {key: value for key, value in keys.items() if "." not in key}
    trainer: dict[str, Any] = {"train_iters": STEPS, "sample_tokens": 0}
    trainer |= {k.removeprefix("trainer."): v for k, v in keys.items() if k.startswith("trainer.")}
    run = tiny_run(trainer=trainer, **own)
    run = _set(run, "checkpoint.save_final", False)
    for key, value in keys.items():
        if "." in key and not key.startswith("trainer."):
            run = _set(run, key, value)
    return run


def _set(section: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    inner = _set(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


class _Slept(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, rest: Rest, seconds: float) -> torch.Tensor:
        context.rest = rest
        context.seconds = seconds
        return x.clone()  # a view could not be freed after it is sent to the next stage

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.rest(context.seconds)
        return gradient, None, None


def _sleeping(
    forward: Callable[..., Any], rest: Rest, seconds: Callable[..., float]
) -> Callable[..., Any]:
    def slept(*args: Any, **kwargs: Any) -> Any:
        each = seconds(*args)
        rest(each)
        output, *more = forward(*args, **kwargs)
        return _Slept.apply(output, rest, 2 * each), *more

    return slept


def _moved_clock() -> Rest:
    """Replace the clocks of this process; return the function that moves them."""
    real = time.monotonic
    begun = real()
    moved = 0.0

    def rest(seconds: float) -> None:
        nonlocal moved
        moved += seconds

    def now() -> float:
        return begun + moved + (real() - begun) / 50

    time.monotonic = time.perf_counter = now
    make = Meter.__init__
    Meter.__init__ = partialmethod(make, clock=now)  # its default is bound to the real one
    return rest


def _skewed(gating: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: gating(x) + torch.tensor([0.5, 0.5, 0.0, 0.0])


def train(home: Path, run: RunConfig, case: Slowdown) -> None:
    """Train with a slowdown."""
    home.mkdir()
    (home / "run.yaml").write_text(run_yaml(run))

    def rank() -> None:
        from mtrain.ckpt import state as ckpt_state
        from mtrain.train import run as train_run
        from mtrain.train.loop.prefetch import _Ready

        here = dist.get_rank()
        assemble = train_run.assemble
        rest = _moved_clock() if case.clock else time.sleep
        held: list[torch.Tensor] = []
        rows: list[int] = []

        def assembled(*args: Any) -> Any:
            context = assemble(*args)

            def of_layer(*_: Any) -> float:
                if case.held and len(held) <= context.state.step:
                    held.append(torch.ones(case.held // 4))
                return case.layer(here, context.state.step)

            def of_experts(given: torch.Tensor, *_: Any) -> float:
                rows.append(len(given))
                return case.row_s * len(given)

            for chunk in context.state.chunks:
                for name, module in chunk.named_modules():
                    if type(module).__name__ == "DecoderLayer":
                        module.forward = _sleeping(module.forward, rest, of_layer)
                    if case.row_s and name.endswith(".experts"):
                        module.forward = _sleeping(module.forward, rest, of_experts)
                    if case.row_s and name.endswith(".router"):
                        module.gating = _skewed(module.gating)
            return context

        train_run.assemble = assembled
        read = _Ready.__call__
        save = ckpt_state.save

        def stalled(ready: Any, place: Any) -> Any:
            time.sleep(case.data_s)
            return read(ready, place)

        def saved(*args: Any, **kwargs: Any) -> Any:
            time.sleep(case.save_s)
            return save(*args, **kwargs)

        _Ready.__call__ = stalled
        ckpt_state.save = saved
        train_run.train(run, lambda _: train_run.Paths(home), lambda *_: None)
        if here == 0:
            excess = 3 * case.row_s * sum(number - ROWS for number in rows)
            (home / "lost_s").write_text(str(excess))

    run_ranks(run.parallel.ranks, rank, timeout_s=240)


@pytest.mark.parametrize("name", CASES)
def test_slowdowns_of_trained_runs_are_priced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    home = tmp_path / "run"
    train(home, run_with(case.keys), case)
    _, page = reported(home)
    head = ["cause", "time", "tokens/s"]
    causes = [row for row in page.rows[page.rows.index(head) + 1 :] if len(row) == 3]
    (named,) = [row for row in causes if row[0].startswith(case.words)]
    wall = json.loads((home / "goodput.json").read_text())["wall_s"]
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(line["tokens_per_s"] * line["step_s"] for line in lines if "lr" in line)
    lost_s = float((home / "lost_s").read_text()) if case.lost_s is None else case.lost_s
    true = tokens / (wall - lost_s) - tokens / wall
    assert number_of_page(named[2]) == pytest.approx(true, rel=0.2), (lost_s, causes)
    before = {row[0] for row in causes[: causes.index(named)]}
    assert before <= {"starting", "loading and compiling"}
