"""Keys of shape, routing and communication: each is in megatron-core's configuration, moves what it
says, no more.

A key that changes the model changes the first step's loss or gradient, by the same amount on one
rank and on several. A key that changes how ranks speak changes neither.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.schema.model import MLAConfig, MoEConfig
from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from mtrain.plan.count import parameters
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run, train_steps, trained

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 64,
}
TP2 = {"ranks": 2, "tp": 2}
SP2 = {**TP2, "sequence_parallel": True}
EP2 = {"ranks": 2, "ep": 2}
PP2 = {"ranks": 2, "pp": 2}
ZERO = {"ranks": 2, "distributed_optimizer": True, "overlap_grad_reduce": True}
TURNS = {**PP2, "vpp": 2}
FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}
# key -> its value, its layout, and the fields of megatron-core that hold it
SHAPES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "embedding_init_method_std": (0.5, TP2, {"embedding_init_method_std": 0.5}),
    "parallel_residual": (True, SP2, {"parallel_residual": True}),
    "softmax_scale": (1.0, TP2, {"softmax_scale": 1.0}),
    "no_rope_freq": (2, PP2, {"no_rope_freq": [0, 1, 0, 1]}),
    "qk_l2_norm": (True, SP2, {"qk_l2_norm": True}),
    "rotary_seq_len_interpolation_factor": (4.0, TP2, {}),
    "activation": ("quick_geglu", TP2, {"gated_linear_unit": True}),
    "glu_linear_offset": (1.0, TP2, {"glu_linear_offset": 1.0}),
    "activation_func_clamp_value": (0.01, TP2, {"activation_func_clamp_value": 0.01}),
    "norm_placement": ("post", SP2, {}),
    "scale_embedding": (True, SP2, {}),
}
# key -> its value, what it needs to reach a number, and its layout
BESIDE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "attn_logit_softcapping": (0.5, {"init_method_std": 0.2}, SP2),
    "qk_layernorm_across_heads": (True, {"qk_layernorm": True}, TP2),
    "rotary_base_local": (10.0, {"window_size": 8, "window_attn_skip_freq": 2}, PP2),
}


def steps(run: RunConfig) -> list[tuple[float, float]]:
    """Return loss and gradient norm of two steps."""
    return trained(run, 2)


def built(run: RunConfig) -> Any:
    """Return the simple values in megatron-core's configuration."""

    def job() -> dict[str, Any]:
        from mtrain.assembly.model import transformer_config
        from mtrain.devices import registry

        held = vars(transformer_config(run, registry.get("cpu")))
        return {
            name: value
            for name, value in held.items()
            if isinstance(value, bool | int | float | str | list)
        }

    return run_alone(job)


@pytest.fixture(scope="module")
def plain() -> list[tuple[float, float]]:
    return steps(tiny_run())


@pytest.fixture(scope="module")
def experts() -> list[tuple[float, float]]:
    return steps(tiny_run(model={"moe": MoEConfig(**EXPERTS)}))


def same(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> bool:
    return all(x == pytest.approx(y, rel=1e-5) for x, y in zip(a, b, strict=True))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("key", some(SHAPES, list(SHAPES)[::3]))
def test_engine_keys_model_key_acts_alike_in_every_layout(
    key: str, plain: list[tuple[float, float]]
) -> None:
    value, layout, fields = SHAPES[key]
    alone = tiny_run(model={key: value})
    cut = tiny_run(model={key: value}, **layout)
    held = built(alone)
    assert {name: held[name] for name in fields} == fields
    found = steps(alone)
    assert not same(found[:1], plain[:1]), f"model.{key} reaches no number"
    assert same(steps(cut), found)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("key", BESIDE)
def test_engine_keys_key_acts_with_its_requirements(key: str) -> None:
    value, needs, layout = BESIDE[key]
    found = steps(tiny_run(model={**needs, key: value}))
    assert not same(found[:1], steps(tiny_run(model=needs))[:1]), f"model.{key} reaches no number"
    assert same(steps(tiny_run(model={**needs, key: value}, **layout)), found)


@pytest.mark.full
def test_engine_keys_zero_centered_norm_starts_equal(
    plain: list[tuple[float, float]],
) -> None:
    run = tiny_run(model={"layernorm_zero_centered_gamma": True}, **SP2)
    assert same(steps(run), plain)

    def weight() -> tuple[float, float]:
        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        with joined(run) as world:
            found = dict(build_model(run, world, wrap=False)[0].named_parameters())
            norm = found["decoder.final_layernorm.weight"]
            return float(norm.min()), float(norm.max())

    assert run_ranks(2, weight)[0] == (0.0, 0.0)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(EP2, marks=pytest.mark.full), SP2], ids=["ep2", "tp2 sequence parallel"]
)
def test_engine_keys_gated_shared_expert_trains_and_is_counted(
    layout: dict[str, Any], experts: list[tuple[float, float]]
) -> None:
    model = {"moe": MoEConfig(**EXPERTS, shared_expert_gate=True)}
    found = steps(tiny_run(model=model))
    assert not same(found[:1], experts[:1])
    assert same(steps(tiny_run(model=model, **layout)), found)
    ungated = tiny_run(model={"moe": MoEConfig(**EXPERTS)}).model
    assert parameters(tiny_run(model=model).model) - parameters(ungated) == 4 * 64


@pytest.mark.full
def test_engine_keys_probs_on_input_is_another_model() -> None:
    one = {**EXPERTS, "router_topk": 1, "router_pre_softmax": True}
    outside, inside = ({"moe": MoEConfig(**one, apply_probs_on_input=on)} for on in (False, True))
    found = steps(tiny_run(model=inside))
    assert not same(found[:1], steps(tiny_run(model=outside))[:1])
    assert same(steps(tiny_run(model=inside, **EP2)), found)


@pytest.mark.full
def test_engine_keys_scaled_rope_reaches_latent_attention() -> None:
    latent: dict[str, Any] = {
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 16,
    }
    yarn = {
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    values = {"mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 32.0, "beta_slow": 1.0}
    usual, other = (
        {
            "mla": MLAConfig(**(latent | yarn | values | more)),
            "num_query_groups": None,
            "init_method_std": 0.2,
        }
        for more in ({}, {"beta_fast": 2.0, "beta_slow": 0.1})
    )
    found = steps(tiny_run(model=other))
    assert built(tiny_run(model=other))["beta_fast"] == 2.0
    assert not same(found[:1], steps(tiny_run(model=usual))[:1])
    assert same(steps(tiny_run(model=other, **TP2)), found)


def test_engine_keys_deterministic_run_repeats(
    plain: list[tuple[float, float]],
) -> None:
    run = tiny_run(trainer={"deterministic": True})
    assert built(run)["deterministic_mode"] is True

    def job() -> tuple[bool, list[tuple[float, float]]]:
        import torch

        values = train_steps(run, 2)
        return torch.are_deterministic_algorithms_enabled(), values

    assert run_ranks(1, job)[0] == (True, plain)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("key", ["input_jitter_eps", "router_force_load_balancing"])
def test_engine_keys_random_routing_reaches_router(
    key: str, experts: list[tuple[float, float]]
) -> None:
    value = 0.5 if key == "input_jitter_eps" else True
    run = tiny_run(model={"moe": MoEConfig(**(EXPERTS | {key: value}))})
    assert built(run)[f"moe_{key}"] == value
    found = steps(run)
    assert not same(found[:1], experts[:1])
    assert same(found, steps(run)), "with one seed it is the same every time"


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("layout", "key", "value"),
    [
        (TURNS, "microbatch_group_size_per_vp_stage", 4),
        (TURNS, "overlap_p2p_comm_warmup_flush", True),
        pytest.param(
            TP2,
            "recompute",
            RecomputeConfig(**FULL, distribute_saved_activations=True),
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_engine_keys_schedule_key_keeps_numbers(
    layout: dict[str, Any], key: str, value: Any, plain: list[tuple[float, float]]
) -> None:
    run = tiny_run(trainer={"micro_batch_size": 1}, **(layout | {key: value}))
    name, held = (key, value) if key != "recompute" else ("distribute_saved_activations", True)
    assert built(run)[name] == held
    assert same(steps(run), steps(tiny_run(trainer={"micro_batch_size": 1}, **layout)))
    assert same(steps(run), plain)


def buckets(run: RunConfig) -> list[int]:
    """Return the number of elements of each bucket of gradients."""

    def job() -> list[int]:
        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        with joined(run) as world:
            (chunk,) = build_model(run, world)
            return [
                bucket.grad_data.numel() for buffer in chunk.buffers for bucket in buffer.buckets
            ]

    sizes: list[int] = run_ranks(run.parallel.ranks or 1, job)[0]
    return sizes


@pytest.mark.full
def test_engine_keys_bucket_size_keeps_numbers(
    plain: list[tuple[float, float]],
) -> None:
    usual = tiny_run(**ZERO)
    small = tiny_run(**ZERO, ddp_bucket_size=20_000)
    padded = tiny_run(**ZERO, ddp_pad_buckets_for_high_nccl_busbw=True)
    assert len(buckets(usual)) == 1
    assert len(buckets(small)) > 4
    assert buckets(usual)[0] % (2 * 65536) != 0
    assert all(size % (2 * 65536) == 0 for size in buckets(padded))
    assert same(steps(small), plain)
    assert same(steps(padded), plain)


@pytest.mark.full
def test_engine_keys_half_gradients_accumulate_in_fp32() -> None:
    layout = {**ZERO, "ranks": 4}
    half, full = (
        tiny_run(dtype="bf16", **layout, ddp_reduce_scatter_with_fp32_accumulation=on)
        for on in (False, True)
    )
    norms = []
    for run in (half, full, tiny_run(dtype="bf16", **layout)):
        less = run.precision.model_copy(update={"grad_reduce_in_fp32": False})
        values = steps(
            run if run not in (half, full) else run.model_copy(update={"precision": less})
        )
        norms.append(values[0][1])
    in_half, in_full, exact = norms
    assert in_half != in_full
    assert in_full == pytest.approx(exact, rel=2e-3)
