"""The run folder: who owns it, what it is resumed from, and what may differ."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from mtrain.config.compose.dump import run_yaml
from mtrain.config.engine import release
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, CorruptData
from mtrain.launching import folder, preflight
from mtrain.launching.resume import anchored
from tests.support.configs import LAPTOP, tiny
from tests.support.saved import committed


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_of(**changes: object) -> RunConfig:
    return resolve(tiny(**changes), LAPTOP)


def made(
    name: str | None, *steps: int, age_s: float = 0.0, launch: str | None = None, **changes: object
) -> Path:
    """Return a run folder as a run leaves it, with empty committed checkpoints."""
    run = run_of(log__name=name, **changes)
    with folder.opened(run, folder.plan(run, launch=launch), [], launch=launch) as owned:
        home = owned.folder
    (home / "metrics.jsonl").write_text('{"step": 1}\n')
    for step in steps:
        committed(anchored(run), home / "checkpoints", step)
    stamp = (home / "run.yaml").stat().st_mtime - age_s
    os.utime(home / "run.yaml", (stamp, stamp))
    return home


def refusal(run: RunConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        folder.plan(run)
    return caught.value


def test_folder_taken_name_suggests_free_one() -> None:
    made("a")
    problem = refusal(run_of(log__name="a")).problems[0]
    assert (problem.code, problem.fix) == ("MT501", "checkpoint.resume=latest, or log.name=a-2")


def test_folder_in_use_names_owner() -> None:
    run = run_of(log__name="a")
    chosen = folder.plan(run)
    with (
        folder.opened(run, chosen, []),
        pytest.raises(ConfigError) as caught,
        folder.opened(run, chosen, []),
    ):
        pass
    assert f"process {os.getpid()}" in caught.value.problems[0].rule


def test_folder_holds_run_file_before_start() -> None:
    home = made("a", parallel__tp=2)
    assert json.loads((home / "plan.json").read_text())["ranks"] == 2
    assert "tp: 2" in (home / "run.yaml").read_text()
    assert "resume: null" in (home / "run.yaml").read_text()
    assert {"env.json", "overrides.txt"} <= {p.name for p in home.iterdir()}


def test_folder_without_steps_is_reused() -> None:
    run = run_of(log__name="a")
    with folder.opened(run, folder.plan(run), []):
        pass
    with folder.opened(run, folder.plan(run), []) as again:
        assert again.folder == Path("runs/a")


@pytest.mark.parametrize(
    ("old", "new"), [("hidden_size: ", "hidden_size: 1"), ("\nparallel:", "\nparalel:")]
)
def test_folder_altered_run_file_is_damage(old: str, new: str) -> None:
    file = made("a", 1) / "checkpoints/step_00000001/run.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(CorruptData, match=r"run.yaml"):
        folder.plan(run_of(checkpoint__resume="runs/a"))


def test_folder_concurrent_name_is_refused_once() -> None:
    run = run_of(log__name="a")
    early = folder.plan(run)  # validated while the name was free
    made("a")
    with pytest.raises(ConfigError, match="exists already"), folder.opened(run, early, []):
        pass


def test_folder_concurrent_unnamed_both_run() -> None:
    run = run_of()
    first = folder.plan(run)
    second = folder.plan(run)
    with folder.opened(run, first, []) as a, folder.opened(run, second, []) as b:
        assert a.folder != b.folder


def test_folder_older_checkpoint_sets_later_aside() -> None:
    home = made("a", 5, 10)
    run = run_of(checkpoint__resume=str(home / "checkpoints/step_00000005"))
    with folder.opened(run, folder.plan(run), []):
        pass
    assert (
        folder.plan(run_of(checkpoint__resume=str(home))).checkpoint
        == home / "checkpoints/step_00000005"
    )


def test_folder_checkpoint_without_manifest_is_an_error() -> None:
    home = made("a", 5, 10)
    (home / "checkpoints/step_00000010/manifest.json").unlink()
    chosen = folder.plan(run_of(checkpoint__resume=str(home)))
    assert chosen.checkpoint == home / "checkpoints/step_00000005"
    assert "step_00000010 has no manifest.json" in chosen.notes[0]
    with pytest.raises(CorruptData, match="not a committed checkpoint"):
        folder.plan(run_of(checkpoint__resume=str(home / "checkpoints/step_00000010")))


def test_folder_foreign_run_file_is_skipped() -> None:
    made("a", 5, age_s=10)
    foreign = Path("runs/zz")
    foreign.mkdir()
    (foreign / "run.yaml").write_text("model: {nope: 1}\n")
    chosen = folder.plan(run_of(checkpoint__resume="latest"))
    assert chosen.folder == Path("runs/a")
    assert "zz" in chosen.notes[0]


def test_folder_other_precision_cannot_resume() -> None:
    made("a", 5)
    problems = refusal(
        run_of(
            log__name="a", checkpoint__resume="latest", precision__dtype="bf16", optim__name="sgd"
        )
    ).problems
    assert {(p.code, p.path) for p in problems} == {
        ("MT503", "precision.dtype"),
        ("MT503", "optim.name"),
    }


def test_folder_latest_has_same_configuration() -> None:
    made("mine", 5, 10, age_s=100)
    made("other", 7, optim__lr=0.5)
    chosen = folder.plan(run_of(checkpoint__resume="latest"))
    assert chosen.folder == Path("runs/mine")
    assert chosen.checkpoint == Path("runs/mine/checkpoints/step_00000010")


def test_folder_half_written_checkpoint_is_not_latest() -> None:
    home = made("a", 5)
    (home / "checkpoints/.saving-step_00000010").mkdir()
    (home / "checkpoints/step_00000009").mkdir()
    assert (
        folder.plan(run_of(log__name="a", checkpoint__resume="latest")).checkpoint
        == home / "checkpoints/step_00000005"
    )


def test_folder_without_checkpoint_starts_again() -> None:
    made("a")
    chosen = folder.plan(run_of(log__name="a", checkpoint__resume="latest"))
    assert (chosen.folder, chosen.checkpoint) == (Path("runs/a"), None)


def test_folder_other_model_names_every_key() -> None:
    made("a", 5)
    problems = refusal(
        run_of(
            log__name="a",
            checkpoint__resume="latest",
            model__num_layers=8,
            model__ffn_hidden_size=512,
        )
    ).problems
    assert [(p.code, p.path, p.fix) for p in problems] == [
        ("MT503", "model.num_layers", "model.num_layers=4"),
        ("MT503", "model.ffn_hidden_size", "model.ffn_hidden_size=704"),
    ]


def test_folder_other_adapter_scale_is_another_model() -> None:
    home = made("a", 5, peft__kind="lora")
    other = run_of(peft__kind="lora", peft__alpha=8.0, checkpoint__init_from=str(home))
    assert [(p.code, p.path, p.fix) for p in refusal(other).problems] == [
        ("MT503", "peft.alpha", "peft.alpha=32.0")
    ]


def test_folder_read_paths_are_absolute_urls_kept() -> None:
    run = run_of(
        data__kind="indexed",
        data__blend=("a", "s3://bucket/b"),
        data__validation_blend=("c",),
        data__chat_template="t.jinja",
        data__tokenizer="~/tokenizer.json",
        peft__init_from="adapters",
        checkpoint__init_from="weights",
    )
    data = folder.anchored(run).data
    here = os.getcwd()
    assert data.blend == (f"{here}/a", "s3://bucket/b")
    assert data.validation_blend == (f"{here}/c",)
    assert (data.chat_template, data.path) == (f"{here}/t.jinja", None)
    assert data.tokenizer == str(Path.home() / "tokenizer.json")
    assert folder.anchored(run).peft.init_from == f"{here}/adapters"
    assert folder.anchored(run).checkpoint.init_from == f"{here}/weights"
    remote = run_of(data__kind="indexed", data__path="memory://corpus")
    assert folder.anchored(remote).data.path == "memory://corpus"


def test_folder_resume_without_corpus_and_adapters(
    tmp_path: Path,
) -> None:
    from mtrain.api import load
    from mtrain.loading.checkpoints import WITHOUT_DATA

    gone = run_of(
        data__kind="indexed",
        data__blend=("/gone/a", "/gone/b"),
        data__blend_sizes=(3, 4),
        data__validation_blend=("/gone/c",),
        data__fim={"rate": 0.5, "ids": (1, 2, 3)},
        peft__kind="lora",
        peft__init_from="/gone/adapters",
    )
    file = tmp_path / "run.yaml"
    file.write_text(run_yaml(gone))
    assert load([f"run={file}", *WITHOUT_DATA]).run.data.kind == "mock"
    with pytest.raises(ConfigError, match="MT488"):
        load([f"run={file}", *WITHOUT_DATA[:-1]])
    assert (
        load([f"run={file}", *WITHOUT_DATA[:-1], "checkpoint.resume=latest"]).run.peft.init_from
        is not None
    )


def test_folder_number_change_needs_word_and_is_recorded() -> None:
    made("a", 5)
    problem = refusal(
        run_of(log__name="a", checkpoint__resume="latest", optim__lr=0.5, optim__min_lr=0.1)
    ).problems[0]
    assert (problem.code, problem.path) == ("MT504", "optim.lr")
    accepted = run_of(
        log__name="a",
        checkpoint__resume="latest",
        optim__lr=0.5,
        optim__min_lr=0.1,
        checkpoint__accept_changes=True,
    )
    assert "optim.lr: 0.0006 -> 0.5" in folder.plan(accepted).changes


def test_folder_other_layout_resumes_silently() -> None:
    made("a", 5)
    chosen = folder.plan(run_of(log__name="a", checkpoint__resume="latest", parallel__tp=2))
    assert "parallel.tp: 1 -> 2" in chosen.changes


def test_folder_checkpoint_can_begin_another_run() -> None:
    made("a", 5, 10)
    older = "runs/a/checkpoints/step_00000005"
    assert folder.plan(run_of(checkpoint__resume=older)).folder == Path("runs/a")
    branch = folder.plan(run_of(log__name="b", checkpoint__resume=older))
    assert (branch.folder, branch.checkpoint) == (Path("runs/b"), Path(older))


@pytest.mark.parametrize("resume", ["latest", "nowhere", "."])
def test_folder_nothing_to_resume_is_reported(resume: str) -> None:
    assert refusal(run_of(checkpoint__resume=resume)).problems[0].code == "MT502"


TORCHRUN = "torchrun 8d21"
SLURM = "slurm 4711"


@pytest.mark.parametrize("name", ["a", None])
def test_folder_one_command_begins_and_resumes(name: str | None) -> None:
    run = run_of(log__name=name)
    first = folder.plan(run, launch=TORCHRUN)
    assert (first.new, first.checkpoint) == (True, None)
    home = made(name, 2, 4, launch=TORCHRUN)
    again = folder.plan(run, launch=TORCHRUN)
    assert (again.new, again.folder, again.checkpoint) == (
        False,
        home,
        home / "checkpoints/step_00000004",
    )
    with folder.opened(run, again, [], launch=TORCHRUN) as owned:
        assert owned.checkpoint == again.checkpoint
    assert json.loads((home / "env.json").read_text())["launch"] == TORCHRUN
    assert sorted(path.name for path in home.parent.iterdir()) == [home.name]


def test_folder_restart_before_checkpoint_begins_again() -> None:
    weights = made("weights", 1)
    home = made("a", launch=SLURM, checkpoint__init_from=str(weights))
    again = folder.plan(run_of(log__name="a", checkpoint__init_from=str(weights)), launch=SLURM)
    assert (again.new, again.folder, again.checkpoint) == (False, home, None)
    assert again.weights == weights / "checkpoints/step_00000001"


@pytest.mark.parametrize("other", [SLURM, None])
def test_folder_launch_leaves_foreign_named_run(other: str | None) -> None:
    made("a", 4, launch=other)
    with pytest.raises(ConfigError) as caught:
        folder.plan(run_of(log__name="a"), launch=TORCHRUN)
    problem = caught.value.problems[0]
    assert (problem.code, problem.fix) == ("MT501", "checkpoint.resume=auto, or log.name=a-2")
    assert f"begun by {other or 'hand'} and not by {TORCHRUN}" in problem.rule


@pytest.mark.parametrize("launch", [TORCHRUN, None])
def test_folder_auto_resumes_named_run_of_anyone(launch: str | None) -> None:
    run = run_of(log__name="a", checkpoint__resume="auto")
    assert folder.plan(run, launch=launch).new
    home = made("a", 4, launch=SLURM)
    chosen = folder.plan(run, launch=launch)
    assert (chosen.new, chosen.checkpoint) == (False, home / "checkpoints/step_00000004")


def test_folder_unnamed_resumes_only_same_launch() -> None:
    made(None, 2, age_s=30, launch=SLURM)
    made("by-hand", 4, age_s=20)
    made("other", 6, age_s=10, launch=TORCHRUN, optim__lr=0.5)
    assert folder.plan(run_of(), launch=TORCHRUN).new
    assert folder.plan(run_of()).new, "a run started by hand is new unless a key resumes one"
    mine = made("mine", 8, launch=TORCHRUN)
    found = folder.plan(run_of(), launch=TORCHRUN)
    assert (found.folder, found.checkpoint) == (mine, mine / "checkpoints/step_00000008")


def test_folder_auto_by_hand_resumes_own_newest() -> None:
    run = run_of(checkpoint__resume="auto")
    assert folder.plan(run).new
    made("launched", 6, launch=SLURM)
    mine = made("mine", 4, age_s=10)
    assert folder.plan(run).folder == mine


def test_folder_auto_ignores_non_run_folder() -> None:
    foreign = Path("runs/a")
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    assert refusal(run_of(log__name="a", checkpoint__resume="auto")).problems[0].code == "MT501"


def test_folder_restart_awaits_replaced_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made("a", 4, launch=TORCHRUN)
    run = run_of(log__name="a")
    chosen = folder.plan(run, launch=TORCHRUN)
    before = folder.opened(run, chosen, [], launch=TORCHRUN)
    before.__enter__()
    ending = threading.Timer(0.5, lambda: before.__exit__(None, None, None))
    ending.start()
    with folder.opened(run, chosen, [], launch=TORCHRUN) as owned:
        assert owned.folder == chosen.folder
    ending.join()
    monkeypatch.setattr(folder, "RESTART_S", 0.1)
    with (
        folder.opened(run, chosen, [], launch=TORCHRUN),
        pytest.raises(ConfigError, match="in use by"),
        folder.opened(run, chosen, [], launch=TORCHRUN),
    ):
        pass


def test_folder_resume_word_is_no_folder_and_suggested() -> None:
    from mtrain.cli.completion import values_of
    from mtrain.config.rules import check

    assert [
        p.code for p in check(run_of(checkpoint__resume="auto")) if p.path == "checkpoint.resume"
    ] == []
    assert values_of("checkpoint.resume", [], "")[:3] == ["auto", "latest", "null"]


def test_folder_model_beyond_memory_states_remedies() -> None:
    large = run_of(model__num_layers=80, model__hidden_size=8192, model__ffn_hidden_size=28672)
    with pytest.raises(BadEnvironment) as caught:
        preflight.check(large, ["model=large"], LAPTOP)
    text = str(caught.value)
    assert "needs at least" in text
    assert "8.0 GiB" in text
    assert "python launch.py check model=large" in text


def test_folder_missing_gpus_are_counted() -> None:
    run = run_of(cluster__device="cuda", cluster__devices_per_node=8, parallel__tp=2)
    with pytest.raises(BadEnvironment, match="needs 8 GPUs on this machine; here: 0"):
        preflight.check(run, [], LAPTOP)


def test_folder_megatron_without_core_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "release", lambda: None)
    monkeypatch.setattr(release, "folder", lambda: None)
    with pytest.raises(BadEnvironment, match="there is no module megatron"):
        preflight.check(run_of(), [], LAPTOP)
