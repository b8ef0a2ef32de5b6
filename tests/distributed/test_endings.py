"""Ends of runs: the files on disk and the report, whatever fails outside the training itself."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from tests.support.commands import SMALL
from tests.support.covering import some
from tests.support.forked import import_engine, run_alone, run_ranks
from tests.support.launched import Launched
from tests.support.runs import tiny_run

STEPS = 3
LOGS = ("Metrics", "Progress", "Memory", "Profile")
"""Hooks that a run goes on without."""
MOMENTS = ("start", "after_step", "finish", "close")


@dataclass
class End:
    """Remains of a run on one rank."""

    error: str
    """Kind of the error that it ended with; empty: none."""
    steps: list[str]
    """Committed checkpoints."""
    said: str
    lines: int
    """Steps in the metrics."""


def small(*, profiled: bool = False, **parallel: Any) -> RunConfig:
    trainer = {
        "train_iters": STEPS,
        "eval_iters": 1,
        "eval_interval": 2,
        "profile_step": 2 if profiled else None,
    }
    run = tiny_run(trainer=trainer, optim={"warmup_iters": 1}, **parallel)
    return run.model_copy(
        update={"log": run.log.model_copy(update={"progress": "plain", "interval": 1})}
    )


def train(run: RunConfig, home: Path, checkpoint: Path | None = None) -> End:
    """Train on this rank into `home`."""
    from mtrain.ckpt.folder import committed
    from mtrain.mcore import api
    from mtrain.train.run import Paths
    from mtrain.train.run import train as train_rank

    home.mkdir(parents=True, exist_ok=True)
    error = ""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            train_rank(run, lambda _: Paths(home, checkpoint), lambda *_: None)
        except Exception as caught:
            error = type(caught).__name__
            print(f"{error}: {caught}")
            api.parallel_state.destroy_model_parallel()
    metrics = home / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    )
    return End(
        error,
        [path.name for path in committed(home / "checkpoints")],
        said.getvalue(),
        sum("lr" in line for line in lines),
    )


def broken(
    name: str, moment: str, error: Exception, rank: int | None = None
) -> tuple[type, str, Any]:
    """Return a hook, one of its moments, and a replacement that raises (on one rank, or on all)."""
    module = import_module(f"mtrain.train.hooks.{name.lower()}")
    owner = getattr(module, name)
    real = getattr(owner, moment)

    def raising(*args: Any, **kwargs: Any) -> Any:
        if rank in (None, dist.get_rank()):
            raise error
        return real(*args, **kwargs)

    return owner, moment, raising


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], End]:
    """Return runs of one rank in which all logs fail at a moment, or the evaluation does; all in
    one process.
    """
    home = tmp_path_factory.mktemp("ends")

    def job() -> dict[tuple[str, str], End]:
        found = {("none", "none"): train(small(), home / "none")}
        for names in (LOGS, ("Evaluation",)):
            for moment in MOMENTS:
                full = OSError(errno.ENOSPC, "No space left on device")
                with pytest.MonkeyPatch.context() as patch:
                    for name in names:
                        patch.setattr(*broken(name, moment, full))
                    end = train(
                        small(profiled=names == LOGS and moment != "start"),
                        home / f"{names[0]}-{moment}",
                    )
                found |= {(name, moment): end for name in names}
        return found

    return dict(run_ranks(1, job, timeout_s=240)[0])


@pytest.mark.sampled
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", LOGS)
def test_ending_failing_logger_warns_once_and_saves(
    name: str, moment: str, ends: dict[tuple[str, str], End]
) -> None:
    end = ends[name, moment]
    assert (end.error, end.steps) == ("", [f"step_{STEPS:08d}"]), end.said
    assert end.said.count(f"warning: {name} failed") == 1, end.said
    assert "No space left on device" in end.said


@pytest.mark.parametrize(
    ("moment", "error", "saved"),
    [
        ("start", "OSError", []),
        ("after_step", "OSError", [1]),
        ("finish", "OSError", [STEPS]),
        ("close", "", [STEPS]),
    ],
)
def test_ending_failing_evaluation_saves_every_step(
    moment: str, error: str, saved: list[int], ends: dict[tuple[str, str], End]
) -> None:
    end = ends["Evaluation", moment]
    assert (end.error, end.steps) == (error, [f"step_{step:08d}" for step in saved]), end.said


def test_ending_healthy_run_warns_of_nothing(ends: dict[tuple[str, str], End]) -> None:
    end = ends["none", "none"]
    assert (end.error, end.steps, end.lines) == ("", [f"step_{STEPS:08d}"], STEPS)
    assert "warning" not in end.said


@pytest.mark.full
def test_ending_logger_failure_on_one_rank_blocks_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.train.hooks import memory

    monkeypatch.setattr(memory, "PEAKS_S", 0.5)
    for name, moment, rank in (
        ("Metrics", "after_step", 0),
        ("Progress", "start", 1),
        ("Memory", "finish", 1),
    ):
        monkeypatch.setattr(*broken(name, moment, ValueError("seeded"), rank))
    ends = run_ranks(2, lambda: train(small(ranks=2, tp=2), tmp_path))
    assert [(end.error, end.steps) for end in ends] == [("", [f"step_{STEPS:08d}"])] * 2
    assert [end.said.count("warning") for end in ends] == [1, 2]
    first, second = json.loads((tmp_path / "memory.json").read_text())["peak_bytes_by_rank"]
    assert first > 0
    assert second is None


@pytest.mark.full
def test_ending_stop_skips_evaluation_and_failed_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import retention
    from mtrain.train.loop import step

    real = step.run_schedule
    evaluated = []

    def interrupted(parts: Any, batches: Any, *, forward_only: bool) -> Any:
        if forward_only and parts.state.step == STEPS:
            evaluated.append(None)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(parts, batches, forward_only=forward_only)

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(step, "run_schedule", interrupted)
    monkeypatch.setattr(retention, "prune", busy)
    run = small()
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"eval_iters": 5})})
    end, batches = run_ranks(1, lambda: (train(run, tmp_path), len(evaluated)))[0]
    assert (end.error, end.steps, batches) == ("", [f"step_{STEPS:08d}"], 1), end.said
    assert "its last evaluation is left out" in end.said
    assert "final validation loss" not in end.said
    assert end.said.count("warning: older checkpoints") == 1


def evaluated(home: Path) -> None:
    """Log three evaluations in a run folder, and close its logs twice."""
    from mtrain.train.hooks.metrics import Metrics

    meter = SimpleNamespace(sign=lambda: SimpleNamespace(seconds={"evaluating": 0.0}))
    world = SimpleNamespace(is_rank0=True, size=1)
    context: Any = SimpleNamespace(meter=meter, world=world, state=SimpleNamespace(step=0))
    metrics = Metrics(home)
    metrics.start(context)
    for step in range(3):
        metrics.log(context, step, {"valid_loss": 1.0, "valid_samples": 8, "valid_tokens": 256})
    metrics.close()
    metrics.close()


def test_ending_metrics_on_a_full_disk_warn_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.events import log

    # Linux's device on which every write finds the disk full
    full = os.open("/dev/full", os.O_WRONLY)
    calls = {"open": lambda *_: os.dup(full)}
    monkeypatch.setattr(log, "os", SimpleNamespace(**vars(os) | calls))
    evaluated(tmp_path)
    os.close(full)
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 1
    assert "No space left on device" in said


@pytest.mark.parametrize("failing_part", ["open", "write", "fsync"])
def test_ending_full_disk_under_metrics_warns_once(
    failing_part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mtrain.events import log

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = {"open": os.open, "write": os.write, "fsync": os.fsync, failing_part: full}
    monkeypatch.setattr(log, "os", SimpleNamespace(**vars(os) | calls))
    evaluated(tmp_path)
    said = capsys.readouterr().err
    assert said.count("cannot be written (No space left on device)") == 1
    lost = "metrics.jsonl: 3 lines were not written" in said
    assert lost == (failing_part != "fsync")


SAMPLED = (
    "data=text",
    "data.path=text.txt",
    "data.tokenizer_vocab_size=300",
    "data.cache_dir=cache",
    *(word for word in SMALL if not word.startswith("data=")),
    "trainer.train_iters=2",
    "trainer.global_batch_size=4",
    "log.name=run",
)
LEARNED = (
    "model.position_embedding_type=learned_absolute",
    "model.max_position_embeddings=33",
    "data.seq_length=33",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"a line that is number {n}\n" for n in range(8000)))
    return tmp_path


def _finish(*argv: str, cwd: Path, patch: Callable[[], None] | None = None) -> tuple[int, str]:
    run = Launched(*argv, cwd=cwd, patch=patch)
    return run.wait(), run.said


@pytest.mark.full
@pytest.mark.parametrize("layout", some(["tp2", "pp2"], ["pp2"]))
def test_ending_sample_fits_positions_and_run_resumes(layout: str, home: Path) -> None:
    words = (*SAMPLED, *LEARNED, f"parallel={layout}", "trainer.sample_tokens=40")
    for argv in (words, ("resume", "runs/run")):
        code, said = _finish(*argv, cwd=home)
        assert code == 0, said
        assert "sample from step_00000002" in said
        assert "warning" not in said


def _fail_on_rank_one() -> None:
    from mtrain.train.generate.sampler import Sampler

    def faulty(self: Any, rows: list[list[int]], cache: Any) -> None:
        if self.world.rank == 1:
            raise RuntimeError("seeded fault")
        dist.barrier()  # as a rank that waits for the other

    Sampler._next_logits = faulty  # type: ignore[method-assign,assignment]


def _lose_the_tokenizer() -> None:
    from mtrain.data.text import tokenizer

    def gone(*_: object) -> None:
        raise FileNotFoundError("seeded fault")

    tokenizer.Tokenizer.__init__ = gone  # type: ignore[method-assign,assignment]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("patch", [_fail_on_rank_one, _lose_the_tokenizer])
def test_ending_failing_sample_is_a_warning(patch: Callable[[], None], home: Path) -> None:
    code, said = _finish(*SAMPLED, "parallel=tp2", cwd=home, patch=patch)
    assert code == 0, said
    assert said.count("warning: no text sample:") == 1, said
    assert "seeded fault" in said
    assert (home / "runs/run/checkpoints/step_00000002/manifest.json").is_file()


def test_ending_stop_during_sample_finishes_run(home: Path) -> None:
    def stopped_by_a_signal() -> None:
        from mtrain.train.generate.sampler import Sampler

        real = Sampler._next_logits

        def interrupted(self: Any, rows: list[list[int]], cache: Any) -> Any:
            if self.world.rank == 1 and len(rows[0]) == 20:
                os.kill(os.getppid(), signal.SIGTERM)  # to the launcher, as a scheduler does
            return real(self, rows, cache)

        Sampler._next_logits = interrupted  # type: ignore[method-assign]

    words = (*SAMPLED, "parallel=tp2", "trainer.sample_tokens=100000")
    code, said = _finish(*words, cwd=home, patch=stopped_by_a_signal)
    assert code == 0, said
    assert "stopped on request: the run is finished" in said


def test_ending_damage_on_any_rank_ends_all_before_a_step(tmp_path: Path) -> None:
    run = small(ranks=2, distributed_optimizer=True)
    run_ranks(2, lambda: train(run, tmp_path / "whole"))
    saved = tmp_path / "whole/checkpoints" / f"step_{STEPS:08d}"
    longer = run.model_copy(
        update={"trainer": run.trainer.model_copy(update={"train_iters": STEPS + 1})}
    )
    dice = random.Random(0)
    damaged = []
    for i, name in enumerate(
        [*(["rank_00000.safetensors", "rank_00001.safetensors"] * 4), "run.yaml", "manifest.json"]
    ):
        copy = Path(shutil.copytree(saved, tmp_path / f"damaged-{i}" / saved.name))
        content = bytearray((copy / name).read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (copy / name).write_bytes(bytes(content))
        damaged.append((name, copy))

    def job() -> list[End]:
        return [train(longer, tmp_path / f"run-{copy.parent.name}", copy) for _, copy in damaged]

    for ends in run_ranks(2, job):
        for (name, copy), end in zip(damaged, ends, strict=True):
            assert end.error == "CorruptData", (name, copy)
            assert name in end.said
            assert end.lines == 0


@pytest.mark.parametrize(
    ("scale", "words"),
    [(None, "grad norm 4.300, update skipped"), (64.0, "update skipped at loss scale 64")],
)
def test_ending_skipped_update_reports_its_limit(scale: float | None, words: str) -> None:
    def line() -> str:
        import_engine()
        from mtrain.train.hooks.progress import Progress

        said = {
            "step": 1,
            "batch_size": 8,
            "read": 10,
            "positions": 10,
            "grad_norm": 4.3,
            "loss": 2.0,
            "lr": 0.1,
        }
        times = {"seconds": {"step": 1.0}, "data_wait_share": 0.0}
        result = SimpleNamespace(**said, **times, updated=False, loss_scale=scale)
        return Progress(tiny_run(), speaks=False)._line(result)  # type: ignore[arg-type]

    assert words in run_alone(line)


def test_ending_device_memory_has_three_figures(tmp_path: Path) -> None:
    from mtrain.train.hooks.memory import Memory

    stats = {"allocated_bytes": 1, "peak_bytes": 20, "reserved_bytes": 30}
    for used, found in ((40, {"driver_bytes_by_rank": [40]}), (None, {})):
        device = SimpleNamespace(memory_stats=lambda: stats, driver_bytes=lambda used=used: used)
        world = SimpleNamespace(
            rank=0, size=1, is_rank0=True, device=device, store=dist.HashStore()
        )
        Memory(tmp_path).finish(SimpleNamespace(world=world))  # type: ignore[arg-type]
        expected = {"peak_bytes_by_rank": [20], "reserved_bytes_by_rank": [30], **found}
        assert json.loads((tmp_path / "memory.json").read_text()) == expected
