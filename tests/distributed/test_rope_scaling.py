"""Rotary positions for longer sequences: every kind moves the numbers, alike in every layout and
kernel.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.rules import apply
from mtrain.config.schema.rope_scaling import RopeScalingConfig
from tests.support.runs import tiny_run, trained

WHOLE: dict[str, Any] = {"original_max_position_embeddings": 16}
YARN: dict[str, Any] = {"beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}
KINDS: dict[str, dict[str, Any]] = {
    "llama3": {**WHOLE, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0},
    "yarn": {**WHOLE, **YARN, "factor": 4.0},
    "longrope": {
        **WHOLE,
        "factor": 4.0,
        "short_factor": (1.0,) * 4,
        "long_factor": (1.0, 1.5, 3.0, 9.0),
    },
    "dynamic": {"factor": 4.0},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "cp2": {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"},
}


def _model(kind: str) -> dict[str, Any]:
    scaling = RopeScalingConfig(rope_type=kind, **KINDS[kind])  # type: ignore[arg-type]
    return {"rope_scaling": scaling, "init_method_std": 0.2, "max_position_embeddings": 16}


def _same(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> bool:
    return all(x == pytest.approx(y, rel=1e-5) for x, y in zip(a, b, strict=True))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=pytest.mark.full if (i + j) % 2 else ())
        for i, kind in enumerate(KINDS)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_rope_scaling_trains_alike_in_every_layout(kind: str, layout: str) -> None:
    found = trained(tiny_run(model=_model(kind)), 2)
    plain = trained(tiny_run(model={**_model(kind), "rope_scaling": None}), 2)
    assert not _same(found[:1], plain[:1])
    assert _same(trained(tiny_run(model=_model(kind), **LAYOUTS[layout]), 2), found)


@pytest.mark.full
def test_rope_scaling_reaches_packed_documents_and_last_stage() -> None:
    run = tiny_run(model={**_model("yarn"), "mtp_num_layers": 1}, ranks=1)
    packed = {"data.packed": True}
    found = trained(apply(run, packed), 2)
    for layout in ({"pp": 2}, {"cp": 2}):
        words = {f"parallel.{key}": value for key, value in {**layout, "ranks": 2}.items()}
        more = {"cluster.devices_per_node": 2} | (
            {"data.packed_multiple": 4} if "cp" in layout else {}
        )
        if "cp" not in layout:
            alone = found
        else:
            alone = trained(apply(run, packed | {"data.packed_multiple": 4}), 2)
        assert _same(trained(apply(run, packed | words | more), 2), alone)
