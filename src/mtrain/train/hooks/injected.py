"""Faults on purpose inside of a step, for tests: `--inject`."""

from __future__ import annotations

from typing import Any

import torch

from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.world import faults


class Injected(Hook):
    """Reaches the moments `forward` and `backward` of `mtrain.world.faults` in each micro-batch.

    A captured graph repeats no hook of a module, so nothing is reached in one.
    """

    def start(self, context: TrainContext) -> None:
        """Watch the chunks of this rank; an evaluation reaches nothing."""
        for chunk in context.state.chunks:
            chunk.register_forward_pre_hook(_before)
            chunk.register_forward_hook(_after)


def _before(chunk: Any, args: Any) -> None:
    if torch.is_grad_enabled():
        faults.reach(faults.FORWARD)


def _after(chunk: Any, args: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(_in_backward)


def _in_backward(gradient: torch.Tensor) -> None:
    faults.reach(faults.BACKWARD)
