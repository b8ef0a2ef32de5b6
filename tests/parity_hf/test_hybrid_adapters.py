"""Adapters of hybrids: merged, exported for `peft` over transformers, and imported again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity_hf.test_hybrid import saved
from tests.parity_hf.test_peft import logits_of, trained
from tests.parity_hf.two_steps import convert
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks

EVERY = "peft.target=[qkv,proj,fc1,fc2,in_proj,out_proj,experts]"
ADAPTED = {
    "nemotron h": "peft=dora",
    "granite experts": f"peft=lora {EVERY}",
    "mamba 2": "peft=lora",
}


@pytest.mark.parametrize("name", some(ADAPTED, []))
def test_hybrid_adapters_round_trip_through_peft(name: str, tmp_path: Path) -> None:
    base, run, merged, alone, again = (
        tmp_path / part for part in ("base", "run", "merged", "alone", "again")
    )
    saved(name, base)
    given = [*ADAPTED[name].split(), "peft.r=4", "peft.alpha=10.5"]
    assert convert("import", base, run, *given) == 0
    run_ranks(1, lambda: trained(run))
    assert convert("export", run, merged) == 0
    assert convert("export", run, alone, "peft=0.19") == 0

    def apart() -> tuple[float, float]:
        whole = logits_of(merged, None)
        others = logits_of(base, alone), logits_of(base, None)
        return tuple(float((other - whole).abs().max() / whole.abs().max()) for other in others)  # type: ignore[return-value]

    error, change = run_alone(apart)
    assert error < 1e-5 < 1e-2 < change
    assert convert("import", base, again, *given, f"peft.init_from={alone}") == 0

    def tensors(folder: Path) -> dict[str, Tensor]:
        from mtrain.train.verify.prove import whole_tensors

        return {
            key: tensor for key, tensor in whole_tensors(folder).items() if key.startswith("model/")
        }

    first, second = (
        run_alone(lambda at=at: tensors(at))
        for at in (run / "checkpoints/step_00000001", again / "checkpoints/step_00000000")
    )
    assert first.keys() == second.keys()
    assert any("mixer.in_proj.lora_b" in key for key in first)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.full
def test_hybrid_adapters_refused_by_peft_are_merged_or_dropped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = ("peft=lora", "peft.target=[out_proj]")
    assert convert("import", saved("mamba 2", tmp_path / "base"), run, *given) == 0
    run_ranks(1, lambda: trained(run))
    assert convert("export", run, tmp_path / "alone", "peft=0.19") == 2
    assert convert("export", run, tmp_path / "merged") == 0
