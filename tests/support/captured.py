"""CUDA graphs on a CPU: a replay does what torch did during a capture again, in the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mtrain.devices import cpu_namespace


class Graph:
    """Operations of a capture in their order, with the tensors that they read and returned."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def register_generator_state(self, state: Any) -> None:
        """Do nothing: captured operations draw no numbers."""

    @torch.no_grad()
    def replay(self) -> None:
        """Do the operations again; each result goes where the first one lies, which is where views
        of it look.

        A device does it behind autograd's back, so no version of a tensor is counted here, either.
        """
        for op, args, kwargs, before in self.calls:
            args, kwargs, first = tree_map_only(
                torch.Tensor, lambda t: t.data, (args, kwargs, before)
            )
            now = op(*args, **kwargs)
            for old, new in zip(tree_leaves(first), tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that were written to, each with a copy of what it held before."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            written = [a for a, at in zip(args, op._schema.arguments, strict=False) if at.is_write]
            written += [
                kwargs[at.name] for at in op._schema.arguments if at.is_write and at.name in kwargs
            ]
            self.changed += [
                (t.data, t.data.clone())
                for t in tree_leaves(written)
                if isinstance(t, torch.Tensor)
            ]
        result = op(*args, **kwargs)
        self.graph.calls.append((op, args, kwargs, result))
        return result


@contextlib.contextmanager
def graph(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    """Capture as `torch.cuda.graph` does: at the end, existing tensors are unchanged."""
    with _Recorder(graph) as recorder:
        yield
    for tensor, before in reversed(recorder.changed):
        tensor.copy_(before)


def let_capture(patch: pytest.MonkeyPatch) -> None:
    """Let only megatron-core's module of CUDA graphs find them on the CPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    namespace = ModuleType("namespace")
    vars(namespace).update(vars(cpu_namespace))
    more: dict[str, Any] = {"CUDAGraph": Graph, "graph": graph, "graph_pool_handle": lambda: 0}
    more |= {
        "default_generators": [torch.default_generator],
        "get_device_capability": lambda *_: (9, 0),
    }
    more |= {
        "memory_stats": lambda *_: {
            f"{kind}_bytes.all.current": 0 for kind in ("allocated", "reserved")
        }
    }
    vars(namespace).update(more)
    patch.setitem(vars(cuda_graphs), "__device_namespace__", namespace)
    patch.setattr(cuda_graphs, "_ensure_generator_state_is_cudagraph_safe", lambda state: state)
    # no graph holds a CPU's generator: plain ones draw, and megatron-core takes them for those of
    # graphs
    patch.setattr("mtrain.world.init.tracker_of", lambda run: {})
    plain = random.get_cuda_rng_tracker

    def tracker() -> Any:
        return SimpleNamespace(is_inference_rng_tracker=True, get_states=plain().get_states)

    patch.setattr(cuda_graphs, "get_cuda_rng_tracker", tracker)
    if hasattr(cuda_graphs, "alloc_tensor_from_graph_mempool"):  # since 0.19
        patch.setattr(
            cuda_graphs, "alloc_tensor_from_graph_mempool", lambda meta: meta.zeros_like()
        )
