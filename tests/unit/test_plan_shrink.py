"""Shrinking keeps what decides which code runs, and always gives a configuration that passes the
rules.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from mtrain.api import load
from mtrain.config.compose.paths import choices_of_group, recipe_names
from mtrain.config.resolve.batches import counted
from mtrain.config.resolve.batches import stages as batch_stages
from mtrain.config.resolve.resolution import Machine
from mtrain.config.resolve.stages import stages
from mtrain.config.rules import apply, check
from mtrain.config.schema.optimizer import Rotated
from mtrain.errors import ConfigError
from mtrain.plan.count import parameters
from mtrain.plan.shrink import _sides, alone, differences, in_eight_bits, shrink
from mtrain.plan.states import update_of
from tests.support.covering import some_recipes
from tests.support.tables import tables

TABLES = tables("plan_shrink")

BIG = Machine(cpu_cores=1024, memory_bytes=1 << 50)
LONG = ["data.seq_length=256", "trainer.global_batch_size=64", "trainer.micro_batch_size=1"]
LAYOUTS = (
    "single",
    "dp2",
    "tp2",
    "tp2sp",
    "tp4pp2sp",
    "pp4",
    "pp2vpp2",
    "tp2cp2",
    "tp8",
    "tp2pp2dp2",
    "ep2",
    "tp2ep4sp",
)


def _pairs() -> list[Any]:
    """Return every model with every second layout, the next model with the others; `make test`
    takes an eighth of them.
    """
    pairs = itertools.product(enumerate(choices_of_group("model")), enumerate(LAYOUTS))
    return [
        pytest.param(model, layout, marks=pytest.mark.full if (i + j) % 16 else ())
        for (i, model), (j, layout) in pairs
        if (i + j) % 2 == 0
    ]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("model", "layout"), _pairs())
def test_shrink_models_are_valid_in_every_layout(model: str, layout: str) -> None:
    words = [
        f"model={model}",
        f"parallel={layout}",
        "data=mock",
        "data.seq_length=1024",
        "trainer.global_batch_size=64",
    ]
    try:
        full = load(words, BIG, {}).run
    except ConfigError:
        return  # the model does not allow the layout
    small = shrink(full, steps=3)
    assert [p for p in check(small) if p.severity == "error"] == []
    assert [p for p in check(alone(small)) if p.severity == "error"] == []
    for degree in ("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel"):
        assert getattr(small.parallel, degree) == getattr(full.parallel, degree)
    kept = (
        "normalization",
        "activation",
        "add_bias_linear",
        "qk_layernorm",
        "tie_word_embeddings",
        "gated",
    )
    assert all(getattr(small.model, key) == getattr(full.model, key) for key in kept)
    assert (small.model.moe is None, small.model.mla is None) == (
        full.model.moe is None,
        full.model.mla is None,
    )
    assert parameters(small.model) < 5_000_000
    assert small.parallel.ranks is not None
    assert small.parallel.ranks <= 16


@pytest.mark.full
def test_shrink_half_of_models_allow_each_layout() -> None:
    """Show that the test above proves something: not every configuration is refused."""
    models = choices_of_group("model")[::6]
    for layout in ("tp2sp", "pp4", "tp4pp2sp"):
        allowed = 0
        for model in models:
            try:
                load(
                    [
                        f"model={model}",
                        f"parallel={layout}",
                        "data=mock",
                        "trainer.global_batch_size=64",
                    ],
                    BIG,
                    {},
                )
                allowed += 1
            except ConfigError:
                pass
        assert allowed >= len(models) // 2, layout


def test_shrink_reports_changes() -> None:
    full = load(["model=llama3_8b", "parallel=tp2", "data=mock"], BIG, {}).run
    told = differences(full, shrink(full, steps=3))
    assert "model.num_layers: 32 -> 2" in told
    assert any(line.startswith("model.hidden_size: 4096 -> ") for line in told)


ASKED = TABLES["asked"]


@pytest.mark.parametrize("name", ASKED)
def test_shrink_keeps_requested_values(name: str) -> None:
    full = load([*ASKED[name], "trainer.global_batch_size=64"], BIG, {}).run
    small = shrink(full, steps=3)
    assert [p for p in check(small) if p.severity == "error"] == []
    asked = [word.partition("=")[0] for word in ASKED[name] if "." in word.partition("=")[0]]
    kept = {key: small.flat()[key] for key in asked}
    assert None not in kept.values()
    assert all(value is not False for value in kept.values())
    if full.parallel.pipeline_layout or full.parallel.layers_per_stage:
        sizes = [[len(s.layers) for s in stages(run)] for run in (full, small)]
        assert [n > min(sizes[0]) for n in sizes[0]] == [n > min(sizes[1]) for n in sizes[1]], (
            "which stage is larger"
        )


READ: dict[str, dict[str, Any]] = TABLES["read"]


@pytest.mark.parametrize("name", READ)
def test_shrink_replaces_data_with_synthetic_tokens(name: str) -> None:
    full = load(["data=mock"], BIG, {}).run
    full = apply(full, {"data": {**full.data.model_dump(), "kind": "indexed", **READ[name]}})
    small = shrink(full, steps=3)
    assert [p for p in check(small) if p.severity == "error"] == []
    assert small.data.packed == full.data.packed


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", some_recipes(recipe_names()))
def test_shrink_every_recipe_is_valid(recipe: str) -> None:
    full = load([f"recipe={recipe}"], BIG, {}).run
    small = shrink(full, steps=3)
    assert [p for p in check(small) if p.severity == "error"] == []
    assert [p for p in check(alone(small)) if p.severity == "error"] == []
    groups = [
        run.parallel.microbatch_group_size_per_vp_stage == run.parallel.pp for run in (full, small)
    ]
    assert groups == [full.parallel.vpp > 1, small.parallel.vpp > 1], (
        "as many micro-batches in turn as stages"
    )


@pytest.mark.parametrize(
    ("words", "group"),
    TABLES["groups"],
)
def test_shrink_micro_batch_groups_follow_pipeline(words: list[str], group: int | None) -> None:
    full = load([*words, *LONG], BIG, {}).run
    small = shrink(full, steps=3, max_ranks=full.parallel.model_ranks // 2 if group else 1)
    assert [p for p in check(small) if p.severity == "error"] == []
    assert small.parallel.microbatch_group_size_per_vp_stage == group


@pytest.mark.parametrize(
    ("recipe", "degrees"),
    [
        ("deepseek/v3_h100x1024", {"tp": 2, "pp": 4, "ep": 4, "vpp": 4}),
        ("mixtral/8x7b_h100x64", {"tp": 1, "pp": 4, "ep": 4}),
        ("llama3/70b_h100x64", {"tp": 4, "pp": 4}),
        ("llama31/8b_128k_h100x64", {"tp": 4, "cp": 4}),
    ],
)
def test_shrink_excess_ranks_halve_axes_but_keep_them(recipe: str, degrees: dict[str, int]) -> None:
    full = load([f"recipe={recipe}"], BIG, {}).run
    small = shrink(full, steps=3)
    assert {axis: getattr(small.parallel, axis) for axis in degrees} == degrees
    assert small.parallel.ranks == 16
    said = " ".join(differences(full, small))
    for axis, degree in degrees.items():
        assert (f"parallel.{axis}: " in said) == (getattr(full.parallel, axis) != degree)


@pytest.mark.parametrize(
    "ramp", ["trainer.rampup_batch_size=[8,8,640]", "trainer.batch_size_schedule=[[8,99999]]"]
)
@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2"])
def test_shrink_growing_batch_still_grows(ramp: str, layout: str) -> None:
    words = [ramp, f"parallel={layout}", "data=mock", *LONG]
    small = shrink(load(words, BIG, {}).run, steps=3)
    assert [p for p in check(small) if p.severity == "error"] == []
    sizes = [size for _, size in counted(batch_stages(small), 3)]
    assert len(sizes) == 2
    assert sizes[0] < sizes[1] == small.trainer.global_batch_size


ZERO_BF16 = ["precision=bf16", "parallel.distributed_optimizer=true"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "words",
    [["optim=adamw_bf16", *ZERO_BF16], ["optim=muon", "precision=bf16"], ["optim=adamw_offload"]],
    ids=str,
)
def test_shrink_every_optimizer_stays_comparable(words: list[str], dtype: str) -> None:
    full = load([*words, "parallel=dp2", "data=mock", *LONG], BIG, {}).run
    small = shrink(full, steps=3, dtype=dtype)
    assert [p for p in check(small) if p.severity == "error"] == []
    assert [p for p in check(alone(small)) if p.severity == "error"] == []
    assert small.optim.in_low_precision == (full.optim.in_low_precision and dtype == "bf16")
    assert small.optim.muon.ns_dtype == (dtype if full.optim.name == "muon" else None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("vocab", "small"), [(50257, 385), (4096, 512)])
def test_shrink_padding_of_vocabulary_is_kept(vocab: int, small: int) -> None:
    words = [f"model.vocab_size={vocab}", *LONG, "data=mock", "model.mask_padded_vocab=false"]
    shrunk = shrink(load(words, BIG, {}).run, steps=3).model
    assert (shrunk.vocab_size, shrunk.padded_vocab_size, shrunk.mask_padded_vocab) == (
        small,
        512,
        False,
    )


def test_shrink_encoder_decoder_divides_above_8() -> None:
    full = load(
        ["model=t5_11b", "parallel=tp16sp", "data=mock", "data.seq_length=1024"], BIG, {}
    ).run
    small = shrink(full, steps=3)
    assert (small.parallel.tp, small.parallel.sequence_parallel) == (16, True)
    assert [p for p in check(small) if p.severity == "error"] == []


def test_shrink_interpreted_triton_is_proven_itself() -> None:
    machine = replace(BIG, triton=True, triton_interpreted=True)
    words = [
        "kernels=triton",
        "parallel=tp2sp",
        "precision=fp8_tensorwise",
        "model.num_layers=4",
        "data=mock",
        *LONG,
    ]
    full = load(words, machine, {}).run
    portable = shrink(full, steps=3)
    small = shrink(full, steps=3, interpreted=True)
    assert "triton" not in {
        portable.kernels.norm,
        portable.kernels.attention,
        portable.kernels.loss,
    }
    assert {small.kernels.norm, small.kernels.attention, small.kernels.loss} == {"triton"}
    assert small.kernels.linear == "cpu"  # nothing is in 8 bits yet
    assert in_eight_bits(small, full, interpreted=True).kernels.linear == "triton"
    assert in_eight_bits(portable, full).kernels.linear == "reference"


def test_shrink_long_sides_stay_too_long_for_eigenbases() -> None:
    words = "model=llama3_70b parallel=tp4pp4 cluster=h100 cluster.nodes=8 optim=soap"
    small = shrink(load(words.split()).run, steps=2)
    how = update_of(small)
    sides = _sides(small)
    assert isinstance(how, Rotated)
    within = {f"{name} {place}" for (name, place), length in sides.items() if length <= how.longest}
    assert within == {
        # hidden_size 8192; max_precond_dim is 10000
        "decoder.layers.self_attention.linear_proj.weight 0",
        "decoder.layers.self_attention.linear_qkv.weight 1",
        "decoder.layers.mlp.linear_fc1.weight 1",
        "decoder.layers.mlp.linear_fc2.weight 0",
    }
    assert shrink(load(["optim=soap"]).run, steps=2).optim.soap.max_precond_dim == 10000  # type: ignore[attr-defined]
    words = "model=mixtral_8x7b parallel=ep4 cluster=h100 optim=soap data=mock"
    # its experts shrink to less than its hidden_size
    small = shrink(load(words.split()).run, steps=2)
    bases = [length <= small.optim.soap.max_precond_dim for length in _sides(small).values()]  # type: ignore[attr-defined]
    assert 2 * sum(bases) > len(bases)
