"""The first abnormal output of a step is named: module, direction, rank and micro-batch."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from mtrain.events import log
from tests.distributed.test_suspect_steps import train
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run

DENSE = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
DENSE |= {"num_attention_heads": 4, "num_query_groups": 2}
EXPERTS = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}}
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda x: x.index_fill(0, torch.tensor([0]), float("nan")),
    "inf": lambda x: x.index_fill(0, torch.tensor([0]), float("inf")),
    "x100": lambda x: 100 * x,
    "sign": lambda x: -x,
}
MICRO_BATCHES = 4


@dataclass(frozen=True)
class Fault:
    """A fault of one module on one rank in one micro-batch."""

    kind: str
    way: str
    rank: int
    module: str
    micro_batch: int

    @property
    def wanted(self) -> tuple[str, str, int, int]:
        """Return what a report has to name."""
        return self.module, self.way, self.rank, self.micro_batch


class Spoiled(torch.autograd.Function):
    """A copy whose gradient a fault changes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return WRONG[ctx.kind](grad), None


def spoil(module: Any, fault: Fault, micro_batches: int, times: int) -> Callable[[], None]:
    """Put a fault into a module, which runs so many times in each micro-batch; return the function
    that takes it out.
    """
    real = module.forward
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        here = calls // times % micro_batches == fault.micro_batch
        calls += 1
        if not here:
            return real(*args, **kwargs)
        if fault.way == "backward":
            own = lambda x: _float(x) and x.requires_grad  # noqa: E731
            first = next((i for i, x in enumerate(args) if own(x)), None)
            if first is not None:
                spoiled = Spoiled.apply(args[first], fault.kind)
                return real(*args[:first], spoiled, *args[first + 1 :], **kwargs)
            word = next((word for word, x in kwargs.items() if own(x)), None)
            if word is None:  # a forward that is computed again for the backward
                return real(*args, **kwargs)
            return real(*args, **(kwargs | {word: Spoiled.apply(kwargs[word], fault.kind)}))
        out = real(*args, **kwargs)
        if isinstance(out, tuple):
            return WRONG[fault.kind](out[0]), *out[1:]
        return WRONG[fault.kind](out)

    def undo() -> None:
        module.forward = real

    module.forward = forward
    return undo


def _float(x: Any) -> bool:
    return torch.is_tensor(x) and x.is_floating_point() and x.dim() > 0


def reports_of(
    run: RunConfig,
    home: Path,
    faults: Callable[[list[list[str]]], Sequence[Fault]],
    healthy: int = 4,
) -> list[tuple[Fault, dict[str, Any] | None]]:
    """Train `healthy` steps, then compute one step with each fault in turn; return the reports.

    `faults` gets the names of the modules of each rank.
    """
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.context import Moments
    from mtrain.train.loop.step import train_step
    from mtrain.train.suspects import tracing as module
    from mtrain.train.suspects.rerun import Suspects
    from mtrain.train.trace.activations import global_names
    from mtrain.world.init import joined

    module.MOST_REPORTS = 1000

    class Reports(Moments):
        last: dict[str, Any] | None = None

        def call(self, moment: str, context: Any, *args: Any, **kwargs: Any) -> None:
            if moment == "on_anomaly":
                self.last = args[0]

    found = []
    with joined(run) as world, redirect_stderr(io.StringIO()):
        splits = splits_of(run)
        context = assemble(run, world, splits)
        reports = Reports()
        context.hooks = reports
        tracing = module.Tracing(context, splits, home)
        context.compute = Suspects(run.resilience, tracing)
        for _ in range(healthy):
            train_step(context, stop_requested=False)
        assert reports.last is None
        modules = {}
        for chunk in map(unwrap, context.state.chunks):
            names = global_names(chunk)
            modules |= {names[path]: part for path, part in chunk.named_modules() if path}
        called = sorted({name for name, way, _ in tracing.healthy.known if way == "backward"})
        every: list[Any] = [None] * world.size
        dist.all_gather_object(every, called)
        size = run.trainer.batch
        times = 2 if run.parallel.recompute.granularity == "full" else 1
        batches = context.prefetcher.take(context.state.consumed_samples, size)
        for fault in faults(every):
            reports.last = None
            here = world.rank == fault.rank
            undo = (
                spoil(modules[fault.module], fault, len(batches), times) if here else lambda: None
            )
            context.compute(context, batches)
            undo()
            found.append((fault, reports.last))
    return found


def traced(steps: int = 12, **keys: Any) -> RunConfig:
    """Return a run whose every step is traced."""
    trainer = {"train_iters": steps, "micro_batch_size": 2}
    run = tiny_run(trainer=trainer, optim={"warmup_iters": 1}, **keys)
    traces = {"on_anomaly": "trace", "trace_interval": 1, "progress": "none"}
    keeps = run.checkpoint.model_copy(update={"save_interval": None})
    changes = {"log": run.log.model_copy(update=traces), "checkpoint": keeps}
    return run.model_copy(update=changes)


def named(report: dict[str, Any] | None) -> tuple[str, str, int, int] | None:
    if report is None or report["found"] is None:
        return None
    found = report["found"]
    return found["module"], found["direction"], found["rank"], found["micro_batch"]


def test_anomalies_of_each_direction_is_traced(tmp_path: Path) -> None:
    import_engine()
    layers = "decoder.layers."
    faults = [
        Fault("nan", "forward", 1, f"{layers}0.mlp.linear_fc1", 2),
        Fault("sign", "backward", 0, f"{layers}0.self_attention.linear_proj", 1),
    ]

    def job() -> Any:
        run = traced(model=DENSE | {"num_layers": 1}, ranks=2, tp=2, sequence_parallel=True)
        return reports_of(run, tmp_path, lambda _: faults, healthy=2)

    for rank in run_ranks(2, job):
        assert [named(report) for _, report in rank] == [fault.wanted for fault in faults]
    written = json.loads((tmp_path / "anomalies/step_3/report.json").read_text())
    assert written["reproduced"]
    # two steps of eight samples before, and micro-batch 1 of two samples
    assert [each["sample"] for each in written["samples"]] == [18, 19]
    assert "sample 18 of train" in (tmp_path / "anomalies/step_3/samples.html").read_text()


def drawn(seed: int, count: int, modules: list[list[str]]) -> list[Fault]:
    """Return faults of all kinds in modules drawn from those of a rank."""
    draw = random.Random(seed)
    kinds = [(kind, way) for kind in WRONG for way in ("forward", "backward")]
    faults = []
    for number in range(count):
        rank = number // len(kinds) % len(modules)
        module = draw.choice(modules[rank])
        faults.append(Fault(*kinds[number % len(kinds)], rank, module, draw.randrange(4)))
    return faults


AGAIN = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "recomputed": {"ranks": 2, "recompute": AGAIN},
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_anomalies_of_layout_is_traced(name: str, tmp_path: Path) -> None:
    import_engine()
    layers = "decoder.layers."
    last = MICRO_BATCHES // 2 - 1 if name in ("dp2", "recomputed") else MICRO_BATCHES - 1
    faults = [
        Fault("inf", "backward", 1, f"{layers}1.mlp.linear_fc2", last),
        Fault("x100", "forward", 1, f"{layers}1.self_attention.linear_qkv", 0),
        Fault("sign", "backward", 1, f"{layers}1.mlp.linear_fc1", 0),
    ]

    def job() -> Any:
        run = traced(model=DENSE | {"num_layers": 4 if "vpp" in name else 2}, **LAYOUTS[name])
        return reports_of(run, tmp_path, lambda _: faults)

    assert [named(report) for _, report in run_ranks(2, job)[0]] == [
        fault.wanted for fault in faults
    ]


@pytest.mark.full
def test_anomalies_of_run_is_in_its_events(tmp_path: Path) -> None:
    import_engine()
    layout = {"ranks": 2, "tp": 2, "sequence_parallel": True}

    def job() -> Any:
        return train(traced(model=DENSE, **layout), tmp_path, "always:flip_activation@9:1")

    for error, _, _, checked in run_ranks(2, job):
        # A flip of the highest bit of an exponent makes a number of 1e38, or no number.
        assert not error or "step 9" in error
        assert checked == 1
    (attempt,) = log.attempts(tmp_path)
    lines = [json.loads(line) for line in attempt.read_text().splitlines()]
    (event,) = (line for line in lines if line["kind"] == "anomaly")
    assert (event["step"], event["found"]["rank"], event["reproduced"]) == (9, 1, True)
    report = json.loads((tmp_path / "anomalies/step_9/report.json").read_text())
    assert report["found"] == event["found"]


@pytest.mark.full
def test_anomalies_200_healthy_steps_have_none(tmp_path: Path) -> None:
    import_engine()

    def job() -> Any:
        run = traced(model=DENSE | {"hidden_dropout": 0.1}, ranks=2, steps=200)
        return train(run, tmp_path)

    for end in run_ranks(2, job, timeout_s=600):
        assert end == ("", None, [], 0)


@pytest.mark.full
def test_anomalies_40_faults_are_traced(tmp_path: Path) -> None:
    import_engine()
    layout = {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}

    def job() -> Any:
        run = traced(model=DENSE | EXPERTS | {"num_layers": 4}, ranks=4, **layout)
        return reports_of(run, tmp_path, lambda modules: drawn(1, 40, modules))

    found = run_ranks(4, job, timeout_s=600)[0]
    right = 0
    for fault, report in found:
        right += named(report) == fault.wanted
        if named(report) != fault.wanted:
            print(fault, named(report), report and report["found"] and report["found"]["why"])
    print(f"{right} of {len(found)} right")
    assert len(found) == 40
    assert right >= 38
