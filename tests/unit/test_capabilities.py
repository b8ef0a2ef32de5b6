"""Features that only some releases of megatron-core have: refused by the others, explained, and
listed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.engine import release as engine
from mtrain.config.engine.capabilities import CAPABILITIES, Capability
from mtrain.config.engine.release import Release
from mtrain.config.messages.keys import choices_of, schema_keys
from mtrain.config.resolve.conditional import condition
from mtrain.errors import ConfigError
from mtrain.launching import folder
from mtrain.recipes import lock

OFFLOADED = "cluster=h100 parallel.activation_offload.modules=[core_attn]"
ASKED = {
    "optim.skip_above_grad_norm": "optim.skip_above_grad_norm=10",
    "model.mtp_detach_heads": "model.mtp_num_layers=1 model.mtp_detach_heads=true",
    (
        "data.packed and model.mtp_num_layers and parallel.recompute.granularity=full "
        "and parallel.recompute.method=uniform"
    ): ("data=mock data.packed=true model.mtp_num_layers=1 parallel.recompute.granularity=full"),
    "parallel.activation_offload.fraction": f"{OFFLOADED} parallel.activation_offload.fraction=0.5",
    "parallel.activation_offload.delta_bytes_across_stages": (
        f"{OFFLOADED} parallel=pp2 cluster.devices_per_node=2 "
        "parallel.activation_offload.delta_bytes_across_stages=1048576"
    ),
    "model.moe.flex_dispatcher_backend=ncclep": (
        "model=mixtral_tiny cluster=h100 parallel=ep2 "
        "model.moe.token_dispatcher_type=flex model.moe.flex_dispatcher_backend=ncclep"
    ),
}
"""Row -> a command line that asks for it."""
ROWS = pytest.mark.parametrize("row", CAPABILITIES, ids=lambda row: row.when)


def _codes(words: str) -> set[str]:
    try:
        return {problem.code for problem in load(words.split()).warnings}
    except ConfigError as error:
        return {problem.code for problem in error.problems}


def _here(patch: pytest.MonkeyPatch, release: Release | None) -> None:
    patch.setattr(engine, "release", lambda: release)


@ROWS
def test_capabilities_refused_by_lacking_releases_only(
    row: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = {release: release in row.versions for release in engine.SUPPORTED}
    assert set(able.values()) == {
        True,
        False,
    }, "a row is for one of the releases that are supported"
    for release, is_able in able.items():
        _here(monkeypatch, release)
        assert ("MT045" in _codes(ASKED[row.when])) is not is_able
        without = [
            f"{key}={'null' if value is None else str(value).lower()}"
            for key, value in row.without.items()
        ]
        assert "MT045" not in _codes(" ".join([*ASKED[row.when].split(), *without]))
    _here(monkeypatch, None)
    assert "MT045" not in _codes(ASKED[row.when])


@ROWS
def test_capabilities_rows_name_existing_keys_and_values(row: Capability) -> None:
    for term in condition(row.when).terms:
        assert term.key in schema_keys()
        assert all(word in (choices_of(term.key) or ("true", "false")) for word in term.words)


@ROWS
def test_capabilities_explain_names_release_and_installed(
    row: Capability, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _here(monkeypatch, (0, 16, 1))
    assert main(["explain", row.keys[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["release"] == [
        f"{row.when}: megatron-core {row.versions}; 0.16.1 is installed"
    ]


def test_capabilities_engines_lists_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for release, here in (((0, 16, 1), False), ((0, 19, 2), True)):
        _here(monkeypatch, release)
        assert main(["engines", "--json"]) == 0
        rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["capabilities"]
        assert {row["when"]: row["is_here"] for row in rows} == dict.fromkeys(ASKED, here)


def test_capabilities_run_record_names_loaded_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put another megatron-core in front of the installed one, and expect its version."""
    assert engine.version() == engine.words(engine.release() or (0, 0, 0))
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 7\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    engine.release.cache_clear()
    try:
        assert lock.versions()["megatron-core"] == folder.versions()["megatron-core"] == "0.19.7"
    finally:
        engine.release.cache_clear()
