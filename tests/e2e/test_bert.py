"""A tiny BERT on the standard library, as a shell sees it: it learns, resumes, is evaluated, and
writes no text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import metrics
from tests.support.launched import mtrain

pytestmark = [pytest.mark.e2e, pytest.mark.full]
STEPS = 100
WORDS = (
    "model=bert_tiny data=stdlib data.seq_length=64 model.num_layers=2 model.hidden_size=64 "
    f"model.ffn_hidden_size=128 model.hidden_dropout=0.1 model.attention_dropout=0.1 optim.lr=3e-3 "
    f"trainer.train_iters={STEPS} trainer.eval_interval=25 checkpoint.save_interval=50 log.name=run"
).split()


def test_bert_trains_resumes_evaluates_without_sampling(tmp_path: Path) -> None:
    done = mtrain(*WORDS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perplexity" not in done.stdout, "the loss has that of the pairs in it"
    run = tmp_path / "runs/run"
    whole = metrics(run)
    valid = [line["valid_loss"] for line in whole if "valid_loss" in line]
    assert valid[-1] < valid[0] - 0.1
    steps = [line for line in whole if "grad_norm" in line]
    assert {line["tokens"] for line in steps} == {8 * round(0.15 * 64)}
    shutil.copytree(run, tmp_path / "kept")
    shutil.rmtree(run / f"checkpoints/step_{STEPS:08d}")
    again = mtrain("resume", "runs/run", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    later = [line for line in metrics(run) if "grad_norm" in line][50:]
    assert [(x["loss"], x["grad_norm"]) for x in later] == [
        (x["loss"], x["grad_norm"]) for x in steps[50:]
    ]
    verified = mtrain("convert", "verify", "runs/run", "kept", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout
    found = mtrain("evaluate", "runs/run", "limit=16", "--json", cwd=tmp_path)
    assert json.loads(found.stdout)["samples"] == 16, found.stderr
    refused = mtrain("generate", "runs/run", "prompt=x", cwd=tmp_path)
    assert (refused.returncode, "MT247" in refused.stderr) == (2, True)
