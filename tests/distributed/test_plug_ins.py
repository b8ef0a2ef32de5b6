"""Hooks with their moments and states, and losses with their metrics, on ranks that train."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.machine import installed
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment
from tests.support.forked import import_engine, run_alone, run_ranks
from tests.support.runs import tiny_run

STEPS = 2


def with_objective(run: RunConfig, name: str) -> RunConfig:
    """Return the run with another loss."""
    return run.model_copy(update={"objective": run.objective.model_copy(update={"name": name})})


def records(run: RunConfig, seen: Any = None) -> list[dict[str, Any]]:
    """Return the log of each step of a run on this rank; `seen` is a hook that is added to it."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.hooks.base import Hook
    from mtrain.train.loop.context import TrainContext
    from mtrain.train.loop.trainer import Trainer
    from mtrain.world.init import joined

    lines = []

    class Listens(Hook):
        def log(self, context: TrainContext, step: int, metrics: Mapping[str, Any]) -> None:
            lines.append(dict(metrics))

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        Trainer(context, [Listens(), *([seen] if seen else [])]).fit()
    return lines


def squared() -> type:
    """Return a loss that also reports the mean square of a micro-batch's losses."""
    from mtrain.train.objectives import Metric
    from mtrain.train.objectives.next_token import NextToken

    class Squared(NextToken):
        def metrics(self) -> tuple[Metric, ...]:
            return (*super().metrics(), Metric("square", reduce="count"), Metric("batches"))

        def loss(self, output: Any, batch: Any) -> Any:
            total, count, metrics = super().loss(output, batch)
            square = Metric("square", output.detach().square())
            return total, count, (*metrics, square, Metric("batches", output.new_ones(())))

    return Squared


def published(group: str, name: str, part: Any) -> None:
    """Publish a part under an entry point, in this process only."""

    class Entry(EntryPoint):
        def load(self) -> Any:
            return part

    installed.entry_points = lambda group: (  # type: ignore[assignment]
        [Entry(name, "tests:part", group)] if group == wanted else []
    )
    wanted = group


@pytest.mark.parametrize("parallel", [{"ranks": 2, "tp": 2}, {"ranks": 2, "pp": 2}])
def test_plug_ins_objective_metrics_are_logged(parallel: dict[str, Any]) -> None:
    run = tiny_run(trainer={"train_iters": STEPS}, optim={"warmup_iters": 1}, **parallel)

    def job() -> list[dict[str, Any]]:
        published(installed.OBJECTIVES, "squared", squared())
        return records(with_objective(run, "squared"))

    plain = run_ranks(2, lambda: records(run))
    for lines, same in zip(run_ranks(2, job), plain, strict=True):
        assert [line["loss"] for line in lines] == [line["loss"] for line in same]
        batches = run.trainer.batch // run.trainer.micro
        # a total of micro-batches: neither metric is counted once per tensor-parallel rank
        assert [line["batches"] for line in lines] == [batches] * STEPS
        assert all(line["square"] > line["loss"] for line in lines)
        assert "count" not in lines[0]


def test_plug_ins_objective_missing_metric_is_an_error() -> None:
    def job() -> str:
        import_engine()
        import torch

        from mtrain.train.loop.readings import packed
        from mtrain.train.objectives import Metric

        try:
            packed([Metric("loss"), Metric("more")], [Metric("loss", torch.zeros(()))])
        except KeyError as error:
            return str(error)
        return ""

    assert run_alone(job) == "'more'"


def test_plug_ins_before_update_changes_gradients() -> None:
    run = tiny_run(trainer={"train_iters": STEPS}, optim={"warmup_iters": 1})

    def job(cleared: bool) -> list[float]:
        from mtrain.train.hooks.base import Hook
        from mtrain.train.loop.context import TrainContext

        begun = []

        class Clears(Hook):
            def before_step(self, context: TrainContext) -> None:
                begun.append(context.state.step + 1)

            def before_update(self, context: TrainContext) -> None:
                for chunk in context.state.chunks:
                    gradients = [p.main_grad for p in chunk.parameters()]
                    assert any(gradient.abs().sum() > 0 for gradient in gradients)
                    for gradient in gradients if cleared else ():
                        gradient.zero_()

        norms = [line["grad_norm"] for line in records(run, Clears())]
        assert begun == [1, 2]
        return norms

    assert run_ranks(1, lambda: job(True))[0] == [0.0] * STEPS
    assert all(norm > 0 for norm in run_ranks(1, lambda: job(False))[0])


def test_plug_ins_hook_state_is_saved_and_restored(tmp_path: Path) -> None:
    run = tiny_run(trainer={"train_iters": STEPS}, optim={"warmup_iters": 1})
    run = run.model_copy(update={"log": run.log.model_copy(update={"progress": "none"})})

    def trained(goal: int, checkpoint: Path | None) -> list[int]:
        from mtrain.train import run as runs
        from mtrain.train.hooks.base import Hook
        from mtrain.train.loop.context import TrainContext
        from mtrain.train.loop.result import StepResult

        seen: list[int] = []

        class Counts(Hook):
            steps = 0

            def start(self, context: TrainContext) -> None:
                seen.append(self.steps)

            def after_step(self, context: TrainContext, result: StepResult) -> None:
                self.steps += 1

            def saved(self, context: TrainContext, path: Path) -> None:
                assert (path / "manifest.json").is_file()
                seen.append(self.steps)

            def state_dict(self) -> dict[str, Any]:
                return {"steps": self.steps}

            def load_state_dict(self, state: Mapping[str, Any]) -> None:
                self.steps = state["steps"]

        published(installed.HOOKS, "counts", Counts)
        keys = {"train_iters": goal}
        longer = run.model_copy(
            update={
                "trainer": run.trainer.model_copy(update=keys),
                "log": run.log.model_copy(update={"hooks": ("counts",)}),
            }
        )
        runs.train(longer, lambda _: runs.Paths(tmp_path, checkpoint), lambda *_: None)
        return seen

    assert run_ranks(1, lambda: trained(STEPS, None))[0] == [0, STEPS]
    saved = tmp_path / "checkpoints" / f"step_{STEPS:08d}"
    state = json.loads((saved / "manifest.json").read_text())["state"]["hooks"]
    assert state["counts"] == {"steps": STEPS}
    assert run_ranks(1, lambda: trained(STEPS + 1, saved))[0] == [STEPS, STEPS + 1]


@pytest.mark.parametrize("part", [object(), dict], ids=["no class", "another class"])
def test_plug_ins_wrong_class_is_refused(part: Any) -> None:
    def job() -> str:
        import_engine()
        from mtrain.train.hooks.optional import enabled

        published(installed.HOOKS, "wrong", part)
        run = tiny_run()
        run = run.model_copy(update={"log": run.log.model_copy(update={"hooks": ("wrong",)})})
        try:
            enabled(run, Path())
        except BadEnvironment as error:
            return str(error)
        return ""

    assert "hook 'wrong': its plug-in" in run_alone(job)


def test_plug_ins_garbage_is_collected_at_intervals() -> None:
    run = tiny_run(trainer={"train_iters": 4}, optim={"warmup_iters": 1})

    def job() -> tuple[list[str], bool]:
        from mtrain.train.hooks.optional import garbage

        garbage.INTERVAL = 2
        real = gc.collect
        made: list[str] = []

        def collect(*levels: int) -> int:
            made.append("off" if not gc.isenabled() else "on")
            return real(*levels)

        garbage.gc.collect = collect  # type: ignore[assignment]
        gc.enable()
        records(run, garbage.HOOK())
        return made, gc.isenabled()

    assert run_ranks(1, job)[0] == (["off"] * 3, True), "before the first step, and after 2 and 4"
