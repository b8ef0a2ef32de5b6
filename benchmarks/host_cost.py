"""Host time and launches of a layer and micro-batch, forward and backward, without a GPU.

    python benchmarks/host_cost.py [--quick] [--only dense,moe] [--layers N] [--json FILE]

mtrain's kernels are compiled for sm_90 and launched by a driver that launches nothing
(`host_cost_driver.py`), so what is left of a step on tiny CPU tensors is the work of the host.
Next to mtrain, transformers and layers of megatron-core alone train the same shapes in the same
process. Their kernels and all GEMMs really compute, on shapes where that takes as long as a call
of cuBLAS takes the host.

Time is the CPU time of the one thread that trains. A step has four micro-batches; contenders take
turns, one step each, in an order that alternates; a figure is the median over rounds and
micro-batches. The begin of a layer is marked in the forward, and in the backward the arrival of
the gradient of what it reads: between the marks of the second layer and of the last lie whole
layers, and neither embedding, loss nor optimizer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import host_cost_driver
import host_cost_models
from host_cost_models import KINDS, Contender

WARM = 4
"""Steps of each contender before the first that counts."""


def main() -> int:
    """Measure the chosen kinds of layers, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer layers and rounds, for CI")
    parser.add_argument("--only", help="kinds of layers, separated by commas: " + ", ".join(KINDS))
    parser.add_argument("--layers", type=int, help="layers of a model, at least 4 (default 8)")
    parser.add_argument("--rounds", type=int, help="steps of each contender (default 30)")
    parser.add_argument("--json", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of mtrain's configuration")
    options = parser.parse_args()
    layers = options.layers or (4 if options.quick else 8)
    rounds = options.rounds or (6 if options.quick else 30)
    kinds = options.only.split(",") if options.only else list(KINDS)
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or layers < 4:
        parser.error(f"no kind {', '.join(unknown)}" if unknown else "--layers must be at least 4")
    prepare()
    result: dict[str, Any] = {}
    for kind in kinds:
        result[kind] = measured(kind, layers, rounds, options.overrides)
        print(table(kind, result[kind]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def prepare() -> None:
    """Set up one thread and the null driver, before anything imports `mtrain_kernels`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    host_cost_driver.install()
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get("cpu"))


@dataclass
class Span:
    """What lies between the marks of two layers in one micro-batch."""

    us: float
    launches: int


@dataclass
class Marks:
    """The thread's time and the launches where layers begin, forward and backward."""

    layers: int
    """Layers between the two that are marked."""
    forward: list[Span] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)
    _begun: dict[str, tuple[float, int]] = field(default_factory=dict)

    def begin(self, way: str) -> None:
        """Note that the first of the layers begins, `forward` or `backward`."""
        self._begun[way] = (time.thread_time(), host_cost_driver.LAUNCHES.total)

    def end(self, way: str) -> None:
        """Note that the layers end."""
        second = time.thread_time()
        launched = host_cost_driver.LAUNCHES.total
        before, launched_before = self._begun.pop(way)
        span = Span(1e6 * (second - before) / self.layers, launched - launched_before)
        getattr(self, way).append(span)

    def clear(self) -> None:
        """Forget the spans."""
        self.forward.clear()
        self.backward.clear()


@contextmanager
def marked(layers: list[Any], period: int) -> Iterator[Marks]:
    """Mark where the second period of layers begins and where the last begins, forward and
    backward, while this is open.
    """
    first = period
    last = len(layers) - period
    marks = Marks(last - first)

    def at_first(stream: Any) -> None:
        if stream.requires_grad:
            stream.register_hook(lambda _: marks.end("backward"))
        marks.begin("forward")

    def at_last(stream: Any) -> None:
        marks.end("forward")
        if stream.requires_grad:
            stream.register_hook(lambda _: marks.begin("backward"))

    hooks = [on_input(layers[first], at_first), on_input(layers[last], at_last)]
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()


def on_input(layer: Any, act: Callable[[Any], None]) -> Any:
    """Call `act` with the hidden states that a layer reads, before it reads them; return the
    hook's handle.
    """

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        act(given[0] if given else named["hidden_states"])

    return layer.register_forward_pre_hook(before, with_kwargs=True)


def measured(kind: str, layers: int, rounds: int, overrides: list[str]) -> dict[str, Any]:
    """Return the figures of all contenders of a kind of layers."""
    with host_cost_models.contenders(kind, layers, overrides) as contenders:
        for _ in range(WARM):
            for contender in contenders:
                contender.step()
        spans = timed(contenders, rounds)
        return {
            "layers": layers,
            "contenders": {
                contender.name: figures(contender, spans[contender.name])
                for contender in contenders
            },
        }


def timed(contenders: list[Contender], rounds: int) -> dict[str, tuple[Marks, list[float]]]:
    """Return marks and seconds of a step of each contender over interleaved rounds."""
    found: dict[str, tuple[Marks, list[float]]] = {}
    for i in range(rounds):
        for contender in contenders[:: 1 - 2 * (i % 2)]:
            gc.collect()
            gc.disable()
            with marked(contender.layers, contender.period) as marks:
                begin = time.thread_time()
                contender.step()
                seconds = time.thread_time() - begin
            gc.enable()
            kept, steps = found.setdefault(contender.name, (Marks(marks.layers), []))
            kept.forward += marks.forward
            kept.backward += marks.backward
            steps.append(seconds)
    return found


def figures(contender: Contender, found: tuple[Marks, list[float]]) -> dict[str, Any]:
    """Return microseconds and launches of a layer and micro-batch, and milliseconds of a step."""
    marks, steps = found
    out: dict[str, Any] = {}
    for way in ("forward", "backward"):
        spans: list[Span] = getattr(marks, way)
        out[way] = {
            "us": round(statistics.median(span.us for span in spans), 1),
            "launches": round(statistics.median(s.launches for s in spans) / marks.layers, 2),
        }
    both = [a.us + b.us for a, b in zip(marks.forward, marks.backward, strict=True)]
    out["us"] = round(statistics.median(both), 1)
    out["quartiles_us"] = [round(q, 1) for q in statistics.quantiles(both, n=4)]
    out["step_ms"] = round(1e3 * statistics.median(steps), 3)
    return out


def table(kind: str, result: dict[str, Any]) -> str:
    """Return the figures of a kind of layers as a table in Markdown."""
    rows = [
        f"### {kind}",
        "",
        "| contender | forward us | backward us | both us | of transformers | launches |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    found = result["contenders"]
    theirs = found.get("transformers", {}).get("us")
    for name, one in found.items():
        share = f"{one['us'] / theirs:.2f}" if theirs else ""
        launches = one["forward"]["launches"] + one["backward"]["launches"]
        rows.append(
            f"| {name} | {one['forward']['us']:,.0f} | {one['backward']['us']:,.0f} |"
            f" {one['us']:,.0f} | {share} | {launches:g} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
