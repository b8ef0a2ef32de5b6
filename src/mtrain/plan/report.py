"""The plan of a run as data: parameters, operations, memory by stage and part, time, checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mtrain.config.engine.formats import bytes_of
from mtrain.config.engine.kernels import left_to_others
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid
from mtrain.models.rank import Equipped, Rank
from mtrain.models.registry import family_of
from mtrain.plan.count import (
    active_parameters,
    adapter_parameters,
    flops_of_token,
    frozen_parameters,
    parameters,
)
from mtrain.plan.fits import is_small
from mtrain.plan.rank import HOW, StageMemory, stage_memories
from mtrain.plan.recompute import Way, frontier
from mtrain.plan.states import main_weight_bytes
from mtrain.plan.storage import is_again, replicated, staged, storage_of, whole
from mtrain.plan.time.report import time_report
from mtrain.plan.time.step import unknown
from mtrain.units import GIB, devices

# A table names up to so many ranges of layers of a stage in full.
MOST_WORDS = 5


def report(run: RunConfig) -> dict[str, Any]:
    """Return the plan of a resolved run in plain numbers; bytes unless a key names another unit.

    Raises:
        ValueError: the family of the model does not say which weights a stage has.
    """
    stages = stage_memories(run)
    memory = run.cluster.device_memory_gib
    worst = max(stages, key=lambda stage: stage.peak)
    disk = storage_of(run, stages)
    size = disk.first
    holds = None if memory is None else int(memory * GIB)
    found: dict[str, Any] = {
        "model": run.model.name,
        "format": run.precision.format,
        "formats": run.precision.words,
        "layout": RankGrid.of(run).sizes,
        "ranks": run.parallel.ranks,
        "cluster": run.cluster.name,
        "batch": run.trainer.batch,
        "micro_batch": run.trainer.micro,
        "seq_length": run.data.length,
        "device_word": device_word(run),
        "kernels": dict(Rank.of(run).words),
        "parameters": _parameters(run, stages),
        "flops_per_token": {
            "causal": flops_of_token(run),
            "all_keys": flops_of_token(run, causal=False),
        },
        "memory": {
            "stages": [_stage(stage) for stage in stages],
            "peak": {"stage": worst.stage, "bytes": worst.peak, "where": worst.where},
            "device": holds,
            "headroom": None if holds is None else holds - worst.peak,
            "how": HOW,
            "recompute": recomputation(run),
            "assumes": assumptions(run),
        },
        "time": time_report(run, size),
        "checkpoint": {
            "bytes": size,
            "at_once": disk.at_once,
            "staged_bytes": staged(run, stages),
            "disk_bytes": disk.checkpoints,
            "export_bytes": disk.exports,
            **_replicas(run, stages, size),
        },
        "notes": notes(run),
    }
    return found


def _replicas(run: RunConfig, stages: Sequence[StageMemory], size: int) -> dict[str, int]:
    """Return the bytes of local checkpoints that other machines hold too; empty without any."""
    if run.checkpoint.local_replicas is None:
        return {}
    found = replicated(run, stages, size)
    sent = run.checkpoint.local_replicas * found.part
    return {"local_disk_bytes": found.disk, "local_sent_bytes": sent}


def recomputation(run: RunConfig) -> list[dict[str, Any]]:
    """Return the ways to recompute, with the bytes that each frees of the peak, the seconds that it
    adds to a step, and the cost of the last of these bytes; empty where the time is not known.
    """
    if unknown(run) or family_of(run.model).stage is None or not is_small(run):
        return []
    first, *others = frontier(run)
    rows = [_way(first, first, first)]
    for before, one in pairwise([first, *others]):
        rows.append(_way(one, first, before))
    own = Way(run).words
    return [row | {"chosen": row["recomputed"] == own} for row in rows]


def _way(one: Way, first: Way, before: Way) -> dict[str, Any]:
    freed = before.peak - one.peak
    return {
        "recomputed": one.words,
        "overrides": one.overrides,
        "peak": one.peak,
        "step_s": one.cost,
        "frees": first.peak - one.peak,
        "adds_s": one.cost - first.cost,
        "s_per_gib": (one.cost - before.cost) / (freed / GIB) if freed else 0.0,
    }


def assumptions(run: RunConfig) -> list[str]:
    """Return the settings that decide a rank's memory and that published figures often omit."""
    p = run.precision
    gradient = bytes_of("fp32" if p.grad_reduce_in_fp32 else p.format)
    again = run.parallel.recompute
    of = f" ({', '.join(again.modules or ())})" if again.granularity == "selective" else ""
    how = "no" if again.granularity in (None, "none") else again.granularity
    words = [
        f"{how} recomputation{of}",
        f"gradients of {gradient} bytes",
        f"main weights of {main_weight_bytes(run)}",
    ]
    if p.quantized is not None:
        words.append(f"weights in {p.format} and {p.multiplies_in}")
    return words


def _parameters(run: RunConfig, stages: list[StageMemory]) -> dict[str, Any]:
    by_kind: Counter[str] = Counter()
    for stage in stages:
        for weight in stage.states.weights:
            by_kind[weight.kind] += 0 if is_again(stage, weight) else whole(run, weight)
    total = parameters(run.model)
    dense, experts = adapter_parameters(run)
    moe = run.model.moe
    visited = experts * moe.router_topk // moe.num_experts if moe is not None else 0
    return {
        "total": total + dense + experts,
        "active": active_parameters(run.model) + dense + visited,
        "frozen": total if run.peft.kind else frozen_parameters(run.model),
        "by_kind": dict(by_kind),
        "by_stage": [
            {
                "stage": s.stage,
                "layers": layers(s.held),
                "rank": s.states.numbers.total(),
                **s.states.numbers,
            }
            for s in stages
        ],
    }


def layers(held: tuple[Stage, ...]) -> str:
    """Return the layers of a rank of a stage, as `E 0-3 16-19 L`."""
    words = []
    for stage in held:
        words += ["E"] if stage.embedding else []
        if stage.layers:
            first = stage.layers[0]
            last = stage.layers[-1]
            words.append(str(first) if first == last else f"{first}-{last}")
        words += ["MTP"] * bool(stage.mtp) + ["L"] * stage.loss
    return " ".join(words)


def _stage(stage: StageMemory) -> dict[str, Any]:
    most, numbers = stage.in_flight
    return {
        "stage": stage.stage,
        "layers": layers(stage.held),
        "parts": stage.parts,
        "kept_by_chunk": stage.kept,
        "in_flight_by_chunk": numbers,
        "kept": most,
        "peak": stage.peak,
        "where": stage.where,
    }


def notes(run: RunConfig) -> list[str]:
    """Return the assumptions of the numbers."""
    out = []
    if run.model.moe is not None:
        out.append(_balance(run))
    if run.data.packed and run.data.document_tokens is None:
        out.append(
            "each packed sample is taken for one document: shorter ones attend to less"
            " (data.document_tokens)"
        )
    if family_of(run.model).stage is None:
        out.append(
            f"the family {run.model.family} does not say what its layers keep: activations are not"
            " counted"
        )
    if not facts_of(run.cluster.device).on_host:
        out.append(
            "saved tensors of fused kernels follow from their sources, and were not measured on a"
            " device"
        )
    if left := left_to_others(run, Equipped()):
        where = "a GPU of no known generation" if run.cluster.sm is None else f"sm_{run.cluster.sm}"
        names = f"others do {', '.join(left)}, unless kernels.{left[0]}=triton names it"
        out.append(
            f"Triton's kernels are taken where committed results admit them, and on {where} {names}"
        )
    if run.trainer.cuda_graph_impl != "none":
        out.append(
            "CUDA graphs: launches take the time that they take without, and the nodes of graphs no"
            " memory; their pools are counted"
        )
    if run.parallel.activation_offload.modules:
        out.append(
            "activations that wait in host memory are counted on the device, and their copies take"
            " no time"
        )
    if run.optim.cpu_offload:
        out.append("moments in host memory are left out; main weights stay on the device")
    return out


def _balance(run: RunConfig) -> str:
    """Return the assumption about the balance of experts."""
    factor = run.parallel.expert_imbalance
    if run.parallel.ep == 1 or factor == 1:
        return (
            "every expert is chosen as often: a rank whose experts are chosen more often keeps more"
            " and takes longer"
        )
    return (
        f"the busiest rank of experts gets {factor:g} times the average (parallel.expert_imbalance)"
    )


def alike(stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge neighbours whose numbers are the same into one row."""
    out: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for stage in stages:
        numbers = {key: value for key, value in stage.items() if key not in ("stage", "layers")}
        if out and out[-1][0] == numbers:
            out[-1][1].append(stage)
        else:
            out.append((numbers, [stage]))
    return [{**numbers, **_joined(group)} for numbers, group in out]


def _joined(group: Sequence[dict[str, Any]]) -> dict[str, str]:
    first = group[0]
    last = group[-1]
    if len(group) == 1:
        return {"stage": str(first["stage"]), "layers": _short(first["layers"])}
    layers = f"{_short(first['layers'])} to {_short(last['layers'])}"
    return {"stage": f"{first['stage']}-{last['stage']}", "layers": layers}


def _short(layers: str) -> str:
    """Return the layers of a stage, without the middle of many."""
    words = layers.split()
    return layers if len(words) <= MOST_WORDS else " ".join([*words[:2], "..", *words[-2:]])


def device_word(run: RunConfig) -> str:
    """Return the usual name of a device in the cluster of a run."""
    return "GPU" if facts_of(run.cluster.device).counted else "device"


def headline(found: Mapping[str, Any]) -> str:
    """Return the subject of the plan: model, number format, layout and machines."""
    layout = " ".join(
        f"{axis}{n}" for axis, n in found["layout"].items() if n > 1 and axis not in ("etp", "edp")
    )
    return (
        f"{found['model']}, {found['formats']}, {layout or 'one rank'} on"
        f" {devices(found['ranks'], found['cluster'])}"
    )
