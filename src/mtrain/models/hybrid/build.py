"""This rank's chunk of a hybrid, with the layers that `kernels` chose."""

from __future__ import annotations

from typing import Any

from mtrain.config.engine.core_fields import GPT_FIELDS, values
from mtrain.config.engine.kernels import operands_apart
from mtrain.config.resolve.stages import stages
from mtrain.config.schema.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.mcore.layers import backend
from mtrain.mcore.layers.mamba_mixer import Scan
from mtrain.mcore.layers.recipe import recipe
from mtrain.mcore.models.hybrid_model import HybridModel, stack_spec
from mtrain.models.gpt.build import arguments
from mtrain.models.hybrid.config import HybridConfig

_NOT_ASKED = ("rope_scaling", "rope_scaling_factor")
"""Arguments that only GPTModel has."""


def chunk(run: RunConfig, config: Any, stage: int | None) -> HybridModel:
    """Return the layers, embedding and loss of a virtual pipeline stage of this rank."""
    ps = mcore.parallel_state
    m = run.model
    hybrid = HybridConfig.of(run.model)
    made: dict[str, Any] = {"fp8": recipe(run), "operands": operands_apart(run) is None}
    provider = backend.provider(run.kernels, backend.Parts.of(m), **made)
    shared = arguments(run, stage)
    # Virtual stages take turns: stage v of pipeline rank p is number v * pp + p of all.
    held = [each.layers for each in stages(run)]
    here = held[(stage or 0) * run.parallel.pp + ps.get_pipeline_model_parallel_rank()]
    own = {name: value for name, value in values(GPT_FIELDS, run).items() if name not in _NOT_ASKED}
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
        features={"embedding_scale": None if factor == 1.0 else factor},
        parallel_output=True,
        **shared,
        **own,
    )
