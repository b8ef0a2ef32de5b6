"""Patches of recomputation, CUDA graphs, and activations that wait in host memory."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtrain.config.engine.release import SINCE_0_19, UNTIL_0_16
from mtrain.mcore.adapter.installed import installed
from mtrain.mcore.layers.padding import remembering
from mtrain.mcore.patches.patch import NO_TE, core, patch


@patch(
    "checkpoint-without-fp8",
    "tensor_parallel/random.py:635",
    "CheckpointWithoutOutput(fp8=False) reads as 'fp8 is on': NameError when a norm or MLP is"
    " recomputed.",
    NO_TE,
)
def checkpoint_without_fp8() -> None:
    """Make the default of the flag mean that FP8 is off."""
    core("tensor_parallel.random").CheckpointWithoutOutput.__init__.__defaults__ = (None,)


@patch(
    "recomputed-bias",
    "tensor_parallel/random.py:508",
    "A recomputed MLP returns its bias for a later addition. The parameter itself then counts"
    " as output of the recomputation, whose backward runs into itself without end: training"
    " hangs.",
    "everywhere",
)
def recomputed_bias() -> None:
    """Hand a bias out of the first forward as a copy that has no history."""
    cls = core("tensor_parallel.random").CheckpointFunction
    original = cls.forward

    def forward(ctx: Any, run_function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        @functools.wraps(run_function)
        def without_parameters(*inputs: Any) -> Any:
            # The first run is without gradients, and its outputs become those of the autograd
            # function. The second one has gradients, and nothing to hide.
            outputs = run_function(*inputs)
            if torch.is_grad_enabled() or not isinstance(outputs, tuple):
                return outputs
            return tuple(o.detach() if isinstance(o, torch.nn.Parameter) else o for o in outputs)

        return original(ctx, without_parameters, distribute, *args)

    cls.forward = staticmethod(forward)


@patch(
    "recomputed-padding",
    "tensor_parallel/random.py:508",
    "A forward that is computed again in the backward does not know which positions of its"
    " micro-batch are padding: routers silently choose and weigh otherwise than the first"
    " time.",
    "everywhere",
)
def recomputed_padding() -> None:
    """Give a recomputation the padding of its own micro-batch."""
    cls = core("tensor_parallel.random").CheckpointFunction
    original = cls.forward

    def forward(ctx: Any, run_function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        return original(ctx, remembering(run_function), distribute, *args)

    cls.forward = staticmethod(forward)
    try:
        # With FP8 layers are recomputed by TransformerEngine's checkpoint instead.
        distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    except ImportError:
        return
    checkpoint = distributed.checkpoint

    @functools.wraps(checkpoint)
    def with_padding(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(remembering(function), *args, **kwargs)

    distributed.checkpoint = with_padding


class _Behind:
    """A layer after the last one of a stage, which returns its input."""

    def __init__(self, last: Any) -> None:
        self.layer_number = last.layer_number

    def __call__(self, hidden_states: Any, context: Any = None, **_: Any) -> tuple[Any, Any]:
        return hidden_states, context


@patch(
    "captured-inputs",
    "transformer/cuda_graphs.py:981",
    "After its forward is captured, a layer's input is memory that gradients of other layers go"
    " to, though its own backward reads it: gradients silently many times too large from the"
    " second step on.",
    "everywhere",
    UNTIL_0_16,
)
def captured_inputs() -> None:
    """Keep the memory of a captured layer's inputs for its backward, which reads them."""
    cls = core("transformer.cuda_graphs").TensorReusePool
    original = cls.insert

    @functools.wraps(original)
    def insert(self: Any, tensor: Tensor) -> None:
        # megatron-core marks the inputs of a graph with this attribute.
        if not hasattr(tensor, "can_skip_replay_copy"):
            original(self, tensor)

    cls.insert = insert


@patch(
    "short-groups",
    "transformer/transformer_block.py:539",
    "Layers are computed again in groups, and the last is taken to be as large as the others:"
    " IndexError where a stage's layers do not divide by it.",
    "everywhere",
    UNTIL_0_16,
    "#3562",
)
def short_groups() -> None:
    """Let the last group of layers end with the stage."""
    cls = core("transformer.transformer_block").TransformerBlock
    original = cls._get_layer

    @functools.wraps(original)
    def _get_layer(self: Any, layer_number: int) -> Any:
        if layer_number < len(self.layers):
            return original(self, layer_number)
        return _Behind(self.layers[-1])

    cls._get_layer = _get_layer


@patch(
    "refilled-outputs",
    "tensor_parallel/random.py:742",
    "Since 0.19 an output that is computed again is given memory by C++ that is compiled in the"
    " backward: RuntimeError without ninja, and a lock that a killed process leaves behind.",
    "everywhere",
    SINCE_0_19,
)
def refilled_outputs() -> None:
    """Copy if no C++ is compiled: CPUs need none, and devices need a compiler and ninja."""
    from torch.utils import cpp_extension

    if (
        installed.device is not None and installed.device.adapts_megatron
    ) or not cpp_extension.is_ninja_available():
        core("tensor_parallel.random")._get_share_storage = lambda: _refill


@torch.no_grad()
def _refill(output: Tensor, again: Tensor) -> None:
    # Views and tensors saved for the backward share the storage: filling it restores them all.
    memory = again.untyped_storage()
    output.untyped_storage().resize_(memory.nbytes())
    output.untyped_storage().copy_(memory)


@patch(
    "evaluated-offload",
    "pipeline_parallel/schedules.py:687",
    "Forwards of an evaluation count among those whose activations go to host memory, and are"
    " never taken back: AssertionError, 'Chunk mismatch', in the first backward after it.",
    "everywhere",
    UNTIL_0_16,
    "#3739",
)
def evaluated_offload() -> None:
    """Count and copy nothing in a forward that has no backward."""
    cls = core(
        "pipeline_parallel.fine_grained_activation_offload"
    ).FineGrainedActivationOffloadingInterface
    original = cls.__init__
    begin = cls.init_chunk_handler
    commit = cls.group_commit

    def __init__(self: Any, offload: bool, tensor: Tensor, name: str) -> None:
        original(self, offload and torch.is_grad_enabled(), tensor, name)

    def init_chunk_handler(*args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled():
            begin(*args, **kwargs)

    def group_commit(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return commit(tensor, *args, **kwargs) if torch.is_grad_enabled() else tensor

    cls.__init__ = __init__
    cls.init_chunk_handler = staticmethod(init_chunk_handler)
    cls.group_commit = staticmethod(group_commit)
