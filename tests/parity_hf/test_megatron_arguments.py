"""A checkpoint for Megatron-LM whose arguments say another network is refused by name, and its own
comes back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.cli.main import main
from tests.parity_hf.test_convert import command, data_of, saved
from tests.support.forked import run_alone
from tests.support.launched import mtrain

CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "rope scaling": (
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
        "model.rope_scaling_factor=8",
    ),
    "activation": ({"swiglu": False, "quick_geglu": True}, "model.activation=quick_geglu"),
    "window": ({"window_size": [15, 0]}, "model.window_size=16"),
    "a part that is not there": (
        {"apply_residual_connection_post_layernorm": True},
        "mtrain has no such part of the network",
    ),
}


@pytest.mark.full
def test_megatron_arguments_of_another_network_are_refused(tmp_path: Path) -> None:
    source = saved("llama 3", tmp_path / "theirs")
    run = tmp_path / "run"
    there = tmp_path / "megatron"
    recipe = tmp_path / "model.yaml"
    common = there / "release/common.pt"
    assert command("import", source, run) == 0
    assert command("export", "--megatron", run, there) == 0
    assert (
        run_alone(
            lambda: main(["recipe", "import", str(source / "config.json"), "-o", str(recipe)])
        )
        == 0
    )
    kept = torch.load(common, weights_only=False)  # which this test wrote
    words = (
        "convert",
        "import",
        "--megatron",
        str(there),
        str(tmp_path / "back"),
        f"recipe={recipe}",
    )
    for changed, said in CHANGED.values():
        for name, value in changed.items():
            setattr(kept["args"], name, value)
        torch.save(kept, common)
        done = mtrain(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert not (tmp_path / "back").exists()
        kept = torch.load(common, weights_only=False)
        for name in changed:
            setattr(kept["args"], name, {"swiglu": True}.get(name))
    torch.save(kept, common)
    assert command("import", "--megatron", there, tmp_path / "back", f"recipe={recipe}") == 0
    assert command("export", tmp_path / "back", tmp_path / "again") == 0
    assert data_of(tmp_path / "again") == data_of(source)
