"""Folders of T5 that `convert export` writes: ids of its config, and the run that its logits are
computed with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.cli import convert
from mtrain.config.schema.run import RunConfig
from tests.support.configs import LAPTOP


@pytest.fixture(scope="module")
def run() -> RunConfig:
    """Return a run with samples shorter than those that null means on a CPU."""
    return load(
        ["model=t5_tiny", "data=mock", "data.seq_length=64", "parallel=single"], LAPTOP, {}
    ).run


def test_convert_t5_export_keeps_begin_and_end_ids(run: RunConfig, tmp_path: Path) -> None:
    kind, body = convert._config_of(run, tmp_path, None)
    assert (kind, body["bos_token_id"]) == ("t5", None)
    convert._write_companions(tmp_path, tmp_path / "home", body)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / name).read_text())
        ids = [said[key] for key in ("decoder_start_token_id", "pad_token_id", "eos_token_id")]
        assert ids == [4096, 4096, 4097], name


def test_convert_t5_logits_ignore_sample_length_and_runs_dir(
    run: RunConfig,
) -> None:
    elsewhere = run.log.model_copy(update={"runs_dir": "/elsewhere"})
    plain = convert._plain(run.model_copy(update={"log": elsewhere}), ["data.seq_length=null"])
    assert plain.model.t5 is not None
    assert (
        plain.data.seq_length,
        plain.model.t5.encoder_length,
        plain.model.t5.decoder_length,
    ) == (256, 232, 56)
