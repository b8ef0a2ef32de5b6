"""The micro-batch and the recomputation that a run leaves open make a step fit, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.config.compose.dump import run_yaml
from mtrain.loading.checkpoints import relaid
from mtrain.loading.configuration import Loaded, load
from mtrain.plan.fits import SPARE
from mtrain.plan.rank import worst_stage
from mtrain.plan.tune.space import changed
from mtrain.units import GIB
from tests.support.configs import LAPTOP

H100 = 80 * GIB
MICRO = "trainer.micro_batch_size"


def loaded(words: str) -> Loaded:
    return load(["data=mock", *words.split()], LAPTOP, {}, to_run=False)


def warned(found: Loaded) -> list[str]:
    return [problem.rule for problem in found.warnings if problem.code == "MT146"]


@pytest.mark.parametrize(
    ("words", "micro", "recomputes"),
    [
        ("model=llama2_7b parallel=dp8 cluster=h100x8", 1, False),
        ("model=llama2_7b parallel=tp2 cluster=h100x8", 4, False),
        ("model=llama3_70b parallel=tp4pp4 cluster=h100x64", 1, True),
        ("model=mixtral_8x7b parallel=tp2pp4 parallel.ep=8 cluster=h100x64", 1, False),
        ("model=qwen3_30b_a3b parallel=ep16 cluster=h100x16", 1, True),
    ],
)
def test_plan_fitted_largest_micro_batch_that_fits(
    words: str, micro: int, *, recomputes: bool
) -> None:
    found = loaded(words)
    room = H100 * (1 - SPARE)
    run = found.run
    assert run.trainer.micro == micro
    assert (run.parallel.recompute.granularity != "none") is recomputes
    assert worst_stage(run).peak <= room
    assert not warned(found)
    if run.parallel.pp == 1:
        assert worst_stage(changed(run, {MICRO: 2 * micro})).peak > room
    if recomputes:
        none = dict.fromkeys(("modules", "method", "num_layers")) | {"granularity": "none"}
        kept = {f"parallel.recompute.{key}": value for key, value in none.items()}
        assert worst_stage(changed(run, kept)).peak > room


def test_plan_fitted_small_model_has_at_most_65536_tokens() -> None:
    run = loaded("model=smollm2_135m parallel=dp8 cluster=h100x8").run
    assert run.trainer.micro * run.data.length == 1 << 16


@pytest.mark.parametrize(
    "words",
    [
        "trainer.micro_batch_size=2 parallel.recompute.granularity=none",
        "trainer.micro_batch_size=2 parallel.recompute.granularity=selective",
    ],
)
def test_plan_fitted_set_values_stay(words: str) -> None:
    found = loaded(f"model=llama2_7b parallel=dp8 cluster=h100x8 {words}")
    assert found.run.trainer.micro == 2
    assert found.run.parallel.recompute.granularity == words.rpartition("=")[2]
    assert warned(found)


def test_plan_fitted_set_micro_batch_is_recomputed() -> None:
    found = loaded("model=llama2_7b parallel=dp8 cluster=h100x8 trainer.micro_batch_size=2")
    assert found.run.parallel.recompute.granularity != "none"
    assert not warned(found)


def test_plan_fitted_hopeless_model_still_warns() -> None:
    found = loaded("model=llama3_70b parallel=tp4pp4 cluster=h100x16")
    assert found.run.parallel.recompute.granularity == "none"
    assert "no recomputation suffices" in found.origins["parallel.recompute.granularity"]
    assert warned(found)


def test_plan_fitted_budget_bounds_a_cpu() -> None:
    free = loaded("model=llama_tiny cluster=cpu parallel=tp2").run
    assert free.parallel.recompute.granularity == "none"
    peak = worst_stage(free).peak / GIB
    tight = f"parallel.recompute.budget_gib={peak}"
    run = loaded(f"model=llama_tiny cluster=cpu parallel=tp2 {MICRO}={free.trainer.micro} {tight}")
    assert run.run.parallel.recompute.granularity != "none"
    assert worst_stage(run.run).peak <= (1 - SPARE) * peak * GIB


def test_plan_fitted_budget_bounds_a_device() -> None:
    words = "model=llama2_7b parallel=dp8 cluster=h100x8 parallel.recompute"
    found = loaded(f"{words}.granularity=auto {words.split()[-1]}.budget_gib=60")
    assert worst_stage(found.run).peak <= 60 * GIB
    none = loaded(f"{words}.granularity=none {words.split()[-1]}.budget_gib=60")
    assert "parallel.recompute.budget_gib is 60.0 GiB" in warned(none)[0]


@pytest.mark.parametrize(("layers", "reset"), [(6, True), (None, False)])
def test_plan_fitted_other_layout_chooses_layers_again(
    layers: int | None, tmp_path: Path, *, reset: bool
) -> None:
    words = "model=llama3_70b parallel=tp4pp4 cluster=h100x64 parallel.recompute.granularity=full"
    if layers:
        words += f" parallel.recompute.method=block parallel.recompute.num_layers={layers}"
    (tmp_path / "run.yaml").write_text(run_yaml(loaded(words).run))
    found = relaid(tmp_path, ["parallel.pp=16"])
    assert found[0] == f"{MICRO}=null"
    assert ("parallel.recompute.num_layers=null" in found) is reset
    assert relaid(tmp_path, ["trainer.train_iters=9"]) == []


def test_plan_fitted_auto_is_chosen_by_tune_within_the_budget() -> None:
    words = "model=llama2_7b parallel=auto cluster=h100x8 parallel.recompute.granularity=auto"
    run = loaded(f"{words} parallel.recompute.budget_gib=40").run
    assert worst_stage(run).peak <= 40 * GIB * (1 - SPARE)
