"""Queries and keys normed and turned as they are unpacked: the same steps as norm, rotation and way
apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mtrain_kernels.rope import packed as op

from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

QWEN = {"qk_layernorm": True, "kv_channels": 16, "rotary_interleaved": False}
SP = {"ranks": 2, "tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "no norms": ({}, {}, True),
    "norms, tp2 sequence parallel": (QWEN, SP, True),
    "neighbours turn, half of a head": (
        {"rotary_interleaved": True, "rotary_percent": 0.5},
        {},
        True,
    ),
    "zero-centered norms, positions of windows apart": (
        {
            **QWEN,
            "layernorm_zero_centered_gamma": True,
            "window_size": 8,
            "window_attn_skip_freq": 2,
        }
        | {"rotary_base_local": 100.0},
        {},
        True,
    ),
    "cp2": (QWEN, {"ranks": 2, "cp": 2}, True),
    "dp2 overlapped": (
        QWEN,
        {
            "ranks": 2,
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        True,
    ),
    "layers computed again": (
        QWEN,
        {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}},
        True,
    ),
}


def _trained(run: RunConfig, folder: Path) -> tuple[list[tuple[float, float]], dict[str, Any], int]:
    def job() -> tuple[list[tuple[float, float]], int]:
        from mtrain.mcore.layers import cache

        made = [0]

        def counted(*args: Any, **given: Any) -> Any:
            made[0] += 1
            return op.rotate_packed(*args, **given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "rotate_packed", counted)
            values = train_steps(run, 3, gradients_to=folder)
        return values, made[0]

    values, made = run_ranks(run.parallel.ranks, job)[0]
    return values, whole_tensors(folder / "step_00000000"), made


def _apart(found: Any, right: Any) -> float:
    pairs = [
        (a, b) for x, y in zip(found[0], right[0], strict=True) for a, b in zip(x, y, strict=True)
    ]
    assert found[1].keys() == right[1].keys()
    worst = max(float((found[1][key] - g).norm() / g.norm()) for key, g in right[1].items())
    return max(worst, *(abs(a - b) / abs(b) for a, b in pairs))


@pytest.mark.parametrize("name", some(CASES, ["neighbours turn, half of a head"]))
def test_packed_positions_fused_rotation_trains_as_separate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parallel, _ = CASES[name]
    run = tiny_run(model=model, **parallel)
    right = _trained(run, tmp_path / "apart")
    monkeypatch.setattr("mtrain.models.gpt.build.positions_apart", lambda run: None)
    found = _trained(run, tmp_path / "packed")
    assert right[2] == 0
    assert found[2] > 0
    assert _apart(found, right) < 1e-5


def test_packed_positions_half_angle_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = _trained(tiny_run(), tmp_path / "apart")
    monkeypatch.setattr("mtrain.models.gpt.build.positions_apart", lambda run: None)
    whole = op.rotate_packed

    def slower(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **given: Any) -> Any:
        return whole(qkv, ((1 + cos) / 2).sqrt(), sin / 2, **given)

    monkeypatch.setattr(op, "rotate_packed", slower)
    assert _apart(_trained(tiny_run(), tmp_path / "slower"), right) > 1e-3
