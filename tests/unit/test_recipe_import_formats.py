"""Flags of number formats: what Megatron-LM means by leaving one out, and flags that it does not
read.
"""

from __future__ import annotations

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply
from mtrain.recipes.imported import Imported
from mtrain.recipes.megatron.exporter import export_script
from mtrain.recipes.megatron.importer import import_texts
from tests.support.configs import LAPTOP

BASE = (
    "python pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length"
    " 128 --bf16 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8"
    " --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 1023 --mock-data "
)


def imported(flags: str) -> Imported:
    return import_texts([(BASE + flags, "s.sh")], "s")


def why(found: Imported) -> dict[str, str]:
    return {u.flag: u.why for u in found.unplaced}


def test_import_formats_plain_fp8_means_delayed_scaling() -> None:
    p = imported("--fp8-format hybrid").run.precision
    assert (p.fp8, p.fp8_recipe, p.fp8_margin) == ("hybrid", "delayed", 0)
    assert (p.fp8_amax_history_len, p.fp8_amax_compute_algo, p.fp8_wgrad) == (
        1,
        "most_recent",
        True,
    )


def test_import_formats_unused_recipe_flags_are_reported() -> None:
    found = imported(
        "--fp8-format e4m3 --fp8-recipe blockwise --fp8-margin 2 --fp8-amax-history-len 1024"
        " --no-fp8-wgrad"
    )
    p = found.run.precision
    assert (p.fp8_recipe, p.fp8_margin, p.fp8_amax_history_len, p.fp8_wgrad) == (
        "blockwise",
        None,
        None,
        True,
    )
    unread = {"--fp8-margin", "--fp8-amax-history-len", "--no-fp8-wgrad"}
    assert {flag for flag, reason in why(found).items() if reason == "no effect"} >= unread


def test_import_formats_bf16_ends_default_to_one_layer() -> None:
    flags = "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
    p = imported(flags).run.precision
    assert (p.num_layers_at_start_in_bf16, p.num_layers_at_end_in_bf16) == (1, 1)
    p = imported(
        f"{flags} --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 2"
    ).run.precision
    assert (p.num_layers_at_start_in_bf16, p.num_layers_at_end_in_bf16) == (0, 2)
    found = imported("--num-layers-at-end-in-bf16 2")
    assert found.run.precision.num_layers_at_end_in_bf16 == 0
    assert why(found)["--num-layers-at-end-in-bf16"] == "no effect"


def test_import_formats_missing_or_code_recipe_is_refused() -> None:
    found = imported("--fp8-recipe mxfp8")
    assert found.run.precision.fp8_recipe is None
    assert why(found)["--fp8-recipe"] == "no effect"
    found = imported("--fp8-format hybrid --fp8-recipe custom --fp8-param-gather")
    assert why(found)["--fp8-recipe"] == "not supported"
    assert why(found)["--fp8-param-gather"] == "not supported"


def test_import_formats_four_bit_and_dispatcher_come_over() -> None:
    p = imported("--fp4-format e2m1").run.precision
    assert (p.fp4, p.fp4_recipe) == ("e2m1", "nvfp4")
    experts = "--num-experts 8 --moe-token-dispatcher-type flex"
    moe = imported(f"{experts} --moe-enable-deepep --moe-shared-expert-gate").run.model.moe
    assert moe is not None
    assert (moe.token_dispatcher_type, moe.flex_dispatcher_backend, moe.shared_expert_gate) == (
        "flex",
        "deepep",
        False,
    )
    moe = imported(f"{experts} --moe-flex-dispatcher-backend hybridep").run.model.moe
    assert moe is not None
    assert moe.flex_dispatcher_backend == "hybridep"


def test_import_formats_nope_layers_become_a_period() -> None:
    rope = "--position-embedding-type rope --no-rope-freq"
    assert imported(f"{rope} 4").run.model.no_rope_freq == 4
    found = imported(f"{rope} [0,1,0,1]")
    assert found.run.model.no_rope_freq is None
    assert why(found)["--no-rope-freq"] == "not supported"


@pytest.mark.parametrize(
    ("flags", "activation"),
    [
        ("", "gelu_tanh"),
        ("--no-bias-gelu-fusion", "gelu"),
        ("--disable-bias-linear", "gelu"),
        ("--no-bias-gelu-fusion --openai-gelu", "gelu_tanh"),
        ("--swiglu --no-bias-gelu-fusion", "swiglu"),
        ("--squared-relu --disable-bias-linear", "squared_relu"),
    ],
)
def test_import_formats_fused_gelu_is_tanh_and_round_trips(flags: str, activation: str) -> None:
    found = imported(flags)
    assert found.run.model.activation == activation
    assert why(found).get("--no-bias-gelu-fusion") == (
        "no effect" if "--swiglu --no" in flags else None
    )
    text = export_script(resolve(found.run, LAPTOP))
    assert import_texts([(text, "back")], "back").run.model.activation == activation
    assert "--openai-gelu" not in text  # megatron-core's models do not read it
    assert ("--no-bias-gelu-fusion" in text) == (flags == "--no-bias-gelu-fusion")


@pytest.mark.parametrize("words", ["gelu_tanh model.add_bias_linear=false", "geglu", "geglu_tanh"])
def test_import_formats_other_gelu_is_exported_as_key(words: str) -> None:
    run = resolve(compose([f"model.activation={words.split()[0]}", *words.split()[1:]]).run, LAPTOP)
    assert f"model.activation={words.split()[0]}" in export_script(run)


@pytest.mark.parametrize(("topk", "groups", "best"), [(8, 4, 2), (6, 3, 2), (6, 4, 1), (6, 2, 3)])
def test_import_formats_group_score_equals_megatron(topk: int, groups: int, best: int) -> None:
    """Sum over router_topk // router_group_topk scores, whatever the model is."""
    flags = (
        f"--num-experts 64 --moe-router-topk {topk} --moe-router-num-groups 8"
        f" --moe-router-group-topk {groups} "
    )
    run = resolve(imported(flags + "--moe-router-pre-softmax --disable-bias-linear").run, LAPTOP)
    assert run.model.moe is not None
    assert run.model.moe.router_group_score_topk == best
    assert "group_score" not in export_script(run)
    other = apply(run, {"model.moe.router_group_score_topk": 4})
    assert "model.moe.router_group_score_topk=4" in export_script(other)
