"""Products in 8 and 4 bits: what each recipe needs, in numbers, and what to take instead."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.engine.core_fields import transformer_values
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import apply
from mtrain.errors import ConfigError
from mtrain.plan.shrink import shrink
from tests.support.configs import LAPTOP, MOE, errors, first_fix, tiny, validate
from tests.support.tables import tables

TABLES = tables("rules_quantized")

H100: dict[str, Any] = {"cluster.device": "cuda", "cluster.devices_per_node": 1, "cluster.sm": 90}
B200 = {**H100, "cluster.sm": 100}
TE = {"kernels.linear": "te"}
FP8: dict[str, Any] = {"precision.dtype": "bf16", "precision.fp8": "hybrid", **H100}
FP4: dict[str, Any] = {"precision.dtype": "bf16", "precision.fp4": "e2m1", **B200}
DELAYED = {
    **FP8,
    "precision.fp8_recipe": "delayed",
    "checkpoint.save_final": False,
    "checkpoint.save_interval": 0,
}
BROKEN: list[tuple[str, str, dict[str, Any]]] = TABLES["broken"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("code", "words", "change"), BROKEN, ids=lambda v: str(v)[:40])
def test_quantized_missing_requirement_has_working_fix(
    code: str, words: str, change: dict[str, Any]
) -> None:
    raw = apply(tiny(), change)
    found = [p for p in errors(raw) if p.code == code and words in p.rule]
    assert found, errors(raw)
    after = errors(apply(raw, first_fix(found[0])))
    assert code not in {p.code for p in after}
    assert {(p.code, p.path) for p in after} < {(p.code, p.path) for p in errors(raw)}


@pytest.mark.parametrize(
    "change",
    TABLES["complete"],
    ids=lambda v: str(v)[-60:],
)
def test_quantized_complete_recipe_has_no_problem(change: dict[str, Any]) -> None:
    assert validate(apply(tiny(), change)) == []


@pytest.mark.parametrize("choice", ["fp8_delayed", "mxfp8", "nvfp4"])
def test_quantized_cpu_needs_are_one_line_with_bf16_fix(
    choice: str,
) -> None:
    raw = compose([f"precision={choice}", "cluster=cpu"]).run
    (problem,) = errors(raw)
    assert problem.code == "MT442"
    assert "runs on cuda, and the device is cpu" in problem.rule
    assert problem.fix.endswith(" or precision=bf16")
    assert errors(apply(raw, first_fix(problem))) == []
    assert errors(compose(["precision=bf16", "cluster=cpu"]).run) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
@pytest.mark.parametrize("choice", ["fp8_tensorwise", "fp8_blockwise"])
def test_quantized_own_gemm_needs_no_te(choice: str, kernels: str) -> None:
    for cluster in ("cpu", "h100x8"):
        for model in ("llama_tiny", "mixtral_tiny"):
            words = [
                f"precision={choice}",
                f"cluster={cluster}",
                f"kernels={kernels}",
                "data=mock",
                f"model={model}",
            ]
            assert errors(compose(words).run) == []


def test_quantized_experts_use_linear_backend() -> None:
    machine = Machine(
        gpus=1, cpu_cores=8, memory_bytes=1 << 36, triton=True, transformer_engine=True
    )
    raw = apply(tiny(), {**FP8, "model.moe": MOE})
    for linear, experts in ((None, "te"), ("triton", "triton")):
        run = resolve(apply(raw, {"kernels.linear": linear}), machine)
        assert (run.kernels.linear, run.kernels.experts) == (linear or "te", experts)
        assert errors(run) == []


@pytest.mark.parametrize(
    ("choice", "cluster", "codes"),
    [
        ("fp8_delayed", "h100x8", set()),
        ("fp8_tensorwise", "l40sx8", set()),
        ("fp8_blockwise", "l40sx8", {"MT443"}),
        ("fp8_blockwise", "h200x8", set()),
        ("mxfp8", "h100x8", {"MT443"}),
        ("mxfp8", "b200x8", set()),
        ("nvfp4", "gb200x72", set()),
        ("nvfp4", "h100x8", {"MT443"}),
        ("fp8_tensorwise", "a100x8", {"MT443"}),
    ],
)
def test_quantized_cluster_has_recipes_of_its_generation(
    choice: str, cluster: str, codes: set[str]
) -> None:
    words = ["model=llama3_8b", "parallel=dp", "data=mock", "trainer.global_batch_size=72"]
    raw = compose([*words, f"precision={choice}", f"cluster={cluster}"]).run
    assert {p.code for p in errors(raw)} == codes


def test_quantized_misspelt_format_suggests_neighbour() -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["precision.fp8=e4m4"])
    assert [p.fix for p in refused.value.problems] == ["precision.fp8=e4m3"]


def test_quantized_null_means_shown_recipe() -> None:
    run = resolve(apply(tiny(), FP8), LAPTOP)
    assert run.precision.fp8_recipe == run.precision.quantized == "tensorwise"
    fields = transformer_values(resolve(apply(tiny(), DELAYED), LAPTOP))
    assert (fields["fp8"], fields["fp8_recipe"], fields["fp8_amax_history_len"]) == (
        "hybrid",
        "delayed",
        1024,
    )


def test_quantized_cpu_rehearsal_uses_full_precision() -> None:
    small = shrink(resolve(apply(tiny(), {**FP8, **TE}), LAPTOP), steps=2)
    assert (small.precision.quantized, small.precision.dtype) == (None, "fp32")
    assert errors(small) == []


def test_quantized_uncheckpointed_scales_warn() -> None:
    (problem,) = validate(apply(tiny(), {**DELAYED, "checkpoint.save_final": True}))
    assert (problem.code, problem.severity) == ("MT448", "warning")
    assert (
        validate(apply(tiny(), {**DELAYED, "checkpoint.save_final": True, **first_fix(problem)}))
        == []
    )
