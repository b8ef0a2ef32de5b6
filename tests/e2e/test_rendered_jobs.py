"""Every shipped recipe as a job of every launcher, judged by the published schemas; and jobs that
really start: a pod that is stopped and continues, and a Ray cluster of two machines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from mtrain.api import load
from mtrain.clusters import placement
from mtrain.clusters.job import Job, word
from mtrain.clusters.kubernetes import KINDS
from mtrain.clusters.launchers import render
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import recipe_names
from tests.support.commands import ROOT, SMALL, environment, mtrain

pytestmark = [pytest.mark.e2e, pytest.mark.full]

PACKAGES = ROOT / ".launch-test"
PLACE = "launch.volumes={/work:training}"
POD = ("launch=kubernetes", "launch.image=ghcr.io/me/mtrain:1", PLACE)
LAUNCHERS = {
    **{kind: (*POD, f"launch.resource={kind}") for kind in KINDS},
    "skypilot": ("launch=skypilot", PLACE),
    "ray": ("launch=ray", "launch.workdir=/work"),
}


def with_packages() -> dict[str, str]:
    """Return an environment in which Python finds the packages of `make .launch-test`."""
    paths = [str(PACKAGES), str(ROOT), *(path for path in sys.path if path)]
    return {**environment(), "PYTHONPATH": os.pathsep.join(paths)}


def validated(folder: Path) -> dict[str, list[str]]:
    """Return the faults of each job in a folder; skip if a validator is absent."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.validators", str(folder)],
        env=with_packages(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    if said["missing"]:
        pytest.skip(f"{'; '.join(said['missing'].values())}: make .launch-test installs it")
    return said["faults"]


def test_jobs_of_all_recipes_pass_their_validators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    scripts = 0
    for recipe in recipe_names():
        for name, words in LAUNCHERS.items():
            text = render(load([f"recipe={recipe}", *words], to_run=False).run)
            if name == "ray":
                done = subprocess.run(
                    ["bash", "-n"], input=text, text=True, capture_output=True, check=False
                )
                assert not done.stderr, done.stderr
                scripts += 1
            else:
                (tmp_path / f"{name}-{recipe.replace('/', '-')}.yaml").write_text(text)
    rendered = time.monotonic() - begun
    faults = validated(tmp_path)
    assert len(faults) + scripts == len(recipe_names()) * len(LAUNCHERS)
    assert {file: found for file, found in faults.items() if found} == {}
    with capsys.disabled():
        seconds = time.monotonic() - begun
        jobs = len(faults) + scripts
        print(
            f"\n{jobs} jobs rendered in {rendered:.0f} s, validated in {seconds - rendered:.0f} s"
        )


def test_jobs_validators_find_misspelt_fields(tmp_path: Path) -> None:
    faults = {
        "jobset": ("publishNotReadyAddresses", "publishNotReadyPods"),
        "trainjob": ("runtimeRef", "runtimeReference"),
        "pytorchjob": ("cleanPodPolicy", "cleanPods"),
        "rayjob": ("terminationGracePeriodSeconds", "graceSeconds"),
        "skypilot": ("job_recovery", "recovery"),
    }
    for name, (right, wrong) in faults.items():
        text = render(load(["recipe=llama/tiny_cpu", *LAUNCHERS[name]], to_run=False).run)
        assert right in text
        (tmp_path / f"{name}.yaml").write_text(text.replace(right, wrong))
    found = validated(tmp_path)
    assert all(found[f"{name}.yaml"] for name in faults), found


HOSTILE = "x'; touch canary; $(touch canary) `touch canary` $$HOME # a: &b *c {[- %"


def test_jobs_hostile_recipe_reads_the_same_in_go(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    folder = tmp_path / HOSTILE
    folder.mkdir()
    recipe = folder / f"{HOSTILE}.yaml"
    about = {"title": HOSTILE, "purpose": f"a\n---\nkind: Pod\n{HOSTILE}", "verified": HOSTILE}
    recipe.write_text(yaml.safe_dump({"recipe": about}))
    words = [word("recipe", str(recipe)), "data=mock"]
    for name in KINDS:
        text = render(load([*words, *LAUNCHERS[name]], to_run=False).run)
        (tmp_path / "job.yaml").write_text(text)
        (tmp_path / "kustomization.yaml").write_text("resources: [job.yaml]\n")
        built = subprocess.run(
            ["kubectl", "kustomize", "."], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        given, read = (
            {one["kind"]: one for one in yaml.safe_load_all(stream)}
            for stream in (text, built.stdout)
        )
        assert read == given
        (tmp_path / "run.yaml").write_text(given["ConfigMap"]["data"]["run.yaml"])
        assert read_run_file(tmp_path / "run.yaml").recipe.title == HOSTILE
    assert not list(tmp_path.rglob("canary"))


def rendered(folder: Path, *words: str) -> str:
    """Return the job of a small run that trains in a folder of this machine."""
    command = f"launch.command=[{sys.executable},-m,mtrain]"
    given = [*words, *SMALL, "trainer.train_iters=900", "log.progress=plain", command]
    done = mtrain("render", *given, "--out", "job", cwd=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "job").read_text()


def stopped_after(
    step: int, command: list[str], folder: Path, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Run a command until a step, send TERM, and return its exit code and output."""
    log = folder / f"output-{step}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**environment(), **variables}, stdout=output, stderr=output
        )
    deadline = time.monotonic() + 180
    while f"step {step:>3}/" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    return process.wait(60), log.read_text()


def test_jobs_restarted_pod_continues_its_run(tmp_path: Path) -> None:
    text = rendered(tmp_path, *POD, "parallel=single")
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    (part,) = documents["JobSet"]["spec"]["replicatedJobs"]
    (container,) = part["template"]["spec"]["template"]["spec"]["containers"]
    file = tmp_path / "run.yaml"
    file.write_text(documents["ConfigMap"]["data"]["run.yaml"])
    known = {"run=/etc/mtrain/run.yaml": f"run={file}"}
    command = [known.get(word, word) for word in container["command"]]
    variables = {one["name"]: one["value"] for one in container["env"]}
    variables |= {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "mtrain-node-0-0"}
    code, _ = stopped_after(2, command, tmp_path, variables)
    assert code == 75
    saved = max((tmp_path / "runs").glob("*/checkpoints/step_*"))
    step = int(saved.name.partition("_")[2])
    code, again = stopped_after(step + 1, command, tmp_path, variables)
    assert code == 75
    assert f"{saved.name}: step {step}" in again
    assert len([folder for folder in (tmp_path / "runs").iterdir() if folder.is_dir()]) == 1


def test_jobs_task_on_two_machines_continues_its_run(tmp_path: Path) -> None:
    words = ["launch=skypilot", PLACE, f"launch.workdir={tmp_path}", "log.runs_dir=/work/runs"]
    words += ["cluster=cpu", "cluster.nodes=2", "parallel=dp2", "checkpoint.save_interval=2"]
    script = yaml.safe_load(rendered(tmp_path, *words))["run"]
    script = script.replace("/work/runs", str(tmp_path / "runs"))
    variables = {"SKYPILOT_TASK_ID": "sky-managed-1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    other = {**environment(), **variables, "SKYPILOT_NODE_RANK": "1"}
    saved = ""
    for start in range(2):
        second = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=other)
        first = {**variables, "SKYPILOT_NODE_RANK": "0"}
        code, output = stopped_after(4 + 8 * start, ["bash", "-c", script], tmp_path, first)
        assert (code, second.wait(60)) == (75, 75)
        assert saved in output
        saved = max((tmp_path / "runs").glob("*/checkpoints/step_*")).name
    assert len([folder for folder in (tmp_path / "runs").iterdir() if folder.is_dir()]) == 1


def test_jobs_ray_places_one_launcher_a_machine(tmp_path: Path) -> None:
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('ray') is None)"
    if subprocess.run([sys.executable, "-c", find], env=with_packages(), check=False).returncode:
        pytest.skip("ray: make .launch-test installs it")
    words = ["launch=ray", f"launch.workdir={tmp_path}", "cluster=cpu", "cluster.nodes=2"]
    words += ["parallel=dp2", "log.name=run", "log.progress=plain", "checkpoint.save_final=false"]
    words += [*SMALL, "trainer.train_iters=3", f"launch.command=[{sys.executable},-m,mtrain]"]
    job = Job(load(words, to_run=False).run)
    for name, text in {"run.yaml": job.yaml, **placement.files(job)}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "tests.support.ray_cluster", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=with_packages(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps if "loss" in line][-1] == 3
    settings = json.loads(placement.files(job)["job.json"])
    settings["words"] = [sys.executable, "-c", "raise SystemExit(75)"]
    (tmp_path / "job.json").write_text(json.dumps(settings))
    done = subprocess.run(
        command, cwd=ROOT, env=with_packages(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 75, done.stdout + done.stderr
