"""This rank's chunk of a decoder-only transformer, with the layers that `kernels` chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtrain.config.engine.core_fields import GPT_FIELDS, values
from mtrain.config.engine.kernels import operands_apart, positions_apart, sums_apart
from mtrain.config.resolve.stages import letters, pattern, stages
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.mcore.adapter.op_overrides import override_operations
from mtrain.mcore.layers import backend
from mtrain.mcore.layers.recipe import recipe
from mtrain.mcore.layers.rotary import frequencies, multiply_turns
from mtrain.mcore.models.block_model import BlockModel, block_spec
from mtrain.mcore.models.language_model import LanguageModel


def embedding_scale(model: ModelConfig) -> float | None:
    """Return the factor on the embeddings of tokens; None: no factor."""
    # Gemma multiplies its embeddings with the root of their width.
    by_width = model.hidden_size**0.5 if model.scale_embedding else None
    if model.mup is None or model.mup.embedding_mult == 1:
        return by_width
    return (by_width or 1.0) * model.mup.embedding_mult


def arguments(run: RunConfig, stage: int | None) -> dict[str, Any]:
    """Return the arguments of every family's chunk: its loss, and its place in the pipeline.

    Also chooses the implementations of operations that megatron-core looks up in its modules.
    """
    ps = mcore.parallel_state
    assert run.kernels.loss is not None, "a resolved run names the implementation of its loss"
    override_operations(run.kernels, run.model.moe.group_score_topk if run.model.moe else None)
    return {
        "loss": run.kernels.loss,
        "loss_vocab_size": run.model.loss_vocab_size,
        "pre_process": ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        "post_process": ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        "vp_stage": stage,
    }


def chunk(
    run: RunConfig,
    config: Any,
    stage: int | None,
    *,
    kind: Callable[..., Any] = LanguageModel,
    more: Mapping[str, Any] = {},
) -> Any:
    """Return the layers of one virtual pipeline stage of this rank, with embedding and loss where
    they belong to it.

    `kind` is the class of the model, a `LanguageModel`; `more` holds its own arguments.
    """
    ps = mcore.parallel_state
    m = run.model
    # Rotary positions of packed documents start again with each of them.
    packed = run.kernels.rope if positions_apart(run) is None else None
    made: dict[str, Any] = {
        "norms_add": sums_apart(run) is None,
        "operands": operands_apart(run) is None,
    }
    provider = backend.provider(
        run.kernels, backend.Parts.of(m), packed=packed, fp8=recipe(run), **made
    )
    if scaling := m.rope_scaling:
        multiply_turns(
            config,
            scaling.attention(
                scaling.original_max_position_embeddings or m.max_position_embeddings
            ),
        )
    features = {
        "soft_cap": m.final_logit_softcapping,
        "frequencies": frequencies(m),
        "embedding_scale": embedding_scale(m),
        "logit_scale": m.mup.logit_mult(m.hidden_size) if m.mup else None,
        "output_init_std": (m.embedding_init_method_std or m.init_method_std) if m.mup else None,
        "repeats_mtp": m.mtp_use_repeated_layer,
        "rotary_base_local": m.rotary_base_local,
    }
    shared = {
        "features": features,
        "parallel_output": True,
        **arguments(run, stage),
        **values(GPT_FIELDS, run),
    }
    if m.head:
        shared["share_embeddings_and_output_weights"] = False
        shared["value_head_std"] = m.value_head_std
    if m.builder == "hybrid":
        # Virtual stages take turns: stage v of pipeline rank p is number v * pp + p of all.
        held = [letters(each.layers) for each in stages(run)]
        here = held[(stage or 0) * run.parallel.pp + ps.get_pipeline_model_parallel_rank()]
        spec = block_spec(config, provider, pattern(m), here, vp_stage=stage)
        return BlockModel(config, spec, pattern=pattern(m), stages=held, **shared)
    return kind(
        config=config,
        transformer_layer_spec=backend.layer_spec(config, provider, vp_stage=stage),
        mtp_block_spec=backend.mtp_spec(config, provider, vp_stage=stage),
        **shared,
        **more,
    )
