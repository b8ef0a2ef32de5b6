"""Faults on purpose inside of a step, for tests: `--inject`."""

from __future__ import annotations

import random
from typing import Any

import torch

from mtrain.mcore.state.local_params import unwrap
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.replicas import INTEGERS
from mtrain.train.loop.context import TrainContext
from mtrain.world import faults
from mtrain.world.faults import Fault
from mtrain.world.heartbeat import heartbeat

BITS = {4: 30, 2: 14}
"""Bytes of a number -> the bit that is flipped: the highest of the exponent."""


class Injected(Hook):
    """Reaches the moments `forward` and `backward` of `mtrain.world.faults` in each micro-batch,
    and flips bits.

    A captured graph repeats no hook of a module, so nothing is reached in one.
    """

    def start(self, context: TrainContext) -> None:
        """Watch the chunks of this rank; an evaluation reaches nothing."""
        for chunk in context.state.chunks:
            chunk.register_forward_pre_hook(_before)
            chunk.register_forward_hook(_after)
        for fault in faults.flips():
            Flip(fault, context.state.chunks)


class Flip:
    """A flip of one bit: of a weight of a layer, or of its output or the gradient of that."""

    def __init__(self, fault: Fault, chunks: list[Any]) -> None:
        """Choose a layer by the fault."""
        self.fault = fault
        self.draw = random.Random(str(fault))
        self.done = False
        self.wrong = False
        """True while the weight has the flipped bit."""
        layers = [
            module
            for chunk in chunks
            for name, module in unwrap(chunk).named_modules()
            if getattr(module, "weight", None) is not None and module.weight.dim() > 1
            # most rows of an embedding are of tokens that the step does not have
            if "embedding" not in name and "output" not in name
        ]
        self.layer = self.draw.choice(layers)
        self.place = self.draw.random()
        self.layer.register_forward_pre_hook(self._before)
        self.layer.register_forward_hook(self._after)

    def _acts(self, kind: str) -> bool:
        made = heartbeat.step == self.fault.step and kind == self.fault.kind
        return made and (self.fault.always or not self.done)

    def _flip(self, tensor: torch.Tensor) -> None:
        # `data`, because the flip must not count as a change that autograd refuses
        bits = tensor.data.view(INTEGERS[tensor.element_size()]).view(-1)
        bits[int(self.place * bits.numel())] ^= 1 << BITS[tensor.element_size()]
        self.done = True

    def _before(self, layer: Any, given: Any) -> None:
        if self._acts("flip_weight") and not self.done and torch.is_grad_enabled():
            self._flip(layer.weight)
            self.wrong = True

    def _after(self, layer: Any, given: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        if self._acts("flip_activation") and torch.is_grad_enabled():
            self._flip(out)
        if self.fault.kind == "flip_gradient" and out.requires_grad:
            out.register_hook(self._in_gradient)
        if self.wrong and not self.fault.always:
            self._flip(layer.weight)
            self.wrong = False

    def _in_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self._acts("flip_gradient"):
            return gradient
        wrong = gradient.clone(memory_format=torch.contiguous_format)
        self._flip(wrong)
        return wrong


def _before(chunk: Any, args: Any) -> None:
    if torch.is_grad_enabled():
        faults.reach(faults.FORWARD)


def _after(chunk: Any, args: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(_in_backward)


def _in_backward(gradient: torch.Tensor) -> None:
    faults.reach(faults.BACKWARD)
