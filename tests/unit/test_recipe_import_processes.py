"""Processes that a script starts: by its launcher, by the options of its job, or left for a person
to say.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.recipes.megatron.importer import import_texts
from tests.unit.test_recipe_import_programs import KNOWN, MODEL


@pytest.mark.parametrize(
    ("head", "world"),
    [
        (
            (
                "#SBATCH -N 2 --gres=gpu:h100:8\n#SBATCH --ntasks-per-node=1\nsrun torchrun"
                " --nproc-per-node $G"
            ),
            (2, 8),
        ),
        ("#SBATCH -N 4 --ntasks-per-node 8\nsrun python", (4, 8)),
        ("#SBATCH -N4 -n32 # all\nsrun python", (4, 8)),
        (
            (
                "#SBATCH -N 2 -G 16 --ntasks-per-node=1\nsrun torchrun"
                " --nproc-per-node=$((SLURM_GPUS/2))"
            ),
            (2, 8),
        ),
        (
            (
                "#SBATCH -N 4 --ntasks-per-node=1 --gpus-per-task=8\nsrun torchrun"
                " --nproc-per-node gpu"
            ),
            (4, 8),
        ),
        ("#SBATCH --nodes=2 --ntasks=8 --gpus-per-task=1\nsrun python", (2, 4)),
        (
            "#SBATCH --nodes 2 --gpus-per-node=a100:2,h100:2\nsrun torchrun --nproc-per-node auto",
            (2, 4),
        ),
        (
            (
                "#SBATCH --nodes=2 --tres-per-node=gres/gpu:4\nsrun torchrun --nnodes $N"
                " --nproc-per-node $G"
            ),
            (2, 4),
        ),
        ("#SBATCH --gres=gpu:8\nmpirun -np 2 python", (1, 2)),
        ("accelerate launch --num_machines 2 --num_processes 16", (2, 8)),
        ("torchrun", (1, 1)),
    ],
)
def test_import_processes_sbatch_options_count_anywhere(head: str, world: tuple[int, int]) -> None:
    found = import_texts([(f"{head} pretrain_gpt.py {MODEL} {KNOWN}\n", "t.sh")], "t")
    assert (found.run.cluster.nodes, found.run.cluster.devices_per_node) == world
    assert not found.open


@pytest.mark.parametrize(
    ("head", "lost"),
    [
        ("torchrun --nproc-per-node $(nvidia-smi -L | wc -l)", {"cluster.devices_per_node"}),
        (
            "#SBATCH -N 2 --ntasks-per-node=1\nsrun torchrun --nproc-per-node gpu",
            {"cluster.devices_per_node"},
        ),
        ("#SBATCH -N 2 --gpus=15\nsrun --ntasks-per-node=1 python", {"cluster.devices_per_node"}),
        (
            "#SBATCH -N 2 --gres=gpu:8\nsrun torchrun --nproc-per-node cpu",
            {"cluster.devices_per_node"},
        ),
        ("torchrun --nnodes $N --nproc-per-node 8", {"cluster.nodes"}),
        ("srun python", {"cluster.nodes", "cluster.devices_per_node"}),
        ("torchrun $DISTRIBUTED", {"cluster.nodes", "cluster.devices_per_node"}),
        ("python", set()),
        ("env A=1 python", set()),
    ],
)
def test_import_processes_countable_only_by_running_stay_open(head: str, lost: set[str]) -> None:
    text = [(f"DISTRIBUTED=$(cat all)\n{head} pretrain_gpt.py {MODEL} {KNOWN}\n", "t.sh")]
    assert import_texts(text, "t").open.keys() == lost
    assert not import_texts(text, "t", ["cluster.nodes=2", "cluster.devices_per_node=8"]).open
    assert not import_texts(text, "t", ["cluster=h100x16"]).open


def test_import_processes_open_count_leaves_recipe_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.sh").write_text(
        f"torchrun --nproc-per-node $G pretrain_gpt.py {MODEL} {KNOWN}\n"
    )
    assert main(["recipe", "import", str(tmp_path / "t.sh")]) == 2
    found = capsys.readouterr()
    assert 'devices_per_node: "???"' in found.out
    assert "t, not complete" in found.out
    assert "MT702" in found.err
