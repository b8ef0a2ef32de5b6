"""The stage `host` of `first_touch.py`: what the host does in a step of the 1B shape, by layer and
by function.

Three steps of one run in this process, behind some that warm up. The first is timed where layers
begin and end, forward and backward; the second counts what is launched there; the third is profiled
by cProfile, with the backward in the thread that calls it. One at a time, for each slows the host.
"""

from __future__ import annotations

import cProfile
import functools
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from first_touch_device import device_here, needs_device
from first_touch_results import Walk
from first_touch_train import PRECISIONS, SEQUENCE, SHAPES, TINY, words_of

Units = dict[str, Callable[[], Any]]
WARM = 3
FUNCTIONS = 30
SIGN = "first_touch "
"""Begins the name of a mark in a trace."""
LAUNCHES = ("LaunchKernel", "GraphLaunch")
"""Parts of the names of calls of the driver that launch something."""


def host(walk: Walk, folder: Path) -> Units:
    """Return the step of the 1B shape in bf16 and FP8; of a dry run, of a tiny model."""
    if walk.dry:
        return {"tiny bf16": functools.partial(_profiled, walk, TINY, "bf16")}
    return {
        f"1b {form}": functools.partial(_profiled, walk, SHAPES["1b"], form)
        for form in PRECISIONS[:2]
    }


@dataclass
class Marks:
    """The begins and ends of layers in a step: (what, layer, seconds, launched so far), in their
    order.
    """

    launched: Callable[[], int]
    named: bool = False
    """True where marks are also written into a trace."""
    found: list[tuple[str, int, float, int]] = field(default_factory=list)

    def __call__(self, what: str, layer: int) -> None:
        """Note that `what` of a layer comes here."""
        if self.named:
            import torch

            with torch.profiler.record_function(f"{SIGN}{what} {layer}"):
                pass
        self.found.append((what, layer, time.perf_counter(), self.launched()))


@contextmanager
def marked(layers: list[Any], mark: Marks) -> Iterator[None]:
    """Call `mark` at the begin and end of each layer inside, forward and backward."""

    def enter(layer: int, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        stream = _first(given) if given else _first(tuple(named.values()))
        if stream is not None and stream.requires_grad:
            stream.register_hook(lambda _: mark("backward end", layer))
        mark("forward begin", layer)

    def leave(layer: int, _: Any, given: tuple[Any, ...], out: Any) -> None:
        mark("forward end", layer)
        stream = _first(out if isinstance(out, tuple) else (out,))
        if stream is not None and stream.requires_grad:
            stream.register_hook(lambda _: mark("backward begin", layer))

    hooks = []
    for number, layer in enumerate(layers):
        hooks.append(
            layer.register_forward_pre_hook(functools.partial(enter, number), with_kwargs=True)
        )
        hooks.append(layer.register_forward_hook(functools.partial(leave, number)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(values: Any) -> Any:
    import torch

    return next(
        (
            value
            for value in values
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ),
        None,
    )


def by_layer(marks: list[tuple[str, int, float, int]]) -> dict[str, dict[str, float]]:
    """Return medians over layers and micro-batches of the microseconds and launches between begin
    and end.
    """
    spans: dict[str, list[tuple[float, int]]] = {"forward": [], "backward": []}
    begun: dict[tuple[str, int], tuple[float, int]] = {}
    for what, layer, second, launched in marks:
        way, end = what.split()
        if end == "begin":
            begun[way, layer] = (second, launched)
        elif (way, layer) in begun:
            second_before, before = begun.pop((way, layer))
            spans[way].append((1e6 * (second - second_before), launched - before))
    return {
        way: {
            "us": round(statistics.median(us for us, _ in found), 1),
            "launches": statistics.median(count for _, count in found),
            "of": len(found),
        }
        for way, found in spans.items()
        if found
    }


def marks_of(events: list[dict[str, Any]]) -> list[tuple[str, int, float, int]]:
    """Return the marks of a trace of torch.profiler with launches of the driver, as `Marks` notes
    them.
    """
    found = []
    launched = 0
    for event in sorted(
        (event for event in events if "ts" in event), key=lambda event: float(event["ts"])
    ):
        name = event.get("name", "")
        if event.get("ph") != "X":
            continue
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and any(
            part in name for part in LAUNCHES
        ):
            launched += 1
        elif name.startswith(SIGN) and event.get("cat") == "user_annotation":
            what, layer = name.removeprefix(SIGN).rsplit(" ", 1)
            found.append((what, int(layer), float(event["ts"]) / 1e6, launched))
    return found


def functions_of(profile: cProfile.Profile, steps: int = 1) -> list[dict[str, Any]]:
    """Return the functions in which most time is spent, without what they call: module, name,
    calls, microseconds a step.
    """
    rows = []
    for (path, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        module = module_of(path)
        rows.append(
            {
                "module": module,
                "function": f"{name}:{line}" if line else name,
                "calls": calls,
                "own": own,
            }
        )
    longest = sorted(rows, key=lambda row: -row["own"])[:FUNCTIONS]
    return [
        {"module": row["module"], "function": row["function"], "calls": row["calls"] / steps}
        | {"us": round(1e6 * row["own"] / steps, 1)}
        for row in longest
    ]


def module_of(path: str) -> str:
    """Return the module that a file is, by the folder of packages that it lies in; "builtins" for
    other files.
    """
    if path.startswith("~") or path.startswith("<"):
        return "builtins" if path.startswith("~") else path
    parts = Path(path).with_suffix("").parts
    for root in ("site-packages", "dist-packages", "src", "kernels", "site"):
        if root in parts[:-1]:
            parts = parts[len(parts) - parts[::-1].index(root) :]
            break
    else:
        parts = parts[-2:]
    return ".".join(parts).removesuffix(".__init__")


def _profiled(walk: Walk, model: tuple[str, Any], precision: str) -> dict[str, Any]:
    """Train a few steps in this process, and say what the host did in one of them."""
    needs_device(walk)
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry

    words = words_of(walk, model, precision, "triton" if not walk.dry else "auto")
    run = load(words).run
    adapter.install(registry.get(run.cluster.device))
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        step = functools.partial(train_step, parts, stop_requested=False)
        layers = _layers(parts.state.chunks)
        for _ in range(1 if walk.dry else WARM):
            step()
        said = _timed(step, layers, world.device.synchronize)
        said["count"] = _counted(step, layers)
        said["functions"] = _functions(step)
        parts.close()
    tokens = run.data.seq_length * run.trainer.batch
    said |= {
        "layers": len(layers),
        "of": "launches" if device_here().type == "cuda" else "operations",
    }
    return said | {
        "tokens": tokens,
        "sequence": 16 if walk.dry else SEQUENCE,
        "command": " ".join(words),
    }


def _layers(chunks: list[Any]) -> list[Any]:
    """Return the layers of a model: of the longest list of modules that is called so."""
    lists = [
        module.layers for chunk in chunks for module in chunk.modules() if hasattr(module, "layers")
    ]
    return list(max(lists, key=len))


def _timed(
    step: Callable[[], Any], layers: list[Any], synchronize: Callable[[], None]
) -> dict[str, Any]:
    mark = Marks(lambda: 0)
    with marked(layers, mark):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        seconds = time.perf_counter() - start
    found = by_layer(mark.found)
    return {
        "step_s": round(seconds, 6),
        "us_of_a_layer": {way: said["us"] for way, said in found.items()},
    }


def _counted(step: Callable[[], Any], layers: list[Any]) -> dict[str, Any]:
    """Count the launches of a layer and of the whole step: kernels on a GPU, dispatched operations
    on a CPU.
    """
    marks, total = (
        _launches(step, layers) if device_here().type == "cuda" else _operations(step, layers)
    )
    return {"step": total} | {way: said["launches"] for way, said in by_layer(marks).items()}


def _operations(
    step: Callable[[], Any], layers: list[Any]
) -> tuple[list[tuple[str, int, float, int]], int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        """Counts what is dispatched to a device."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    counting = Counting()
    mark = Marks(lambda: counting.count)
    with marked(layers, mark), counting:
        step()
    return mark.found, counting.count


def _launches(
    step: Callable[[], Any], layers: list[Any]
) -> tuple[list[tuple[str, int, float, int]], int]:
    import torch

    mark = Marks(lambda: 0, named=True)
    with torch.profiler.profile() as profiler, marked(layers, mark):
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = marks_of(events)
    called = (
        event.get("name", "")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    )
    return found, sum(any(part in name for part in LAUNCHES) for name in called)


def _functions(step: Callable[[], Any]) -> list[dict[str, Any]]:
    import torch

    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.enable()
        step()
        profile.disable()
    return functions_of(profile)
