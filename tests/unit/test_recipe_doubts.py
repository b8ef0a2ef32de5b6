"""Guesses about a script: the recipe says so at recipe.verified, and is not complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.cli.recipe.capture import capture
from mtrain.recipes.imported import WHOLE
from mtrain.recipes.megatron.importer import import_texts

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 64 --vocab-size 512"
    " --train-iters 5"
)
RUN = f"torchrun --nproc-per-node 8 pretrain_gpt.py {MODEL}"


@pytest.mark.parametrize(
    "text",
    [
        "if [ $SIZE = big ]; then\nRUN --swiglu\nelse\nRUN\nfi\n",
        "RUN --train-iters 2\nRUN --tensor-model-parallel-size 2\n",
        "train() { RUN $@; }\ntrain --seed 1\ntrain --seed 2\n",
        "torchrun --nproc-per-node 4 pretrain_gpt.py MODEL\nRUN\n",
        "RUN\n[ -n $TWO ] && ssh node2 RUN --seed 3\n",
    ],
)
def test_doubts_several_commands_leave_open(text: str) -> None:
    found = import_texts([(text.replace("RUN", RUN).replace("MODEL", MODEL), "t.sh")], "t")
    assert "which is meant?" in found.open[WHOLE]


@pytest.mark.parametrize(
    "text",
    [
        "if [ $NODES = 1 ]; then\nRUN\nfi\n",
        "RUN\nRUN\n",
        "for RANK in 0 1; do AT --node-rank $RANK; done\n",
        (
            "AT --node_rank 0 --master-addr a --master_port=1\nAT --node_rank 1 --master-addr b"
            " --master_port=2\n"
        ),
        "ssh node1 AT --node-rank=0\nssh node2 AT --node-rank=1\n",
        "python tools/count.py --seq-length 64\nRUN\n",
    ],
)
def test_doubts_commands_of_one_training_are_one(text: str) -> None:
    for name in ("RUN", "AT"):
        text = text.replace(f"{name}\n", f"{RUN}\n")
    lines = []
    for line in text.splitlines():
        before, at, after = line.partition("AT ")
        options, semicolon, rest = after.partition(";")
        launcher = f"torchrun --nnodes 2 --nproc-per-node 8 {options} pretrain_gpt.py {MODEL}"
        lines.append(f"{before}{launcher}{semicolon}{rest}" if at else line)
    assert WHOLE not in import_texts([("\n".join(lines), "t.sh")], "t").open


def test_doubts_untaken_number_flag_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.sh").write_text(f"{RUN} --moe-router-dtype fp64 --num-experts 8\n")
    assert main(["recipe", "import", "t.sh"]) == 2
    shown = capsys.readouterr()
    assert (
        "--moe-router-dtype fp64 is not taken over, and changes the numbers: routers" in shown.err
    )
    assert 'verified: "???"' in shown.out
    assert main(["recipe", "import", "t.sh", "recipe.verified=the flags are read"]) == 0


def test_doubts_several_trainings_leave_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.sh").write_text(f"{RUN}\n{RUN} --tensor-model-parallel-size 2\n")
    found = capture(["bash", "t.sh"], ())
    assert "call 1 trains otherwise" in found.open[WHOLE]
