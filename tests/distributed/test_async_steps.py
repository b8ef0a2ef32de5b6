"""Steps that the host launches ahead of the device: it waits for nothing between two readings, and
numbers stay.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.config.schema.run import RunConfig
from tests.support.devices import stand_in
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

STEPS = 8
INTERVAL = 4
ASKS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")
"""Operations after which the host knows a number of the device."""


class Asked(TorchDispatchMode):
    """Counts how often the host asks for a number of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> Asked:
        self.tensor = torch.tensor
        torch.tensor = self._tensor_of  # type: ignore[assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.tensor = self.tensor

    def _tensor_of(self, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Make a tensor of numbers, each of which may be asked of a device where no
        mode sees it.
        """
        items = data if isinstance(data, (list, tuple)) else [data]
        self.count += sum(isinstance(item, torch.Tensor) for item in items)
        return self.tensor(data, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.removeprefix("aten::") in ASKS
        return func(*args, **(kwargs or {}))


@contextmanager
def assembled(run: RunConfig, device: Any = None) -> Iterator[Any]:
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.world.init import joined

    with joined(run) as world:
        if device is not None:
            world = dataclasses.replace(world, device=device)
        yield assemble(run, world, splits_of(run))


def of(*, packed: bool = False, **more: Any) -> RunConfig:
    trainer = {"train_iters": STEPS, "global_batch_size": 4, **more.pop("trainer", {})}
    run = tiny_run(model={"num_layers": 2}, trainer=trainer, optim={"warmup_iters": 1}, **more)
    log = run.log.model_copy(update={"interval": INTERVAL})
    data = run.data.model_copy(update={"packed": packed})
    return run.model_copy(update={"log": log, "data": data})


def trained(
    run: RunConfig, ahead: bool
) -> tuple[list[Any], list[tuple[int, int]], Counter[str], list[torch.Tensor]]:
    """Train; return the result of each step, the step during which it was reported, the requests to
    the device, and the weights.
    """
    from mtrain.train.hooks.base import Hook
    from mtrain.train.loop.trainer import Trainer

    counts: Counter[str] = Counter()
    told: list[tuple[int, int]] = []
    results: list[Any] = []
    asked = Asked()

    class Listens(Hook):
        def after_step(self, parts: Any, result: Any) -> None:
            results.append(
                (result.step, result.loss, result.grad_norm, result.tokens, result.consumed_samples)
            )
            told.append((result.step, parts.state.step))
            assert result.seconds["step"] >= result.seconds["forward_backward"] > 0

        def finish(self, parts: Any) -> None:
            counts["asked"] = asked.count

    with assembled(run, stand_in(counts) if ahead else None) as parts, asked:
        Trainer(parts, [Listens()]).fit()
        weights = [p.detach().clone() for chunk in parts.state.chunks for p in chunk.parameters()]
    return results, told, counts, weights


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "bf16, packed": {"dtype": "bf16", "packed": True},
    "pp2": {"ranks": 2, "pp": 2},
    "distributed optimizer": {"ranks": 2, "distributed_optimizer": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_async_steps_device_is_not_queried_between_readings(layout: str) -> None:
    run = of(**LAYOUTS[layout])
    plain = run_ranks(run.parallel.ranks or 1, trained, run, False)
    ahead = run_ranks(run.parallel.ranks or 1, trained, run, True)
    for (results, _, _, weights), (again, told, counts, others) in zip(plain, ahead, strict=True):
        assert [step for step, _ in told] == list(range(1, STEPS + 1))
        assert {at for _, at in told} == {INTERVAL, STEPS}, "results are read at log.interval"
        assert counts["device"] == 0, "the device is never waited for as a whole"
        assert counts["asked"] == 0, "no number of the device decides what the host does"
        assert counts["event"] <= 2 * STEPS, "a step and a slot of samples before are waited for"
        assert counts["pinned"] <= 1 + run.data.prefetch + 2, "memory is pinned once"
        assert [row[0] for row in results] == [row[0] for row in again]
        for row, other in zip(results, again, strict=True):
            assert row[1] == other[1]
            assert row[2] == pytest.approx(other[2], rel=1e-12)
            assert row[3:] == other[3:]
        assert all(map(torch.equal, weights, others))


def test_async_steps_gradient_norm_is_one_device_number() -> None:
    def norms() -> tuple[list[float], int]:
        from mtrain.mcore.patches.optimizer import norm_of_all

        made = torch.Generator().manual_seed(0)
        tensors = [torch.randn(size, generator=made) for size in ((3,), (5000, 2), (40, 40), (1,))]
        with Asked() as asked:
            found = [norm_of_all(tensors, in_rows=rows) for rows in (True, False)]
        exact = torch.cat([t.reshape(-1) for t in tensors]).double().norm()
        return [norm.item() / exact.item() for norm in found], asked.count

    ratios, asked = run_ranks(1, norms)[0]
    assert ratios == pytest.approx([1.0, 1.0], rel=1e-6)
    assert asked == 0


def test_async_steps_nan_ends_run_before_saving(tmp_path: Path) -> None:
    from mtrain.ckpt.folder import committed

    run = of()
    run = run.model_copy(
        update={"checkpoint": run.checkpoint.model_copy(update={"save_interval": 3})}
    )

    def job() -> tuple[str, list[int], list[str]]:
        from mtrain.train.hooks.base import Hook
        from mtrain.train.hooks.checkpoints import Checkpoints
        from mtrain.train.loop import trainer

        told: list[int] = []
        real = trainer.launch_step

        def poisoned(parts: Any, **more: Any) -> Any:
            launched = real(parts, **more)
            if parts.state.step == 1:
                for parameter in parts.state.chunks[0].parameters():
                    parameter.data.fill_(torch.nan)
            return launched

        class Listens(Hook):
            def after_step(self, parts: Any, result: Any) -> None:
                told.append(result.step)

        trainer.launch_step = poisoned
        quiet: Any = SimpleNamespace(note=lambda text: None)
        with assembled(run, stand_in(Counter())) as parts:
            try:
                trainer.Trainer(parts, [Listens(), Checkpoints(tmp_path, quiet, {})]).fit()
            except Exception as error:
                return (
                    f"{type(error).__name__}: {error}",
                    told,
                    [path.name for path in committed(tmp_path)],
                )
        return "", told, []

    error, told, saved = run_ranks(1, job)[0]
    assert error.startswith("TrainingError: step 2: the loss is nan")
    assert (told, saved) == ([1], [])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("poisoned", [False, True])
def test_async_steps_joint_report_has_one_evaluation(poisoned: bool, tmp_path: Path) -> None:
    run = of(trainer={"eval_interval": 3, "eval_iters": 1})

    def job() -> tuple[str, list[tuple[int, list[str]]]]:
        from mtrain.plan.compare import lines_of
        from mtrain.train.hooks.evaluation import Evaluation
        from mtrain.train.hooks.metrics import Metrics
        from mtrain.train.loop import trainer

        real = trainer.launch_step

        def launched(parts: Any, **more: Any) -> Any:
            found = real(parts, **more)
            if poisoned and parts.state.step == 2:
                for parameter in parts.state.chunks[0].parameters():
                    parameter.data.fill_(torch.nan)
            return found

        trainer.launch_step = launched
        quiet: Any = SimpleNamespace(note=lambda text: None)
        metrics = Metrics(tmp_path)
        error = ""
        with assembled(run, stand_in(Counter())) as parts:
            try:
                trainer.Trainer(parts, [metrics, Evaluation(metrics, quiet)]).fit()
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        lines = lines_of(tmp_path / "metrics.jsonl")
        return error, [
            (line["step"], sorted({"loss", "valid_loss"} & line.keys())) for line in lines
        ]

    steps = {step: (step, ["loss"]) for step in range(1, STEPS + 1)}
    evaluations = {step: (step, ["valid_loss"]) for step in (3, 6, 8)}
    error, lines = run_ranks(1, job)[0]
    if poisoned:
        assert error.startswith("TrainingError: step 3: the loss is nan")
        assert lines == [steps[1], steps[2]]
    else:
        assert error == ""
        first, second, last = evaluations.values()
        assert lines == [
            *map(steps.get, (1, 2, 3)),
            first,
            *map(steps.get, (4, 5, 6)),
            second,
            steps[7],
            steps[8],
            last,
        ]


def test_async_steps_stop_on_one_rank_ends_all_a_step_later() -> None:
    run = of(ranks=2, tp=2, trainer={"train_iters": 100})
    run = run.model_copy(update={"log": run.log.model_copy(update={"interval": 100})})

    def job() -> tuple[str, list[int], int]:
        import signal

        from mtrain.train.hooks.base import Hook
        from mtrain.train.loop import trainer

        told: list[int] = []
        real = trainer.launch_step

        def interrupted(parts: Any, **more: Any) -> Any:
            if parts.state.step == 4 and parts.world.rank == 1:
                signal.raise_signal(signal.SIGUSR1)
            return real(parts, stop_requested=parts.stop_requested)

        class Listens(Hook):
            def after_step(self, parts: Any, result: Any) -> None:
                told.append(result.step)

        trainer.launch_step = interrupted
        with assembled(run, stand_in(Counter())) as parts:
            try:
                trainer.Trainer(parts, [Listens()]).fit()
            except Exception as error:
                return type(error).__name__, told, parts.state.step
        return "", told, parts.state.step

    for error, told, step in run_ranks(2, job):
        assert (error, step) == ("Preempted", 6)
        assert told == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("ranks", "bounds"), [(1, [0, 3, 10, 11, 24]), (2, [0, 4, 16, 24]), (2, [0, 24])]
)
def test_async_steps_packed_rotation_equals_megatron(ranks: int, bounds: list[int]) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    from mtrain.mcore.adapter.ahead import rotated

    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(max(b - a for a, b in pairwise(bounds)), 1, 1, 8, generator=generator)
    tokens = torch.randn(24 // ranks, 2, 8, generator=generator)
    edges = torch.tensor(bounds, dtype=torch.int32)
    for rank in range(ranks):
        group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        expected = rope_utils._apply_rotary_pos_emb_thd(tokens, edges, angles, cp_group=group)
        with Asked() as asked:
            for _ in range(2):
                assert torch.equal(rotated(tokens, edges.clone(), angles, cp_group=group), expected)
        assert asked.count == 2, "only the comparisons wait for the device"


def test_async_steps_sync_debug_covers_steps_after_compilation() -> None:
    run = of()
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"sync_debug": "error"})})

    def job() -> list[str]:
        from mtrain.train.hooks.base import Hook
        from mtrain.train.loop import trainer

        said: list[str] = []
        device = dataclasses.replace(stand_in(Counter()), set_sync_debug=said.append)

        class Listens(Hook):
            def after_step(self, parts: Any, result: Any) -> None:
                said.append(f"told {result.step}")

        with assembled(run, device) as parts:
            trainer.Trainer(parts, [Listens()]).fit()
        return said

    launched = ["error", "default"]
    told = [f"told {step}" for step in range(1, STEPS + 1)]
    assert run_ranks(1, job)[0] == [
        *launched,
        *told[:INTERVAL],
        *launched * INTERVAL,
        *told[INTERVAL:],
    ]
