"""The uploads of a run's checkpoints, and the way back: no failure, kill or foreign hand makes a
partial or altered checkpoint count, and none is lost.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mtrain.ckpt import folder
from mtrain.ckpt.remote import transfer, uploader
from mtrain.ckpt.remote.place import OWNER, Place
from mtrain.ckpt.remote.uploader import Uploader
from mtrain.ckpt.retention import Policy
from mtrain.cli.checkpoint.verdict import answered, report
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadPlace, ConfigError, CorruptData, Preempted, TrainingError
from mtrain.launching import from_store, resume, uploads
from mtrain.launching.uploads import Claim, claimed, note, uploading
from mtrain.loading import checkpoints
from tests.support.configs import LAPTOP, errors, refusals, tiny
from tests.support.saved import committed

URL = "memory://bucket/run"
ID = "1"


def run_of(**keys: Any) -> RunConfig:
    sizes = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 512}
    model = {f"model__{key}": value for key, value in sizes.items()}
    return resolve(tiny(**model, **keys), LAPTOP)


@pytest.fixture(autouse=True)
def _working_folder(store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(uploader, "RETRY_S", 0.01)
    monkeypatch.chdir(tmp_path)


def home_with(*steps: int, name: str = "run", **keys: Any) -> Path:
    """Return a run folder with checkpoints of these steps."""
    home = Path("runs") / name
    for step in steps:
        saved = committed(run_of(**keys), Path("new"), step)
        (home / "checkpoints").mkdir(parents=True, exist_ok=True)
        saved.rename(home / "checkpoints" / saved.name)
    return home


def uploaded(home: Path, policy: Policy | None = None, **more: Any) -> dict[str, Any]:
    """Upload everything in a run folder, as at the end of a run."""
    Place(URL).claim({"id": ID, "run": home.name})
    return Uploader(home, URL, ID, policy or Policy(2), **more).run()


def steps() -> list[int]:
    return [one.step for one in Place(URL).committed()]


def notes(home: Path) -> list[tuple[int, str]]:
    lines = (home / "uploads.jsonl").read_text().splitlines()
    return [(line["step"], line["state"]) for line in map(json.loads, lines)]


class Killed(BaseException):
    """The end of a process at a request."""


def interrupted(patch: pytest.MonkeyPatch, error: type[BaseException], *numbers: int) -> None:
    """Let requests that write fail by number, after a part of a file was written."""
    calls = count()
    put = MemoryFileSystem.put_file
    pipe = MemoryFileSystem.pipe_file

    def put_file(self: Any, source: str, target: str, **more: Any) -> None:
        if next(calls) in numbers:
            pipe(self, target, Path(source).read_bytes()[:100])
            raise error("https://signed.example/?token=secret")
        put(self, source, target, **more)

    def pipe_file(self: Any, target: str, data: bytes, **more: Any) -> None:
        if next(calls) in numbers:
            raise error("https://signed.example/?token=secret")
        pipe(self, target, data, **more)

    patch.setattr(MemoryFileSystem, "put_file", put_file)
    patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)


def test_uploads_send_newest_first_and_keep_what_the_run_keeps() -> None:
    home = home_with(1, 2, 3, 4)
    assert uploaded(home, Policy(2, 3)) == {"missing": None, "why": ""}
    assert notes(home) == [(4, "uploaded"), (3, "uploaded")]
    assert steps() == [3, 4]
    shutil.rmtree(home / "checkpoints/step_00000001")
    home_with(6, 7)
    uploaded(home, Policy(2, 3), begun=4)
    assert notes(home)[2:] == [(7, "uploaded"), (6, "uploaded")]
    # Complete ones are not sent again; 3 stays for good.
    assert steps() == [3, 6, 7]
    for step in steps():
        assert transfer.verified(Place(URL) / folder.folder_name(step)).damage == ()


def test_uploads_best_stays_although_metrics_are_gone() -> None:
    home = home_with(1, 2, 3)
    lines = [{"step": step, "valid_loss": loss} for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5))]
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    uploaded(home, Policy(1, best="valid_loss"))
    assert steps() == [2, 3]
    # Another machine has only the newest one, and no metrics.
    other = home_with(4, name="other")
    uploaded(other, Policy(1, best="valid_loss"), begun=3)
    assert steps() == [2, 4]


def test_uploads_killed_at_each_request_are_completed_next(store: Any) -> None:
    uploaded(home_with(1))
    home = home_with(2)
    for n in count():
        try:
            with pytest.MonkeyPatch.context() as patch:
                interrupted(patch, Killed, n)
                Uploader(home, URL, ID, Policy(2), begun=1).run()
            break
        except Killed:
            assert steps() == [1]
            # The machine is lost, too: the next one continues with what is complete.
            assert transfer.verified(Place(URL) / "step_00000001").damage == ()
    # Two files and the manifest
    assert (n, steps()) == (3, [1, 2])
    assert transfer.verified(Place(URL) / "step_00000002").damage == ()


def test_uploads_killed_before_they_delete_delete_next(monkeypatch: pytest.MonkeyPatch) -> None:
    home = home_with(1)
    uploaded(home, Policy(1))
    home_with(2)
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "pruned", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            uploaded(home, Policy(1))
    assert steps() == [1, 2]
    uploaded(home, Policy(1))
    assert steps() == [2]


def test_uploads_failures_are_retried_and_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = home_with(5)
    Place(URL).claim({"id": ID, "run": "run"})
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, OSError, 0, 2, 3)
        found = Uploader(home, URL, ID, Policy(2), retries=3).run()
    assert found["missing"] is None
    assert notes(home) == [(5, "failed")] * 3 + [(5, "uploaded")]
    said = capsys.readouterr()
    assert said.err.count("cannot be uploaded") == 1
    assert "OSError; the run goes on" in said.err
    assert "after 3 failures" in said.out
    assert "secret" not in said.out + said.err + (home / "uploads.jsonl").read_text()


def test_uploads_that_fail_to_the_end_are_reported_missing() -> None:
    home = home_with(5)
    Place(URL).claim({"id": ID, "run": "run"})
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, OSError, *range(100))
        found = Uploader(home, URL, ID, Policy(2), retries=1).run()
    assert found["missing"] == "step_00000005"
    assert "OSError" in found["why"]
    assert steps() == []


def test_uploads_of_another_course_replace_the_one_it_left() -> None:
    uploaded(home_with(2, 4, 6))
    # The run went back to step 4 and saved other weights of step 5.
    home = home_with(4, name="again")
    home_with(5, name="again", trainer__seed=7)
    assert steps() == [4, 6]
    uploaded(home, begun=4)
    assert steps() == [4, 5]


def test_uploads_stop_where_another_run_has_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    home = home_with(1)
    Place(URL).claim({"id": "2", "run": "other"})
    found = Uploader(home, URL, ID, Policy(2), retries=5).run()
    assert found["missing"] == "step_00000001"
    assert notes(home) == [(1, "failed")]
    assert "other writes its checkpoints there now" in capsys.readouterr().err
    assert Place(URL).checkpoints() == []


def test_uploads_claim_refuses_other_runs_and_takes_over_dead() -> None:
    run = run_of(checkpoint__remote=URL)
    dead = {"id": "2", "run": "b", "host": os.uname().nodename, "pid": str(2**22 + 1)}
    Place(URL).claim(dead)
    with claimed(run, Path("runs/a"), None) as claim:
        assert claim is not None
        assert Place(URL).owner()["id"] == claim.identity
        # Nothing was uploaded, and the process is alive.
        with (
            pytest.raises(ConfigError, match=r"MT501.*a of .* writes its checkpoints there"),
            claimed(run, Path("runs/b"), None),
        ):
            pass
    # Given back, since nothing was uploaded.
    assert Place(URL).owner() == {}
    uploaded(home_with(1))
    with pytest.raises(ConfigError, match="MT501"), claimed(run, Path("runs/c"), None):
        pass
    # Its own folder goes on; checkpoints that nobody claimed are no run's to delete.
    note(Path("runs/run"), URL, ID)
    with claimed(run, Path("runs/run"), None) as claim:
        assert claim == Claim(URL, ID)
    Place(URL).remove([OWNER])
    with pytest.raises(ConfigError, match="another run"), claimed(run, Path("runs/c"), None):
        pass
    assert steps() == [1]


def test_uploads_address_is_no_choice_of_a_recipe() -> None:
    Path("mine.yaml").write_text("checkpoint: {remote: 's3://bucket/run'}\n")
    (problem,) = refusals("recipe=mine.yaml")
    assert (problem.code, problem.path) == ("MT458", "checkpoint.remote")
    assert compose(["recipe=mine.yaml", "checkpoint.remote=s3://own/run"]).run.checkpoint.remote
    # A folder of choices of the user's own may set it, and so may the folder of the run itself.
    Path("conf/checkpoint").mkdir(parents=True)
    Path("conf/checkpoint/far.yaml").write_text("remote: s3://bucket/run\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTRAIN_CONF", str(Path("conf").absolute()))
        assert compose(["checkpoint=far"]).run.checkpoint.remote == "s3://bucket/run"
    home = home_with(1)
    text = run_yaml(run_of(checkpoint__remote="s3://bucket/run"))
    (home / "run.yaml").write_text(text)
    assert refusals(f"run={home}/run.yaml")
    note(home, "s3://bucket/run", ID)
    assert compose([f"run={home}/run.yaml"]).run.checkpoint.remote == "s3://bucket/run"
    shutil.copytree(home, home.with_name("b"))
    assert refusals(f"run={home.with_name('b')}/run.yaml")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("s3://bucket", "no prefix"),
        ("ftp://bucket/run", "the scheme ftp"),
        ("file://bucket/run", "begins with /"),
        ("memory://bucket/run", "end with the process"),
        ("s3://key:canary@bucket/run", "credentials"),
    ],
)
def test_uploads_address_that_cannot_serve_is_refused(address: str, why: str) -> None:
    (problem,) = errors(tiny(checkpoint__remote=address))
    assert problem.code == "MT459"
    assert why in problem.render()
    assert "canary" not in problem.render()


def test_uploads_store_without_library_is_refused() -> None:
    fsspec.register_implementation("az", "missing_library.FS", errtxt="no library", clobber=True)
    run = run_of(checkpoint__remote="az://bucket/run")
    with pytest.raises(BadPlace, match=r"MT489.*no library.*pip install"):
        from_store.brought(_resuming(run, "latest"), launch=None, restarted=None, say=print)
    with pytest.raises(BadPlace, match="MT489"), claimed(run, Path("runs/a"), None):
        pass


def _resuming(run: RunConfig, how: str) -> RunConfig:
    section = run.checkpoint.model_copy(update={"resume": how})
    return run.model_copy(update={"checkpoint": section})


def brought(how: str, **keys: Any) -> str | None:
    run = _resuming(run_of(checkpoint__remote=URL, **keys), how)
    found = from_store.brought(run, launch=None, restarted=None, say=lambda _: None)
    return found.checkpoint.resume


def test_uploads_serve_latest_on_an_empty_machine() -> None:
    uploaded(home_with(1, 2, name="mine"))
    shutil.rmtree("runs")
    assert brought("latest") == "runs/mine"
    saved = Path("runs/mine/checkpoints/step_00000002")
    folder.read_manifest(saved, verify=True)
    assert Path("runs/mine/run.yaml").read_bytes() == (saved / "run.yaml").read_bytes()
    # What is here already is not fetched, and a later one here counts.
    home_with(3, name="mine")
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, Killed, 0)
        assert brought("latest") == "runs/mine"
    # The new machine takes over from the old one.
    with claimed(run_of(checkpoint__remote=URL), Path("runs/mine"), None) as claim:
        assert claim is not None
        assert claim.identity != ID
        assert Place(URL).owner()["id"] == claim.identity
    # `auto` takes a run of the same name only.
    shutil.rmtree("runs")
    assert brought("auto", log__name="other") == "auto"
    assert brought("auto") == "auto"
    assert not Path("runs").exists()
    assert brought("auto", log__name="mine") == "runs/mine"


def test_uploads_serve_a_named_step() -> None:
    uploaded(home_with(1, 2, name="mine"))
    shutil.rmtree("runs")
    assert brought(f"{URL}/step_00000001") == "runs/mine/checkpoints/step_00000001"
    with pytest.raises(ConfigError, match="MT502"):
        brought(f"{URL}/step_00000007")
    with pytest.raises(ConfigError, match="MT502"):
        brought("memory://bucket/nothing")


def test_uploads_give_weights_and_model_to_a_new_run(store: Any) -> None:
    uploaded(home_with(1, name="mine"))
    composed = checkpoints.composed([f"checkpoint.init_from={URL}"])
    assert composed.run.model is not None
    assert composed.run.model.hidden_size == 64
    assert composed.choices["model"] == f"{URL}/step_00000001/run.yaml"
    run = run_of(checkpoint__init_from=URL)

    def start(run: RunConfig) -> Path | None:
        found = from_store.brought(run, launch=None, restarted=None, say=lambda _: None)
        return resume.weights_of(found)

    weights = start(run)
    assert weights is not None
    assert weights.name == "step_00000001"
    uploaded(home_with(2, name="mine"), begun=1)
    # A start that may resume stays with what an earlier one took; a new run takes the newest.
    again = start(_resuming(run, "auto"))
    assert again == weights
    newest = start(run)
    assert newest is not None
    assert newest.name == "step_00000002"
    with pytest.raises(ConfigError, match=r"MT502.*checkpoint\.init_from"):
        start(run_of(checkpoint__init_from="memory://bucket/nothing"))


def test_uploads_interrupted_start_leaves_no_checkpoint(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded(home_with(2, name="mine"))
    shutil.rmtree("runs")
    get = MemoryFileSystem.get_file
    calls: list[str] = []

    def get_file(self: Any, source: str, target: str, **more: Any) -> None:
        calls.append(Path(source).name)
        assert not target.endswith(".safetensors"), "shards stay where they are"
        if len(calls) == 3:
            Path(target).write_bytes(b"cut")
            raise Killed
        get(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    with pytest.raises(Killed):
        brought("latest")
    assert folder.committed(Path("runs/mine/checkpoints")) == []
    brought("latest")
    assert len(calls) > 3
    (saved,) = folder.committed(Path("runs/mine/checkpoints"))
    folder.read_manifest(saved, verify=True)


FILES = ("rank_00000.safetensors", "run.yaml", "manifest.json")
CHANGES = [(name, change) for name in FILES for change in ("flipped", "cut", "gone")]


# Files of another step are the same here but for the manifest.
@pytest.mark.parametrize(("name", "change"), [*CHANGES, ("manifest.json", "swapped")])
def test_uploads_altered_object_is_never_read_as_a_checkpoint(
    name: str, change: str, store: Any
) -> None:
    uploaded(home_with(1, 2, name="mine"))
    shutil.rmtree("runs")
    path = f"{URL}/step_00000002/{name}"
    data = store.cat_file(path)
    other = store.cat_file(path.replace("02/", "01/"))
    if change == "gone":
        store.rm_file(path)
    else:
        altered = {"flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "cut": data[:-1]}
        store.pipe_file(path, {**altered, "swapped": other}[change])
    if change == "gone" and name == "manifest.json":
        # It was never complete: the one before it is the newest.
        assert brought("latest") == "runs/mine"
        assert [path.name for path in Path("runs/mine/checkpoints").iterdir()] == ["step_00000001"]
        return
    saved = Path("runs/mine/checkpoints/step_00000002")

    def read() -> None:
        brought("latest")
        folder.read_manifest(saved, verify=True)

    with pytest.raises(CorruptData, match=name):
        read()
    # Only the bytes of tensors are compared when they are read.
    assert saved.exists() == (name.endswith(".safetensors") and change == "flipped")


@pytest.mark.parametrize("words", [[], ["parallel=tp2"]])
def test_uploads_verdict_of_an_address_is_that_of_its_run(words: list[str], store: Any) -> None:
    home = home_with(1, 2, name="mine", data__kind="mock", data__tokenizer_vocab_size=300)
    uploaded(home)
    saved = f"{URL}/step_00000002"
    shutil.copyfile(home / "checkpoints/step_00000002/run.yaml", home / "run.yaml")
    here = report(answered([str(home), *words]))
    there = report(answered([URL, *words]))
    assert here["outcome"] == ("resharded" if words else "same")
    assert here.pop("checkpoint") == f"{home}/checkpoints/step_00000002"
    assert there.pop("checkpoint") == saved
    problems = there.pop("problems")
    assert [one["code"] for one in problems] == [one["code"] for one in here.pop("problems")]
    assert there == here
    # A warning names the configuration of the run by its address.
    assert str(problems).count(f"in {URL}/run.yaml") == len(words)
    # A shard of another course has the same size: its header tells.
    name = f"{saved}/rank_00000.safetensors"
    data = store.cat_file(name)
    store.pipe_file(name, data.replace(b"exp_avg", b"exp_bvg", 1))
    answer = answered([URL, *words])
    assert (answer.outcome, answer.exit_code) == ("impossible", 4)
    assert f"{name} is not what was written" in str(answer.problems)
    assert "mtrain-" not in str(report(answer))


def test_uploads_process_goes_on_after_kill_and_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store/run"
    run = run_of(checkpoint__remote=url)
    home = home_with(1)
    with claimed(run, home, None) as claim, uploading(run, home, None, claim, barred=False):
        _wait_for(lambda: len(Place(url).committed()) == 1)
        os.kill(_worker(), signal.SIGKILL)
        home_with(2)
    assert [one.step for one in Place(url).committed()] == [1, 2]
    # The one after the kill knows what the first has uploaded.
    assert notes(home) == [(1, "uploaded"), (2, "uploaded")]
    said = capfd.readouterr()
    assert "ended with SIGKILL; another one goes on" in said.err
    assert "waiting for the upload of step_00000002" in said.out
    assert "step 2: uploaded to" in said.out


def test_uploads_failure_ends_a_run_that_went_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store/run"
    run = run_of(checkpoint__remote=url)
    home = home_with(1)
    Place(url).claim({"id": "another", "run": "b"})
    claim = Claim(url, ID)
    with (
        pytest.raises(TrainingError, match=r"step_00000001 of runs/run is not in file://.*copy"),
        uploading(run, home, None, claim, barred=False),
    ):
        pass
    with pytest.raises(Preempted), uploading(run, home, None, claim, barred=False):
        raise Preempted("stopped on request")
    assert "is not in file://" in capfd.readouterr().err


def _wait_for(done: Any) -> None:
    from tests.support.commands import wait_for

    wait_for(done, 20)


def _worker() -> int:
    """Return the process that uploads: the child of this process's child. Other tests may have
    left children, which have none.
    """
    import psutil

    (worker,) = (one for guard in psutil.Process().children() for one in guard.children())
    return int(worker.pid)


def test_uploads_task_names_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    seen: list[Any] = []
    monkeypatch.setattr(uploads, "execute", lambda *words: seen.append(words) or os.getpid())
    monkeypatch.setattr(uploads._Process, "_order", lambda self, line: seen.append(line))
    uploads._Process(run_of(), Path("runs/a"), None, Claim(URL, ID), barred=False)._close()
    command, environment, *rest = seen[0]
    # The library of the store finds them in the environment of the process, and only there.
    assert environment["AWS_SECRET_ACCESS_KEY"] == "canary"
    assert "canary" not in str([command, rest, seen[1:]])
