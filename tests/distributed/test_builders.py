"""A decoder-only transformer is the same, number by number, as megatron-core's GPTModel and as its
hybrid model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.schema.run import RunConfig
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.engine_runs import CASES as OF_BOTH_RELEASES
from tests.support.engine_runs import IN_HALVES
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

BUILDERS = ("gpt", "hybrid")
TOLERANCE = 1e-6
WORDS = (
    "data=mock data.seq_length=32 trainer.train_iters=2 trainer.global_batch_size=4"
    " trainer.micro_batch_size=1 trainer.eval_iters=0 optim.warmup_iters=0 cluster=cpu"
    " kernels=reference"
)
DEEPSEEK = "model=deepseek_tiny model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"
LAYOUTS = cases_of("builders")


def built_as(builder: str, words: str) -> RunConfig:
    said = {word.partition("=")[0] for word in words.split()}
    base = [word for word in WORDS.split() if word.partition("=")[0] not in said]
    return load([*words.split(), *base, f"model.builder={builder}"]).run


def _steps(run: RunConfig, home: Path) -> tuple[list[tuple[float, float]], int]:
    """Return two steps, with a checkpoint after each, and the number of layers in the first chunk
    of this rank; a job for a rank.
    """
    from mtrain.assembly.model import build_model
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.world.init import joined

    with joined(run) as world:
        layers = len(unwrap(build_model(run, world, drawn=False)[0]).decoder.layers)
    return train_steps(run, 2, save_to=home, save_after=1), layers


def _saved(
    run: RunConfig, steps: int, home: Path, begin: Path | None = None
) -> list[tuple[float, float]]:
    return train_steps(run, steps, load_from=begin, save_to=home)


def _far(left: Any, right: Any) -> float:
    pairs = [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a / b - 1) for a, b in pairs)


@pytest.mark.engine
@pytest.mark.parametrize("name", some(LAYOUTS, ["experts ep2"]))
def test_builders_make_equal_steps_and_resume_each_other(name: str, tmp_path: Path) -> None:
    runs = {builder: built_as(builder, LAYOUTS[name]) for builder in BUILDERS}
    ranks = runs["gpt"].parallel.ranks or 1
    made = {
        builder: run_ranks(ranks, _steps, run, tmp_path / builder) for builder, run in runs.items()
    }
    assert _far(made["gpt"][0][0], made["hybrid"][0][0]) < TOLERANCE
    assert [2 * layers for _, layers in made["gpt"]] == [layers for _, layers in made["hybrid"]]
    for reads, wrote in (BUILDERS, BUILDERS[::-1]):
        saved = tmp_path / wrote / "step_00000001"
        again = tmp_path / f"{reads} of {wrote}"

        def job(
            run: RunConfig = runs[reads], saved: Path = saved, again: Path = again
        ) -> list[tuple[float, float]]:
            return train_steps(run, 1, load_from=saved, save_to=again, save_after=0)

        assert _far(run_ranks(ranks, job)[0], made[wrote][0][0][1:]) < TOLERANCE
        expected = whole_tensors(saved)
        found = whole_tensors(again / saved.name)
        assert expected.keys() == found.keys()
        assert [
            key for key, tensor in expected.items() if not torch.equal(tensor, found[key])
        ] == []


@pytest.mark.full
@pytest.mark.parametrize("name", IN_HALVES)
def test_builders_make_twenty_equal_steps(name: str) -> None:
    case = OF_BOTH_RELEASES[name]
    runs = [
        tiny_run(**(case | {"model": {**case["model"], "builder": builder}}))
        for builder in BUILDERS
    ]
    left, right = (run_ranks(run.parallel.ranks or 1, train_steps, run, 20)[0] for run in runs)
    assert len(left) == 20
    assert _far(left, right) < TOLERANCE


def test_builders_swapped_block_numbers_are_found() -> None:
    def job(builder: str) -> list[tuple[float, float]]:
        from mtrain.mcore.models import block_model

        block_model.BlockLayer.number = lambda self, layer_number: 5 - (layer_number + 1) // 2  # type: ignore[method-assign]
        return train_steps(built_as(builder, LAYOUTS["windows"]), 1)

    left, right = (run_ranks(1, job, builder)[0] for builder in BUILDERS)
    assert _far(left, right) > 10 * TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    "words", ["model=qwen3_next_tiny parallel=tp2", f"{DEEPSEEK} parallel=pp2"]
)
def test_builders_write_equal_hf_folders_readable_by_either(words: str, tmp_path: Path) -> None:
    def convert(*said: object) -> None:
        assert run_alone(lambda: main(["convert", *map(str, said)])) == 0

    for builder in BUILDERS:
        run_ranks(2, _saved, built_as(builder, words), 1, tmp_path / builder)
        convert("export", tmp_path / builder / "step_00000001", tmp_path / f"{builder} folder")
    one, other = (tmp_path / f"{builder} folder/model.safetensors" for builder in BUILDERS)
    assert one.read_bytes() == other.read_bytes()
    convert("import", other.parent, tmp_path / "run")
    run = built_as("hybrid", f"run={tmp_path}/run/run.yaml {words.split()[-1]}")
    begin = tmp_path / "run/checkpoints/step_00000000"
    run_ranks(2, _saved, run, 0, tmp_path / "again", begin)
    expected = whole_tensors(tmp_path / "gpt/step_00000001")
    found = whole_tensors(tmp_path / "again/step_00000000")
    assert all(
        torch.equal(found[key], tensor)
        for key, tensor in expected.items()
        if key.startswith("model/")
    )
