"""Biases that balance routers stay where they are at a rate of 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtrain.api import load
from tests.support.forked import run_ranks
from tests.support.launched import mtrain
from tests.support.runs import train_steps, whole_tensors

RATE = "model.moe.router_bias_update_rate"
SCRIPT = """torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 128 \\
  --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 \\
  --global-batch-size 8 --train-iters 10 \\
  --lr 1e-3 --vocab-size 512 --eval-iters 0 --num-experts 4 --moe-router-score-function sigmoid \\
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --swiglu
"""


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("rate", "moves"), [("0", False), ("null", True)])
def test_frozen_biases_zero_rate_freezes_biases_only(
    rate: str, moves: bool, tmp_path: Path
) -> None:
    words = [
        "model=glm45_tiny",
        "parallel=single",
        "data=mock",
        "data.seq_length=32",
        f"{RATE}={rate}",
    ]
    run = load(words).run
    batch = {"global_batch_size": 2, "micro_batch_size": 2, "train_iters": 20, "eval_iters": 0}
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update=batch)})
    run_ranks(1, lambda: train_steps(run, 2, save_to=tmp_path, save_after=0))
    begun, ended = (whole_tensors(tmp_path / f"step_{n:08d}") for n in (0, 2))
    biases = [key for key in begun if key.endswith("expert_bias")]
    assert biases
    assert all(torch.equal(begun[key], ended[key]) != moves for key in biases)
    assert not torch.equal(begun[key := "model/embedding.word_embeddings.weight"], ended[key])


def test_frozen_biases_imported_from_script(tmp_path: Path) -> None:
    (tmp_path / "frozen.sh").write_text(SCRIPT)
    done = mtrain("recipe", "import", "frozen.sh", "-o", "frozen.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "router_bias_update_rate: 0.0" in (tmp_path / "frozen.yaml").read_text()
