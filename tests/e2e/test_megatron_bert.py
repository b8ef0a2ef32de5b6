"""Megatron's BERT as a shell meets it: its script becomes a recipe that passes every rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched import mtrain

# tests/unit/test_recipe_import_bert.py reads such a script without a command
pytestmark = [pytest.mark.e2e, pytest.mark.full]
SCRIPT = (
    "torchrun --nproc-per-node 8 pretrain_bert.py --num-layers 24 --hidden-size 1024"
    " --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 4"
    " --global-batch-size 32 --lr 1e-4 --train-iters 100 --tokenizer-type BertWordPieceCase"
    " --mock-data --bf16\n"
)


def test_megatron_bert_script_becomes_passing_recipe(tmp_path: Path) -> None:
    (tmp_path / "bert.sh").write_text(SCRIPT)
    made = mtrain("recipe", "import", "bert.sh", "-o", "bert.yaml", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "bert.yaml").read_text()
    assert "family: bert" in text
    checked = mtrain("check", "recipe=bert.yaml", "cluster.device=cuda", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "model   bert, 334.72M parameters, bf16" in checked.stdout
