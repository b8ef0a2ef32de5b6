"""Event files for TensorBoard, by a stand-in of torch's writer, and without the package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mtrain.errors import BadEnvironment
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run

STEPS = 2
MODULE = "torch.utils.tensorboard"


def _with_writer() -> list[tuple[Any, ...]]:
    """Put a writer in the place of torch's; return what it is going to be called with."""
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            calls.append(("open", folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    module = ModuleType(MODULE)
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    return calls


def test_tensorboard_rank_0_writes_every_metric(tmp_path: Path) -> None:
    run = tiny_run(trainer={"train_iters": STEPS}, optim={"warmup_iters": 1}, ranks=2, tp=2)
    keys = {"hooks": ("tensorboard",), "progress": "none"}
    run = run.model_copy(update={"log": run.log.model_copy(update=keys)})

    def job() -> list[tuple[Any, ...]]:
        from mtrain.train import run as runs

        calls = _with_writer()
        runs.train(run, lambda _: runs.Paths(tmp_path), lambda *_: None)
        return calls

    calls, others = run_ranks(2, job)
    assert calls[0] == ("open", str(tmp_path / "tensorboard"), 1)
    assert [call[2] for call in calls if call[0] == "loss"] == [1, 2]
    assert {"lr", "grad_norm", "tokens_per_s"} < {call[0] for call in calls}
    assert calls[-2:] == [("flush",), ("close",)]
    assert others == []


def test_tensorboard_missing_package_is_named() -> None:
    def job() -> str:
        from mtrain.train.hooks.optional.tensorboard import TensorBoard

        sys.modules[MODULE] = None  # type: ignore[assignment]
        try:
            TensorBoard.of(tiny_run(), Path())
        except BadEnvironment as error:
            return str(error)
        return ""

    assert "Use pip install tensorboard" in run_alone(job)
