"""Rendered scripts: every recipe, hostile values, and what SLURM does with the batch script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from mtrain.api import load
from mtrain.cli import submit as verbs
from mtrain.clusters.job import label
from mtrain.clusters.launchers import LAUNCHERS, render
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import recipe_names
from mtrain.config.schema.launch import LaunchConfig
from mtrain.errors import BadEnvironment, ConfigError

SHELLS = ("local", "torchrun", "slurm")
SAMPLE = ("llama3/70b_h100x64", "llama/tiny_cpu", "t5/11b_h100x64")
BATCH = ("launch=slurm", "model=llama_tiny", "parallel=single", "data=mock")
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1"}
STUBS = {
    # A step that saves on a TERM of SLURM (USR1 of the stub below), as mtrain does, or else trains
    # on; srun itself answers TERM with KILL.
    "srun": """
        printf '%s\\n' "$@" >> "$HERE/srun"
        echo $$ > "$HERE/step"
        trap 'touch "$HERE/killed"; exit 137' TERM
        trap 'touch "$HERE/saved"; exit "${CODE:-75}"' USR1
        touch "$HERE/started"
        for i in $(seq 200); do sleep 0.05; [ -z "${ENDS:-}" ] || exit "$ENDS"; done
    """,
    "squeue": 'case $* in *--steps*) echo 4711.0;; *) echo "${STATE:-RUNNING}";; esac',
    "scancel": """
        [ "$*" = "--signal=TERM 4711" ] && kill -USR1 "$(cat "$HERE/step")"
    """,
    "scontrol": 'echo "$@" > "$HERE/scontrol"',
    "python": 'printf "%s\\n" "$@" > "$HERE/python"',
    "torchrun": 'printf "%s\\n" "$@" > "$HERE/torchrun"',
    "sbatch": """
        echo "sbatch: $1"
        echo "$1" >> "$HERE/sbatch"
        echo "$MTRAIN_SUBMITTED" > "$HERE/submitted"
        if [ "$1" = "--test-only" ] && [ -n "${REFUSAL:-}" ]; then echo "$REFUSAL"; exit 1; fi
    """,
}


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """Put programs in front of PATH that record their arguments; return the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "HERE": str(tmp_path), **SLURM}


def started(text: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a script as a scheduler does."""
    file = folder / "job"
    file.write_text(text)
    return subprocess.Popen(["bash", str(file)], cwd=folder, env=environment)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.01)


def check_syntax(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert not done.stderr, done.stderr


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full)
        for name in recipe_names()
    ],
)
def test_clusters_render_recipe_is_a_valid_script(recipe: str, tmp_path: Path) -> None:
    for kind in SHELLS:
        run = load([f"recipe={recipe}", f"launch={kind}"], to_run=False).run
        text = render(run)
        check_syntax(text)
        body = text.partition("<<'END_OF_RUN_YAML'\n")[2].partition("END_OF_RUN_YAML\n")[0]
        file = tmp_path / "run.yaml"
        file.write_text(body)
        # the job trains the run that was validated
        assert read_run_file(file).digest() == run.digest()
        assert run.digest() in text.partition("cat >")[0]


@pytest.mark.parametrize("kind", SHELLS)
def test_clusters_shellcheck_has_no_warning(kind: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    words = ["launch.env=[A,B]", "launch.setup=env/bin/activate", "launch.workdir='~/work'"]
    if kind == "slurm":
        words += ["launch.image=a:1", "launch.mounts=['/a:/b','/c:/d']", "launch.relayout=true"]
    file = tmp_path / "job.sh"
    file.write_text(render(load([f"launch={kind}", *BATCH[1:], *words], to_run=False).run))
    done = subprocess.run(
        [program, "--severity=warning", file], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout


def test_clusters_launch_changes_no_digest() -> None:
    plain = load(["recipe=llama3/70b_h100x64"], to_run=False).run
    words = ["recipe=llama3/70b_h100x64", "launch=slurm", "launch.partition=gpu"]
    assert load(words, to_run=False).run.digest() == plain.digest()


def test_clusters_slurm_term_saves_and_requeues(tmp_path: Path, stubs: dict[str, str]) -> None:
    text = render(load(BATCH, to_run=False).run)
    batch = started(text, tmp_path, stubs)
    wait_for(tmp_path / "started")
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(10) == 75
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    assert "checkpoint.resume" not in (tmp_path / "srun").read_text()


def test_clusters_slurm_cancelled_job_stays_away(tmp_path: Path, stubs: dict[str, str]) -> None:
    text = render(load(BATCH, to_run=False).run)
    batch = started(text, tmp_path, {**stubs, "STATE": "COMPLETING", "ENDS": "75"})
    assert batch.wait(10) == 75
    assert not (tmp_path / "scontrol").exists()


def test_clusters_slurm_failed_run_keeps_its_code(tmp_path: Path, stubs: dict[str, str]) -> None:
    text = render(load(BATCH, to_run=False).run)
    assert started(text, tmp_path, {**stubs, "ENDS": "5"}).wait(10) == 5
    assert not (tmp_path / "scontrol").exists()


def test_clusters_slurm_requeued_job_resumes(tmp_path: Path, stubs: dict[str, str]) -> None:
    words = [*BATCH, "launch.relayout=true", "checkpoint.resume=latest"]
    text = render(load(words, to_run=False).run)
    again = {**stubs, "ENDS": "0", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NUM_NODES": "3"}
    assert started(text, tmp_path, again).wait(10) == 0
    arguments = (tmp_path / "srun").read_text().splitlines()
    assert arguments[-3:] == ["checkpoint.resume=auto", "cluster.nodes=3", "parallel=auto"]
    # SLURM's own number of tasks is that of the first start
    assert "--ntasks=3" in arguments


def test_clusters_slurm_other_machines_are_refused(tmp_path: Path, stubs: dict[str, str]) -> None:
    text = render(load(BATCH, to_run=False).run)
    assert started(text, tmp_path, {**stubs, "SLURM_JOB_NUM_NODES": "3"}).wait(10) == 3
    assert not (tmp_path / "srun").exists()


def test_clusters_slurm_early_term_requeues(tmp_path: Path, stubs: dict[str, str]) -> None:
    text = render(load(BATCH, to_run=False).run)
    # 143: SIGTERM ended Python before mtrain could handle it.
    batch = started(text, tmp_path, {**stubs, "CODE": "143"})
    wait_for(tmp_path / "started")
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(10) == 75
    assert (tmp_path / "scontrol").exists()


def test_clusters_slurm_unset_variable_is_named(tmp_path: Path, stubs: dict[str, str]) -> None:
    text = render(load([*BATCH, "launch.env=[WANDB_API_KEY]"], to_run=False).run)
    assert started(text, tmp_path, stubs).wait(10) == 3
    assert not (tmp_path / "srun").exists()
    secret = {**stubs, "ENDS": "0", "WANDB_API_KEY": "canary"}
    assert started(text, tmp_path, secret).wait(10) == 0


HOSTILE = "x'; touch canary; $(touch canary) `touch canary` \" \\"


@pytest.mark.parametrize("kind", SHELLS)
def test_clusters_render_hostile_values_run_nothing(
    kind: str, tmp_path: Path, stubs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "$(touch canary)")
    run = load([f"launch={kind}", *BATCH[1:], "launch.env=[SECRET]"], to_run=False).run
    recipe = run.recipe.model_copy(update={"title": f"END_OF_RUN_YAML\n{HOSTILE}"})
    log = run.log.model_copy(update={"runs_dir": HOSTILE})
    data = run.data.model_copy(update={"cache_dir": HOSTILE})
    launch = run.launch.model_copy(
        update={"workdir": HOSTILE, "setup": f"./setup {HOSTILE}", "command": ("python", HOSTILE)}
    )
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / HOSTILE / f"setup {HOSTILE}").touch()
    sections = {"recipe": recipe, "log": log, "data": data, "launch": launch}
    text = render(run.model_copy(update=sections))
    environment = {**stubs, "ENDS": "0", "SECRET": "$(touch canary)", "MASTER_ADDR": "$(id)"}
    assert started(text, tmp_path, environment).wait(10) == 0
    program = {"local": "python", "torchrun": "torchrun", "slurm": "srun"}[kind]
    arguments = (tmp_path / program).read_text().splitlines()
    assert HOSTILE in arguments
    assert any(word.startswith("data.cache_dir=") for word in arguments)
    assert not list(tmp_path.rglob("canary"))
    written = list((tmp_path / HOSTILE / HOSTILE).glob(".job-*.yaml"))
    assert len(written) == 1
    assert read_run_file(written[0]).log.runs_dir == HOSTILE


@pytest.mark.parametrize(
    "setting",
    ["partition='a b'", "account='$(id)'", "image='x;id'", "time='1h'", "env=['A=B']"],
)
def test_clusters_launch_shell_character_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(["launch=slurm", f"launch.{setting}"], to_run=False)
    assert refused.value.exit_code == 2
    assert f"launch.{setting.partition('=')[0]}" in refused.value.problems[0].path


def test_clusters_recipe_with_launcher_is_refused(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/mine.yaml").write_text("kind: slurm\npartition: gpu\n")
    sets = tmp_path / "sets.yaml"
    sets.write_text("launch: {command: [touch, canary]}\n")
    chooses = tmp_path / "chooses.yaml"
    chooses.write_text("defaults: [override /launch: slurm]\n")
    whole = tmp_path / "whole.yaml"
    whole.write_text(run_yaml(load(BATCH, to_run=False).run))
    maps = tmp_path / "maps.yaml"
    maps.write_text("launch: {volumes: {/work: theirs}, resources: {cpu: 1}}\n")
    pods = ["launch.kind=kubernetes", "launch.image=a:1"]
    cases = [[f"recipe={sets}"], [f"recipe={chooses}"], [f"run={whole}"], [f"recipe={maps}", *pods]]
    for words in cases:
        with pytest.raises(ConfigError) as refused:
            load(words, to_run=False)
        assert {problem.code for problem in refused.value.problems} == {"MT021"}
    assert [problem.path for problem in refused.value.problems] == [
        "launch.volumes./work",
        "launch.resources.cpu",
    ]
    # a choice of one's own may
    assert load([f"launch={tmp_path}/launch/mine.yaml"], to_run=False).run.launch.partition == "gpu"


def test_clusters_submit_asks_before_it_submits(
    tmp_path: Path, stubs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "HERE"):
        monkeypatch.setenv(name, stubs[name])
    assert verbs.submit(list(BATCH)) == 0
    words = (tmp_path / "sbatch").read_text().splitlines()
    assert words[0] == "--test-only"
    assert words[1].endswith("/llama-tiny.sbatch")
    # the job cannot ask how long it was queued
    assert abs(int((tmp_path / "submitted").read_text()) - time.time()) < 60


@pytest.mark.parametrize(
    ("setting", "said", "reason"),
    [
        (
            "launch.partition=gpu",
            "sbatch: error: invalid partition specified: gpu\n"
            "allocation failure: Invalid partition name specified",
            "invalid partition specified: gpu",
        ),
        (
            "launch.account=chem",
            "allocation failure: Invalid account or account/partition combination specified",
            "Invalid account or account/partition combination specified",
        ),
        ("launch.qos=high", "allocation failure: Invalid qos specification", "Invalid qos"),
        (
            "launch.segment=2",
            "sbatch: unrecognized option '--segment=2'\nTry \"sbatch --help\"",
            "unrecognized option '--segment=2'",
        ),
        ("launch.kind=slurm", "allocation failure: Unable to contact controller", "Unable to"),
    ],
)
def test_clusters_submit_refusal_names_the_key(
    setting: str,
    said: str,
    reason: str,
    tmp_path: Path,
    stubs: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PATH", "HERE"):
        monkeypatch.setenv(name, stubs[name])
    monkeypatch.setenv("REFUSAL", said)
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        verbs.submit([*BATCH, setting])
    assert refused.value.exit_code == 2
    (problem,) = refused.value.problems
    assert f"{problem.path}={problem.value}" == setting
    assert (tmp_path / "sbatch").read_text() == "--test-only\n"


def test_clusters_submit_without_program_exits_with_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadEnvironment, match="sbatch is not installed") as missing:
        verbs.submit(list(BATCH))
    assert missing.value.exit_code == 3


def test_clusters_label_is_a_host_name() -> None:
    assert label("Llama 3_70B") == "llama-3-70b"
    assert label("3b..") == "run-3b"
    assert label("x" * 60) == "x" * 40


def test_clusters_every_kind_has_a_launcher() -> None:
    assert get_args(LaunchConfig.model_fields["kind"].annotation) == tuple(LAUNCHERS)
    words = ["launch.image=mtrain:1", "launch.volumes={/work:training}"]
    needs = {"kubernetes": words, "skypilot": words[1:], "ray": ["launch.workdir=/work"]}
    for kind in LAUNCHERS:
        run = load([f"launch={kind}", *needs.get(kind, [])], to_run=False).run
        assert run.launch.kind == kind
