"""This rank's chunk of a hybrid, with the layers that `kernels` chose."""

from __future__ import annotations

from typing import Any

from mtrain.config.engine.core_fields import GPT_FIELDS, values
from mtrain.config.engine.fusions import operands_apart
from mtrain.config.resolve.stages import stages
from mtrain.config.schema.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.mcore.adapter.op_overrides import override_operations
from mtrain.mcore.layers import backend
from mtrain.mcore.layers.mamba_mixer import Scan
from mtrain.mcore.layers.recipe import recipe
from mtrain.mcore.models.hybrid_model import HybridModel, stack_spec
from mtrain.models.hybrid.count import own

_NOT_ASKED = ("rope_scaling", "rope_scaling_factor")
"""Of GPTModel alone."""


def chunk(run: RunConfig, config: Any, stage: int | None) -> HybridModel:
    """Return the layers of one virtual pipeline stage of this rank, with embedding and loss where
    they belong to it.
    """
    ps = mcore.parallel_state
    m = run.model
    hybrid = own(run.model)
    made: dict[str, Any] = {"fp8": recipe(run), "operands": operands_apart(run) is None}
    provider = backend.provider(run.kernels, backend.Parts.of(m), **made)
    assert run.kernels.loss is not None, "a resolved run says who makes its loss"
    override_operations(run.kernels, m.moe.group_score_topk if m.moe else None)
    held = [each.layers for each in stages(run)]
    here = held[(stage or 0) * run.parallel.pp + ps.get_pipeline_model_parallel_rank()]
    scan = Scan(hybrid.conv_kernel, hybrid.chunk_size, hybrid.time_step_min)
    factor = hybrid.embedding_multiplier
    return HybridModel(
        config,
        stack_spec(
            config,
            provider,
            scan,
            hybrid.pattern,
            here,
            vp_stage=stage,
            residual_multiplier=hybrid.residual_multiplier,
            logits_scaling=hybrid.logits_scaling,
        ),
        pattern=hybrid.pattern,
        stages=held,
        loss=run.kernels.loss,
        loss_vocab_size=m.loss_vocab_size,
        vp_stage=stage,
        features={"embedding_scale": None if factor == 1.0 else factor},
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        **{
            name: value for name, value in values(GPT_FIELDS, run).items() if name not in _NOT_ASKED
        },
    )
