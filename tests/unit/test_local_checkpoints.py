"""Local checkpoints: the ones that a start uses, those that it passes over, and what it leaves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt import local
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError
from mtrain.launching import folder
from mtrain.launching.resume import anchored
from mtrain.layout.grid import RankGrid
from tests.support.configs import LAPTOP, refusals, tiny
from tests.support.saved import committed


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_of(**changes: object) -> RunConfig:
    given = {"checkpoint__local_dir": "local", "checkpoint__local_interval": 2, **changes}
    return resolve(tiny(log__name="a", **given), LAPTOP)


def owned(run: RunConfig) -> folder.Plan:
    """Return the plan of a start, which has ended without a step."""
    with folder.opened(run, folder.plan(run), []) as plan:
        return plan


def killed(shared: int = 2, newest: int = 4) -> tuple[Path, Path]:
    """Return the run folder and the local checkpoint of a run that was killed."""
    run = run_of()
    home = owned(run).folder
    (home / "metrics.jsonl").write_text('{"step": 1}\n')
    place = local.place_of(home, "local")
    assert place is not None
    if shared:
        committed(anchored(run), home / "checkpoints", shared)
    return home, committed(anchored(run), place.root, newest, local_of=place.owner)


def test_local_checkpoint_that_is_newer_is_resumed() -> None:
    home, newest = killed()
    for how in ("latest", "auto", str(home)):
        plan = folder.plan(run_of(checkpoint__resume=how))
        assert (plan.folder.name, plan.checkpoint, plan.new) == ("a", newest.absolute(), False)
        assert plan.notes == ()
    owned(run_of(checkpoint__resume="latest"))
    assert newest.is_dir()


def test_local_checkpoint_alone_is_resumed() -> None:
    _, newest = killed(shared=0)
    assert folder.plan(run_of(checkpoint__resume="latest")).checkpoint == newest.absolute()


def test_local_checkpoint_that_is_not_newer_is_left_alone() -> None:
    home, _ = killed(shared=4)
    plan = folder.plan(run_of(checkpoint__resume="latest"))
    assert plan.checkpoint == Path("runs/a/checkpoints/step_00000004")
    owned(run_of(checkpoint__resume="latest"))
    assert not local.exist(home)


def _shorten(path: Path) -> None:
    file = path / ckpt_folder.shard_name(0)
    os.truncate(file, file.stat().st_size - 1)


def _flip(path: Path) -> None:
    file = path / ckpt_folder.shard_name(0)
    with file.open("r+b") as opened:
        opened.seek(-5000, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-5000, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))


def _of_another_run(path: Path) -> None:
    shutil.rmtree(path)
    committed(anchored(run_of()), path.parent, 4, local_of="b-00000000-0000")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "no file": (lambda path: (path / ckpt_folder.shard_name(0)).unlink(), "is missing"),
    "short": (_shorten, "were written"),
    "altered": (_flip, "rank_00000.safetensors"),
    "other run": (_of_another_run, "it belongs to b-00000000-0000"),
    "other step": (lambda path: path.rename(path.with_name("step_00000005")), "it is of step 4"),
    "gone": (lambda path: shutil.rmtree(path.parent.parent), "is not on this machine"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_local_checkpoint_with_fault_is_passed_over(name: str) -> None:
    home, newest = killed()
    damage, words = FAULTS[name]
    damage(newest)
    run = run_of(checkpoint__resume="latest")
    plan = folder.plan(run)
    assert plan.checkpoint == Path("runs/a/checkpoints/step_00000002")
    (note,) = plan.notes
    assert note.startswith(str(newest.absolute().parent.parent))
    assert words in note
    # a later one that cannot be used would be kept as the newest
    owned(run)
    assert not local.exist(home)


def test_local_checkpoint_of_another_course_is_deleted() -> None:
    home, newest = killed()
    first = owned(run_of(checkpoint__resume=str(home / "checkpoints/step_00000002")))
    assert first.checkpoint == Path("runs/a/checkpoints/step_00000002")
    assert not newest.exists()
    place = local.place_of(home, "local")
    assert place is not None
    # what another machine still holds belongs to the old token
    assert place.root != newest.absolute().parent


def test_local_checkpoint_folder_names_only_its_run(tmp_path: Path) -> None:
    home, newest = killed()
    shutil.copytree(home, home.with_name("b"))
    other = home.with_name("b")
    assert local.newest(other, 0, []) is None
    local.remove(other)
    assert newest.is_dir()
    precious = tmp_path / "precious/checkpoints/step_00000001"
    precious.mkdir(parents=True)
    text = (home / local.FILE).read_text()
    place = str(newest.absolute().parent.parent)
    (home / local.FILE).write_text(text.replace(place, str(precious.parent.parent)))
    local.remove(home)
    assert precious.is_dir()


def test_local_checkpoints_of_another_user_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    plan = folder.plan(run_of(checkpoint__resume="latest"))
    assert plan.checkpoint == Path("runs/a/checkpoints/step_00000002")
    assert "belongs to somebody else" in plan.notes[0]


def _parts(home: Path, run: RunConfig, machine: int, *steps: int) -> None:
    place = local.place_of(home, "local", machine)
    assert place is not None
    for step in steps:
        facts = {"machine": [machine, 2], "grid": RankGrid.of(run).sizes}
        committed(anchored(run), place.root, step, local_of=place.owner, **facts)


def _of(grid: Mapping[str, int], machines: int = 2, broken: str = "") -> local.Elsewhere:
    """Return machine 1, which gives and takes copies in the folders of this disk unless they are
    `broken`.
    """

    def ask(home: Path, than: int) -> dict[int, local.Held]:
        copies = local.steps_of(local.replicas(home, than, 1))
        return {1: local.Held("machine 1 (m1)", local.intact(home, than, 1), copies)}

    def bring(home: Path, step: int, machine: int, holder: int) -> str:
        parts = local.replicas(home, 0, holder)[machine]
        (part,) = [path for path in parts if ckpt_folder.step_of(path) == step]
        if not broken and not local.fault_of(part):
            shutil.copytree(part, local.root_for(home, machine) / part.name, dirs_exist_ok=True)
        return broken or local.fault_of(part)

    return local.Elsewhere(grid, machines, ask, bring)


def _lost(home: Path, machine: int) -> None:
    """Have the other machine hold the only copies of a machine's parts."""
    for place in Path("local").iterdir():
        root = place / f"checkpoints_{machine}"
        root.rename(local.replica_root(root, machine, 1 - machine))


@pytest.mark.parametrize("machine", [0, 1])
def test_local_part_of_a_lost_machine_is_brought_back(machine: int) -> None:
    home, _ = killed(newest=3)
    run = run_of(checkpoint__resume="latest")
    grid = RankGrid.of(run).sizes
    _parts(home, run, 0, 4, 6)
    _parts(home, run, 1, 4, 6)
    _lost(home, machine)
    with local.asking(_of(grid, broken="no route to host")):
        plan = folder.plan(run)
    assert plan.checkpoint is not None
    assert plan.checkpoint.parts[-2:] == ("checkpoints", "step_00000002")
    assert f"cannot give machine {machine}" in plan.notes[0]
    assert plan.notes[0].endswith("its part: no route to host")
    # The newest copy is damaged: the one before it is used.
    (copy,) = Path("local").glob("*/replica_*/step_00000006")
    _flip(copy)
    with local.asking(_of(grid)):
        plan = folder.plan(run)
    assert plan.checkpoint is not None
    assert plan.checkpoint.parts[-2:] == ("checkpoints_0", "step_00000004")
    assert f"{copy}/rank_00000.safetensors is not what was written" in plan.notes[0]
    assert "step_00000006: local checkpoint passed over: " in plan.notes[1]
    assert "lacks its part of local step 4: copied from machine " in plan.notes[2]
    assert len(list(Path("local").glob("*/checkpoints_?/step_00000004"))) == 2
    # what is later, and what a transfer left, goes on both machines
    (copy.parent / ".saving-step_00000008").mkdir()
    with local.asking(_of(grid)):
        local.begin(home, plan.checkpoint, "local")
    local.follow(home, "local", 4, 1)
    left = {path.name for path in Path("local").glob("*/*_?/*")}
    assert left == {"step_00000004"}


def test_local_parts_are_used_where_every_machine_holds_its_own() -> None:
    home, _ = killed(newest=3)
    run = run_of(checkpoint__resume="latest")
    grid = RankGrid.of(run).sizes
    _parts(home, run, 0, 4, 6)
    _parts(home, run, 1, 4, 6)
    _flip(home.parents[1] / "local" / _place(home) / "checkpoints_1/step_00000006")

    with local.asking(_of(grid)):
        plan = folder.plan(run)
    assert plan.checkpoint is not None
    assert plan.checkpoint.parts[-2:] == ("checkpoints_0", "step_00000004")
    assert "step_00000006: local checkpoint passed over: machine 1 (m1) does not" in plan.notes[0]
    assert local.part_of(home, plan.checkpoint, 1) == plan.checkpoint.parents[1] / (
        "checkpoints_1/step_00000004"
    )
    other = {**grid, "dp": 2}
    for elsewhere, why in (
        (None, "it is the part of one of 2 machines"),
        (_of(grid, 3), "it is the part of one of 2 machines"),
        (_of(other), "it was written in another layout"),
    ):
        with nullcontext() if elsewhere is None else local.asking(elsewhere):
            plan = folder.plan(run)
        # The whole one of step 3 is only on this machine.
        newest = "step_00000003" if elsewhere is None else "step_00000002"
        assert plan.checkpoint is not None
        assert (plan.checkpoint.name, why in plan.notes[0]) == (newest, True)


def test_local_parts_of_another_course_are_deleted() -> None:
    home, _ = killed(newest=3)
    _parts(home, run_of(), 1, 4)
    (old,) = Path("local").glob("*/checkpoints_1/step_00000004")
    with local.asking(_of({})):
        local.begin(home, None, "local")
    _parts(home, run_of(), 1, 4, 6)
    shutil.copytree(next(Path("local").glob("*/checkpoints_1/step_00000004")), old)
    local.follow(home, "local", 4, 1)
    found = [path.name for path in Path("local").glob("*/checkpoints_1/*")]
    assert (found, old.exists()) == (["step_00000004"], False)


def _place(home: Path) -> str:
    place = local.place_of(home, "local")
    assert place is not None
    return place.owner


def test_local_folder_that_cannot_be_written_is_refused() -> None:
    Path("local").write_text("")
    with pytest.raises(BadEnvironment) as refused:
        owned(run_of())
    assert "checkpoint.local_dir=local: cannot hold local checkpoints because" in str(refused.value)


def test_local_checkpoints_of_several_machines_are_refused() -> None:
    parallel = SimpleNamespace(ranks=2)
    run = SimpleNamespace(parallel=parallel, checkpoint=run_of().checkpoint)
    with pytest.raises(ConfigError) as refused:
        folder.refuse_local(run, 1)  # type: ignore[arg-type]
    assert "error[MT455] checkpoint.local_dir=local: cannot keep local" in str(refused.value)
    assert "(1 of 2 ranks are on this machine)" in str(refused.value)


def test_local_folder_outside_is_no_choice_of_a_recipe() -> None:
    Path("mine.yaml").write_text(
        "checkpoint: {local_dir: /dev/shm, local_interval: 2}\n", encoding="utf-8"
    )
    (problem,) = refusals("recipe=mine.yaml")
    assert (problem.code, problem.path) == ("MT019", "checkpoint.local_dir")


def test_local_folder_outside_is_that_of_the_resumed_run(tmp_path: Path) -> None:
    Path("work").mkdir()
    os.chdir("work")
    place = str(tmp_path / "local")
    home = owned(run_of(checkpoint__local_dir=place)).folder
    local.remove(home)
    assert compose([f"run={home}/run.yaml"]).run.checkpoint.local_dir == place
    # a run folder that came from elsewhere chooses no place
    shutil.copytree(home, home.with_name("b"))
    (problem,) = refusals(f"run={home.with_name('b')}/run.yaml")
    assert (problem.code, problem.path) == ("MT019", "checkpoint.local_dir")
