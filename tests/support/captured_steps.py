"""Steps of whole runs under the capture recorder, for an H100 that need not exist: `python -m
tests.support.captured_steps`.

A run is resolved for a GPU and built on tensors without memory; Triton's kernels are launched
without being run, in the interpreter, which has to be chosen before Triton is imported. So this is
a process of its own. It reads JSON, names and the words of each command line, and prints for each
the codes of the rules that refuse it, or what the recorder found in two of its steps.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch._C._distributed_c10d import FakeWork

from tests.support import capture_recorder
from tests.support.capture_recorder import Capture, Finding, Outside
from tests.support.gradient_passes import GradientPasses
from tests.support.interpreted import answer_of

HERE = [
    "cluster=h100",
    "parallel=single",
    "cluster.devices_per_node=1",
    "data=mock",
    "kernels=triton",
    "data.seq_length=128",
    "trainer.micro_batch_size=1",
    "trainer.global_batch_size=2",
    "trainer.eval_iters=1",
]
META = torch.device("meta")


def recorded(cases: dict[str, list[str]], timeout_s: float = 300) -> dict[str, dict[str, Any]]:
    """Return the findings of every case by its name: `refused`, codes of rules; `found`, sentences;
    `graphs`, how many were recorded; `passes` over gradients apart from `products`, see
    `GradientPasses`.

    Raises `AssertionError` with what the process printed if it did not end well.
    """
    return answer_of("tests.support.captured_steps", cases, timeout_s)  # type: ignore[no-any-return]


def steps_of(words: list[str]) -> dict[str, Any]:
    """Return the codes that refuse a run, or the findings in its second and third step; the word
    `fault=NAME` puts one of `captured_steps_faults` into its layers.
    """
    from mtrain.config.compose.composer import compose
    from mtrain.config.resolve.resolution import Machine, resolve
    from mtrain.config.rules import check

    machine = Machine(cpu_cores=8, memory_bytes=64 << 30, gpus=8, triton=True)
    faults = [word.removeprefix("fault=") for word in words if word.startswith("fault=")]
    words = [word for word in words if not word.startswith("fault=")]
    named = {word.partition("=")[0] for word in words}
    given = [word for word in HERE if word.partition("=")[0] not in named]
    run = resolve(compose([*given, *words]).run, machine)
    refused = sorted({p.code for p in check(run) if p.severity == "error"})
    if refused:
        return {"refused": refused, "found": [], "graphs": 0}
    findings: list[Finding] = []
    seen = _steps(run, findings, faults)
    return {"refused": [], "found": [str(finding) for finding in findings], **seen}


def _steps(run: Any, findings: list[Finding], faults: list[str]) -> dict[str, Any]:
    from mtrain.devices import cpu_namespace
    from mtrain.world import fake_world

    # Weights are updated between graphs, by an optimizer that has tests of its own.
    optimizer = SimpleNamespace(scale_loss=lambda loss: loss, zero_grad=lambda: None)
    registered = fake_world.tracker_of(run)["use_cudagraphable_rng"]
    with ExitStack() as stack:
        # The generator of a CPU cannot be registered with a graph.
        stack.enter_context(mock.patch.object(fake_world, "tracker_of", return_value={}))
        world = stack.enter_context(fake_world.silent_world(run, 0, META))
        # megatron-core is adapted from here on.
        from mtrain.mcore.adapter.ahead import stay_on_device
        from mtrain.train import assemble
        from mtrain.train.loop import step as steps
        from mtrain.train.loop.prefetch import Batch, to_device
        from tests.support.captured_steps_faults import seeded

        for fault in faults:
            stack.enter_context(seeded(fault))
        for name, value in (("build_optimizer", optimizer), ("build_schedule", None)):
            stack.enter_context(mock.patch.object(assemble, name, return_value=value))
        layers = _Layers(findings)
        whole = _Whole(findings)
        wrapper = "megatron.core.full_cuda_graph.FullCudaGraphWrapper"
        stack.enter_context(mock.patch(wrapper, side_effect=whole.wrapping))
        stack.enter_context(_recorded_managers(layers))
        stack.enter_context(_eager_parts(run))
        stack.enter_context(_generators(findings, registered))
        stack.enter_context(cpu_namespace.shapes_only())
        stack.enter_context(_Alone(findings))
        # Some code asks a tensor for CUDA, and not for its device.
        cuda = property(lambda tensor: tensor.is_meta)
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", cuda))
        # As `get_device` of a tensor without memory.
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=-1))
        with META:
            context = assemble.assemble(run, world, assemble.splits_of(run), drawn=False)
        # As in a run on a GPU, where the host does not wait for these numbers.
        stay_on_device(context.state.chunks[0].config)
        read = context.train_data.microbatches(0, run.trainer.batch)
        batches = [to_device(cast(Batch, batch), world) for batch in read]
        with GradientPasses(context.state.chunks) as passes:
            steps.gradients(context, batches)
        for _ in range(2):
            layers.on = run.trainer.cuda_graph_impl == "local"
            whole.on = True
            reports = steps.gradients(context, batches)
            layers.on = False
            gc.collect()
            whole.end(reports)
            del reports
            layers.end()
            if run.trainer.eval_iters:
                _evaluate(context, batches)
        return {
            "graphs": layers.number + (whole.run is not None),
            "passes": passes.found,
            "products": passes.products,
        }


def _evaluate(context: Any, batches: list[Any]) -> None:
    from mtrain.mcore.state.sharding import gathered
    from mtrain.train.loop import step as steps

    with gathered(context.state.chunks), torch.no_grad():
        for chunk in context.state.chunks:
            chunk.eval()
        steps.run_schedule(context, batches, forward_only=True)
        for chunk in context.state.chunks:
            chunk.train()


class _Alone(Outside):
    """Collectives without other ranks: they return at once what they were given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        outs = [
            FakeWork().boxed() if "Work" in str(one.type) else args[0]
            for one in func._schema.returns
        ]
        return outs[0] if len(outs) == 1 else tuple(outs)


class _Whole:
    """megatron-core's wrapper of a step's schedule, which records it where that would capture."""

    def __init__(self, findings: list[Finding]) -> None:
        self.capture = Capture(findings)
        self.schedule: Callable[..., Any] | None = None
        self.run: Any = None
        self.on = False

    def wrapping(self, schedule: Callable[..., Any], **_: Any) -> _Whole:
        """Take the place of the class, once for each run."""
        self.schedule = schedule
        return self

    def __call__(self, **given: Any) -> Any:
        assert self.schedule is not None
        if not self.on or given["forward_only"]:
            return self.schedule(**given)
        batches = list(given.pop("data_iterator"))
        self.run = self.capture.begun()
        with self.capture.part(self.run, batches):
            return self.schedule(data_iterator=iter(batches), **given)

    def end(self, results: Any) -> None:
        """Compare the step with the first."""
        if self.run is not None:
            self.capture.returns(self.run, results)
            self.capture.ended(self.run)
        self.on = False


class _Layers:
    """The graphs of layers."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        self.on = False
        self.captures: dict[int, Capture] = {}
        self.runs: list[tuple[Capture, Any]] = []

    @property
    def number(self) -> int:
        """Return the number of graphs."""
        return len(self.captures)

    def begun(self, manager: Any) -> tuple[Capture, Any]:
        """Begin a run of a layer's graph."""
        capture = self.captures.setdefault(id(manager), Capture(self.findings))
        run = capture.begun()
        self.runs.append((capture, run))
        return capture, run

    def end(self) -> None:
        """Compare every run of this step with the first one of its layer."""
        for capture, run in self.runs:
            capture.ended(run)
        self.runs = []


@contextmanager
def _recorded_managers(layers: _Layers) -> Iterator[None]:
    """Record what megatron-core's manager of a module's graphs would capture."""
    from megatron.core.distributed import distributed_data_parallel
    from megatron.core.models.common.language_module import language_module
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.module import MegatronModule

    class Manager(torch.nn.Module):
        def __init__(
            self, config: Any, base_module: Any = None, function_name: str | None = None, **_: Any
        ) -> None:
            super().__init__()
            self.function: Callable[..., Any] | None = None
            if function_name is not None:
                self.function = getattr(base_module, function_name)
                setattr(base_module, function_name, self._replacing(base_module))

        def _replacing(self, module: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: self(module, args, kwargs)

        def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
            call = self.function or super(MegatronModule, module).__call__
            if not layers.on or not torch.is_grad_enabled():
                return call(*args, **kwargs)
            # Data parallelism gathers weights before a graph, and does nothing in it.
            for part in module.modules():
                for hook in part._forward_pre_hooks.values():
                    hook(part)
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            weights = list(module.parameters())
            given: dict[str, Any] = {"call": call, "args": args, "kwargs": kwargs}
            outs = _Graphed.apply(layers.begun(self), given, len(tensors), *tensors, *weights)
            found = iter(outs if isinstance(outs, tuple) else (outs,))
            plain = given["plain"]
            if not isinstance(plain, tuple):
                return next(found)
            return tuple(next(found) if one is _Graphed else one for one in plain)

    def capturing() -> bool:
        return layers.on and capture_recorder.recording()

    with (
        mock.patch.object(cuda_graphs, "CudaGraphManager", Manager),
        # Since 0.19 it makes one for inference.
        mock.patch.object(language_module, "CudaGraphManager", Manager, create=True),
        mock.patch.object(distributed_data_parallel, "is_graph_capturing", capturing),
    ):
        yield


@contextmanager
def _eager_parts(run: Any) -> Iterator[None]:
    """Leave out experts that run between graphs, where the host reads numbers that no tensor has
    here, and the exchange between stages.
    """
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def experts(layer: Any, hidden: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        # Every weight gets a gradient, as data parallelism expects.
        return hidden + 0 * sum(weight.sum() for weight in layer.parameters()), None

    parts = run.trainer.cuda_graph_modules
    with ExitStack() as stack:
        if parts is not None and "moe" not in parts:
            stack.enter_context(mock.patch.object(MoELayer, "forward", experts))
        for name in ("_batched_p2p_ops", "_p2p_ops"):
            stack.enter_context(mock.patch.object(p2p_communication, name, return_value=[]))
        yield


class _Graphed(torch.autograd.Function):
    """A call whose forward and backward are recorded apart from what surrounds them, as they are
    captured.
    """

    @staticmethod
    def forward(ctx: Any, graph: Any, given: dict[str, Any], number: int, *tensors: Any) -> Any:
        capture, run = graph
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors[:number]]
        place = iter(inputs)

        def own(value: Any) -> Any:
            return next(place) if isinstance(value, torch.Tensor) else value

        args = tuple(own(value) for value in given["args"])
        kwargs = {name: own(value) for name, value in given["kwargs"].items()}
        with torch.enable_grad(), capture.part(run, inputs):
            outs = given["call"](*args, **kwargs)
        every = outs if isinstance(outs, tuple) else (outs,)
        given["plain"] = outs
        if isinstance(outs, tuple):
            given["plain"] = tuple(
                _Graphed if isinstance(one, torch.Tensor) else one for one in outs
            )
        else:
            given["plain"] = _Graphed
        made = [one for one in every if isinstance(one, torch.Tensor)]
        ctx.graph = graph
        ctx.outs = [one for one in made if one.requires_grad]
        ctx.wanted = [one.requires_grad for one in made]
        ctx.inputs = [*inputs, *tensors[number:]]
        capture.returns(run, made)
        results = tuple(one.detach() for one in made)
        ctx.mark_non_differentiable(
            *(one for one, wanted in zip(results, ctx.wanted, strict=True) if not wanted)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        capture, run = ctx.graph
        wanted = [g for g, w in zip(gradients, ctx.wanted, strict=True) if w]
        sources = [one for one in ctx.inputs if one.requires_grad]
        with capture.part(run, wanted):
            found = torch.autograd.grad(ctx.outs, sources, wanted, allow_unused=True)
        capture.returns(run, found)
        ctx.outs = None
        filled = iter(found)
        return (
            None,
            None,
            None,
            *(next(filled) if one.requires_grad else None for one in ctx.inputs),
        )


@contextmanager
def _generators(findings: list[Finding], registered: bool) -> Iterator[None]:
    """Record random states that the host moves: a graph keeps only registered generators."""
    from megatron.core.tensor_parallel import random

    def moved(*_: Any, graph_safe: bool = False, **__: Any) -> Any:
        if not graph_safe and capture_recorder.recording():
            where = capture_recorder.caller()
            findings.append(Finding("the host moves a random state", "a generator", where))
        return torch.empty(0)

    tracker = random.get_cuda_rng_tracker()
    with (
        mock.patch.object(random, "_get_cuda_rng_state", moved),
        mock.patch.object(random, "_set_cuda_rng_state", moved),
        mock.patch.object(tracker, "use_cudagraphable_rng", registered),
    ):
        yield


def _main() -> None:
    found = {name: steps_of(words) for name, words in json.load(sys.stdin).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
