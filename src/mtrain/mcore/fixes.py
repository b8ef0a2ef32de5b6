"""Known silent bugs of megatron-core 0.16.1 and of systems like this one, and what became of each here.

Those of megatron-core were looked up in the sources of 0.16.1 and 0.19.2. `engines --fixes` prints this table; a test
checks every name in it, and that each patch of it has a case that fails without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Became = Literal["patched", "refused", "out of reach", "kept by tests"]


@dataclass(frozen=True, slots=True)
class Fix:
    """One row."""

    number: str
    """Of the change or the issue, in Megatron-LM where no other project is named."""
    about: str
    became: Became
    by: str
    """The patch, the code of the rule, or the test; empty for what is out of reach."""
    why: str
    """Why our paths do not reach it, or what keeps it away."""
    where: str = ""
    """File under megatron/core and line in 0.16.1; empty for what is no code of megatron-core."""
    is_in_0_19: bool | None = None
    """Whether 0.19.2's source has the change; None: its code was rewritten, and reading did not tell."""


_OWN_STORE = "no checkpoint of ours is written or read by megatron-core's optimizers: ckpt/state.py does it by weight"
_LOSS = "gradients are sums over tokens, divided once by those of the global batch, in every layout"
_NOT_OFFERED = "no key feeds it: "
_LAYOUTS = "tests/dist/test_layouts_are_proven.py"
_MOE, _OPTIM = "transformer/moe", "optimizer/distrib_optimizer.py"

FIXES: tuple[Fix, ...] = (
    Fix(
        "#5047",
        "balancing and z-losses too small with tensor parallelism",
        "patched",
        "moe-loss-tokens",
        "0.19 has it but for the loss over data-parallel ranks and tokens that are not learnt from",
        f"{_MOE}/router.py:465",
        is_in_0_19=True,
    ),
    Fix(
        "#5338",
        "_reduce returns what it did not sum",
        "patched",
        "reduce-result",
        "",
        "tensor_parallel/mappings.py:31",
        True,
    ),
    Fix(
        "#4047",
        "what a stage sends is freed before it is sent",
        "out of reach",
        "",
        "nothing is freed where sends overlap: frees_sent in config/core_fields.py",
        "pipeline_parallel/schedules.py:1522",
        True,
    ),
    Fix("#5077", "resharding of the optimizer's state", "out of reach", "", _OWN_STORE, f"{_OPTIM}:1280"),
    Fix(
        "#4705",
        "learning rates of groups overwritten at load",
        "out of reach",
        "",
        f"{_OWN_STORE}; rates come from the configuration",
        "optimizer/optimizer.py:96",
        True,
    ),
    Fix(
        "#3693",
        "several optimizer instances wait for the default stream, not for the one that computes",
        "out of reach",
        "",
        "a step computes on the default stream: neither the trainer nor a kernel starts another",
        "distributed/param_and_grad_buffer.py:422",
        True,
    ),
    Fix(
        "#5798",
        "the balancing loss of sequences depends on the batch size",
        "patched",
        "sequence-loss-batch",
        "",
        f"{_MOE}/router.py:366",
        True,
    ),
    Fix(
        "#3389",
        "each layer takes the exchange of the next one under context parallelism",
        "out of reach",
        "",
        "parallel.cp_comm_type is one word for all layers, and not a list",
        "transformer/transformer_layer.py:297",
        True,
    ),
    Fix(
        "#3575",
        "the gate of attention is not cut where there are fewer key/value heads than tp",
        "patched",
        "gate-slices",
        "",
        "transformer/attention.py:1488",
        True,
    ),
    Fix(
        "#3624",
        "predicting layers stand twice in a sharded state",
        "out of reach",
        "",
        "names alone are read of it (mcore/shard_specs.py), and the second entry has the name of the first",
        "transformer/multi_token_prediction.py:1150",
        True,
    ),
    Fix(
        "#3401",
        "the tracker of balancing losses hangs with multi-token prediction",
        "out of reach",
        "",
        "losses are read from the step itself; the tracker is never reduced over ranks",
        f"{_MOE}/moe_utils.py:910",
        True,
    ),
    Fix(
        "#5530",
        "a norm of no gradients",
        "out of reach",
        "",
        "the 2-norm alone is asked for, which has a case for none in 0.16.1 too",
        "optimizer/clip_grads.py:89",
        True,
    ),
    Fix(
        "#3003",
        "values narrower than keys in packed samples with latent attention",
        "out of reach",
        "",
        "the portable attention takes any two widths; TransformerEngine's, on GPUs, was not tried",
        "transformer/multi_latent_attention.py:567",
        True,
    ),
    Fix(
        "#3504",
        "residuals in fp32 are cast back between layers",
        "out of reach",
        "",
        f"{_NOT_OFFERED}fp32_residual_connection",
        "models/common/embeddings/language_model_embedding.py:131",
        True,
    ),
    Fix(
        "#2765",
        "sigmoid scores of balancing losses in 16 bits",
        "out of reach",
        "",
        "routers compute in fp32 (moe_router_dtype is fixed), so their scores are in fp32",
        f"{_MOE}/moe_utils.py:783",
        True,
    ),
    Fix(
        "#4070",
        "the loss of sparse attention's indexer is not averaged",
        "out of reach",
        "",
        "linear attention is of gated delta nets here; sparse attention is no key",
        "transformer/experimental_attention_variant/dsa.py:139",
        True,
    ),
    Fix(
        "#4609",
        "the layer-wise gather of weights is left in gradients",
        "out of reach",
        "",
        "muon is ours (mcore/muon.py); megatron-core's layer-wise optimizer is never made",
        "optimizer/layer_wise_optimizer.py:147",
        True,
    ),
    Fix(
        "#3754",
        "Megatron-FSDP without sharding does not converge",
        "out of reach",
        "",
        "parallel.fsdp_sharding knows optim, optim_grads and optim_grads_params",
        "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:2638",
    ),
    Fix(
        "#6114",
        "a padding mask is laid over experts instead of tokens",
        "out of reach",
        "",
        "no padding mask is handed to a model: padded samples are documents of their own",
        f"{_MOE}/router.py:542",
        False,
    ),
    Fix(
        "#5197",
        "activations of experts are freed late in full recomputation",
        "out of reach",
        "",
        "it changes memory and no number; what is kept is measured by tests/dist/test_plan_kept.py",
        "tensor_parallel/random.py:508",
    ),
    Fix("#3569", "main weights are not loaded", "out of reach", "", _OWN_STORE, f"{_OPTIM}:940"),
    Fix("#3537", "state that is no tensor is loaded as one", "out of reach", "", _OWN_STORE, f"{_OPTIM}:940", True),
    Fix(
        "#4448",
        "a checkpoint is written of a step that the rerun machine rejected",
        "out of reach",
        "",
        "no step runs under the rerun machine: check_for_nan_in_grad and check_for_large_grads are off",
        "rerun_state_machine.py:434",
        True,
    ),
    Fix(
        "rerun machine",
        "NoneType in its checkpoint",
        "out of reach",
        "",
        "no step runs under it, and it is in no checkpoint",
        "rerun_state_machine.py:805",
        True,
    ),
    Fix(
        "#5067",
        "clipping of attention logits leaks",
        "out of reach",
        "",
        f"{_NOT_OFFERED}qk_clip",
        "transformer/attention.py:1517",
        True,
    ),
    Fix(
        "#3564",
        "parameters of packed samples",
        "kept by tests",
        "tests/dist/test_packing_is_proven.py",
        "boundaries are made in one place, train/step.py, for every stage",
        "packed_seq_params.py:12",
    ),
    Fix(
        "#5916",
        "the gradient norm counts a part of the experts where ep lies over tp",
        "patched",
        "expert-norm",
        "biases behind TransformerEngine's experts; ours were counted",
        "tensor_parallel/layers.py:96",
        True,
    ),
    Fix(
        "#5750",
        "the epsilon of Mamba's norm is the default's",
        "kept by tests",
        "tests/dist/test_hybrid.py",
        "stack_spec says the epsilon (mcore/hybrid_model.py)",
        "ssm/mamba_layer.py:85",
        True,
    ),
    Fix(
        "#5243",
        "rotary positions of packed samples under context parallelism",
        "kept by tests",
        "tests/dist/test_packing_is_proven.py",
        "0.16.1 takes the positions that 0.19.2 takes; layouts with cp are compared with one document at a time",
        "models/common/embeddings/rope_utils.py:212",
        True,
    ),
    Fix(
        "#3399",
        "uneven stages of Mamba",
        "kept by tests",
        "tests/dist/test_hybrid.py",
        "Stack takes the layers that the layout says (mcore/hybrid_model.py)",
        "ssm/mamba_block.py:172",
    ),
    Fix(
        "#7452",
        "the gradient of a gated delta net's norm is not summed over tp",
        "patched",
        "gated-delta-norm",
        "",
        "ssm/gated_delta_net.py:202",
    ),
    Fix(
        "#7452 FSDP",
        "a checkpoint of Megatron-FSDP counts each stage's layers from 0",
        "out of reach",
        "",
        f"{_OWN_STORE}, and layers are counted over all stages",
        "distributed/fsdp/mcore_fsdp_adapter.py:369",
    ),
    Fix(
        "#5694",
        "a balancing loss is on by default",
        "kept by tests",
        "tests/dist/test_keys_reach_the_engine.py",
        "model.moe.aux_loss_coeff is a key whose value the table hands over in any case",
        "transformer/transformer_config.py:659",
    ),
    Fix("#5956", "expert gradients divided by ep", "kept by tests", _LAYOUTS, f"{_LOSS}; layouts with ep"),
    Fix("#673", "a loss divided by a rank's tokens under cp", "kept by tests", _LAYOUTS, f"{_LOSS}; layouts with cp"),
    Fix("#1532", "predictions of further tokens not averaged", "kept by tests", _LAYOUTS, f"{_LOSS}; a prediction"),
    Fix(
        "NVIDIA-NeMo/Megatron-Bridge#2952",
        "packed samples without boundaries on stages in between",
        "kept by tests",
        "tests/dist/test_packing_is_proven.py",
        "boundaries are made on every stage",
    ),
    Fix(
        "PrimeIntellect-ai/prime-rl#1957",
        "a loss divided by one micro-batch's tokens",
        "kept by tests",
        _LAYOUTS,
        _LOSS,
    ),
    Fix("PrimeIntellect-ai/prime-rl#1960", "a loss averaged over dp ranks", "kept by tests", _LAYOUTS, _LOSS),
    Fix("PrimeIntellect-ai/prime-rl#1961", "a loss divided twice under cp", "kept by tests", _LAYOUTS, _LOSS),
    Fix("SkyRL#1420", "a loss divided by a rank's own tokens", "kept by tests", "tests/dist/test_chats.py", _LOSS),
    Fix("tunix#1662", "accumulation divides by micro-batches", "kept by tests", "tests/dist/test_chats.py", _LOSS),
    Fix(
        "SkyRL#1403",
        "Adam counts from a stale step after a resume",
        "patched",
        "optimizer-step-counters",
        "get_step of mcore/optimizer_state.py refuses parameters that disagree",
        f"{_OPTIM}:820",
    ),
    Fix(
        "NVIDIA-NeMo/Megatron-Bridge#3397",
        "weights loaded under Megatron-FSDP act from the second step on",
        "kept by tests",
        "tests/dist/test_fully_sharded.py",
        "a resumed run ends in the bits of one that was not interrupted",
    ),
    Fix(
        "NVIDIA-NeMo/Automodel#1755",
        "adapters of experts are loaded and do nothing",
        "kept by tests",
        "tests/parity_hf/test_peft.py",
        "logits are compared with those of peft over transformers",
    ),
    Fix(
        "NVIDIA-NeMo/Automodel#3592",
        "adapters of experts under other names",
        "kept by tests",
        "tests/parity_hf/test_peft.py",
        "every tensor of a folder is used once, or named",
    ),
)
