"""Every rule fires where it must, is quiet where it must be, and shows a fix that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import apply
from mtrain.data.store.indexed import IndexedWriter, token_dtype
from tests.support.configs import LAPTOP, MOE, errors, first_fix, tiny, validate
from tests.support.tables import tables

TABLES = tables("rules_catalogue")

BROKEN: list[tuple[str, dict[str, Any]]] = TABLES["broken"]
H100: dict[str, Any] = {"cluster.device": "cuda", "cluster.devices_per_node": 1}
FINE: list[dict[str, Any]] = TABLES["fine"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("code", "change"), BROKEN, ids=lambda v: v if isinstance(v, str) else str(v)[:60]
)
def test_rules_broken_names_value_and_working_fix(code: str, change: dict[str, Any]) -> None:
    raw = apply(tiny(), change)
    found = [p for p in errors(raw) if p.code == code]
    assert found, errors(raw)
    problem = found[0]
    assert problem.rule
    assert problem.fix, problem
    after = errors(apply(raw, first_fix(problem)))
    assert code not in {p.code for p in after}
    assert {(p.code, p.path) for p in after} < {(p.code, p.path) for p in errors(raw)}


def test_rules_missing_corpus_has_no_substitute() -> None:
    (problem,) = errors(apply(tiny(), {"data.kind": "indexed", "data.path": "/nowhere/at/all"}))
    assert (problem.code, problem.value, problem.fix) == ("MT306", "/nowhere/at/all", "")


@pytest.mark.parametrize("change", FINE, ids=lambda v: str(v)[:60])
def test_rules_legal_configuration_has_no_error(change: dict[str, Any]) -> None:
    assert errors(apply(tiny(), change)) == []


def test_rules_fp16_loss_scales_are_ordered() -> None:
    raw = apply(tiny(), {"precision.dtype": "fp16", "precision.min_loss_scale": 1e6, **H100})
    (problem,) = errors(raw)
    assert problem.code == "MT402"
    assert errors(apply(raw, first_fix(problem))) == []


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("MT132", {"parallel.pp": 4, "trainer.global_batch_size": 8}),
        ("MT133", {"trainer.global_batch_size": 1 << 20}),
        ("MT139", {"trainer.batch_size_schedule": [[8, 10**6]]}),
        ("MT139", {"trainer.rampup_batch_size": [4, 4, 10**6]}),
        ("MT211", {"model.init_method_std": 0.5}),
        ("MT239", {"model.moe": {**MOE, "router_force_load_balancing": True}}),
        ("MT219", {"model.layernorm_epsilon": 0.0}),
        ("MT219", {"model.layernorm_epsilon": 1.0}),
        ("MT311", {"data.tokenizer_vocab_size": 400}),
        ("MT427", {"optim.lr": 3.0}),
        ("MT435", {"checkpoint.save_interval": 1000, "checkpoint.save_final": False}),
    ],
)
def test_rules_unusual_is_a_warning_only(code: str, change: dict[str, Any]) -> None:
    found = validate(apply(tiny(), change))
    assert [(p.code, p.severity) for p in found] == [(code, "warning")]
    assert found[0].fix


def test_rules_all_are_run_at_once() -> None:
    raw = tiny(
        parallel__tp=3,
        parallel__pp=3,
        optim__min_lr=1.0,
        kernels__attention="te",
        trainer__global_batch_size=15,
    )
    assert {"MT101", "MT107", "MT421", "MT403", "MT130"} <= {p.code for p in errors(raw)}


def test_rules_partial_cluster_states_both_numbers() -> None:
    raw = tiny(
        cluster__device="cuda", cluster__nodes=8, cluster__devices_per_node=8, parallel__ranks=32
    )
    problem = next(p for p in errors(raw) if p.code == "MT114")
    assert "32 ranks on 8 * 8 = 64 devices" in problem.rule
    assert problem.fix.startswith("parallel.ranks=null")


def test_rules_local_gpu_needs_no_cluster() -> None:
    one_gpu = Machine(cpu_cores=8, memory_bytes=1 << 36, gpus=1)
    assert errors(tiny(), one_gpu) == []
    assert resolve(tiny(parallel__tp=2), one_gpu).cluster.device == "cpu"
    problem = errors(tiny(parallel__tp=2, cluster__device="cuda"), one_gpu)[0]
    assert problem.code == "MT112"
    assert errors(apply(tiny(parallel__tp=2), first_fix(problem)), one_gpu) == []


def test_rules_missing_file_suggests_neighbour(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("text\n" * 200)
    (problem,) = errors(tiny(data__path=str(tmp_path / "corpsu")))
    assert problem.fix.startswith(f"data.path={tmp_path / 'corpus'}")


def test_rules_empty_folder_file_and_foreign_differ(
    tmp_path: Path,
) -> None:
    (tmp_path / "e.txt").write_text("")
    assert "file is empty" in errors(tiny(data__path=str(tmp_path / "e.txt")))[0].rule
    (tmp_path / "empty").mkdir()
    assert "folder is empty" in errors(tiny(data__path=str(tmp_path / "empty")))[0].rule
    (tmp_path / "empty/x.bin").write_bytes(b"x")
    assert "no file ending in" in errors(tiny(data__path=str(tmp_path / "empty")))[0].rule


def test_rules_indexed_data_needs_both_files(tmp_path: Path) -> None:
    (tmp_path / "tokens.idx").write_bytes(b"x")
    change = {"data.kind": "indexed", "data.path": str(tmp_path / "tokens")}
    assert "tokens.bin: there is no such file" in errors(apply(tiny(), change))[0].rule
    with IndexedWriter(tmp_path / "tokens", token_dtype(4096)) as writer:
        for _ in range(10):
            writer.add(np.zeros(1000, np.uint16))
    assert errors(apply(tiny(), {**change, "data.split": [0.8, 0.2, 0.0]})) == []
    (problem,) = errors(apply(tiny(), {**change, "data.path": str(tmp_path / "tokens.bin")}))
    assert problem.fix.startswith(f"data.path={tmp_path / 'tokens'}")
    (problem,) = errors(apply(tiny(), {**change, "data.path": str(tmp_path / "tokeens")}))
    assert problem.fix.startswith(f"data.path={tmp_path / 'tokens'}")


def test_rules_taken_run_folder_suggests_free_name(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    raw = tiny(log__runs_dir=str(tmp_path), log__name="first")
    (problem,) = validate(raw)
    assert (problem.code, problem.severity) == ("MT434", "warning")
    assert problem.fix.startswith("log.name=first-2")


def test_rules_change_nothing() -> None:
    raw = tiny(parallel__tp=3)
    before = raw.to_dict()
    validate(raw, LAPTOP)
    assert raw.to_dict() == before


def test_rules_batch_in_tokens_suggests_samples() -> None:
    (problem,) = validate(tiny(trainer__global_batch_size=1 << 20))
    assert problem.fix == "trainer.global_batch_size=4096"
    assert validate(tiny(trainer__global_batch_size=1 << 19)) == []
