"""Published peaks of device memory against the plan of the same layouts.

    python benchmarks/plan_memory.py [FILE.csv] [--set precision.grad_reduce_in_fp32=false ...]

FILE, by default benchmarks/data/published_memory.csv, has the columns of that file; gradients and
offload may be missing, and lines with # are skipped. A row is compared if it states everything that
decides the memory. Every other row is listed with its missing settings, and with the plan for its
stated ones if those are a configuration. A row on the savings of offloading is compared with the
difference of two plans. `--set` adds keys to every row, to see the effect of an unstated one.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator
from pathlib import Path

from plan_time_rows import NAMES, SELECTIVE, layers_of

from mtrain.api import load
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.resolve.resolution import Machine
from mtrain.errors import MtrainError
from mtrain.plan.rank import StageMemory, stage_memories
from mtrain.plan.report import assumptions
from mtrain.units import GIB

HERE = Path(__file__).parent / "data" / "published_memory.csv"
BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
UNITS = {"GB": 10**9, "GiB": GIB}
LAYOUT = ("gpus", "tp", "pp", "cp", "ep")
NEEDED = (*LAYOUT, "mbs", "seq", "recompute", "gradients")
ELSEWHERE = {
    "FSDP compile": "another system's sharding, compiled",
    "1F1B async TP": "another system's schedule and sharding",
    "graphs": "the pools of CUDA graphs",
    "selective": "which modules are computed again",
    "packed text": "how full its samples of packed text are",
}
"""Words of a row -> the unknown setting behind them."""
Row = dict[str, str]


def base_model(row: Row) -> str:
    """Return the model that a row trains, without the way of training."""
    name = row["model"].removesuffix("_sft").removesuffix("_lora")
    return NAMES.get(name, name)


def again(row: Row) -> list[str]:
    """Return the recomputation of a row."""
    kind = row["recompute"]
    if kind in ("", "none"):
        return []
    if kind == "full":
        return ["parallel.recompute.granularity=full"]
    if kind == "selective":
        # torchtitan's saves every other product and attention; here, half of the layers
        return [
            "parallel.recompute.granularity=full",
            "parallel.recompute.method=block",
            f"parallel.recompute.num_layers={round(SELECTIVE * layers_of(base_model(row)))}",
        ]
    modules = kind.replace("+", ",")
    return [
        "parallel.recompute.granularity=selective",
        f"parallel.recompute.modules=[{modules}]",
    ]


def missing(row: Row) -> Iterator[str]:
    """Yield the settings that decide the memory and that a row leaves out."""
    needed = LAYOUT if row["kind"] == "saved" else NEEDED
    yield from (name for name in needed if not row.get(name))
    if base_model(row) not in choices_of_group("model"):
        yield f"{row['model']} is not a model that ships"
    if row["model"].endswith("_lora"):
        yield "rank and layers of its adapters"
    if row["pp"] not in ("", "1") and row["kind"] != "saved":
        yield "which pipeline stage was measured"
    yield from (
        why for word, why in ELSEWHERE.items() if word in f"{row['other']} {row['recompute']}"
    )
    if row["precision"].startswith("fp8") and "weights in 8 bits" not in row["other"]:
        yield "whether weights are kept in 8 bits"


def words(row: Row) -> list[str]:
    """Return the configuration of a row, with mtrain's defaults for unstated settings."""
    layout = "".join(
        f"{key}{row[name]}"
        for key, name in (
            ("tp", "tp"),
            ("pp", "pp"),
            ("vpp", "vp"),
            ("cp", "cp"),
            ("ep", "ep"),
        )
        if row[name] not in ("", "1")
    )
    micro = row["mbs"] or "1"
    seq = row["seq"] or "4096"
    ranks = int(row["gpus"] or 8)
    share = max(1, ranks // (int(row["tp"]) * int(row["pp"]) * int(row["cp"])))
    if "FSDP" in row["other"]:
        fsdp = ["parallel.fsdp=fsdp2"]
    else:
        fsdp = ["parallel.distributed_optimizer=true"]
    sp = ["parallel.sequence_parallel=true"] if row["tp"] != "1" else []
    low = ["precision.grad_reduce_in_fp32=false"] if row.get("gradients") == "bf16" else []
    lora = ["peft=lora"] if row["model"].endswith("_lora") else []
    return [
        f"model={base_model(row)}",
        f"parallel={layout or 'single'}",
        f"precision={row['precision']}",
        "data=mock",
        f"data.seq_length={seq}",
        "trainer.sample_tokens=0",
        f"trainer.micro_batch_size={micro}",
        f"trainer.global_batch_size={row['gbs'] or int(micro) * share * 4 * int(row['pp'])}",
        f"cluster={row['gpu']}",
        f"cluster.nodes={-(-ranks // 8)}",
        *fsdp,
        *again(row),
        *sp,
        *low,
        *lora,
    ]


def peak(row: Row, more: list[str]) -> float:
    """Return the planned bytes at the peak, without the context, and without the reserve unless it
    was measured.
    """
    stages = stage_memories(load([*words(row), *more], BIG, {}, to_run=False).run)
    return max(_of_model(row, stage) for stage in stages)


def _of_model(row: Row, stage: StageMemory) -> float:
    parts = stage.parts
    found = stage.peak - parts["context"] - (parts["reserve"] if row["kind"] != "reserved" else 0)
    # Weights that are kept in 8 bits have no copies in 16: as many bytes as the two in 8 bits.
    return float(found - (parts["low_precision"] if "weights in 8 bits" in row["other"] else 0))


def assumed(row: Row, more: list[str]) -> str:
    """Return the assumptions of a plan, and those of a row that replace them."""
    try:
        found = assumptions(load([*words(row), *more], BIG, {}, to_run=False).run)
    except MtrainError:
        return ""
    if "weights in 8 bits" in row["other"]:
        found[-1] = "weights only in 8 bits"
    return ", ".join(found)


def planned(row: Row, more: list[str]) -> float | str:
    """Return the planned bytes of a row, or why there is no plan."""
    try:
        offload = [f"optim.cpu_offload={row['offload']}"] if row.get("offload") else []
        with_all = peak(row, [*offload, *more])
        return peak(row, more) - with_all if row["kind"] == "saved" else with_all
    except (MtrainError, ValueError) as error:
        return str(error).splitlines()[0][:90]


def line(row: Row, found: float | str, compared: bool) -> str:
    """Return the line that is printed for a row."""
    published = float(row["peak"]) * UNITS[row["unit"]]
    layout = " ".join(
        f"{key}{row[key]}" for key in ("tp", "pp", "vp", "cp", "ep") if row[key] not in ("", "1")
    )
    offload = f"offload {row['offload']}" if row.get("offload") else row["precision"]
    head = (
        f"{row['model']:20} {layout or 'dp':16} {offload:15} {row['kind']:9}"
        f" {published / GIB:6.1f} GiB"
    )
    if isinstance(found, str):
        return f"{head}  no plan: {found}"
    return (
        f"{head}  plan {found / GIB:6.1f} GiB "
        f" {found / published - 1:+7.1%}{'  compared' if compared else ''}"
    )


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=HERE)
    parser.add_argument(
        "--set", nargs="*", default=[], dest="more", help="keys of the configuration, for every row"
    )
    options = parser.parse_args()
    with options.file.open() as lines:
        rows = list(csv.DictReader(text for text in lines if not text.startswith("#")))
    off = []
    for row in rows:
        left_out = list(missing(row))
        found = planned(row, options.more)
        compared = not left_out and not isinstance(found, str)
        print(line(row, found, compared))
        if words_of := assumed(row, options.more):
            print(f"{'':20} with {words_of}")
        if left_out:
            print(f"{'':20} leaves out: {'; '.join(left_out)}")
        if not left_out and not isinstance(found, str):
            off.append(abs(found / (float(row["peak"]) * UNITS[row["unit"]]) - 1))
    print(f"rows that state enough: {len(off)} of {len(rows)}")
    if off:
        print(f"median error {statistics.median(off):.1%}, worst {max(off):.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
