"""The whole configuration of a run, its canonical text and its digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field

from mtrain.config.base import Effect, Section
from mtrain.config.cluster import ClusterConfig
from mtrain.config.groups import (
    CheckpointConfig,
    DataConfig,
    KernelsConfig,
    LogConfig,
    OptimConfig,
    TrainerConfig,
)
from mtrain.config.model import ModelConfig
from mtrain.config.parallel import ParallelConfig
from mtrain.config.precision import PrecisionConfig

GROUPS = (
    "model",
    "parallel",
    "precision",
    "data",
    "optim",
    "trainer",
    "kernels",
    "checkpoint",
    "log",
    "cluster",
)

_EFFECT_OF_GROUP = {
    "model": Effect.SHAPE,
    "precision": Effect.NUMBERS,
    "data": Effect.NUMBERS,
    "optim": Effect.NUMBERS,
    "trainer": Effect.NUMBERS,
    "parallel": Effect.LAYOUT,
    "kernels": Effect.LAYOUT,
    "checkpoint": Effect.OPERATION,
    "log": Effect.OPERATION,
    "cluster": Effect.OPERATION,
}
_EFFECT_OF_KEY = {
    "model.name": Effect.OPERATION,
    "model.published": Effect.OPERATION,
    "model.published.peak_lr": Effect.OPERATION,
    "model.published.batch_tokens": Effect.OPERATION,
    "model.published.source": Effect.OPERATION,
    "precision.dtype": Effect.SHAPE,
    "precision.max_skipped_updates": Effect.OPERATION,
    "optim.name": Effect.SHAPE,
    "data.path": Effect.OPERATION,
    "data.blend": Effect.OPERATION,
    "data.tokenizer": Effect.OPERATION,
    "model.attention_dropout": Effect.NUMBERS,
    "model.hidden_dropout": Effect.NUMBERS,
    "model.init_method_std": Effect.NUMBERS,
    "model.embedding_init_method_std": Effect.NUMBERS,
    "model.softmax_scale": Effect.NUMBERS,
    "model.mask_padded_vocab": Effect.NUMBERS,
    "model.final_logit_softcapping": Effect.NUMBERS,
    "model.glu_linear_offset": Effect.NUMBERS,
    "model.activation_func_clamp_value": Effect.NUMBERS,
    "model.rotary_seq_len_interpolation_factor": Effect.NUMBERS,
    "model.moe.input_jitter_eps": Effect.NUMBERS,
    "model.moe.router_force_load_balancing": Effect.NUMBERS,
    "model.moe.router_padding_for_quantization": Effect.NUMBERS,
    "model.moe.flex_dispatcher_backend": Effect.LAYOUT,
    "parallel.ddp_reduce_scatter_with_fp32_accumulation": Effect.NUMBERS,
    "model.moe.aux_loss_coeff": Effect.NUMBERS,
    "model.moe.z_loss_coeff": Effect.NUMBERS,
    "model.moe.token_dispatcher_type": Effect.LAYOUT,
    "data.cache_dir": Effect.OPERATION,
    "trainer.micro_batch_size": Effect.LAYOUT,
    "trainer.eval_interval": Effect.OPERATION,
    "trainer.eval_iters": Effect.OPERATION,
    "trainer.sample_tokens": Effect.OPERATION,
    "trainer.sample_prompt": Effect.OPERATION,
    "trainer.deterministic": Effect.LAYOUT,
    "trainer.profile_step": Effect.OPERATION,
    "trainer.timeout_s": Effect.OPERATION,
    "trainer.soft_timeout_s": Effect.OPERATION,
    "trainer.join_timeout_s": Effect.OPERATION,
    "optim.cpu_offload": Effect.LAYOUT,
    "optim.main_params_dtype": Effect.SHAPE,
    "optim.store_param_remainders": Effect.LAYOUT,
    "model.window_size": Effect.NUMBERS,
    "model.window_attn_skip_freq": Effect.NUMBERS,
    "model.mtp_loss_scaling_factor": Effect.NUMBERS,
    "model.moe.router_bias_update_rate": Effect.NUMBERS,
    "model.moe.expert_capacity_factor": Effect.NUMBERS,
    "model.moe.pad_expert_input_to_capacity": Effect.LAYOUT,
    "model.moe.token_drop_policy": Effect.NUMBERS,
    "model.moe.shared_expert_overlap": Effect.LAYOUT,
}


def effect_of(path: str) -> Effect:
    """What changing the key at dotted `path` changes."""
    return _EFFECT_OF_KEY.get(path) or _EFFECT_OF_GROUP[path.split(".", 1)[0]]


class RecipeConfig(Section):
    """`recipe`: what a recipe file says of itself. No key of it changes a run."""

    title: str = ""
    """One line."""
    purpose: str = ""
    """When to pick this recipe."""
    hardware: str = ""
    """What it was made for."""
    source: str = ""
    """Where its hyperparameters come from."""
    verified: str = ""
    """How it was verified, or that it was not."""


class RunConfig(Section):
    """Everything that decides a run. The file `run.yaml` in a run folder is exactly this."""

    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    recipe: RecipeConfig = Field(default_factory=RecipeConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-like values of every key."""
        return self.model_dump(mode="json")

    def flat(self) -> dict[str, Any]:
        """Every leaf by its dotted key, without the recipe's words about itself."""
        out: dict[str, Any] = {}

        def walk(prefix: str, value: Any) -> None:
            if isinstance(value, dict) and value:
                for key, inner in value.items():
                    walk(f"{prefix}.{key}" if prefix else key, inner)
            else:
                out[prefix] = value

        walk("", {k: v for k, v in self.to_dict().items() if k != "recipe"})
        return out

    def recorded(self) -> RunConfig:
        """The run as it is written down: without the words that chose what to go on from."""
        choice = {"resume": None, "accept_changes": False}
        return self.model_copy(update={"checkpoint": self.checkpoint.model_copy(update=choice)})

    def digest(self) -> str:
        """sha256 of the canonical JSON of all keys but how to resume and the recipe's words about itself."""
        text = json.dumps(self.recorded().flat(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
