"""The critic of PPO: a second model in the policy's layout, with its own optimizer and schedule.

A critic is a `TrainContext` of its own, so the functions that compute a policy's step compute its
step, too: gradients, division, updates and metrics have one implementation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from mtrain.assembly.model import build_model
from mtrain.assembly.optim import build_optimizer, build_schedule
from mtrain.ckpt import state as ckpt_state
from mtrain.ckpt.state import TrainState
from mtrain.config.compose.paths import user_path
from mtrain.errors import ConfigError, TrainingError
from mtrain.plan.critic import critic_of
from mtrain.plan.teacher import FIX, HF_CONFIG
from mtrain.train.critic import value_losses
from mtrain.train.folder_weights import load_folder
from mtrain.train.loop.context import Critic, TrainContext
from mtrain.train.loop.prefetch import Batch
from mtrain.train.loop.readings import Reading, summed_report
from mtrain.train.loop.result import StepResult
from mtrain.train.loop.step import gradients, log_probabilities, update
from mtrain.train.objectives import Metric, Objective
from mtrain.train.teacher import checkpoint_of

RETURNS = "returns"
VALUES = "old_values"
METRICS = (
    Metric("loss", reduce="count"),
    Metric("count"),
    Metric("tokens"),
    Metric("value_clip_share", reduce="tokens"),
)


class ValueObjective(Objective):
    """The loss of a critic's values of sampled tokens, divided as the policy's loss."""

    def metrics(self) -> tuple[Metric, ...]:
        """Return the loss, its counts, and the share of values that are clipped."""
        return METRICS

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the weighted sum of a micro-batch; `output` holds the value before each label
        [b, s].
        """
        clip = self.run.objective.value_clip
        assert clip is not None
        weights = batch["loss_mask"]
        losses, clipped = value_losses(output, batch[VALUES], batch[RETURNS], clip)
        # In fp64, as the losses of a policy.
        total = (losses.double() * weights).sum()
        count = batch.get("loss_counts", weights).sum()
        counted = (weights > 0).double()
        found = {
            "loss": total.detach(),
            "count": count,
            "tokens": counted.sum(),
            "value_clip_share": (clipped * counted).sum(),
        }
        return total.float(), count, [one.of(found[one.name]) for one in METRICS]


@dataclass
class TrainedCritic(Critic):
    """A critic on this rank."""

    readings: dict[int, tuple[Reading, float | Tensor, float]] = field(default_factory=dict)
    """Numbers of steps that are not reported yet, with the gradient's norm and the rate."""

    @cached_property
    def objective(self) -> Objective:
        """Return the loss of values."""
        return ValueObjective(self.run)

    def values(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the value before each label [b, s] of micro-batches on the last stage; elsewhere
        nothing.
        """
        return log_probabilities(self, batches, "none")

    def learn(self, batches: Sequence[Batch], step: int) -> None:
        """Make one update from the micro-batches of a step."""
        reports = gradients(self, batches)
        _, norm, lr = update(self.state, self.run.optim.schedule_counts)
        row = summed_report(self.world, self.table, reports, {})
        if isinstance(norm, Tensor):
            norm = norm.detach().clone()
        self.readings[step] = self.board.copy(row), norm, lr

    def measured(self, context: TrainContext, result: StepResult) -> dict[str, float]:
        """Return the numbers of a step for its record.

        Raises:
            TrainingError: the loss of values is not a number.
        """
        if result.step not in self.readings:
            return {}
        reading, norm, lr = self.readings.pop(result.step)
        found = self.table.divided(reading.read())
        if not math.isfinite(found["loss"]):
            error = TrainingError(
                f"step {result.step}: the loss of the critic is {found['loss']}; nothing of this"
                " step is saved"
            )
            error.alert = "non_finite"
            raise error
        return {
            "value_loss": found["loss"],
            "value_clip_share": found["value_clip_share"],
            "critic_grad_norm": float(norm),
            "critic_lr": lr,
        }


def build_critic(context: TrainContext, *, drawn: bool = True) -> TrainedCritic | None:
    """Return the critic of a run with the weights that it starts from; None without one. Unless
    `drawn`, weights have no values.

    Raises:
        ConfigError: `objective.critic` has no weights, or those of another model.
        CorruptData: its weights are not whole.
    """
    run = critic_of(context.run)
    if run is None:
        return None
    world = context.world
    # The same seed and names as the policy: the same weights, but for the head.
    chunks = build_model(run, world, drawn=drawn)
    optimizer = build_optimizer(run, chunks)
    state = TrainState(chunks, optimizer, build_schedule(run, optimizer))
    if drawn and run.objective.critic is not None:
        folder = Path(user_path(run.objective.critic))
        checkpoint = checkpoint_of(folder)
        if checkpoint is not None:
            ckpt_state.load_model(ckpt_state.opened(checkpoint, run, world), chunks)
        elif (folder / HF_CONFIG).is_file():
            load_folder(run, folder, chunks)
        else:
            why = f"{folder} has no checkpoint and no config.json"
            raise ConfigError.of("MT374", "objective.critic", str(folder), why, FIX)
        ckpt_state.renew(state)
    critic = TrainedCritic(run, world, state, context.train_data, None)
    context.measures.append(critic.measured)
    return critic
