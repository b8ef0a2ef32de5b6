"""A finished run is made longer from the command line, with the same bits as one that was as long
from the start.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.commands import SMALL, metrics
from tests.support.launched import mtrain

RUN = (
    *SMALL,
    "parallel=single",
    "trainer.global_batch_size=2",
    "optim.lr=1e-2",
    "optim.warmup_iters=0",
)


@pytest.mark.full
def test_longer_run_constant_rate_equals_long_run(tmp_path: Path) -> None:
    constant = (*RUN, "optim.schedule=constant")
    assert (
        mtrain("log.name=short", *constant, "trainer.train_iters=2", cwd=tmp_path).returncode == 0
    )
    longer = mtrain("resume", "runs/short", "trainer.train_iters=3", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert mtrain("log.name=long", *constant, "trainer.train_iters=3", cwd=tmp_path).returncode == 0
    step = "checkpoints/step_00000003/rank_00000.safetensors"
    assert (tmp_path / "runs/short" / step).read_bytes() == (
        tmp_path / "runs/long" / step
    ).read_bytes()


@pytest.mark.full
def test_longer_run_cosine_extension_is_reported_and_accepted(tmp_path: Path) -> None:
    assert mtrain("log.name=cosine", *RUN, "trainer.train_iters=2", cwd=tmp_path).returncode == 0
    refused = mtrain("resume", "runs/cosine", "trainer.train_iters=4", cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        "would go from 0.001 at step 2 to 0.00232 at step 3 and 0.001 at step 4" in refused.stderr
    )
    assert "Use checkpoint.accept_changes=true" in refused.stderr
    # as the page of resume says it
    words = (
        "trainer.train_iters=4",
        "checkpoint.accept_changes=true",
    )
    assert mtrain("resume", "runs/cosine", *words, cwd=tmp_path).returncode == 0
    assert [f"{line['lr']:.3g}" for line in metrics(tmp_path / "runs/cosine")][2:] == [
        "0.00232",
        "0.001",
    ]


@pytest.mark.full
def test_longer_run_first_run_ends_with_working_commands(tmp_path: Path) -> None:
    done = mtrain(cwd=tmp_path, timeout_s=240)
    assert done.returncode == 0, done.stderr
    following = done.stdout.partition("\nnext:\n")[2].splitlines()
    assert len(following) == 6
    commands = [
        line.strip().removeprefix("python launch.py ").partition("  ")[0] for line in following
    ]
    for words in commands:
        if words.startswith(("generate", "check", "plan", "help")):
            done = mtrain(*shlex.split(words), cwd=tmp_path)
            assert done.returncode == 0, f"{words}: {done.stderr}"
    resume = shlex.split(next(words for words in commands if words.startswith("resume")))
    done = mtrain("check", *(word for word in resume if "=" in word), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    longer = mtrain(*resume, "trainer.train_iters=82", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert "step  82" in longer.stdout or "82/82" in longer.stdout, longer.stdout
