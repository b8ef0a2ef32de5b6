"""Patches of what is computed again, or replayed: a function each, which changes megatron-core in
this process.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtrain.mcore.adapter.installed import installed
from mtrain.mcore.layers.padding import remembering


def _core(module: str) -> Any:
    return importlib.import_module(f"megatron.core.{module}")


def checkpoint_without_fp8() -> None:
    """Make the default of the flag mean that FP8 is off."""
    _core("tensor_parallel.random").CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def recomputed_bias() -> None:
    """Hand a bias out of the first forward as a copy that has no history."""
    cls = _core("tensor_parallel.random").CheckpointFunction
    original = cls.forward

    def forward(ctx: Any, run_function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        @functools.wraps(run_function)
        def without_parameters(*inputs: Any) -> Any:
            outputs = run_function(*inputs)
            if torch.is_grad_enabled() or not isinstance(outputs, tuple):
                return outputs
            return tuple(o.detach() if isinstance(o, torch.nn.Parameter) else o for o in outputs)

        return original(ctx, without_parameters, distribute, *args)

    cls.forward = staticmethod(forward)


def recomputed_padding() -> None:
    """Know the padding of its own micro-batch in what is computed again."""
    cls = _core("tensor_parallel.random").CheckpointFunction
    original = cls.forward

    def forward(ctx: Any, run_function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        return original(ctx, remembering(run_function), distribute, *args)

    cls.forward = staticmethod(forward)
    try:
        distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    except ImportError:
        return
    checkpoint = distributed.checkpoint

    @functools.wraps(checkpoint)
    def with_padding(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(remembering(function), *args, **kwargs)

    distributed.checkpoint = with_padding


class _Behind:
    """What stands behind the last layer of a stage: hands on what arrives."""

    def __init__(self, last: Any) -> None:
        self.layer_number = last.layer_number

    def __call__(self, hidden_states: Any, context: Any = None, **_: Any) -> tuple[Any, Any]:
        return hidden_states, context


def short_groups() -> None:
    """Let the last group of layers end with the stage."""
    cls = _core("transformer.transformer_block").TransformerBlock
    original = cls._get_layer

    @functools.wraps(original)
    def _get_layer(self: Any, layer_number: int) -> Any:
        if layer_number < len(self.layers):
            return original(self, layer_number)
        return _Behind(self.layers[-1])

    cls._get_layer = _get_layer


def captured_inputs() -> None:
    """Keep the memory of a captured layer's inputs for its backward, which reads them."""
    cls = _core("transformer.cuda_graphs").TensorReusePool
    original = cls.insert

    @functools.wraps(original)
    def insert(self: Any, tensor: Tensor) -> None:
        if not hasattr(tensor, "can_skip_replay_copy"):  # what an input of a graph is marked with
            original(self, tensor)

    cls.insert = insert


def refilled_outputs() -> None:
    """Copy where no C++ is compiled: a CPU has no need of it, and other devices need a compiler and
    ninja.
    """
    from torch.utils import cpp_extension

    if (
        installed.device is not None and installed.device.adapts_megatron
    ) or not cpp_extension.is_ninja_available():
        _core("tensor_parallel.random")._get_share_storage = lambda: _refill


@torch.no_grad()
def _refill(output: Tensor, again: Tensor) -> None:
    memory = again.untyped_storage()
    output.untyped_storage().resize_(memory.nbytes())
    output.untyped_storage().copy_(memory)
