"""Jobs for Kubernetes, SkyPilot and Ray: what they hold, what their commands run, and how `submit`
submits them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtrain.api import load
from mtrain.cli import submit as verbs
from mtrain.clusters import placement
from mtrain.clusters.job import Job
from mtrain.clusters.kubernetes import KINDS
from mtrain.clusters.launchers import render
from mtrain.clusters.manifest import emitted
from mtrain.clusters.ray_job import REFUSED, Machine
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError

MODEL = ("model=llama_tiny", "parallel=dp4", "cluster=h100x16", "cluster.devices_per_node=2")
POD = ("launch=kubernetes", "launch.image=ghcr.io/me/mtrain:1", "launch.volumes={/work:training}")
TASK = ("launch=skypilot", "launch.volumes={/work:training}")
RAY = ("launch=ray", "launch.workdir=/work")
SECRET = ("launch.env=[HF_TOKEN]", "launch.secret=tokens")
HOSTILE = (
    "x'; touch canary; $(touch canary) `touch canary` \" \\ $(HOME) $$HOME ${HOME}\n"
    "---\nkind: Pod\n- &a *a !!map {a: ]\tEND\n# c: é\u2028"
)
STUB = """#!/bin/bash
printf '%s\\0' "$@" > "$HERE/${0##*/}"
printf '%s' "${MTRAIN_MACHINE:-} of ${MTRAIN_MACHINES:-} ${RANK:-none}" > "$HERE/place"
trap 'exit 75' TERM
touch "$HERE/trapped"
if [ -n "${WAITS:-}" ]; then for ((i = 0; i < 200; i++)); do sleep 0.05; done; fi
exit "${ENDS:-0}"
"""


def configured(*words: str) -> RunConfig:
    return load(["data=mock", *MODEL, *words], to_run=False).run


def kinds_of(text: str) -> dict[str, Any]:
    """Return the documents of a manifest by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def container_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container of the first pod in a document."""
    if "containers" in document:
        (container,) = document["containers"]
        return container
    return next(
        found
        for value in document.values()
        for inner in (value if isinstance(value, list) else [value])
        if isinstance(inner, dict) and (found := container_of_or_none(inner))
    )


def container_of_or_none(document: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return container_of(document)
    except StopIteration:
        return None


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Return a text as Kubernetes passes it to a container: $(NAME) is a variable, $$ a dollar."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", value, text)


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """Put programs in front of PATH that record their arguments; return the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "kubectl", "sky", "ray"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "HERE": str(tmp_path)}


def arguments(folder: Path, program: str) -> list[str]:
    return (folder / program).read_text().split("\0")[:-1]


def started(
    container: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the command of a container as Kubernetes does, in a folder of this machine."""
    given = {
        one["name"]: expanded(one["value"], environment)
        for one in container["env"]
        if "value" in one
    }
    values = {**environment, **given}
    words = [expanded(word, values) for word in container["command"]]
    return subprocess.Popen(words, cwd=folder, env=values)


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_carry_the_run_and_no_secret(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-value")
    run = configured(*POD, *SECRET, f"launch.resource={kind}", "launch.queue=gpu")
    text = render(run)
    assert f"# digest {run.digest()}" in text
    assert "canary-value" not in text
    found = kinds_of(text)
    file = tmp_path / "run.yaml"
    file.write_text(found["ConfigMap"]["data"]["run.yaml"])
    assert read_run_file(file).digest() == run.digest()
    *_, job = found.values()
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpu"}
    holder = found.get("TrainingRuntime", job)
    container = container_of(holder)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    secret = {"name": "tokens", "key": "HF_TOKEN"}
    assert container["env"][-1] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        "/etc/mtrain",
        "/dev/shm",
        "/work",
    }
    assert container["workingDir"] == "/work"
    name = found["ConfigMap"]["metadata"]["name"]
    assert f"configMap: {{name: {name}}}" in yaml.safe_dump(holder, default_flow_style=None)


def test_manifests_jobset_restarts_what_may_succeed() -> None:
    spec = kinds_of(render(configured(*POD, "launch.grace_s=300")))["JobSet"]["spec"]
    (part,) = spec["replicatedJobs"]
    body = part["template"]["spec"]
    assert (body["completions"], body["parallelism"], body["backoffLimit"]) == (2, 2, 0)
    rules = body["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules[:2]}
    assert codes == {"FailJob": [2, 3, 4], "Ignore": [75]}
    (final,) = spec["failurePolicy"]["rules"]
    assert (final["action"], final["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    pod = body["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    values = {one["name"]: one["value"] for one in container_of(pod)["env"]}
    assert values["MASTER_ADDR"] == "llama-tiny-node-0-0.llama-tiny"
    assert values["JOB_COMPLETIONS"] == "2"


def test_manifests_contents_change_the_name_of_their_map() -> None:
    names = [
        kinds_of(render(configured(*POD, *more)))["ConfigMap"]["metadata"]["name"]
        for more in ((), (), ("trainer.train_iters=7",))
    ]
    assert names[0] == names[1] != names[2]


def test_manifests_larger_than_a_map_are_refused() -> None:
    run = configured(*POD)
    recipe = run.recipe.model_copy(update={"purpose": "x" * (1 << 20)})
    with pytest.raises(ConfigError, match="MT474"):
        render(run.model_copy(update={"recipe": recipe}))


WORDS = "yes y 1e3 0o7 0x1F 1_000 12:30:45 ~ null .inf &a *a !!python/name:os.system %TAG @a `"
LINES = ["\tx\n", "é\n", "a\nb", "a \nb\n", " a\nb\n", "\n\na\n", "a\n\n\n", "---\na\n", "...\n"]
ODD = ["", " ", "- a", "a: b", "# c", "a #b", "a\u2028b\n", "\x07\n", "\ufeff", "a\rb\n", HOSTILE]


@pytest.mark.parametrize("text", WORDS.split() + LINES + ODD)
def test_manifests_emitter_keeps_every_text(text: str) -> None:
    data = {"kind": text, text or "key": [{"a": text}, text]}
    written = emitted(Job(configured()), [data, data])
    assert list(yaml.safe_load_all(written)) == [data, data]


def hostile(run: RunConfig, folder: str = HOSTILE) -> RunConfig:
    """Return a run with hostile text in every place that comes from a user's words or files."""
    recipe = run.recipe.model_copy(
        update={"title": HOSTILE, "purpose": f"END_OF_RUN_YAML\n{HOSTILE}"}
    )
    log = run.log.model_copy(update={"runs_dir": folder})
    data = run.data.model_copy(update={"cache_dir": HOSTILE})
    launch = run.launch.model_copy(
        update={"workdir": folder, "setup": f"./setup {HOSTILE}", "command": ("python", HOSTILE)}
    )
    sections = {"recipe": recipe, "log": log, "data": data, "launch": launch}
    return run.model_copy(update=sections)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rayjob"])
def test_manifests_hostile_values_run_nothing(
    kind: str, tmp_path: Path, stubs: dict[str, str]
) -> None:
    run = hostile(configured(*POD, f"launch.resource={kind}"))
    found = kinds_of(render(run))
    (tmp_path / f"setup {HOSTILE}").touch()
    container = container_of(found.get("TrainingRuntime", list(found.values())[-1]))
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    assert started(container, tmp_path, {**stubs, **ranks}).wait(10) == 0
    words = arguments(tmp_path, "python")
    assert words[:2] == [HOSTILE, "run=/etc/mtrain/run.yaml"]
    assert [word.partition("=")[0] for word in words[2:]] == ["data.cache_dir", "log.runs_dir"]
    assert not list(tmp_path.rglob("canary"))
    file = tmp_path / "run.yaml"
    file.write_text(found["ConfigMap"]["data"]["run.yaml"])
    assert read_run_file(file).recipe.title == HOSTILE


def test_manifests_task_hostile_values_run_nothing(tmp_path: Path, stubs: dict[str, str]) -> None:
    run = hostile(configured(*TASK, "launch.env=[SECRET]"))
    task = yaml.safe_load(render(run))
    assert task["secrets"] == {"SECRET": None}
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / HOSTILE / f"setup {HOSTILE}").touch()
    environment = {**stubs, "SECRET": "$(touch canary)"}
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    words = arguments(tmp_path, "python")
    assert words[0] == HOSTILE
    assert not list(tmp_path.rglob("canary"))
    (written,) = (tmp_path / HOSTILE / HOSTILE).glob(".job-*.yaml")
    assert read_run_file(written).recipe.title == HOSTILE
    lacking = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=stubs, check=False)
    assert lacking.returncode == 3


def test_manifests_ray_hostile_values_run_nothing(tmp_path: Path, stubs: dict[str, str]) -> None:
    stub = tmp_path / "bin/ray"
    stub.write_text(
        '#!/bin/bash\nshift 2; cp -r "$2" "$HERE/copy"; printf "%s " "$@" > "$HERE/ray"'
    )
    run = hostile(configured(*RAY), str(tmp_path))
    file = tmp_path / "job.sh"
    file.write_text(render(run))
    assert subprocess.run(["bash", file], cwd=tmp_path, env=stubs, check=False).returncode == 0
    assert (tmp_path / "ray").read_text().endswith("-- python ray_job.py ")
    job = json.loads((tmp_path / "copy/job.json").read_text())
    assert read_run_file(tmp_path / "copy/run.yaml").recipe.title == HOSTILE
    (tmp_path / f"setup {HOSTILE}").touch()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stubs.items():
            patch.setenv(name, value)
        text = (tmp_path / "copy/run.yaml").read_text()
        assert Machine(job, text).run(1, "10.0.0.4", 12_345) == 0
        patch.setenv("ENDS", "75")
        assert Machine(job, text).run(1, "10.0.0.4", 12_345) == 75
    words = arguments(tmp_path, "python")
    assert words[0] == HOSTILE
    assert words[1].startswith("run=/tmp/mtrain-")
    assert (tmp_path / "place").read_text() == "1 of 2 none"
    assert not list(tmp_path.rglob("canary"))


def test_manifests_ray_machine_saves_when_stopped(
    tmp_path: Path, stubs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**stubs, "WAITS": "yes"}.items():
        monkeypatch.setenv(name, value)
    files = placement.files(Job(configured("launch=ray", f"launch.workdir={tmp_path}")))
    machine = Machine(json.loads(files["job.json"]), "")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(machine.run(0, "a", 1)))
    thread.start()
    # the stub has set its trap
    while not (tmp_path / "trapped").exists():
        assert thread.is_alive()
    machine.stop()
    thread.join(10)
    assert codes == [75]


def test_manifests_ray_machine_lacking_something_refuses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = json.loads(placement.files(Job(configured(*RAY, "launch.env=[NO_SUCH]")))["job.json"])
    assert Machine(job, "").run(0, "a", 1) == REFUSED
    assert "NO_SUCH is not set" in capfd.readouterr().err
    job |= {"needed": [], "folder": str(tmp_path / "none")}
    assert Machine(job, "").run(0, "a", 1) == REFUSED
    assert "No such file or directory" in capfd.readouterr().err


def test_manifests_pytorchjob_saved_run_is_restarted(tmp_path: Path, stubs: dict[str, str]) -> None:
    found = kinds_of(render(configured(*POD, "launch.resource=pytorchjob")))["PyTorchJob"]
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert {role: part["replicas"] for role, part in replicas.items()} == {"Master": 1, "Worker": 1}
    assert {part["restartPolicy"] for part in replicas.values()} == {"ExitCode"}
    container = container_of(replicas["Worker"]["template"])
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
    pod = started(container, tmp_path, {**stubs, **ranks, "WAITS": "yes"})
    while not (tmp_path / "trapped").exists():
        assert pod.poll() is None
    pod.send_signal(signal.SIGTERM)
    # The operator restarts a pod after 128 and more.
    assert pod.wait(10) == 143
    assert (tmp_path / "place").read_text() == "1 of 2 none"
    assert started(container, tmp_path, {**stubs, **ranks, "ENDS": "3"}).wait(10) == 3


def test_manifests_task_names_gpus_storage_and_recovery() -> None:
    words = ["launch.volumes={/work:training,/data:'s3://corpus'}", "launch.spot=true"]
    task = yaml.safe_load(render(configured(TASK[0], *words, "launch.infra=aws/us-east-1")))
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "infra": "aws/us-east-1",
        "accelerators": "H100:2",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]},
    }
    assert task["volumes"] == {"/work": "training"}
    assert task["file_mounts"] == {"/data": {"source": "s3://corpus", "mode": "MOUNT"}}


@pytest.mark.parametrize("words", [TASK, RAY, (*RAY, "launch.setup=env/bin/activate")])
def test_manifests_scripts_pass_shellcheck(words: tuple[str, ...], tmp_path: Path) -> None:
    text = render(configured(*words, "launch.env=[A]"))
    file = tmp_path / "job.sh"
    file.write_text(yaml.safe_load(text)["run"] if words is TASK else text)
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [program, "--severity=warning", file], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout


def submitted(words: tuple[str, ...], folder: Path, stubs: dict[str, str]) -> list[list[str]]:
    """Submit a run to stubs that append their words and input; return one list for each call."""
    for name in ("kubectl", "sky", "ray"):
        text = '#!/bin/bash\n(printf "%s " "${0##*/}" "$@"; echo; cat; echo @@) >> "$HERE/calls"\n'
        (folder / "bin" / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stubs.items():
            patch.setenv(name, value)
        assert verbs.submit(["data=mock", *MODEL, *words]) == 0
    calls = (folder / "calls").read_text().split("@@\n")[:-1]
    return [call.split("\n", 1) for call in calls]


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_submit_asks_the_server_first(
    kind: str, tmp_path: Path, stubs: dict[str, str]
) -> None:
    calls = submitted((*POD, f"launch.resource={kind}"), tmp_path, stubs)
    assert [command for command, _ in calls] == [
        "kubectl apply --dry-run=server -f - ",
        "kubectl apply -f - ",
    ] * (2 if kind == "trainjob" else 1)
    kinds = [list(kinds_of(text)) for _, text in calls]
    assert kinds[0] == kinds[1]
    if kind == "trainjob":
        # The server knows the runtime before it judges the job that names it.
        assert kinds[1:3] == [["ConfigMap", "TrainingRuntime"], ["TrainJob"]]


def test_manifests_submit_passes_names_of_secrets(tmp_path: Path, stubs: dict[str, str]) -> None:
    ((command, _),) = submitted((*TASK, "launch.env=[HF_TOKEN]"), tmp_path, stubs)
    assert command.startswith("sky jobs launch --yes --detach-run --secret HF_TOKEN /")


def test_manifests_submit_to_ray_runs_its_program(tmp_path: Path, stubs: dict[str, str]) -> None:
    ((command, _),) = submitted(RAY, tmp_path, stubs)
    assert command.startswith("ray job submit --working-dir ")


@pytest.mark.parametrize(("words", "program"), [(POD, "kubectl"), (TASK, "sky"), (RAY, "ray")])
def test_manifests_submit_without_program_exits_3(
    words: tuple[str, ...], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadEnvironment, match=f"{program} is not installed") as missing:
        verbs.submit(["data=mock", *MODEL, *words])
    assert missing.value.exit_code == 3
