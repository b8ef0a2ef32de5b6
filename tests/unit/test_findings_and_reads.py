"""Findings belong to the keys that their rule read: a refused key hides no finding of other
keys.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.config.disk.files import MAX_ENTRIES
from mtrain.config.resolve.resolution import Machine
from mtrain.config.resolve.watch import watched
from mtrain.config.rules import Answers, all_rules, findings, findings_and_reads, value_at
from mtrain.errors import ConfigError
from tests.support.catalogue import accepted, validated
from tests.support.configs import LAPTOP


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("parallel.ep=0 trainer.train_iters=80 optim.warmup_iters=1000", {"MT014", "MT422"}),
        (
            "optim.lr=-1 optim.warmup_iters=1000 parallel=tp3",
            {"MT014", "MT422", "MT101", "MT102", "MT103", "MT105"},
        ),
        ("model.ffn_hidden_size=0 parallel=tp3", {"MT014", "MT101", "MT102", "MT105"}),
        ("kernels.loss=nope kernels.rope=triton", {"MT014", "MT407"}),
        ("kernels.norm=nope kernels.linear=te", {"MT014", "MT403"}),
        ("parallel.recompute.modules=[nope] optim.warmup_iters=1000", {"MT014", "MT422"}),
        ("parallel.recompute.modules=[nope] data.blend=[a]", {"MT014", "MT150"}),
        ("data.split=[a,b,c] optim.min_lr=1.0", {"MT013", "MT421"}),
        (f"trainer.eval_interval={10**30} optim.lr=-1 optim.warmup_iters=1000", {"MT014", "MT422"}),
        ("trainer.train_iters=0 optim.warmup_iters=1000", {"MT014"}),
        ("parallel.pp=0 parallel.ranks=7", {"MT014"}),
        ("parallel.ranks=0 trainer.global_batch_size=7 parallel=dp2", {"MT014"}),
        ("parallel=nope trainer.global_batch_size=7", {"MT011"}),
    ],
)
def test_findings_refused_key_hides_only_its_dependants(words: str, codes: set[str]) -> None:
    assert {p.code for p in validated(words.split()) if p.severity == "error"} == codes


def test_findings_watched_reads_keep_findings() -> None:
    assert len(accepted()) > 20
    for run in accepted():
        assert [finding for finding, _ in findings_and_reads(run, Answers())] == list(findings(run))


def test_findings_reads_of_rules_are_keys() -> None:
    for run in accepted():
        keys = run.flat()
        for rule in all_rules():
            reads: set[str] = set()
            list(rule(watched(run, reads)))
            for key in reads:
                assert key in keys or key.endswith("."), f"{rule} reads {key}"
                assert key.endswith(".") or key in keys or value_at(run, key) is None


def test_findings_only_disk_rules_read_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a rule that is not of the disk looked at the disk: {args}")

    for name in ("stat", "lstat", "access", "scandir", "listdir", "open", "readlink", "statvfs"):
        monkeypatch.setattr(os, name, touched)
    monkeypatch.setattr("builtins.open", touched)
    for run in accepted():
        for rule in all_rules():
            if not rule.disk:
                list(rule(run))


def test_findings_fix_trials_walk_a_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walk a folder without a text file only once, although dozens of fixes for other rules are
    tried.
    """
    (tmp_path / "a.dat").write_text("text")
    walks = []
    scandir = os.scandir

    def counted(path: str) -> object:
        walks.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    words = [f"data.path={tmp_path}", "parallel=tp3pp3", "model.num_query_groups=3"]
    assert "MT305" in {p.code for p in validated(words)}
    assert walks.count(str(tmp_path)) <= 3  # once for the rule, once to tell whether it is empty


@pytest.mark.parametrize("files", [0, MAX_ENTRIES])
def test_findings_folder_walk_is_bounded(tmp_path: Path, files: int) -> None:
    """Bound the walk over links that lead back and over too many entries: unread entries are a
    warning.
    """
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/back").symlink_to(tmp_path)
    for number in range(files):
        os.mknod(f"{tmp_path}/deep/{number}.dat")
    begun = time.process_time()
    found = {
        p.code: p.severity
        for p in validated([f"data.path={tmp_path}", "data.suffixes=[.zzzz]", "parallel=tp3pp3"])
    }
    assert time.process_time() - begun < 1.0
    assert (found.get("MT321"), found.get("MT305")) == (
        ("warning", None) if files else (None, "error")
    )


def test_findings_fix_ignores_hidden_rules() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["parallel=nope", "model.num_query_groups=3", "optim.min_lr=1.0"], LAPTOP, {})
    assert next(p.fix for p in caught.value.problems if p.code == "MT421").startswith(
        "optim.min_lr=0.0006"
    )


def test_findings_refused_key_is_reported_with_gpu() -> None:
    """Look for obstacles of kernels, whose reads are recorded inside of another recorded read."""
    machine = Machine(cpu_cores=16, memory_bytes=1 << 37, gpus=1, triton=True)
    with pytest.raises(ConfigError) as told:
        load(
            ["model=llama_tiny", "cluster=h200", "parallel.recompute=full"],
            machine,
            {},
            to_run=False,
        )
    assert [problem.code for problem in told.value.problems] == ["MT013"]


def test_findings_nested_watch_notes_reads_twice() -> None:
    outer: set[str] = set()
    inner: set[str] = set()
    run = watched(watched(load(["model=llama_tiny"], LAPTOP, {}).run, outer), inner)
    assert run.optim.name == "adamw"
    assert outer == inner == {"optim.", "optim.name"}
