"""Patches of tensor parallelism: collectives that gloo refuses, and random state."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from typing import Any

import torch

from mtrain.config.engine.release import UNTIL_0_16
from mtrain.mcore.adapter.installed import installed
from mtrain.mcore.patches.patch import core, patch


@patch(
    "reduce-result",
    "tensor_parallel/mappings.py:31",
    "_reduce sums a contiguous copy and returns its input: silently no sum for a tensor that is"
    " not contiguous.",
    "everywhere",
    UNTIL_0_16,
    "#5338",
)
def reduce_result() -> None:
    """Return the tensor that was summed."""

    def _reduce(input_: torch.Tensor, group: Any) -> torch.Tensor:
        if group.size() > 1:
            input_ = input_.contiguous()
            torch.distributed.all_reduce(input_, group=group)
        return input_

    core("tensor_parallel.mappings")._reduce = _reduce


@patch(
    "uneven-splits",
    "tensor_parallel/mappings.py:150",
    "Experts sharded over tensor-parallel ranks gather tokens in pieces of different sizes,"
    " which gloo refuses: RuntimeError. Pieces are padded to the longest; a reduce-scatter of"
    " such pieces becomes an all-reduce.",
    "off CUDA",
)
def uneven_splits() -> None:
    """Gather and scatter pieces of different sizes with collectives that gloo has."""
    mappings = core("tensor_parallel.mappings")
    dist = torch.distributed
    gather = mappings._gather_along_first_dim
    scatter = mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kw: Any
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kw)
        sizes = [int(size) for size in output_split_sizes]
        # `1`, because all pieces may be empty.
        padded = input_.new_zeros((max(*sizes, 1), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @functools.wraps(scatter)
    def scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kw: Any
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, *args, **kw)
        # A copy: the all-reduce works in place, and the input is the caller's.
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven


@patch(
    "gathered-pieces",
    "tensor_parallel/utils.py:93",
    "Gathers a tensor of several dimensions into one of one dimension, which gloo refuses:"
    " RuntimeError.",
    "off CUDA",
)
def gathered_pieces() -> None:
    """Gather a tensor of several dimensions as a row of elements, like the result."""
    utils = core("tensor_parallel.utils")
    parallel = core("tensor_parallel")
    original = utils.gather_split_1d_tensor

    @functools.wraps(original)
    def gather(tensor: torch.Tensor, tp_group: Any = None) -> torch.Tensor:
        whole: torch.Tensor = original(tensor.reshape(-1), tp_group)
        return whole

    for module in (utils, parallel, core("tensor_parallel.random")):
        module.gather_split_1d_tensor = gather


@patch(
    "host-weights",
    "tensor_parallel/layers.py:149",
    "Weights drawn on the host are alike on all ranks because the device's seeds leave the"
    " host's random numbers untouched. Where the CPU is the device there is one generator: they"
    " silently follow the device's seed.",
    "off CUDA",
)
def host_weights() -> None:
    """Draw them as a host does that has a generator of its own; a device that is no CPU has one."""
    layers = core("tensor_parallel.layers")
    original = layers._initialize_affine_weight_cpu

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        with getattr(getattr(installed.device, "namespace", None), "host_random", nullcontext)():
            return original(*args, **kwargs)

    # Both call the function by a name of their own.
    for module in (layers, core("transformer.moe.experts")):
        if hasattr(module, original.__name__):
            setattr(module, original.__name__, initialize)


def _is_no_rng_remark(record: logging.LogRecord) -> bool:
    return record.getMessage() != "CPU RNG state changed within GPU RNG context"


@patch(
    "rng-remark",
    "tensor_parallel/random.py:265",
    "Warns at every dropout that the CPU's random state changed, as it must where the CPU is"
    " the device.",
    "off CUDA",
)
def rng_remark() -> None:
    """Keep the remark out of the log."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_no_rng_remark)
