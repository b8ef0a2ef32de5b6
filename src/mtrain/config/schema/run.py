"""The whole configuration of a run, its canonical text and its digest."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Self

from pydantic import Field

from mtrain.config.schema.base import Effect, Key, Section
from mtrain.config.schema.checkpoint import CheckpointConfig, UnresolvedCheckpoint
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.data import DataConfig, UnresolvedData
from mtrain.config.schema.kernels import KernelsConfig
from mtrain.config.schema.launch import LaunchConfig
from mtrain.config.schema.log import LogConfig
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.optim import OptimConfig, UnresolvedOptim
from mtrain.config.schema.parallel import (
    ActivationOffloadConfig,
    ParallelConfig,
    UnresolvedParallel,
)
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.precision import PrecisionConfig, UnresolvedPrecision
from mtrain.config.schema.resilience import ResilienceConfig
from mtrain.config.schema.rollout import RolloutConfig
from mtrain.config.schema.trainer import TrainerConfig, UnresolvedTrainer

GROUPS = (
    "model",
    "peft",
    "parallel",
    "precision",
    "data",
    "optim",
    "trainer",
    "objective",
    "rollout",
    "kernels",
    "checkpoint",
    "log",
    "cluster",
    "launch",
    "resilience",
)


class RecipeConfig(Section):
    """`recipe`: metadata of a recipe file. None of its keys changes a run."""

    title: str = ""
    """One line."""
    purpose: str = ""
    """Situation in which to choose this recipe."""
    hardware: str = ""
    """The cluster that it was made for."""
    source: str = ""
    """The source of its hyperparameters."""
    verified: str = ""
    """Evidence that the recipe works, or a note that it was not verified."""


class UnresolvedRun(Section):
    """Everything that decides a run, as composed: null stands for values that `resolve` decides."""

    model: Annotated[ModelConfig, Key(effect=Effect.ARCHITECTURE)]
    peft: Annotated[PeftConfig, Key(effect=Effect.NUMERICS)] = Field(default_factory=PeftConfig)
    parallel: Annotated[UnresolvedParallel, Key(effect=Effect.PARALLELISM)] = Field(
        default_factory=UnresolvedParallel
    )
    precision: Annotated[UnresolvedPrecision, Key(effect=Effect.NUMERICS)] = Field(
        default_factory=UnresolvedPrecision
    )
    data: Annotated[UnresolvedData, Key(effect=Effect.NUMERICS)] = Field(
        default_factory=UnresolvedData
    )
    optim: Annotated[UnresolvedOptim, Key(effect=Effect.NUMERICS)] = Field(
        default_factory=UnresolvedOptim
    )
    trainer: Annotated[UnresolvedTrainer, Key(effect=Effect.NUMERICS)] = Field(
        default_factory=UnresolvedTrainer
    )
    objective: Annotated[ObjectiveConfig, Key(effect=Effect.NUMERICS)] = Field(
        default_factory=ObjectiveConfig
    )
    rollout: Annotated[
        RolloutConfig,
        Key(effect=Effect.NUMERICS, when="objective.name=grpo|rloo|ppo|reinforce_pp|distil"),
    ] = Field(default_factory=RolloutConfig)
    kernels: Annotated[KernelsConfig, Key(effect=Effect.PARALLELISM)] = Field(
        default_factory=KernelsConfig
    )
    checkpoint: Annotated[UnresolvedCheckpoint, Key(effect=Effect.RUNTIME)] = Field(
        default_factory=UnresolvedCheckpoint
    )
    log: Annotated[LogConfig, Key(effect=Effect.RUNTIME)] = Field(default_factory=LogConfig)
    cluster: Annotated[ClusterConfig, Key(effect=Effect.RUNTIME)] = Field(
        default_factory=ClusterConfig
    )
    launch: Annotated[LaunchConfig, Key(effect=Effect.RUNTIME)] = Field(
        default_factory=LaunchConfig
    )
    resilience: Annotated[ResilienceConfig, Key(effect=Effect.RUNTIME)] = Field(
        default_factory=ResilienceConfig
    )
    recipe: RecipeConfig = Field(default_factory=RecipeConfig)

    def on_any_device(self) -> Self:
        """Return the run without features that only a GPU has and that change no number: graphs,
        copies to host memory.
        """
        graphs = {
            "cuda_graph_impl": "none",
            "cuda_graph_modules": None,
            "cuda_graph_warmup_steps": None,
        }
        update = {
            "trainer": self.trainer.model_copy(update=graphs),
            "parallel": self.parallel.model_copy(
                update={"activation_offload": ActivationOffloadConfig()}
            ),
        }
        return self.model_copy(update=update)

    def to_dict(self) -> dict[str, Any]:
        """Return every key as plain JSON-like values."""
        return self.model_dump(mode="json")

    def flat(self) -> dict[str, Any]:
        """Return every leaf by its dotted key, without the recipe's metadata."""
        out: dict[str, Any] = {}

        def walk(prefix: str, value: Any) -> None:
            if isinstance(value, dict) and value:
                for key, inner in value.items():
                    walk(f"{prefix}.{key}" if prefix else key, inner)
            else:
                out[prefix] = value

        walk("", {k: v for k, v in self.to_dict().items() if k != "recipe"})
        return out

    def recorded(self) -> Self:
        """Return the run as recorded: without the words that chose what to resume, and without the
        launcher.
        """
        # A resumed run is the same run: otherwise its digest would differ from the checkpoint's.
        choice = {"resume": None, "accept_changes": False}
        checkpoint = self.checkpoint.model_copy(update=choice)
        return self.without_launcher().model_copy(update={"checkpoint": checkpoint})

    def without_launcher(self) -> Self:
        """Return the run as a file that others may read: no run file may set keys of `launch`."""
        return self.model_copy(update={"launch": LaunchConfig()})

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON of all keys, without resumption, restarts, the
        launcher and the recipe's metadata.
        """
        apart = ("launch.", "resilience.")
        keys = {k: v for k, v in self.recorded().flat().items() if not k.startswith(apart)}
        # Sorted: the digest must not change when keys of the schema change places.
        text = json.dumps(keys, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class RunConfig(UnresolvedRun):
    """A resolved run, which only `resolve` makes: no derived value is null. The file `run.yaml` in
    a run folder is exactly this.
    """

    parallel: ParallelConfig
    precision: PrecisionConfig
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    checkpoint: CheckpointConfig

    @property
    def together(self) -> int:
        """Return the number of consecutive samples that stay in one micro-batch: 2, the answers of
        a pair, which a packed sample has whole; else 1.
        """
        return 2 if self.objective.contrasts and not self.data.packed else 1

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a rank in an optimizer step."""
        return max(1, self.trainer.batch // (self.trainer.micro * self.parallel.dp))


# Sections with derived keys -> their class in a resolved run.
DERIVED_SECTIONS: dict[str, type[Section]] = {
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "checkpoint": CheckpointConfig,
}
