"""Keys that only GPUs have: megatron-core takes the values that rules allow, and refuses those that
rules refuse because of its limits.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.engine import release
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import check
from mtrain.config.schema.model import MoEConfig
from mtrain.config.schema.parallel import ActivationOffloadConfig, RecomputeConfig
from mtrain.config.schema.run import RunConfig
from mtrain.recipes.megatron.exporter import export_words
from mtrain.recipes.megatron.importer import import_texts
from tests.support.configs import LAPTOP
from tests.support.forked import run_alone
from tests.support.runs import tiny_run

EXPERTS = {"num_experts": 4, "ffn_hidden_size": 64}
PADDED = MoEConfig(**EXPERTS, expert_capacity_factor=1.0, pad_expert_input_to_capacity=True)
DROPLESS = MoEConfig(**EXPERTS)
AGAIN = {"recompute": RecomputeConfig(granularity="full", method="uniform", num_layers=1)}
H100 = "cluster=h100 cluster.devices_per_node=1 parallel=single data=mock"
OFFLOAD = "parallel.activation_offload.modules"


def _graphs(impl: str, *modules: str, **keys: Any) -> RunConfig:
    return tiny_run(
        trainer={"cuda_graph_impl": impl, "cuda_graph_modules": modules or None}, **keys
    )


def _offload(*modules: str, fraction: float | None = None, **keys: Any) -> RunConfig:
    return tiny_run(
        activation_offload=ActivationOffloadConfig(modules=modules, fraction=fraction), **keys
    )


def _taken(runs: list[RunConfig]) -> list[dict[str, Any] | str]:
    """Return megatron-core's configuration of each run, or the reason why there is none."""

    def job() -> list[dict[str, Any] | str]:
        from mtrain.assembly.model import transformer_config
        from mtrain.devices import registry

        out: list[dict[str, Any] | str] = []
        for run in runs:
            try:
                held = vars(transformer_config(run, registry.get("cpu")))
            except (AssertionError, ValueError) as error:
                out.append(str(error))
                continue
            named = {name: held[name] for name in held if "graph" in name or "offload" in name}
            for name in ("cuda_graph_scope", "cuda_graph_modules"):
                named[name] = [word.name for word in named.get(name) or ()]
            out.append(named)
        return out

    found: list[dict[str, Any] | str] = run_alone(job)
    return found


def test_device_keys_valid_combinations_are_accepted() -> None:
    runs = [
        _graphs("local"),
        _graphs("transformer_engine", "attn", "mlp"),
        _graphs("full_iteration", **AGAIN),
        _graphs("local", "attn", "moe_router", "moe_preprocess", model={"moe": DROPLESS}),
        _graphs("transformer_engine", "moe", model={"moe": PADDED}),
        _offload("core_attn", "attn_proj", "mlp_norm"),
        _offload("expert_fc1", "moe_act", model={"moe": DROPLESS}),
    ]
    found = _taken(runs)
    assert all(isinstance(each, dict) for each in found), found
    layers, _, step, *_, norms, _ = found
    assert isinstance(layers, dict)
    assert isinstance(step, dict)
    assert isinstance(norms, dict)
    names = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")
    old = not release.at_least(0, 19)
    assert [layers[name] for name in names] == ["local", [], []]
    assert [step[name] for name in names] == (
        ["local", ["full_iteration"], []] if old else ["full_iteration", [], []]
    )
    assert norms["fine_grained_activation_offloading"] is True
    assert norms["offload_modules"] == ["core_attn", "attn_proj", "mlp_norm"]
    assert layers["fine_grained_activation_offloading"] is False


def test_device_keys_refusals_match_megatron() -> None:
    runs = [
        _graphs("local", "moe"),
        _graphs("local", "mlp", model={"moe": DROPLESS}),
        _graphs("local", "moe", "moe_router", model={"moe": PADDED}),
        _graphs("transformer_engine", "moe_preprocess", model={"moe": DROPLESS}),
        _graphs("local", "moe", model={"moe": DROPLESS}),
        _graphs("local", **AGAIN),
        _offload("attn_proj"),
    ]
    assert [type(each) for each in _taken(runs)] == [str] * len(runs)


def test_device_keys_graphs_need_known_micro_batches() -> None:
    def job() -> list[int]:
        from unittest import mock

        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core.transformer import cuda_graphs

        from mtrain.mcore.adapter.cuda_graphs import CapturedLayers

        seen = []

        class Helper:
            def __init__(self, **_: Any) -> None:
                pass

            def create_cudagraphs(self) -> None:
                seen.append(cuda_graphs.get_num_microbatches())

        with mock.patch.object(cuda_graphs, "TECudaGraphHelper", Helper):
            CapturedLayers([mock.Mock()], None, 32, 2, 6).capture(gathers=False)
        assert calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None
        return seen

    assert run_alone(job) == [6]


@pytest.mark.skipif(not release.at_least(0, 19), reason="megatron-core can since 0.19")
def test_device_keys_partial_offload_reaches_0_19() -> None:
    (found,) = _taken([_offload("core_attn", fraction=0.5)])
    assert isinstance(found, dict)
    assert found["activation_offload_fraction"] == 0.5


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (f"{OFFLOAD}=[core_attn]", "MT174"),
        (f"{H100} {OFFLOAD}=[core_attn] kernels.linear=reference", "MT175"),
        (f"{H100} {OFFLOAD}=[attn_proj]", "MT176"),
        (f"{H100} {OFFLOAD}=[moe_act]", "MT176"),
        (f"{H100} {OFFLOAD}=[core_attn] parallel.recompute.granularity=full", "MT176"),
        (f"{H100} {OFFLOAD}=[core_attn] model.builder=hybrid", "MT176"),
        (f"{H100} model=mixtral_tiny {OFFLOAD}=[moe_act]", "MT175"),
        (f"{H100} model=mixtral_tiny {OFFLOAD}=[expert_fc1,moe_act] kernels.experts=te", ""),
        (f"{H100} {OFFLOAD}=[core_attn] trainer.cuda_graph_impl=local", "MT176"),
        (f"{H100} parallel.activation_offload.min_tensor_elements=10", "MT150"),
        (f"{H100} {OFFLOAD}=[core_attn,attn_proj]", ""),
    ],
)
def test_device_keys_impossible_offload_is_refused(words: str, code: str) -> None:
    problems = [
        p for p in check(resolve(compose(words.split()).run, LAPTOP)) if p.severity == "error"
    ]
    assert {p.code for p in problems} == ({code} if code else set())
    assert all(p.fix for p in problems)


def test_device_keys_offload_flags_round_trip() -> None:
    model = (
        "--num-layers 4 --hidden-size 72 --num-attention-heads 4 --seq-length 128"
        " --micro-batch-size 1 --lr 1e-3"
    )
    data = (
        "--vocab-size 1023 --tokenizer-type NullTokenizer --mock-data --train-iters 10"
        " --global-batch-size 8"
    )
    flags = "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"
    start = "torchrun --nproc-per-node 1 pretrain_gpt.py"
    run = import_texts([(f"{start} {model} {data} {flags}\n", "run.sh")], "offload").run
    assert run.parallel.activation_offload.modules == ("core_attn", "attn_proj")
    words = " ".join(word for group in export_words(resolve(run, LAPTOP))[1] for word in group)
    assert "--offload-modules core_attn attn_proj" in words
    again = import_texts([(f"{start} {words}\n", "run.sh")], "offload").run
    assert again.parallel.activation_offload == run.parallel.activation_offload


def test_device_keys_gpu_keys_are_proven_on_cpu() -> None:
    from mtrain.plan.shrink import shrink

    run = resolve(compose(f"{H100} trainer.cuda_graph_impl=local".split()).run, LAPTOP)
    small = shrink(run, steps=2)
    assert small.trainer.cuda_graph_impl == "none"
    assert not [p for p in check(small) if p.severity == "error"]
