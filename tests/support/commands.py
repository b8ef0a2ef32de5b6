"""The command line as a user's shell runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.patience import patient

ROOT = Path(__file__).resolve().parents[2]

SMALL = (
    "data=mock",
    "data.seq_length=32",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.vocab_size=512",
    "trainer.eval_iters=0",
    "trainer.eval_interval=0",
    "log.interval=1",
)
"""Overrides that make the default run small enough for a step of some hundredths of a second."""

STEPS_ONLY = (
    "trainer.eval_iters=0",
    "trainer.eval_interval=0",
    "trainer.sample_tokens=0",
    "checkpoint.save_interval=0",
    "checkpoint.save_final=false",
    "log.progress=none",
)
"""Overrides with which a run trains and does nothing else."""


def latest(*argv: str) -> list[str]:
    """Return a command line that sets each key once, to its last value: a test's words override a
    base.
    """
    last = {word.partition("=")[0]: index for index, word in enumerate(argv)}
    return [
        word
        for index, word in enumerate(argv)
        if "=" not in word or last[word.partition("=")[0]] == index
    ]


def command(*argv: str) -> list[str]:
    """Return the words of `python launch.py ...`."""
    return [sys.executable, str(ROOT / "launch.py"), *latest(*argv)]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables of a launcher."""
    return {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }


def mtrain(*argv: str, cwd: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*argv),
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
        env=environment(),
        cwd=cwd,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + patient(timeout_s)
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("waited in vain")
        time.sleep(0.005)
