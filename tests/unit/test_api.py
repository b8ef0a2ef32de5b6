"""The public Python API: each function, on the smallest run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtrain import api
from mtrain.errors import ConfigError

TINY = [
    "model=llama_tiny",
    "cluster=cpu",
    "data.seq_length=32",
    "trainer.train_iters=2",
    "trainer.micro_batch_size=1",
    "trainer.global_batch_size=2",
    "log.progress=none",
]
ONE = [*TINY, "parallel=single"]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo the variables that a run sets for the libraries of its ranks."""
    before = dict(os.environ)
    os.environ.pop("WORLD_SIZE", None)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_api_load_returns_a_resolved_configuration() -> None:
    loaded = api.load(ONE)
    assert loaded.run.trainer.global_batch_size == 2
    assert loaded.origins["data.seq_length"] == "command line"
    assert loaded.argv == tuple(ONE)
    assert api.load(to_run=False).argv == ()


def test_api_load_of_a_wrong_key_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="MT0"):
        api.load(["model.num_layer=3"])


def test_api_plan_counts_parameters_memory_and_time() -> None:
    loaded = api.load(["recipe=llama3/70b_h100x64"], to_run=False)
    facts = api.plan(loaded)
    assert 70e9 < facts["parameters"]["total"] < 71e9
    assert facts["memory"]["stages"]


def test_api_train_and_generate_return_folder_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = api.train(api.load(ONE))
    assert (folder / "run.yaml").is_file()
    written = api.generate(
        folder, ["import ", "def "], sampling=api.Sampling(tokens=3, temperature=0)
    )
    assert [one.prompt for one in written.texts] == ["import ", "def "]
    assert written.tokens == 6
    assert written.seconds > 0
    with pytest.raises(ConfigError, match="MT313"):
        api.generate(folder, ["x"], overrides=["parallel=cp2"])


@pytest.mark.full
def test_api_prove_compares_a_layout_with_one_rank() -> None:
    started: list[object] = []
    proof = api.prove(api.load([*TINY, "parallel=tp2"]), before=started.append)
    assert proof.equal
    assert [one.run for one in proof.comparisons] == started
    assert {row.what for row in proof.comparisons[0].rows} >= {"loss", "weight"}
    assert not proof.drew
