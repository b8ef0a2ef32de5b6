"""File systems without locks, hard links or folders that can be synced, and machines without a
/dev/shm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain import durable, locks
from mtrain.cli.atomic_output import drafted
from mtrain.cli.main import main
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.data.store import cache
from mtrain.errors import BadEnvironment, ConfigError
from mtrain.launching import folder
from tests.support.configs import LAPTOP, tiny
from tests.support.forked import run_without_privileges
from tests.support.token_corpora import bpe


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(durable, "_reported", set())


def refusing(
    number: int, when: Callable[..., bool] = lambda *_: True, then: Any = None
) -> Callable[..., Any]:
    """Return a system call that fails with an error number."""

    def call(*words: Any, **more: Any) -> Any:
        if when(*words):
            raise OSError(number, os.strerror(number))
        return then(*words, **more)

    return call


@pytest.fixture(
    params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get
)
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(request.param))


@pytest.fixture
def without_synced_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    is_folder = lambda file: stat.S_ISDIR(os.fstat(file).st_mode)  # noqa: E731
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL, is_folder, os.fsync))


def run_of(**changes: object) -> RunConfig:
    return resolve(tiny(**changes), LAPTOP)


def of_a_process_that_ended() -> locks.Owner:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return locks.Owner(
            locks.Owner.me().host, process.pid, locks.Owner.me().boot, locks._started(process.pid)
        )


def owned_by(owner: locks.Owner) -> Path:
    """Return a run folder that another process has left."""
    home = Path("runs/a")
    home.mkdir(parents=True)
    (home / ".lock.owner").write_text(json.dumps(vars(owner)))
    return home


def tokenized(*words: str) -> int:
    Path("d.jsonl").write_text(
        "".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(40))
    )
    return main(
        ["data", "tokenize", "d.jsonl", f"tokenizer={bpe(Path('.'))}", "out=corpus", *words]
    )


def test_file_system_without_locks_keeps_folder_and_warns_once(
    without_locks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        run = run_of(log__name=name)
        with folder.opened(run, folder.plan(run), []) as owned:
            assert owned.folder == Path("runs") / name
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a", "b"]
    assert capsys.readouterr().err.count("no locks") == 1


def test_file_system_without_locks_refuses_second_run(without_locks: None) -> None:
    named = run_of(log__name="a")
    unnamed = run_of()
    planned = folder.plan(named)
    with folder.opened(named, planned, []):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):
            folder.opened(named, planned, []).__enter__()
        first = folder.plan(unnamed)
        second = folder.plan(unnamed)
        with folder.opened(unnamed, first, []) as one, folder.opened(unnamed, second, []) as two:
            assert two.folder == one.folder.with_name(f"{one.folder.name}-2")
    with folder.opened(named, planned, []) as again:
        assert again.folder == planned.folder


def test_file_system_ended_owner_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    home = owned_by(of_a_process_that_ended())
    run = run_of(log__name="a")
    with folder.opened(run, folder.plan(run), []) as owned:
        assert owned.folder == home
        assert json.loads((home / ".lock.owner").read_text())["pid"] == os.getpid()
    assert not (home / ".lock.owner").exists()


def test_file_system_takeover_file_always_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = of_a_process_that_ended()
    file = owned_by(locks.Owner.me()) / ".lock.owner"
    real = locks._read

    def read(path: Path) -> locks.Owner | None:
        assert file.exists(), "a third process would create it meanwhile"
        return real(path)

    monkeypatch.setattr(locks, "_read", read)
    assert not locks._taken_over(file, gone)
    assert real(file) == locks.Owner.me()
    assert list(file.parent.iterdir()) == [file]


def test_file_system_takeover_admits_one_process() -> None:
    gone = of_a_process_that_ended()
    file = owned_by(gone) / ".lock.owner"
    marker = file.with_name(f"{file.name}.{gone.pid}-{gone.started}")
    marker.touch()
    assert not locks._taken_over(file, gone)
    assert locks._read(file) == gone
    marker.unlink()
    assert locks._taken_over(file, gone)
    assert list(file.parent.iterdir()) == []


def test_file_system_full_disk_leaves_no_unknown_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    monkeypatch.setattr(json, "dumps", refusing(errno.ENOSPC))
    with open("file", "w") as file, pytest.raises(OSError, match="No space left"):
        locks.lock(file.fileno(), Path("file"))
    assert [path.name for path in Path(".").iterdir()] == ["file"]


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {}])
def test_file_system_live_or_remote_owner_is_kept(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    parent = os.getppid()
    owner = vars(locks.Owner.me()) | {"pid": parent, "started": locks._started(parent)} | change
    home = owned_by(locks.Owner(**owner))
    run = run_of(log__name="a")
    with pytest.raises(
        ConfigError, match=rf"process {parent} on .*; if it is gone, remove .*\.lock\.owner"
    ):
        folder.opened(run, folder.plan(run), []).__enter__()
    assert [path.name for path in home.parent.iterdir()] == ["a"]


def test_file_system_disk_error_is_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    run = run_of(log__name="a")
    with pytest.raises(BadEnvironment, match=r"runs/a cannot be written: Input/output error"):
        folder.opened(run, folder.plan(run), []).__enter__()


def test_file_system_without_locks_makes_caches_and_corpora(without_locks: None) -> None:
    def make(at: Path) -> None:
        (at / "meta.json").write_text("{}")

    home = Path("cache/order-0123456789abcdef")

    def read() -> dict[str, Any] | None:
        return {} if (home / "meta.json").exists() else None

    assert cache.build_once(home, read, make) == {}
    assert cache.make_room(home.parent) == []
    with drafted(Path("out"), "importing") as draft:
        with (
            pytest.raises(BadEnvironment, match="another process writes"),
            drafted(Path("out"), "importing"),
        ):
            pass
        (draft / "file").write_text("")
    assert [path.name for path in Path("out").iterdir()] == ["file"]
    assert tokenized("workers=1") == 0
    assert not list(Path(".").rglob("*.owner"))


def test_file_system_without_locks_removes_no_corpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = Path("cache/corpus-0123456789abcdef")
    home.mkdir(parents=True)
    for name in ("meta.json", *cache.FILES):
        (home / name).write_text("{}")
    os.utime(home / "meta.json", (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
        assert cache.make_room(home.parent) == []
    (home / cache.USED).unlink(missing_ok=True)
    assert cache.make_room(home.parent) == [home]


def test_file_system_unsyncable_folder_keeps_files(
    without_synced_folders: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with drafted(Path("out"), "importing") as draft:
        (draft / "file").write_text("all of it")
    assert Path("out/file").read_text() == "all of it"
    assert tokenized("workers=1") == 0
    assert capsys.readouterr().err.count("cannot sync a folder") == 1


def test_file_system_unsyncable_file_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("file").write_text("")
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL))
    with pytest.raises(OSError, match="Invalid argument"):
        durable.sync(Path("file"))


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV], ids=errno.errorcode.get
)
def test_file_system_without_hard_links_keeps_old_config(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "link", refusing(number))
    run = run_of(log__name="a")
    with folder.opened(run, folder.plan(run), []):
        pass
    before = Path("runs/a/run.yaml").read_text()
    for further in (1, 2):
        later = run_of(log__name="a", checkpoint__resume="latest", log__interval=further)
        with folder.opened(later, folder.plan(later), []):
            pass
    assert Path("runs/a/run.1.yaml").read_text() == before
    assert "interval: 1\n" in Path("runs/a/run.2.yaml").read_text()
    assert capsys.readouterr().err.count("no hard links") == 1


def test_file_system_unusable_checkpoint_folder_is_refused() -> None:
    run = run_of(log__name="a")
    with folder.opened(run, folder.plan(run), []):
        pass
    Path("runs/a/checkpoints").mkdir(mode=0o555)
    again = run_of(log__name="a", checkpoint__resume="latest")

    def refused() -> str:
        try:
            with folder.opened(again, folder.plan(again), []):
                return ""
        except BadEnvironment as error:
            return str(error)

    said = run_without_privileges(refused)
    assert "runs/a cannot be written: runs/a/checkpoints takes no new files" in said
    assert "fix: log.runs_dir=" in said


@pytest.mark.parametrize("workers", [1, 2])
def test_file_system_without_dev_shm_tokenizes(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import _multiprocessing  # type: ignore[import-not-found]

    semaphores = type("SemLock", (), {"SEM_VALUE_MAX": 1, "__init__": refusing(errno.EROFS)})
    monkeypatch.setattr(_multiprocessing, "SemLock", semaphores)
    assert tokenized(f"workers={workers}") == 0
    assert Path("corpus.bin").stat().st_size > 0


@pytest.mark.parametrize(
    ("verb", "closed"),
    [
        ("evaluate", "mine"),
        ("export", "mine/checkpoints/step_00000001"),
        ("convert inspect", "mine/model.safetensors.index.json"),
    ],
)
def test_file_system_unreadable_is_an_environment_error(verb: str, closed: str) -> None:
    checkpoint = "mine/checkpoints/step_00000001"
    of_a_run = ("mine/run.yaml", f"{checkpoint}/manifest.json")
    Path("mine" if closed.endswith("index.json") else checkpoint).mkdir(parents=True)
    for file in (closed,) if closed.endswith("index.json") else of_a_run:
        Path(file).write_text("{}")
    Path(closed).chmod(0)
    more = ["out"] if verb == "export" else []

    def said() -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            return main([*verb.split(), "mine", *more]), text.getvalue()

    code, text = run_without_privileges(said)
    assert (code, "ermission denied" in text, "unexpected" in text) == (3, True, False), text
