"""The pictures of `plan --draw` on a terminal: memory, schedule, time and machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

from mtrain.errors import Styled
from mtrain.layout.grid import RankGrid, machines
from mtrain.plan.rank import StageMemory
from mtrain.plan.report import alike
from mtrain.plan.timeline import Timeline
from mtrain.units import bytes_

# Most and fewest cells of a bar, and the cells of its label.
WIDTH = 88
LEAST = 24
BESIDE = 30
# Part of the memory -> the letter that fills its part of a bar.
LETTERS = {
    "context": "x",
    "communication": "c",
    "reserve": "r",
    "weights": "W",
    "gradients": "G",
    "low_precision": "8",
    "optimizer": "O",
    "activations": "A",
    "loss": "L",
    "recompute": "R",
    "working": "w",
    "graphs": "g",
}
STAGES_DRAWN = 32


def pictures(
    found: Mapping[str, Any], stages: Sequence[StageMemory], line: Timeline | None
) -> list[Styled]:
    """Return all of them as lines; without `line` no schedule."""
    out: list[Styled] = [*_memory(found)]
    if line is not None:
        out += [[("", "")], *_schedule(line)]
    if found["time"]["step_s"] is not None:
        out += [[("", "")], *_time(found["time"]["parts_s"])]
    return [*out, [("", "")], *_machines(stages)]


def _width() -> int:
    """Return the number of cells of a bar on this terminal."""
    return max(LEAST, min(WIDTH, get_terminal_size((WIDTH + BESIDE, 0)).columns - BESIDE))


def share(part: float) -> str:
    """Return a share in percent."""
    return f"{100 * part:.1f}%"


def _memory(found: Mapping[str, Any]) -> Iterator[Styled]:
    memory = found["memory"]
    rows = alike(memory["stages"])
    device = memory["device"]
    width = _width()
    most = max(memory["peak"]["bytes"], device or 0)
    used = [part for part in LETTERS if any(row["parts"][part] for row in rows)]
    yield [("memory of a rank at its peak", "bold")]
    for row in rows:
        bar = ""
        at = 0
        for part in used:
            at += row["parts"][part]
            bar += LETTERS[part] * (round(width * at / most) - len(bar))
        free = "." * (round(width * (device or 0) / most) - len(bar))
        over = " too much" if device and row["peak"] > device else ""
        yield [
            (f"  stage {row['stage']:<9} ", ""),
            (bar, ""),
            (free, "dim"),
            (f" {bytes_(row['peak'])}{over}", ""),
        ]
    names = ", ".join(f"{LETTERS[part]} {part.replace('_', ' ')}" for part in used)
    yield [(f"  {names}{f', . left of {bytes_(device)}' if device else ''}", "dim")]


def _schedule(line: Timeline) -> Iterator[Styled]:
    """Yield a row for each stage; digits are forwards, letters backwards of their micro-batch."""
    drawn = "all micro-batches"
    if line.cut is not None:
        drawn = (
            f"begin and end of {line.of} micro-batches, {line.of - line.micro} left out at the |"
        )
    yield [
        (f"pipeline schedule, {drawn}", "bold"),
        (f"; the busiest stage waits {share(line.bubble)} of the step", ""),
    ]
    width = _width()
    for stage, blocks in list(enumerate(line.blocks))[:STAGES_DRAWN]:
        cells: list[tuple[str, str]] = [(".", "dim")] * width
        for block in blocks:
            first = round(width * block.begin / line.end)
            last = max(first + 1, round(width * block.end / line.end))
            number = line.number(block) % 10
            sign = "0123456789"[number] if block.forward else "abcdefghij"[number]
            cells[first:last] = [(sign, "" if block.forward else "loss")] * (
                min(last, width) - first
            )
        if line.cut is not None:
            cells[round(width * line.cut / line.end)] = ("|", "bold")
        yield [(f"  stage {stage:<9} ", ""), *cells]
    if len(line.blocks) > STAGES_DRAWN:
        yield [(f"  and {len(line.blocks) - STAGES_DRAWN} stages more", "dim")]
    yield [("  0 to 9 forward of a micro-batch, a to j its backward, . the bubble", "dim")]


def _time(parts: Mapping[str, float]) -> Iterator[Styled]:
    total = sum(parts.values())
    wide = max(map(len, parts))
    yield [("time of a step by part", "bold")]
    for name, seconds in parts.items():
        if seconds:
            bar = "#" * max(1, round((_width() - wide) * seconds / total))
            yield [
                (
                    f"  {name.ljust(wide)}  {seconds * 1e3:>9.1f} ms {share(seconds / total):>6} ",
                    "",
                ),
                (bar, ""),
            ]


def _machines(stages: Sequence[StageMemory]) -> Iterator[Styled]:
    run = stages[0].run
    grid = RankGrid.of(run)
    devices = run.cluster.devices_per_node or run.parallel.ranks
    yield [("ranks on machines", "bold"), (f", {devices} devices each, by pipeline stage", "")]
    for group in machines(grid, devices):
        last = group.first + group.number - 1
        name = f"{group.first}" if group.number == 1 else f"{group.first}-{last}"
        yield [(f"  {name:<9} ", ""), (" ".join(f"{stage:>2}" for stage in group.stages), "")]
    here = [
        f"{axis} {size}"
        for axis, size in grid.sizes.items()
        if size > 1 and axis not in ("etp", "edp")
    ]
    order = ", ".join(here) or "one rank"
    yield [(f"  ranks count tp first, then cp, dp and pp: {order}", "dim")]
