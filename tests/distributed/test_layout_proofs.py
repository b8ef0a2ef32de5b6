"""`prove` over every kind of layout; the faults that it exists to find are in `tests/museum`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.launching import local, prove
from tests.support.commands import mtrain
from tests.support.covering import some
from tests.support.runs import whole_tensors

DEEPSEEK = "model=deepseek_tiny"
MIXTRAL = "model=mixtral_tiny"
GEMMA = "model=gemma_tiny"
CAPS = "model.attn_logit_softcapping=0.5 model.final_logit_softcapping=2"
OLMO = "model.norm_placement=post model.qk_layernorm=true model.qk_layernorm_across_heads=true"
LAYOUTS = {
    "tp2": "parallel=tp2",
    "tp2 sequence parallel": "parallel=tp2sp",
    "tp4": "parallel=tp4",
    "pp2": "parallel=pp2",
    "pp4": "parallel=pp4",
    "pp2vpp2": "parallel=pp2vpp2",
    "uneven stages by sizes": "parallel=pp2 model.num_layers=7 parallel.layers_per_stage=[4,3]",
    "uneven stages by a layout": (
        "parallel=pp2vpp2 model.num_layers=5 parallel.pipeline_layout=Et|tt|t|tL"
    ),
    "embedding and loss count as layers": (
        "parallel=pp4 model.num_layers=6 parallel.account_for_embedding_in_pipeline_split=true"
        " parallel.account_for_loss_in_pipeline_split=true"
    ),
    "dp2": "parallel=dp2",
    "dp2 distributed optimizer overlapped": (
        "parallel=dp2 parallel.distributed_optimizer=true "
        "parallel.overlap_grad_reduce=true parallel.overlap_param_gather=true"
    ),
    "cp2 all-gather": "parallel=cp2 parallel.cp_comm_type=all_gather",
    "cp2 ring": "parallel=cp2 parallel.cp_comm_type=p2p",
    "cp2 all-to-all": "parallel=cp2 parallel.cp_comm_type=a2a",
    "cp4": "parallel=cp4",
    "cp4 hierarchical": (
        "parallel=cp4 parallel.cp_comm_type=a2a+p2p parallel.hierarchical_cp_sizes=[2,2]"
    ),
    "ep2": f"{MIXTRAL} parallel=ep2",
    "ep2 allgather dispatcher": f"{MIXTRAL} parallel=ep2 model.moe.token_dispatcher_type=allgather",
    "ep2tp2 of padded exchanges": (
        f"{MIXTRAL} parallel=tp2ep2etp2sp model.moe.pad_alltoall=true "
        "model.moe.alltoall_capacity_factor=1.1"
    ),
    "ep2tp2 etp1": f"{MIXTRAL} parallel=tp2ep2etp1sp",
    "ep2tp2 etp2": f"{MIXTRAL} parallel=tp2ep2etp2sp",
    "tp2 etp1 without ep": f"{MIXTRAL} parallel=tp2etp1sp",
    "tp2pp2": "parallel=tp2pp2",
    "tp2pp2dp2": "parallel=tp2pp2dp2",
    "tp2cp2": "parallel=tp2cp2",
    "pp2cp2": "parallel=pp2cp2",
    "pp2vpp2tp2": "parallel=tp2pp2vpp2",
    "pp2ep2": f"{MIXTRAL} parallel=pp2ep2",
    "tp2pp2ep2 of a small DeepSeek-V3": f"{DEEPSEEK} parallel=tp2pp2ep2etp1sp",
    "tp2 of latent norms with their epsilon": (
        f"{DEEPSEEK} parallel=tp2sp model.mla.layernorm_epsilon=1e-2"
    ),
    "cp2 all-to-all of MLA": f"{DEEPSEEK} parallel=cp2 parallel.cp_comm_type=a2a",
    "multi-token prediction in a stage of its own": (
        "parallel=pp4 model.num_layers=5 model.mtp_num_layers=1 "
        "parallel.pipeline_layout=Ett|ttt|m|L"
    ),
    "two predictions, tied": "parallel=pp2 model.mtp_num_layers=2 model.tie_word_embeddings=true",
    "tied embeddings pp2": "parallel=pp2 model.tie_word_embeddings=true",
    "fewer key/value heads than tp": "parallel=tp4 model.num_query_groups=2",
    "sinkhorn": (
        f"{MIXTRAL} parallel=ep2 model.moe.router_load_balancing_type=sinkhorn"
        " model.moe.aux_loss_coeff=0"
    ),
    "capacity and padding": (
        f"{MIXTRAL} parallel=ep2 model.moe.expert_capacity_factor=1.0 "
        "model.moe.pad_expert_input_to_capacity=true"
    ),
    "overlapped shared experts": (
        f"{MIXTRAL} parallel=tp2ep2sp model.moe.shared_expert_intermediate_size=256 "
        "model.moe.shared_expert_overlap=true"
    ),
    "sequence-wise balancing, z-loss": (
        f"{MIXTRAL} parallel=tp2cp2ep2sp model.moe.z_loss_coeff=0.01 "
        "model.moe.router_load_balancing_type=seq_aux_loss"
    ),
    "window and sinks": (
        "parallel=tp2cp2sp model.window_size=8 model.window_attn_skip_freq=2 "
        "model.softmax_type=learnable parallel.cp_comm_type=p2p"
    ),
    "Gemma 3 tp2": f"{GEMMA} parallel=tp2sp",
    "Gemma 3 pp2vpp3": f"{GEMMA} parallel=pp2vpp3",
    "Gemma 3 with caps, tp2cp2 ring": f"{GEMMA} {CAPS} parallel=tp2cp2sp parallel.cp_comm_type=p2p",
    "Gemma 3 and a prediction pp2": f"{GEMMA} {CAPS} parallel=pp2 model.mtp_num_layers=1",
    "Gemma 3 bf16": f"{GEMMA} {CAPS} parallel=tp2sp precision=bf16",
    "norms behind, over all heads tp2": f"{OLMO} parallel=tp2",
    "norms behind, over all heads tp2pp2": f"{OLMO} parallel=tp2pp2sp",
    "norms over all heads, fewer key/value heads than tp": (
        f"{OLMO} parallel=tp4 model.num_query_groups=2 model.layernorm_zero_centered_gamma=true"
    ),
    "a small MiniMax-M2 tp2ep2": (
        f"{MIXTRAL} parallel=tp2ep2etp1sp model.qk_layernorm=true"
        " model.qk_layernorm_across_heads=true model.rotary_percent=0.5"
        " model.moe.router_score_function=sigmoid model.moe.router_enable_expert_bias=true"
        " model.moe.router_load_balancing_type=none model.moe.aux_loss_coeff=0"
    ),
    "attention and MLP side by side": "model=pythia_tiny parallel=tp2pp2sp",
    "attention and MLP side by side, between norms, with a base for windows": (
        "model=pythia_tiny parallel=tp2sp "
        "model.norm_placement=pre_and_post model.window_size=8 model.window_attn_skip_freq=2 "
        "model.rotary_base_local=100.0"
    ),
    "biases in attention alone": (
        "parallel=tp2pp2sp model.add_qkv_bias=true model.add_proj_bias=true"
    ),
    "biases in the MLP alone": "parallel=tp2pp2sp model.add_mlp_bias=true",
    "tp2ep2 of a small GPT-OSS": "model=gpt_oss_tiny parallel=tp2ep2etp1sp",
    "tp2cp2 of a small Phi-4-mini": "model=phi3_tiny parallel=tp2cp2",
    "tp2pp2ep2 of a small GLM-4.5": "model=glm45_tiny parallel=tp2pp2ep2etp1sp",
    "Megatron's BERT, tp2pp2": "model=megatron_bert_tiny parallel=tp2pp2sp",
    "Megatron's BERT, dp2 fsdp2": (
        "model=megatron_bert_tiny parallel=dp2 parallel.fsdp=fsdp2 "
        "parallel.distributed_optimizer=false"
    ),
    "Megatron's BERT, tp2 bf16": "model=megatron_bert_tiny parallel=tp2sp precision=bf16",
    "tp2pp2 of a small Nemotron-4": "model=nemotron4_tiny parallel=tp2pp2sp",
    "tp2cp2 of a small Nemotron-4, bf16": "model=nemotron4_tiny parallel=tp2cp2 precision=bf16",
    "yarn under cp": (
        "parallel=tp2cp2 "
        "model.rope_scaling={rope_type:yarn,factor:8.0,original_max_position_embeddings:64}"
    ),
    "full recomputation": (
        "parallel=tp2pp2sp parallel.recompute.granularity=full parallel.recompute.method=block"
    ),
    "a hybrid, tp2cp2": "model=nemotron_h_tiny parallel=tp2cp2sp",
    "a hybrid, pp2cp2 bf16": "model=nemotron_h_tiny parallel=pp2cp2 precision=bf16",
    "tp2 bf16": "parallel=tp2sp precision=bf16",
    "tp2cp2 bf16": "parallel=tp2cp2 precision=bf16 parallel.cp_comm_type=p2p",
    "ep2 bf16": f"{MIXTRAL} parallel=ep2 precision=bf16",
}


STEPS = 2
"""The first gradient is compared, and the weights that the second step makes of the first one's."""


def _compared(words: str) -> list[Any]:
    """Rows of every number format that the configuration is proven in."""
    argv = words.split()
    full = load(argv).run
    return [
        row
        for dtype in prove.formats(full)
        for row in prove.compared(prove.comparable(full, argv, STEPS, dtype))
    ]


ALWAYS = (
    "multi-token prediction in a stage of its own",
    "capacity and padding",
    "Gemma 3 pp2vpp3",
    "tp2pp2ep2 of a small GLM-4.5",
)
"""Most axes and kinds of layer; the tests of layouts, families and positions have the others."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", some(LAYOUTS, ALWAYS))
def test_layout_proof_layout_is_proven(name: str) -> None:
    rows = _compared(LAYOUTS[name])
    assert all(row.equal for row in rows), prove.table(rows)


RECOMPUTED = {
    "full, uniform": ("", "granularity=full"),
    "full, block": ("parallel=pp2", "granularity=full parallel.recompute.method=block"),
    "attention, norms and MLPs": (
        "parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[core_attn,layernorm,mlp]",
    ),
    "Gemma's attention, norms and MLPs": (
        f"{GEMMA} {CAPS} parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[core_attn,layernorm,mlp]",
    ),
    "Gemma, full": (f"{GEMMA} {CAPS}", "granularity=full"),
    "MLPs with biases": (
        "model=gpt_1.7b parallel=pp2",
        "granularity=selective parallel.recompute.modules=[mlp]",
    ),
    "experts": (
        f"{MIXTRAL} parallel=ep2",
        "granularity=selective parallel.recompute.modules=[moe]",
    ),
    "expert activations": (
        f"{MIXTRAL} parallel=ep2",
        "granularity=selective parallel.recompute.modules=[moe_act,layernorm]",
    ),
    "norms and MLPs side by side": (
        "model=pythia_tiny parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[layernorm,mlp]",
    ),
    "a hybrid, block": (
        "model=nemotron_h_tiny model.hidden_dropout=0.1 parallel=pp2",
        "granularity=full parallel.recompute.method=block",
    ),
    "a hybrid, FSDP": (
        "model=nemotron_h_tiny parallel=dp2 parallel.fsdp=fsdp2",
        "granularity=full",
    ),
    "a hybrid, groups": (
        "model=nemotron_h_tiny parallel=tp2sp",
        "granularity=full parallel.recompute.num_layers=2",
    ),
    "a hybrid's attention, norms and MLPs": (
        "model=nemotron_h_tiny parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[core_attn,layernorm,mlp]",
    ),
    "latent projections": (
        f"{DEEPSEEK} parallel=tp2sp",
        "granularity=selective parallel.recompute.modules=[mla_up_proj,shared_experts]",
    ),
}


RECOMPUTED_ALWAYS = ("full, block", "expert activations", "a hybrid, block")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", some(RECOMPUTED, RECOMPUTED_ALWAYS))
def test_layout_proof_recomputation_is_bitwise(name: str, tmp_path: Path) -> None:
    layout, recompute = RECOMPUTED[name]
    ends = []
    for i, words in enumerate(
        (layout.split(), [*layout.split(), *f"parallel.recompute.{recompute}".split()])
    ):
        home = tmp_path / str(i)
        home.mkdir()
        local.observe(prove.shrunk(load(words).run, words, 2, "fp32"), home)
        ends.append(whole_tensors(home / "step_00000002"))
    kept, recomputed = ends
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(kept[key], tensor) for key, tensor in recomputed.items())


def test_layout_proof_nan_loss_equals_nothing() -> None:
    from mtrain.train.verify.prove import relative

    assert relative(None, None) == relative(1.0, None) == relative(None, 1.0) == float("inf")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_layout_proof_interpreted_triton_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = (
        f"{MIXTRAL} parallel=tp2ep2etp1sp kernels=triton model.qk_layernorm=true"
        " model.moe.pad_alltoall=true"
    )
    done = mtrain("prove", *words.split(), "model.num_layers=2", cwd=tmp_path, timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("kernels: ")]
    ours = said.partition("; ")[0]
    assert all(op in ours for op in ("norm", "rope", "attention", "experts", "moe_permute", "loss"))
