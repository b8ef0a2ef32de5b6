"""Reported tokens and evaluations of a run in a user's shell: padding never counts."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.chats import drawn_chats, folder_of
from tests.support.commands import SMALL, metrics
from tests.support.launched import Launched, mtrain

pytestmark = pytest.mark.e2e
EXPERTS = (
    "model.moe={num_experts: 4, ffn_hidden_size: 64, aux_loss_coeff: 1.0, z_loss_coeff: 0.1}",
    "cluster=cpu",
    "parallel=single",
    "precision=fp32",
    "trainer.train_iters=2",
    "trainer.micro_batch_size=1",
)
CHATS = 8
VALIDATION = 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_chats(tmp_path_factory.mktemp("counts"), CHATS)


def of_chats(home: Path, length: int, batch: int) -> tuple[str, ...]:
    return (
        *[word for word in SMALL if not word.startswith(("data", "model.vocab", "trainer.eval"))],
        *EXPERTS,
        "trainer=sft",
        "data=sft",
        "data.path=chats.jsonl",
        "data.tokenizer=tokenizer.json",
        f"data.cache_dir='{home}/cache'",
        f"data.seq_length={length}",
        f"data.split=[{CHATS - VALIDATION},{VALIDATION},0]",
        "model.vocab_size=320",
        f"trainer.global_batch_size={batch}",
        "trainer.eval_interval=null",
        "trainer.eval_iters=1",
        "optim.lr=1e-9",
        "cluster.peak_tflops={fp32:1}",
        f"log.name=chats_{length}_{batch}",
    )


@pytest.fixture(scope="module")
def short(home: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the metrics of a run with little padding, and its output."""
    done = mtrain(*of_chats(home, 72, 3), cwd=home)
    assert done.returncode == 0, done.stderr
    return metrics(home / "runs/chats_72_3"), done.stdout


@pytest.mark.full
def test_token_counts_padding_keeps_tokens_work_and_gradient(
    home: Path, short: tuple[list[dict[str, Any]], str]
) -> None:
    done = mtrain(*of_chats(home, 128, 3), cwd=home)
    assert done.returncode == 0, done.stderr
    one = short[0][0]
    other = metrics(home / "runs/chats_128_3")[0]
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert other["tokens_per_s"] * other["step_s"] == pytest.approx(
        one["tokens_per_s"] * one["step_s"], rel=1e-3
    )
    assert other["model_flops"] == pytest.approx(one["model_flops"], rel=1e-9)
    for line in (one, other):
        assert line["mfu"] * line["step_s"] == pytest.approx(one["model_flops"] / 1e12, rel=1e-3)
    read = round(one["tokens_per_s"] * one["step_s"])
    assert one["tokens"] < read < 3 * 72
    assert other["padding_share"] == pytest.approx(1 - read / (3 * 128), abs=1e-5)
    for line, said in ((one, short[1]), (other, done.stdout)):
        assert f"padding {100 * line['padding_share']:.1f}%" in said


def test_token_counts_metrics_lines_have_timestamps(
    short: tuple[list[dict[str, Any]], str],
) -> None:
    times = [datetime.fromisoformat(line["time"]) for line in short[0]]
    assert times == sorted(times)
    assert timedelta() <= datetime.now(UTC) - times[0] < timedelta(minutes=60)


def test_token_counts_small_split_counts_each_sample_once(
    home: Path, short: tuple[list[dict[str, Any]], str]
) -> None:
    """Count two samples, requested by batches of three and four, and by `evaluate`."""
    done = mtrain(*of_chats(home, 72, 4), cwd=home)
    assert done.returncode == 0, done.stderr
    found = [short[0][-1], metrics(home / "runs/chats_72_4")[-1]]
    for batch, said in ((3, short[1]), (4, done.stdout)):
        assert f"over {VALIDATION} samples, all samples of the {batch} requested" in said
    done = mtrain("evaluate", "runs/chats_72_3", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert found[0]["valid_loss"] == pytest.approx(measured["loss"], rel=1e-6)
    assert found[1]["valid_loss"] == pytest.approx(measured["loss"], rel=1e-6)
    assert (
        [line["valid_samples"] for line in found] == [measured["samples"]] * 2 == [VALIDATION] * 2
    )
    assert [line["valid_tokens"] for line in found] == [measured["tokens"]] * 2


@pytest.mark.full
def test_token_counts_longer_samples_keep_gradient(tmp_path: Path) -> None:
    """Mask predictions by `eod_mask_loss` and packing, but keep their tokens in the balancing
    loss.
    """
    documents = [
        {"text": "".join(random.Random(i).choices("abc ", k=20 + i % 7))} for i in range(24)
    ]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, documents)))
    folder_of(tmp_path, "chatml")
    done = mtrain(
        "data",
        "tokenize",
        "docs.jsonl",
        "--out",
        "docs",
        "--tokenizer",
        "tokenizer.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    norms = []
    reads = []
    for length in (40, 96):
        words = [
            *SMALL,
            *EXPERTS,
            "model.vocab_size=320",
            "data=packed",
            "data.path=docs",
            "data.packed_window=1",
        ]
        words += (
            f"data.seq_length={length}",
            "data.split=[1,0,0]",
            "trainer.global_batch_size=4",
            "optim.lr=1e-9",
        )
        done = mtrain(*words, f"log.name=docs_{length}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        line = metrics(tmp_path / f"runs/docs_{length}")[0]
        norms.append(line["grad_norm"])
        reads.append(line["tokens_per_s"] * line["step_s"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert reads[1] == pytest.approx(reads[0], rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("iters", [4, 2])
def test_token_counts_killed_evaluation_runs_after_resume(iters: int, tmp_path: Path) -> None:
    words = [*SMALL, "parallel=single", f"trainer.train_iters={iters}", "trainer.eval_iters=1"]
    words += (
        "trainer.eval_interval=2",
        "checkpoint.save_interval=2",
        "optim.warmup_iters=1",
        "log.name=run",
    )

    def die() -> None:
        from mtrain.train.hooks.evaluation import Evaluation

        def killed(self: Evaluation, parts: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        Evaluation._evaluate = killed  # type: ignore[method-assign]

    cut = tmp_path / "cut"
    whole = tmp_path / "whole"
    cut.mkdir()
    whole.mkdir()
    assert Launched(*words, cwd=cut, patch=die).wait() != 0
    assert [line["step"] for line in metrics(cut / "runs/run")] == [1, 2]
    assert (cut / "runs/run/checkpoints/step_00000002").is_dir()
    done = mtrain("resume", "runs/run", cwd=cut)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mtrain(*words, cwd=whole).returncode == 0
    lines = [metrics(home / "runs/run") for home in (cut, whole)]
    losses = [
        [(line["step"], line["valid_loss"]) for line in each if "valid_loss" in line]
        for each in lines
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(2, iters + 1, 2))
    assert re.search(r"step 2: validation loss .* over 8 samples", done.stdout)
