"""Training scripts as people write them: what their flags mean, by hand, against what the import
makes of them.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.recipe.capture import capture
from mtrain.config.engine.core_fields import transformer_values
from mtrain.config.resolve.batches import linear, samples_of, steps_within
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.recipes.delta import delta, recipe_text
from mtrain.recipes.imported import Imported
from mtrain.recipes.megatron.importer import import_scripts, import_texts
from mtrain.recipes.megatron.table import known_flags
from tests.support.configs import LAPTOP

RUN = ("llama3_70b",)
SCRIPTS = Path(__file__).resolve().parents[1] / "support/megatron_scripts"
CLUSTER = Machine(cpu_cores=64, memory_bytes=1 << 40, gpus=8, transformer_engine=True)

# What Megatron-LM's TransformerConfig would hold, by the script's flags and the defaults of its
# parser.
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "swiglu",
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
TRANSFORMER: dict[str, dict[str, Any]] = {
    "gpt_1.7b_slurm": {
        "num_layers": 24,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "kv_channels": 128,
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "gated_linear_unit": False,
        "activation_func": "gelu_tanh",
        "add_bias_linear": True,
        "qk_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.02,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "bf16": True,
    },
    "gpt3_175b": {
        "num_layers": 96,
        "hidden_size": 12288,
        "ffn_hidden_size": 49152,
        "num_attention_heads": 96,
        "num_query_groups": 96,
        "normalization": "LayerNorm",
        "activation_func": "gelu_tanh",
        "add_bias_linear": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "init_method_std": 0.006,
        "output_layer_init_method": 0.006 / math.sqrt(192),
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 16,
        "virtual_pipeline_model_parallel_size": None,
        "fp16": True,
        "bf16": False,
    },
    "llama2_7b": {
        **LLAMA,
        "num_layers": 32,
        "ffn_hidden_size": 11008,
        "num_query_groups": 32,
        "layernorm_epsilon": 1e-5,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
    "llama3_8b_cp2": {
        **LLAMA,
        "num_layers": 32,
        "ffn_hidden_size": 14336,
        "num_query_groups": 8,
        "kv_channels": 128,
        "init_method_std": 0.0134,
        "context_parallel_size": 2,
        "cp_comm_type": "p2p",
        "sequence_parallel": False,
    },
    "llama3_70b": {
        **LLAMA,
        "num_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 5,
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
        "overlap_p2p_comm": True,
        "gradient_accumulation_fusion": True,
        "transformer_impl": "transformer_engine",
    },
    "llama31_405b": {
        **LLAMA,
        "num_layers": 126,
        "hidden_size": 16384,
        "ffn_hidden_size": 53248,
        "num_attention_heads": 128,
        "context_parallel_size": 2,
        "cp_comm_type": "a2a",
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": [
            ["embedding", *["decoder"] * 15],
            *[["decoder"] * 16] * 6,
            [*["decoder"] * 15, "loss"],
        ],
    },
    "mixtral_8x7b": {
        **LLAMA,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 14336,
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_pre_softmax": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_layer_freq": [1] * 32,
        "moe_z_loss_coeff": None,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "init_method_std": 0.01,
    },
    "deepseek_v3": {
        **LLAMA,
        "num_layers": 61,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "rotary_base": 10000.0,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
        "num_moe_experts": 256,
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_shared_expert_overlap": True,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "moe_router_dtype": "fp32",
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.1,
        "expert_model_parallel_size": 64,
        "expert_tensor_parallel_size": 1,
        "recompute_modules": ["mla_up_proj", "mlp"],
        "virtual_pipeline_model_parallel_size": 4,
    },
    "qwen25_7b": {
        **LLAMA,
        "add_qkv_bias": True,
        "num_attention_heads": 28,
        "num_query_groups": 4,
        "layernorm_epsilon": 1e-6,
        "tensor_model_parallel_size": 4,
    },
    "qwen3_30b_a3b": {
        **LLAMA,
        "kv_channels": 128,
        "num_query_groups": 4,
        "qk_layernorm": True,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "moe_router_pre_softmax": True,
        "moe_z_loss_coeff": 1e-5,
        "moe_expert_capacity_factor": 1.25,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "probs",
        "expert_model_parallel_size": 1,
    },
    "window_sinks": {
        "num_layers": 12,
        "ffn_hidden_size": 3072,
        "activation_func": "squared_relu",
        "gated_linear_unit": False,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "window_size": (127, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
        "rotary_interleaved": True,
        "attention_dropout": 0.05,
        "hidden_dropout": 0.1,
    },
}
# What stands outside the TransformerConfig.
OTHER: dict[str, dict[str, Any]] = {
    "gpt_1.7b_slurm": {
        "model.vocab_size": 131072,
        "model.tie_word_embeddings": False,
        "model.position_embedding_type": "learned_absolute",
        "parallel.ranks": 48,
        "cluster.nodes": 6,
        "trainer.global_batch_size": 192,
        "optim.warmup_iters": 5,
        "optim.beta2": 0.95,
        "optim.schedule": "cosine",
        "data.split": [969.0, 30.0, 1.0],
        "precision.grad_reduce_in_fp32": True,
    },
    "gpt3_175b": {
        "model.vocab_size": 51200,
        "model.tie_word_embeddings": True,
        "parallel.ranks": 128,
        "trainer.rampup_batch_size": [16, 16, 5859375],
        "optim.decay_iters": 430000,
        "optim.warmup_iters": 430,
        "optim.weight_decay": 0.1,
        "precision.initial_loss_scale": 2.0**32,
        "precision.grad_reduce_in_fp32": False,
        "data.path": "/data/pile/pile_text_document",
        "data.split": [949.0, 50.0, 1.0],
        "checkpoint.save_interval": 10000,
        "parallel.distributed_optimizer": False,
    },
    "llama2_7b": {
        "model.vocab_size": 32000,
        "model.position_embedding_type": "rope",
        "model.rotary_base": 10000.0,
        "data.path": "/data/my corpus/text_document",
        "trainer.train_iters": 2000,
        "optim.warmup_iters": 200,
        "optim.eps": 1e-5,
        "optim.decay_iters": None,
        "checkpoint.save_final": False,
    },
    "llama3_8b_cp2": {
        "model.vocab_size": 128256,
        "model.rotary_base": 500000.0,
        "trainer.train_iters": 15258,
        "optim.decay_iters": 15228,
        "optim.warmup_iters": 30,
        "precision.grad_reduce_in_fp32": False,
        "parallel.ranks": 8,
        "checkpoint.save_interval": 1000,
        "checkpoint.keep": None,
        "log.interval": 1,
    },
    "llama3_70b": {
        "model.vocab_size": 128512,
        "parallel.ranks": 64,
        "data.tokenizer": "/models/llama3/tokenizer.json",
        "trainer.global_batch_size": 256,
        "optim.warmup_iters": 2000,
        "kernels.default": "te",
    },
    "llama31_405b": {
        "model.vocab_size": 128256,
        "model.rope_scaling_factor": 8.0,
        "model.max_position_embeddings": 131072,
        "parallel.hsdp_replicas": 2,
        "optim.cpu_offload": 0.5,
        "trainer.timeout_s": 1800.0,
        "parallel.ranks": 1024,
    },
    "mixtral_8x7b": {
        "model.vocab_size": 32000,
        "model.rotary_base": 1000000.0,
        "parallel.ranks": 32,
        "optim.decay_iters": 320000,
        "optim.beta2": 0.999,
        "data.kind": "indexed",
        "parallel.overlap_param_gather": True,
    },
    "deepseek_v3": {
        "model.vocab_size": 129280,
        "model.kv_channels": None,
        "model.num_query_groups": None,
        "parallel.pipeline_layout": "Et|(tt|)*30mL",
        "parallel.ranks": 1024,
        "trainer.train_iters": 35762,
        "optim.warmup_iters": 93,
    },
    "qwen25_7b": {
        "model.vocab_size": 152064,
        "optim.schedule": "wsd",
        "optim.wsd_decay_iters": 1000,
        "optim.wsd_decay_style": "exponential",
        "optim.weight_decay": 0.01,
        "optim.min_lr": 0.0,
    },
    "qwen3_30b_a3b": {
        "model.vocab_size": 151936,
        "parallel.fsdp": "megatron",
        "parallel.fsdp_sharding": "optim_grads_params",
        "parallel.distributed_optimizer": False,
        "optim.schedule": "constant",
    },
    "window_sinks": {
        "model.vocab_size": 32000,
        "model.tie_word_embeddings": True,
        "model.max_position_embeddings": 1024,
        "model.moe": None,
        "model.rotary_percent": 0.5,
        "optim.name": "sgd",
        "optim.momentum": 0.8,
        "optim.clip_grad": None,
        "optim.schedule": "linear",
        "trainer.seed": 42,
        "trainer.global_batch_size": 2,
        "precision.dtype": "fp32",
    },
}


@cache
def imported(name: str) -> Imported:
    """The script as it is read, or as it runs where it sets flags in a function."""
    path = SCRIPTS / f"{name}.sh"
    return capture(["bash", str(path)], ()) if name in RUN else import_scripts([path])


@pytest.mark.parametrize("name", TRANSFORMER)
def test_import_script_means_its_flags(name: str) -> None:
    run = resolve(imported(name).run, CLUSTER if name == "llama3_70b" else LAPTOP)
    values = transformer_values(run)
    assert {field: values.get(field, "not there") for field in TRANSFORMER[name]} == TRANSFORMER[
        name
    ]
    flat = run.flat()
    assert {key: flat.get(key, "not there") for key in OTHER[name]} == OTHER[name]


def test_import_script_all_have_expectations() -> None:
    assert {file.stem for file in SCRIPTS.glob("*.sh")} == set(TRANSFORMER) == set(OTHER)
    assert len(TRANSFORMER) >= 10


@pytest.mark.parametrize("name", TRANSFORMER)
def test_import_script_every_flag_is_read_or_listed(name: str) -> None:
    text = (SCRIPTS / f"{name}.sh").read_text()
    found = imported(name)
    listed = {u.flag for u in found.unplaced}
    noted = " ".join(found.notes)
    for word in text.replace("=", " ").split():
        flag = word.strip("\"'()\\")
        if (
            flag.startswith("--")
            and flag not in known_flags()
            and "SBATCH" not in text.split(flag)[0][-8:]
        ):
            launcher = flag in LAUNCHER
            assert launcher or flag in listed or flag in noted, f"{flag} was lost"


LAUNCHER = {
    "--nproc_per_node",
    "--nproc-per-node",
    "--nnodes",
    "--master_addr",
    "--node_rank",
    "--rdzv_id",
    "--label",
    "--job-name",
    "--nodes",
    "--ntasks-per-node",
    "--output",
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", TRANSFORMER)
def test_import_script_written_recipe_is_same_run(name: str, tmp_path: Path) -> None:
    from mtrain.config.compose.composer import compose

    run = imported(name).run
    file = tmp_path / "r.yaml"
    file.write_text(recipe_text(delta(run), {"title": name}))
    assert compose([f"recipe={file}"]).run.digest() == run.digest()


@pytest.mark.parametrize(
    ("name", "flag", "why"),
    [
        ("gpt3_175b", "--load", "not supported"),
        ("gpt3_175b", "--save", "derived here"),
        ("llama3_8b_cp2", "--decoupled-lr", "not supported"),
        ("llama3_8b_cp2", "--use-mcore-models", "no effect"),
        ("mixtral_8x7b", "--data-path", "unreadable"),
        ("mixtral_8x7b", "--sequence-parallel", "no effect"),
        ("deepseek_v3", "--kv-channels", "no effect"),
        ("qwen3_30b_a3b", "--moe-router-load-balancing-type", "not supported"),
        ("qwen3_30b_a3b", "--use-distributed-optimizer", "derived here"),
        ("qwen3_30b_a3b", "--no-such-flag", "unknown"),
        ("window_sinks", "--moe-router-topk", "no effect"),
        ("window_sinks", "--apply-query-key-layer-scaling", "not supported"),
        ("gpt_1.7b_slurm", "--wandb-api-key", "secret"),
    ],
)
def test_import_script_unplaced_flag_has_reason(name: str, flag: str, why: str) -> None:
    assert {u.flag: u.why for u in imported(name).unplaced}[flag] == why


def test_import_script_vocabulary_comes_from_same_shape() -> None:
    shape = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048"
    found = import_texts([(f"torchrun pretrain_gpt.py {shape}", "x.sh")], "x")
    assert "the vocabulary of 50257 is that of model=gpt3_175b" in "".join(found.notes)
    text = (
        "torchrun pretrain_gpt.py --num-layers 3 --hidden-size 66 --num-attention-heads 2"
        " --seq-length 8"
    )
    assert import_texts([(text, "x.sh")], "x").open.keys() == {"model.vocab_size"}
    assert import_texts([(text, "x.sh")], "x", ["model.vocab_size=512"]).run.model.vocab_size == 512


RATE = (
    "optim.lr is not set; it is 0.0006, resolved from GPT-3 table 2.1 (arXiv 2005.14165): its 125M"
    " model"
)


@pytest.mark.parametrize(
    ("launcher", "flags", "notes"),
    [
        (
            "torchrun --nproc-per-node 8",
            "--vocab-size 512",
            [RATE, "it is 64, resolved from x: max_position_emb"],
        ),
        (
            "python",
            "--vocab-size 512",
            [RATE, "data.seq_length is not set; it is chosen where it runs"],
        ),
        ("python", "--seq-length 8", ["optim.lr is not set; it is chosen where it runs"]),
        ("python", "--seq-length 8 --lr 0.1", []),
    ],
)
def test_import_script_unset_becomes_resolved(launcher: str, flags: str, notes: list[str]) -> None:
    model = "--num-layers 3 --hidden-size 66 --num-attention-heads 2 --max-position-embeddings 64"
    flags = f"{model} --train-iters 9 --global-batch-size 8 {flags}"
    found = import_texts([(f"{launcher} pretrain_gpt.py {flags}", "x.sh")], "x")
    said = [note for note in found.notes if " is not set; it is " in note]
    assert len(said) == len(notes)
    assert all(note in text for note, text in zip(notes, said, strict=True))


@pytest.mark.parametrize(
    ("words", "vocab", "masked"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50257, False),
        ("--vocab-size 50257 --make-vocab-size-divisible-by 64", 50257, False),
        ("--vocab-size 500 --tensor-model-parallel-size 2", 500, False),
        ("--vocab-size 512", 512, True),
        ("--vocab-size 500 --padded-vocab-size 640", 640, True),
    ],
)
def test_import_script_padding_stays_in_softmax_as_megatron(
    words: str, vocab: int, masked: bool
) -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8"
    found = import_texts(
        [(f"torchrun --nproc-per-node 2 pretrain_gpt.py {model} {words}", "x.sh")], "x"
    )
    assert (found.run.model.vocab_size, found.run.model.mask_padded_vocab) == (vocab, masked)
    assert any("padding in the softmax" in note for note in found.notes) is not masked


def test_import_script_overrides_beat_script() -> None:
    found = import_scripts(
        [SCRIPTS / "mixtral_8x7b.sh"], ["cluster=h100x64", "optim.lr=5e-5", "parallel.ep=4"]
    )
    assert (found.run.cluster.name, found.run.optim.lr, found.run.parallel.ep) == (
        "h100x64",
        5e-5,
        4,
    )


def test_import_script_sourced_script_comes_first(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text(
        "MODEL=(--num-layers 4 --hidden-size 64 --num-attention-heads 4)\n"
    )
    (tmp_path / "train.sh").write_text(
        'source model.sh\ntorchrun --nproc-per-node 2 pretrain_gpt.py "${MODEL[@]}" --vocab-size'
        " 500 --seq-length 8\n"
    )
    found = import_scripts([tmp_path / "model.sh", tmp_path / "train.sh"])
    assert (found.run.model.num_layers, found.run.cluster.devices_per_node) == (4, 2)
    found = import_scripts([tmp_path / "train.sh"])
    assert (found.run.model.num_layers, found.open) == (4, {})
    assert any("model.sh is read in place" in note for note in found.notes)
    (tmp_path / "alone").mkdir()
    (tmp_path / "train.sh").rename(tmp_path / "alone/train.sh")
    found = import_scripts([tmp_path / "alone/train.sh"])
    assert "model.num_layers" in found.open
    assert any("model.sh is not read" in note for note in found.notes)


def test_import_script_samples_count_along_ramp() -> None:
    """100 samples in steps of 4, as many in steps of 8 and of 12, and 16 each after that."""
    model = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3"
        " --vocab-size 300"
    )
    words = (
        "--global-batch-size 16 --rampup-batch-size 4 4 300 --train-samples 1000"
        " --lr-warmup-samples 40"
    )
    flags = f"{model} {words}"
    values = import_texts(
        [(f"torchrun pretrain_gpt.py {flags} --micro-batch-size 1\n", "x.sh")], "x"
    ).run.flat()
    plan = linear((4, 4, 300), 16)
    assert values["trainer.rampup_batch_size"] == [4, 4, 300]
    assert values["optim.warmup_iters"] == 10
    assert values["trainer.train_iters"] == steps_within(plan, 1000)
    assert 1000 - 16 < samples_of(plan, values["trainer.train_iters"]) <= 1000
