"""megatron-core's CUDA graphs of training: of whole steps, and of layers by TransformerEngine.

Those of `trainer.cuda_graph_impl=local` are layers' own: megatron-core's schedules capture them
after a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def whole_steps(schedule: Callable[..., Any], warmup_steps: int) -> Callable[..., Any]:
    """Return `schedule` of keyword arguments, captured with its backward after so many calls and
    replayed from then on.

    Tensors of a micro-batch are copied to the graph's inputs; results lie in the memory of the
    graph until the next call. Calls with and without backward are two graphs.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    def gathering(**given: Any) -> Any:
        chunks = given["model"]
        if not given["forward_only"]:
            for chunk in chunks if isinstance(chunks, list) else [chunks]:
                _gather_again(chunk)
        return schedule(**given)

    # megatron-core keeps graphs and the samples that they read in classes. It would replay those of
    # an earlier run of this process, whose memory is free and whose samples may differ in shape.
    StaticBufferLoader.static_buffers = {"training": [], "validation": []}
    FullCudaGraphWrapper.curr_iteration = {"training": 0, "validation": 0}
    FullCudaGraphWrapper.cuda_graph = {"training": None, "validation": None}
    FullCudaGraphWrapper.result = {"training": None, "validation": None}
    captured: Callable[..., Any] = FullCudaGraphWrapper(
        gathering, cuda_graph_warmup_steps=warmup_steps
    )
    return captured


def _gather_again(chunk: Any) -> None:
    """Let the next forward gather the weights, where it does so as it meets them.

    After an evaluation they are gathered already. A step captured then would hold no gather, and
    every replay would compute with the weights of that moment.
    """
    for name in ("bucket_groups", "expert_parallel_bucket_groups"):
        for group in getattr(chunk, name, ()):
            if group.ddp_config.overlap_param_gather and group.param_gather_handle is None:
                group.param_gather_dispatched = False


class CapturedLayers:
    """The layers of the chunks of a rank, captured by TransformerEngine."""

    def __init__(
        self,
        chunks: list[Any],
        optimizer: Any,
        seq_length: int,
        micro_batch_size: int,
        micro_batches: int,
    ) -> None:
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        self.chunks = chunks
        self.micro_batches = micro_batches
        self.graphs = TECudaGraphHelper(
            model=chunks,
            config=chunks[0].config,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            optimizers=[optimizer],
        )

    def capture(self, *, gathers: bool) -> None:
        """Capture them between two steps.

        `gathers`: hooks of their modules gather weights before they are read; a graph cannot, so
        megatron-core calls those hooks before it runs one. How many micro-batches a step has is
        known to megatron-core meanwhile.
        """
        from megatron.core import num_microbatches_calculator as calculator

        # `param_sync=False`: the values of weights do not matter while a graph is captured.
        for chunk in self.chunks if gathers else ():
            chunk.disable_forward_pre_hook(param_sync=False)
        # The graphs read the number of micro-batches from this global, which mtrain does not set
        # otherwise: it passes the number to the schedules.
        calculator.init_num_microbatches_calculator(0, None, self.micro_batches, 1, 1)
        self.graphs.create_cudagraphs()
        calculator.unset_num_microbatches_calculator()
        for chunk in self.chunks if gathers else ():
            chunk.enable_forward_pre_hook()
        if gathers:
            self.graphs.cuda_graph_set_manual_hooks()
