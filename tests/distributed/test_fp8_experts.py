"""Experts in 8 bits without TransformerEngine: the same in every layout, near bf16, quantised where
it has to be.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from mtrain_kernels.fp8_grouped import op

from mtrain.api import load
from mtrain.config.rules import apply
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.run import RunConfig
from mtrain.launching import prove
from tests.distributed.test_fp8_linear import WIDE, assert_stays_near_bf16, counted, fp8
from tests.distributed.test_fp8_operands import SMALL
from tests.support.cases import cases_of
from tests.support.commands import STEPS_ONLY
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run

MOE = "model=mixtral_tiny"
PROVEN = cases_of("fp8_experts")


def _proven(words: str) -> dict[str, prove.Row]:
    argv = [*words.split(), "kernels=reference"]
    full = load(argv).run
    assert prove.formats(full) == ["fp32", "bf16", "fp8"]
    return {row.what: row for row in prove.compared(prove.comparable(full, argv, 2, "fp8"))}


@pytest.mark.full
@pytest.mark.parametrize("name", some(PROVEN, ["tensor, tp2 ep2"]))
def test_fp8_experts_layout_is_proven(name: str) -> None:
    rows = _proven(PROVEN[name])
    assert all(row.equal for row in rows.values()), prove.table(list(rows.values()))


@pytest.mark.full
def test_fp8_experts_row_dependent_scales_are_not_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_engine()
    from mtrain_kernels.quantize import reference

    exact = reference.multiplier
    monkeypatch.setattr(
        reference, "multiplier", lambda amax, format, scale="fp32": exact(amax, format)
    )
    rows = _proven(PROVEN["tensor, dp2 ep2"])
    assert rows["gradient"].error > 2 * rows["gradient"].tolerance


def mixture(**parallel: Any) -> RunConfig:
    moe = MoEConfig(num_experts=4, ffn_hidden_size=32)
    return fp8(tiny_run(model={"num_layers": 1, "moe": moe}, **parallel), "tensorwise")


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_fp8_experts_weights_are_quantised_once_a_step(recompute: bool) -> None:
    full = {"granularity": "full", "method": "uniform", "num_layers": 1}
    run = apply(
        mixture(), {f"parallel.recompute.{key}": value for key, value in full.items() if recompute}
    )
    micro = run.trainer.batch // run.trainer.micro
    assert micro > 1

    jobs = (partial(counted, run, op, "quantize_weights", gone) for gone in (None, "weights_stay"))
    once, again = (run_ranks(1, job)[0] for job in jobs)
    assert once[0] == again[0]
    assert once[1] == 2 * 2
    assert again[1] == 2 * 2 * micro * (2 if recompute else 1)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_blockwise"])
def test_fp8_experts_triton_stays_near_emulation(precision: str) -> None:
    from tests.support import interpreted

    base = [
        "data=mock",
        "data.seq_length=32",
        "trainer.train_iters=10",
        "trainer.global_batch_size=1",
        MOE,
        "trainer.micro_batch_size=1",
        "trainer.seed=2",
        *STEPS_ONLY,
        "model.num_layers=1",
        "model.hidden_size=64",
        "model.ffn_hidden_size=64",
        "model.vocab_size=128",
        "model.moe.ffn_hidden_size=64",
        "precision.num_layers_at_start_in_bf16=0",
        "precision.num_layers_at_end_in_bf16=0",
        "parallel=tp2ep2sp",
        "parallel.etp=1",
        f"precision={precision}",
    ]
    values = interpreted.trained(
        {k: [*base, f"kernels={k}"] for k in ("reference", "triton")}, timeout_s=500
    )
    ours = values["triton"]
    right = values["reference"]
    assert len(ours) == len(right) == 20
    assert ours[:10] == pytest.approx(right[:10], rel=2e-3)
    assert ours != right, "not one bit differs, so Triton did nothing"


KEPT = {
    "in bf16": ("parallel=single", "precision=bf16"),
    "in 8 bits": ("parallel=single", "precision=fp8_tensorwise"),
    "shared experts, blocks": (
        "parallel=single",
        "precision=fp8_blockwise",
        "model.moe.shared_expert_intermediate_size=128",
    ),
    "activations again": (
        "parallel=single",
        "precision=fp8_tensorwise",
        "parallel.recompute.granularity=selective",
        "parallel.recompute.modules=[moe_act]",
    ),
}


@pytest.mark.full
def test_fp8_experts_triton_keeps_planned_bytes() -> None:
    """Subtract the planned bytes of the other layers, which are the same in bf16."""
    from tests.support import operands

    found = {
        name: how["together"]
        for name, how in operands.both({name: [*words(name), MOE] for name in KEPT}).items()
    }
    off = {name: one["planned"] + one["copies"] - one["keeps"] for name, one in found.items()}
    for name, one in found.items():
        assert off[name] == pytest.approx(off["in bf16"], abs=0.02 * one["keeps"]), name
    again, kept = (found[name]["keeps"] for name in ("activations again", "in 8 bits"))
    # of the second layer
    assert kept - again == pytest.approx(128 * ((128 * 2 + 127 * 4) // 128 * 128), abs=64)


def words(name: str) -> list[str]:
    """Return the words for a layer of four experts, with those of a case."""
    said = {word.partition("=")[0] for word in KEPT[name]} | {"data.seq_length"}
    more = [word for word in SMALL if word.partition("=")[0] not in said]
    return [
        *more,
        "data.seq_length=128",
        "model.moe.ffn_hidden_size=128",
        "model.moe.num_experts=4",
        *KEPT[name],
    ]


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_fp8_experts_200_steps_stay_near_bf16(recipe: str) -> None:
    wide = {**WIDE, "hidden_size": 128, "ffn_hidden_size": 128}
    assert_stays_near_bf16({**wide, "moe": MoEConfig(num_experts=4, ffn_hidden_size=128)}, recipe)
