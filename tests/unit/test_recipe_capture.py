"""`recipe import --capture`: the user's own script runs, what starts training is
recorded, no more.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.cli.recipe.capture import capture
from mtrain.errors import ConfigError
from tests.support.patience import patient
from tests.support.tables import tables

TABLES = tables("recipe_capture")

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 64 --vocab-size 512"
    " --train-iters 5"
)
SECRET = "c4n4ry-of-the-environment"


def test_capture_holds_bash_words_without_secret(
    tmp_path: Path,
) -> None:
    (tmp_path / "blend.py").write_text("print('0.7 /d/a 0.3 /d/b')\n")
    (tmp_path / "train.sh").write_text(
        'echo "started" > ran.txt\nTP=1; ((TP*=2))\nfor i in 0 1 2 3; do F+=$((i > 0)),;'
        f" done\nMODEL=({MODEL} --num-experts 4 --lr 1e-3 --global-batch-size 8 --micro-batch-size"
        ' 1)\nMODEL+=(--moe-layer-freq "[${F%,}]" --tensor-model-parallel-size $TP'
        ' --wandb-exp-name "$HF_TOKEN")\nfor rank in 0 1; do\n  /no/such/place/bin/torchrun'
        ' --nnodes 2 --node_rank $rank --nproc-per-node 8 pretrain_gpt.py "${MODEL[@]}"'
        ' --data-path $(python3 blend.py) "$@" &\ndone\nwait\n'
    )
    before = (tmp_path / "train.sh").read_bytes()
    words = "recipe import --capture -o my.yaml -- bash train.sh --seed 7"
    done = subprocess.run(
        [sys.executable, ROOT / "launch.py", *shlex.split(words)],
        cwd=tmp_path,
        env={**os.environ, "HF_TOKEN": SECRET},
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("runs `bash train.sh --seed 7`: all that it does is done")
    text = (tmp_path / "my.yaml").read_text()
    for line in (
        "first_dense_layers: 1",
        "blend: [/d/a, /d/b]",
        "seed: 7",
        "title: train with tp2 dp8",
        "nodes: 2",
    ):
        assert line in text, line
    assert SECRET not in text + done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "train.sh",
        "blend.py",
        "ran.txt",
        "my.yaml",
    }
    assert (tmp_path / "train.sh").read_bytes() == before


@pytest.mark.parametrize(
    "text",
    TABLES["launchers"],
    ids=[
        "exec",
        "sbatch",
        "srun",
        "mpirun",
        "interpreter",
        "deepspeed",
        "ssh",
        "ray",
        "mpiexec",
        "accelerate",
    ],
)
def test_capture_records_each_launcher(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.sh").write_text(text.replace("PYTHON ", f"{sys.executable} "))
    found = capture(["bash", "t.sh"], ())
    assert (found.run.model.hidden_size, found.run.cluster.devices_per_node, found.open) == (
        128,
        8,
        {},
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "text",
    TABLES["own_environment"],
)
@pytest.mark.parametrize("starts", [["bash", "t.sh"], ["./t.sh"]], ids=["bash", "itself"])
def test_capture_environment_of_its_own_trains_nothing(
    text: str, starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VENV", str(tmp_path / "venv"))
    (tmp_path / "venv/bin").mkdir(parents=True)
    for name in ("python", "python3", "python3.11"):
        (tmp_path / "venv/bin" / name).symlink_to(sys.executable)
    (tmp_path / "pretrain_gpt.py").write_text("open('trained', 'w')\n")
    script = text if text.startswith("#!") else f"#!/bin/bash\n{text}"
    (tmp_path / "t.sh").write_text(script.replace("RUN", f"pretrain_gpt.py {MODEL}"))
    (tmp_path / "t.sh").chmod(0o700)
    assert capture(starts, ()).run.model.hidden_size == 128
    assert not (tmp_path / "trained").exists()


def test_capture_recorders_are_invisible_to_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.sh").write_text(
        "set -u\n[[ x4 =~ x(.) ]]\nPATH=$PATH true\nS=${BASH_REMATCH[1]}\n(exit 3)\nS=$S$?\ntrue"
        " $S\nS=$_\nfalse | true\nS=$S${PIPESTATUS[0]}\nf() { local kept=yes; trap 'kept=no'"
        " RETURN; g; [ $kept = yes ] && S=${S}5; }\ng() { :; }\nf\nset -- $(PYTHONPATH=/a env"
        f" | grep -c '^PYTHONPATH=.*/a$')\ntrap - DEBUG\npython pretrain_gpt.py {MODEL} --seed"
        " $S$1\n"
    )
    assert capture(["bash", "t.sh"], ()).run.trainer.seed == 43151


def test_capture_without_training_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("API_KEY", SECRET)
    (tmp_path / "t.sh").write_text("echo cannot find $API_KEY; exit 3\n")
    assert main(["recipe", "import", "--capture", "--", "bash", "t.sh"]) == 2
    said = capsys.readouterr().err
    assert "ended with exit code 3, and no training program was started" in said
    assert "one that it started in another way has run for real" in said
    assert "cannot find ***" in said
    assert SECRET not in said
    (tmp_path / "t.sh").write_text("sleep 60\n")
    with pytest.raises(ConfigError, match="was ended after its time"):
        capture(["bash", "t.sh"], (), 0.5)
    assert main(["recipe", "import", "--capture", "t.sh"]) == 2
    assert "recipe import --capture -- bash t.sh" in capsys.readouterr().err
    assert main(["recipe", "import", "--capture", "bash", "t.sh"]) == 2
    assert "recipe import --capture -- bash t.sh" in capsys.readouterr().err
    assert main(["recipe", "import", "--capture", "--", "no-such-command"]) == 2
    assert "no-such-command cannot be started" in capsys.readouterr().err


def test_capture_runs_other_python_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make_seed.py").write_text("import sys\nprint(int(sys.argv[1]) + 1)\n")
    (tmp_path / "t.sh").write_text(
        "S=$(python make_seed.py $(python3 -c 'print(40)' 2>&1) 2>&1)\npython pretrain_gpt.py"
        f" {MODEL} --seed $S\n"
    )
    assert capture(["bash", "t.sh"], ()).run.trainer.seed == 41


def test_capture_folder_and_hub_name_suggest_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/train.sh").write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {MODEL}\n")
    assert main(["recipe", "import", "job"]) == 0
    assert "hidden_size: 128" in capsys.readouterr().out
    (tmp_path / "job/other.sh").write_text("")
    assert main(["recipe", "import", "job"]) == 2
    assert "recipe import job/other.sh or recipe import job/train.sh" in capsys.readouterr().err
    assert main(["recipe", "import", "meta-llama/Llama-3.1-8B"]) == 2
    assert (
        "hf download meta-llama/Llama-3.1-8B config.json --local-dir Llama-3.1-8B"
        in capsys.readouterr().err
    )
