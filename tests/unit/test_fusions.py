"""Fusions of a kernel with its neighbours, and the obstacles to them, in the reasons of a run."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.engine.kernels import fusions
from mtrain.config.rules import apply
from mtrain.models.hybrid.config import HybridConfig
from tests.support.runs import tiny_run

HYBRID = HybridConfig(pattern="M*", num_heads=8)
TRITON = {"kernels.norm": "triton", "kernels.rope": "triton"}


def test_fusions_silent_where_triton_has_none() -> None:
    assert fusions(tiny_run()) == {}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({}, "norm", "makes the sums"),
        ({}, "rope", "as it unpacks"),
        ({"model.hidden_dropout": 0.1}, "norm", "hidden_dropout 0.1 lies between"),
        ({"parallel.fsdp": "fsdp2"}, "norm", "fsdp2 gathers a layer"),
        ({"data.packed": True}, "rope", "each document begin at 0"),
        (
            {"model.qk_layernorm": True, "kernels.norm": "reference"},
            "rope",
            "kernels.norm is reference",
        ),
        (
            {"model.qk_layernorm": True, "model.qk_layernorm_across_heads": True},
            "rope",
            "not RMSNorm of each head",
        ),
        ({"model.attention_output_gate": True}, "rope", "gates stand between queries and keys"),
        ({"model.hybrid": HYBRID}, "rope", "hybrids norm and turn apart"),
        ({"model.hybrid": HYBRID}, "norm", "hybrids make it apart"),
        (
            {"parallel.ranks": 8, "parallel.tp": 8},
            "rope",
            "num_query_groups 4 are fewer than parallel.tp 8",
        ),
    ],
)
def test_fusions_report_fusion_or_reason(change: dict[str, Any], name: str, words: str) -> None:
    assert words in fusions(apply(tiny_run(), {**TRITON, **change}))[name]
