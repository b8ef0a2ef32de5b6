"""Defects of megatron-core that configuration cannot avoid, each patched once when the adapter is
installed.

Each has a test in `tests/distributed/test_adapter_patches.py` that fails without it, on every
release that it is for. At an upgrade of megatron-core every entry is to be looked up again: the
reason says what to look for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from mtrain.config.engine import release as engine
from mtrain.config.engine.release import SINCE_0_19, UNTIL_0_16, Release
from mtrain.devices.base import Device
from mtrain.mcore.patches import patching, patching_linear, patching_recompute, patching_shards
from mtrain.mcore.patches.patch import NO_TE, Patch, Where


def apply_patches(device: Device, without: frozenset[str] = frozenset()) -> None:
    """Apply every patch that this device and installation need, but those in `without`; `install`
    calls this once.

    Raises `ValueError` for an unknown name.
    """
    unknown = without - {patch.name for patch in PATCHES}
    if unknown:
        raise ValueError(f"no such patches: {', '.join(sorted(unknown))}")
    for patch, why_not in standing(device, engine.release()):
        if not why_not and patch.name not in without:
            patch.apply()


def standing(device: Device, release: Release | None) -> Iterator[tuple[Patch, str]]:
    """Yield each patch, and why a device and an installation with this release do without it; empty
    where they need it.
    """
    has_te = importlib.util.find_spec("transformer_engine") is not None
    spared: dict[Where, str] = {
        "everywhere": "",
        "without TransformerEngine": "TransformerEngine is installed" if has_te else "",
        "off CUDA": "" if device.adapts_megatron else f"the device is {device.name}",
    }
    for patch in PATCHES:
        absent = release is not None and release not in patch.versions
        yield patch, f"for {patch.versions} alone" if absent else spared[patch.applies]


PATCHES: tuple[Patch, ...] = (
    Patch(
        "router-gemm",
        "transformer/moe/moe_utils.py:22",
        "te_general_gemm stays unbound without TransformerEngine, and line 1192 asks for it:"
        " NameError in every MoE.",
        NO_TE,
        patching.router_gemm,
        UNTIL_0_16,
    ),
    Patch(
        "mla-flag",
        "transformer/multi_latent_attention.py:62",
        "HAVE_TE says True although TELinear is a MagicMock, so isinstance at line 185 raises"
        " TypeError.",
        NO_TE,
        patching.mla_flag,
        UNTIL_0_16,
        "#3763",
    ),
    Patch(
        "mla-down-projection",
        "transformer/multi_latent_attention.py:437",
        "Down projections must be of classes known by name. The one that works without"
        " TransformerEngine splits its weight; the key position's gradient then misses other"
        " tensor-parallel ranks' heads: silent, 1e-3 relative.",
        "everywhere",
        patching.mla_down_projection,
    ),
    Patch(
        "mla-query-projection",
        "transformer/multi_latent_attention.py:497",
        "Since 0.19 MLA without a rank of queries takes TransformerEngine's projection with a norm"
        " in it, whatever a spec says: silently another model (DeepSeek-V2-Lite has no such norm),"
        " or RuntimeError.",
        "everywhere",
        patching.mla_query_projection,
        SINCE_0_19,
    ),
    Patch(
        "mla-query-norm",
        "distributed/finalize_model_grads.py:354",
        "Gradients of every q_layernorm are summed over tensor-parallel ranks. Without sequence"
        " parallelism MLA's is whole on each rank: silently tp times too large. Now the mean is"
        " taken, which is right for equal ones.",
        "everywhere",
        patching.mla_query_norm,
    ),
    Patch(
        "moe-loss-tokens",
        "transformer/moe/router.py:469",
        "With a loss per token, balancing and z-losses are weighted with a rank's tokens and"
        " gradients divided by those of all: under sequence or context parallelism these losses are"
        " silently tp * cp times too small. Since 0.19 (#5047) they are not, but for the loss over"
        " data-parallel ranks and for tokens that are not learnt from.",
        "everywhere",
        patching.moe_loss_tokens,
        upstream="#5047",
    ),
    Patch(
        "sequence-loss-batch",
        "transformer/moe/router.py:366",
        "With a loss per token, the balancing loss of sequences is weighted with the tokens of one"
        " of them: silently as many times too small as a micro-batch has samples.",
        "everywhere",
        patching.sequence_loss_batch,
        UNTIL_0_16,
        "#5798",
    ),
    Patch(
        "routed-padding",
        "transformer/moe/router.py:542",
        "Padding is routed, fills capacities and counts in losses and biases unless a mask is"
        " handed over, which MTP layers and pipeline stages in between lack; and with one the"
        " losses of several ranks are weighted wrongly.",
        "everywhere",
        patching.routed_padding,
        upstream="#6114",
    ),
    Patch(
        "expert-gradients",
        "tensor_parallel/layers.py:842",
        "Without expert parallelism, experts count as dense weights. If those are sharded otherwise"
        " (etp is not tp) their gradients are summed over the wrong ranks: silently half of a"
        " gradient with tp 2 and etp 1.",
        "everywhere",
        patching.expert_gradients,
        UNTIL_0_16,
    ),
    Patch(
        "expert-norm",
        "tensor_parallel/layers.py:96",
        "What experts hold whole (biases behind them) counts in the gradient norm on the first"
        " tensor-parallel rank alone. Where others hold other experts (ep beside tp) theirs"
        " silently do not count.",
        "everywhere",
        patching_shards.expert_norm,
        UNTIL_0_16,
        "#5916",
    ),
    Patch(
        "gate-slices",
        "transformer/attention.py:1488",
        "With fewer key/value heads than tensor-parallel ranks the gate of attention stays that of"
        " all query heads of a group: RuntimeError about its shape.",
        "everywhere",
        patching_shards.gate_slices,
        UNTIL_0_16,
        "#3575",
    ),
    Patch(
        "mtp-tied-output",
        "models/gpt/gpt_model.py:248",
        "Where a stage predicts several tokens with tied embeddings, the output layer has a weight"
        " of its own beside the embedding that it uses: AssertionError when the state is split into"
        " shards.",
        "everywhere",
        patching.mtp_tied_output,
    ),
    Patch(
        "mtp-without-labels",
        "models/gpt/gpt_model.py:605",
        "A model that was trained with multi-token prediction asks for labels when it generates:"
        " AttributeError; since 0.19 it makes all further tokens' logits, too, and does not know"
        " where its cache is: RuntimeError.",
        "everywhere",
        patching.mtp_without_labels,
    ),
    Patch(
        "mtp-names",
        "transformer/multi_token_prediction.py:622",
        "Since 0.19 the weights of multi-token prediction have other names (mtp_model_layer):"
        " another release's checkpoints lack them, and initial weights, which are drawn by name,"
        " are silently others.",
        "everywhere",
        patching.mtp_names,
        SINCE_0_19,
    ),
    Patch(
        "reduce-result",
        "tensor_parallel/mappings.py:31",
        "_reduce sums a contiguous copy and returns its input: silently no sum for a tensor that is"
        " not contiguous.",
        "everywhere",
        patching.reduce_result,
        UNTIL_0_16,
        "#5338",
    ),
    Patch(
        "uneven-splits",
        "tensor_parallel/mappings.py:150",
        "Experts sharded over tensor-parallel ranks gather tokens in pieces of different sizes,"
        " which gloo refuses: RuntimeError. Pieces are padded to the longest; a reduce-scatter of"
        " such pieces becomes an all-reduce.",
        "off CUDA",
        patching.uneven_splits,
    ),
    Patch(
        "gathered-pieces",
        "tensor_parallel/utils.py:93",
        "Gathers a tensor of several dimensions into one of one dimension, which gloo refuses:"
        " RuntimeError.",
        "off CUDA",
        patching.gathered_pieces,
    ),
    Patch(
        "host-weights",
        "tensor_parallel/layers.py:149",
        "Weights drawn on the host are alike on all ranks because the device's seeds leave the"
        " host's random numbers alone. Where the CPU is the device there is one generator: they"
        " silently follow the device's seed.",
        "off CUDA",
        patching.host_weights,
    ),
    Patch(
        "gradient-norm",
        "utils.py:1205",
        "Without Apex the norm is torch.norm in fp32, on a CPU with an error of 1e-5 at a million"
        " elements and 7e-5 at four: layouts clip differently. On a GPU the host waits for the norm"
        " of each gradient.",
        NO_TE,
        patching.gradient_norm,
    ),
    Patch(
        "optimizer-state-before-first-step",
        "optimizer/distrib_optimizer.py:642",
        "state_dict() takes the step from torch Adam's state, which is empty before the first step:"
        " AssertionError.",
        NO_TE,
        patching.optimizer_state_before_first_step,
    ),
    Patch(
        "optimizer-state-loading",
        "optimizer/distrib_optimizer.py:940",
        "Loading copies into every state tensor of torch Adam: KeyError 'step', or an in-place"
        " change of a leaf.",
        NO_TE,
        patching.optimizer_state_loading,
    ),
    Patch(
        "optimizer-step-counters",
        "optimizer/distrib_optimizer.py:820",
        "Loading gives all parameters one step tensor; torch Adam then counts one step per"
        " parameter: silently wrong from the second step after a resume.",
        NO_TE,
        patching.optimizer_step_counters,
    ),
    Patch(
        "te-version",
        "utils.py:348",
        "Without TransformerEngine, an optimizer with main weights asks for a version of it:"
        " TypeError.",
        NO_TE,
        patching.te_version,
        UNTIL_0_16,
    ),
    Patch(
        "checkpoint-without-fp8",
        "tensor_parallel/random.py:635",
        "CheckpointWithoutOutput(fp8=False) reads as 'fp8 is on': NameError when a norm or MLP is"
        " recomputed.",
        NO_TE,
        patching_recompute.checkpoint_without_fp8,
    ),
    Patch(
        "recomputed-bias",
        "tensor_parallel/random.py:508",
        "A recomputed MLP returns its bias for a later addition. The parameter itself then counts"
        " as output of the recomputation, whose backward runs into itself without end: training"
        " hangs.",
        "everywhere",
        patching_recompute.recomputed_bias,
    ),
    Patch(
        "recomputed-padding",
        "tensor_parallel/random.py:508",
        "A forward that is computed again in the backward does not know which positions of its"
        " micro-batch are padding: routers silently choose and weigh otherwise than the first"
        " time.",
        "everywhere",
        patching_recompute.recomputed_padding,
    ),
    Patch(
        "captured-inputs",
        "transformer/cuda_graphs.py:981",
        "After its forward is captured, a layer's input is memory that gradients of other layers go"
        " to, though its own backward reads it: gradients silently many times too large from the"
        " second step on.",
        "everywhere",
        patching_recompute.captured_inputs,
        UNTIL_0_16,
    ),
    Patch(
        "short-groups",
        "transformer/transformer_block.py:539",
        "Layers are computed again in groups, and the last is taken to be as large as the others:"
        " IndexError where a stage's layers do not divide by it.",
        "everywhere",
        patching_recompute.short_groups,
        UNTIL_0_16,
        "#3562",
    ),
    Patch(
        "refilled-outputs",
        "tensor_parallel/random.py:742",
        "Since 0.19 an output that is computed again is given memory by C++ that is compiled in the"
        " backward: RuntimeError without ninja, and a lock that a killed process leaves behind.",
        "everywhere",
        patching_recompute.refilled_outputs,
        SINCE_0_19,
    ),
    *patching_shards.PATCHES,
    Patch(
        "torch-norm",
        "transformer/torch_norm.py:32",
        "The norm that models take by default refuses sequence parallelism and zero-centered"
        " scales: AssertionError.",
        NO_TE,
        patching.torch_norm,
    ),
    Patch(
        "gated-delta-without-fla",
        "ssm/gated_delta_net.py:101",
        "A gated delta net is not built where fla is not installed, on a CPU for one: ImportError.",
        "everywhere",
        patching_linear.gated_delta_without_fla,
    ),
    Patch(
        "gated-delta-norm",
        "distributed/finalize_model_grads.py:354",
        "Tensor-parallel ranks norm the outputs of their heads with the same weight. Without"
        " sequence parallelism the gradients of it are not summed: silently that of a rank's heads,"
        " and weights that drift apart.",
        "everywhere",
        patching_linear.gated_delta_norm,
        upstream="#7452",
    ),
    Patch(
        "rng-remark",
        "tensor_parallel/random.py:265",
        "Warns at every dropout that the CPU's random state changed, as it must where the CPU is"
        " the device.",
        "off CUDA",
        patching.rng_remark,
    ),
)
"""All patches, in the order in which they are applied."""
