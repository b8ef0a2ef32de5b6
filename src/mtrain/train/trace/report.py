"""A traced step as data, next to the plan of the same kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid
from mtrain.models.rank import Rank
from mtrain.plan.rank import StageMemory, stage_memories
from mtrain.train.trace.recorder import HOST

if TYPE_CHECKING:
    from mtrain.train.trace.trace import Traced

SAVED = ("activations", "loss", "recompute")
"""Parts of the plan that autograd keeps."""
WORKING = ("working", "communication")
"""Parts of the plan that are transient memory."""


def trace_report(requested: RunConfig, traced: Traced) -> dict[str, Any]:
    """Return the report of a trace, for the run that the user requested; sizes are bytes."""
    # The traced run has portable kernels: its plan has them too, so the two can be compared.
    run = traced.run
    seen = traced.recorder
    step = run.micro_batches
    planned = planned_parts(stage_memories(run)[traced.stage])
    seen_parts = traced_parts(seen.peak.parts)
    return {
        "model": run.model.name,
        "format": run.precision.format,
        "asked": requested.precision.words,
        "layout": RankGrid.of(run).sizes,
        "rank": traced.rank,
        "stage": traced.stage,
        "kernels": dict(Rank.of(run).words),
        "microbatches": {"traced": traced.microbatches, "of_a_step": step},
        "peak": {"bytes": seen.peak.bytes, "parts": seen.peak.parts, **asdict(seen.peak.place)},
        "most_saved": seen.kept,
        "host": seen.sizes[HOST],
        "plan": {"bytes": sum(planned.values()), "parts": planned},
        "difference_percent": _differences(planned, seen_parts),
        "timeline": [
            {
                **{
                    "phase": s.place.phase,
                    "microbatch": s.place.microbatch,
                    "chunk": s.place.chunk,
                },
                **{"before": s.before, "peak": s.peak, "module": s.module, "after": s.after},
            }
            for s in seen.segments
        ],
        "flops": seen.operations.flops(),
        "operations": seen.operations.table(),
        "notes": _notes(requested, run),
    }


def planned_parts(stage: StageMemory) -> dict[str, int]:
    """Return the planned bytes of a program's tensors, without device and allocator."""
    parts = stage.parts
    states = {name: parts[name] for name in ("weights", "gradients", "optimizer")}
    return {
        **states,
        "saved": sum(parts[n] for n in SAVED),
        "working": sum(parts[n] for n in WORKING),
    }


def traced_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """Return the traced bytes of the same parts."""
    states = {name: parts[name] for name in ("weights", "gradients", "optimizer")}
    return {
        **states,
        "saved": parts["activations"] + parts["recompute"],
        "working": parts["temporary"] + parts["other"],
    }


def _differences(
    planned: Mapping[str, int], seen_parts: Mapping[str, int]
) -> dict[str, float | None]:
    """Return the differences of the plan from the trace, in percent."""
    totals = {"peak": (sum(planned.values()), sum(seen_parts.values()))}
    # The peaks themselves may be in different moments; parts are compared one by one.
    pairs = totals | {name: (planned[name], seen_parts[name]) for name in planned}
    return {name: round(100 * (a / b - 1), 3) if b else None for name, (a, b) in pairs.items()}


def _notes(requested: RunConfig, run: RunConfig) -> list[str]:
    words = Rank.of(requested).words
    traced = Rank.of(run).words
    others = [f"{op} {word}" for op, word in words.items() if traced[op] != word]
    notes = []
    if others:
        notes.append(
            f"traced and planned with the portable kernels; the run itself has {', '.join(others)},"
            " of which `plan` without --trace says what they keep"
        )
    # Portable kernels are traced without quantisation.
    if requested.precision.quantized is not None:
        notes.append(
            f"products in {requested.precision.quantized} are traced in {run.precision.format}"
        )
    if requested.on_any_device() != requested:
        notes.append(
            "CUDA graphs, and copies of activations to host memory, are no part of a trace"
        )
    if run.parallel.hybrid_context_parallel:
        notes.append(
            "documents are those of synthetic samples: which ones a rank has depends on their"
            " lengths"
        )
    if run.model.moe is not None:
        notes.append(
            "every expert is chosen as often: a rank whose experts are chosen more often keeps more"
        )
    notes.append(
        "what one operation needs inside of itself, the device and its allocator are not in a trace"
    )
    return notes
