"""The page of `plan --html`: one file without scripts, that opens without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtrain.cli.html import COLOURS, LIMIT, PAGE, Svg, html_page, hue, legend, table_of, text_of
from mtrain.cli.plan_pictures import share
from mtrain.layout.grid import Machines, RankGrid, machines
from mtrain.plan.rank import StageMemory
from mtrain.plan.report import alike, headline
from mtrain.plan.time.report import no_time
from mtrain.plan.timeline import Block, Timeline, kept_over_time
from mtrain.units import GIB, MIB, bytes_, count, duration, in_unit, seconds, short

ROW = 26
# the gap in a schedule where micro-batches are left out
BREAK = 24.0
# The shortest block of a schedule has room for its number, as long as the picture is not wider.
LEAST_BLOCK = 18.0
MOST_WIDE = 8000.0
TICKS = 5
# Of more stages, the first and the last ones are drawn over time.
STAGES_DRAWN = 16
# Machines of a kind are alike: more of them show nothing new.
NODES_DRAWN = 12
# the side of a device, and the gap between machines
SIDE = 15
GAP = 26
# where the bars of memory begin, and how wide the memory of a device may be
LEFT = 110
WIDE = 790
# parts of the memory that do not change in a step, from below
STANDING = (
    "context",
    "graphs",
    "communication",
    "reserve",
    "weights",
    "gradients",
    "low_precision",
    "optimizer",
)
# colours of the first chunks of a stage and of later ones, and of the numbers on them
FORWARD = ("#7aa3d4", "#5b86bd", "#4069a0", "#2c5084")
BACKWARD = ("#93c7a0", "#6dab7c", "#478657", "#377247")
NUMBERS = ("#10202f", "#10202f", "#fff", "#fff")

# left, top, width and height
Box = tuple[float, float, float, float]


def page_of(found: Mapping[str, Any], stages: Sequence[StageMemory], line: Timeline | None) -> str:
    """Return the page of a report; without `line`, pictures over time are left out."""
    body = [f"<h1>{text_of(found['model'])}</h1><p>{text_of(headline(found))}</p>", _cards(found)]
    body += _memory(found)
    if line is not None:
        body += [*_over_time(found, stages, line), *_schedule(line)]
    body += _recomputation(found["memory"]["recompute"])
    body += [*_time(found), *grid_of(stages), *_parameters(found)]
    if found["notes"]:
        body.append("<h2>What this assumes</h2>")
    body += [f"<p>{text_of(note)}</p>" for note in found["notes"]]
    return html_page(f"plan of {found['model']}", "plan.css", body)


def _cards(found: Mapping[str, Any]) -> str:
    memory = found["memory"]
    numbers = found["parameters"]
    batch = found["batch"]
    length = found["seq_length"]
    cards = {
        "parameters": count(numbers["total"]),
        f"batch, in micro-batches of {found['micro_batch']}": f"{batch} samples",
        "sequence length": f"{length} tokens",
        "tokens of a step": count(batch * length),
    }
    if numbers["active"] != numbers["total"]:
        cards["active for a token"] = count(numbers["active"])
    cards[f"peak memory, stage {memory['peak']['stage']}"] = bytes_(memory["peak"]["bytes"])
    bad = ""
    if memory["headroom"] is not None:
        left = memory["headroom"]
        bad = "too little on a device" if left < 0 else ""
        cards[bad or "left on a device"] = bytes_(abs(left))
    cards |= _speed(found["time"], found["device_word"])
    cards["checkpoint"] = bytes_(found["checkpoint"]["bytes"])
    made = (
        f'<div class="card {"bad" if name == bad else ""}"><b>{text_of(value)}</b>'
        f"<span>{text_of(name)}</span></div>"
        for name, value in cards.items()
    )
    return f'<div class="cards">{"".join(made)}</div>'


def _speed(time: Mapping[str, Any], word: str) -> dict[str, str]:
    """Return the cards of a step and of the whole run, if known; `word` names a device."""
    if time["step_s"] is None:
        return {}
    whole = time["run"]
    cards = {
        "a step": duration(time["step_s"]),
        f"tokens/s per {word}": count(time["tokens_per_s_per_device"]),
    }
    for of in time["mfu_by_peak"]:
        cards[f"MFU of {of['peak_tflops']:g} TFLOP/s in {of['format']}"] = share(of["causal"])
    cards["the whole run"] = seconds(whole["seconds"])
    cards[f"{word} hours"] = short(whole["device_hours"])
    if whole["cost"] is not None:
        cards["cost"] = f"{whole['cost']:,.0f}"
    return cards


def _memory(found: Mapping[str, Any]) -> list[str]:
    """Return a bar for each stage, of its parts, against the memory of a device."""
    memory = found["memory"]
    rows = alike(memory["stages"])
    device = memory["device"]
    most = max([memory["peak"]["bytes"], device or 0]) * 1.02
    parts = [part for part in memory["how"] if any(row["parts"][part] for row in rows)]
    end = ROW * len(rows)
    svg = Svg(PAGE, end + 50)
    peaks = list[tuple[float, float, str]]()
    for number, row in enumerate(rows):
        y = 8.0 + number * ROW
        at = 0.0
        svg.text(0, y + 15, f"stage {row['stage']}")
        for part in parts:
            size = row["parts"][part]
            title = f"stage {row['stage']}, {_words(part)}: {bytes_(size)}. {memory['how'][part]}"
            x = LEFT + WIDE * at / most
            svg.box(x, y, WIDE * size / most, ROW - 6, COLOURS[part], title)
            at += size
        peaks.append((LEFT + 6 + WIDE * at / most, y + 15, bytes_(row["peak"])))
    if device:
        x = LEFT + WIDE * device / most
        svg.line(x, 2, x, end + 28, LIMIT)
        svg.text(x, end + 42, f"device: {bytes_(device)}", middle=True)
    for size, words in _ticks(most):
        x = LEFT + WIDE * size / most
        svg.line(x, end + 8, x, end + 12, "currentColor")
        svg.text(x, end + 26, words, middle=True)
    # over the line of the device, which would strike the numbers through
    for x, y, peak in peaks:
        svg.text(x, y, peak, halo=True)
    return [
        "<h2>Memory of a rank at its peak</h2>",
        f"<p>The peak is on stage {memory['peak']['stage']}, "
        f"{text_of(memory['peak']['where'])}.</p>",
        legend((_words(part), COLOURS[part]) for part in parts),
        svg.markup(),
    ]


def _words(part: str) -> str:
    return part.replace("_", " ")


def _over_time(
    found: Mapping[str, Any], stages: Sequence[StageMemory], line: Timeline
) -> list[str]:
    """Draw the memory of each stage over the step: static memory, and saved activations on top."""
    device = found["memory"]["device"]
    peak = found["memory"]["peak"]["bytes"]
    most = max(peak, device or 0) * 1.05
    wide = 430
    high = 96
    shown = list(stages)
    if len(stages) > STAGES_DRAWN:
        half = STAGES_DRAWN // 2
        shown = [*stages[:half], *stages[-half:]]
    svg = Svg(PAGE, -(-len(shown) // 2) * (high + 34) + 4)
    for number, stage in enumerate(shown):
        x = 50 + number % 2 * 500
        y = 22 + number // 2 * (high + 34)
        _area(svg, stage, line, (x, y, wide, high), most)
        for size, words in _ticks(most):
            level = y + high - high * size / most
            svg.line(x - 4, level, x, level, "currentColor")
            svg.text(x - 50, level + 4, words)
        if line.cut is not None:
            svg.box(x + wide * line.cut / line.end - 3, y, 6, high, "Canvas", "what is left out")
        if device:
            level = y + high - high * device / most
            svg.line(x, level, x + wide, level, LIMIT)
        svg.text(x, y - 6, f"stage {stage.stage}: peak {bytes_(stage.peak)}")
    unit = GIB if peak >= 4 * GIB else MIB
    text = f"Each picture is {in_unit(round(most), unit)} {'GiB' if unit == GIB else 'MiB'} high"
    text += "; the red line is the memory of a device." if device else "."
    if line.cut is not None:
        text += (
            f" Of {line.of} micro-batches the begin and the end of the step are drawn, with a break"
            " between."
        )
    if len(shown) < len(stages):
        text += f" {len(stages) - len(shown)} stages between them are not drawn."
    names = [(_words(p), COLOURS[p]) for p in STANDING if any(s.parts[p] for s in stages)]
    names.append(("what autograd keeps", COLOURS["activations"]))
    names.append(("at the peak, for a moment", COLOURS["working"]))
    return ["<h2>Memory over a step</h2>", f"<p>{text}</p>", legend(names), svg.markup()]


def _ticks(most: float) -> Iterator[tuple[float, str]]:
    """Round sizes up to `most` bytes, in GiB or MiB."""
    unit, name = (GIB, "GiB") if most >= 4 * GIB else (MIB, "MiB")
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    step = next(step for step in steps if step * unit * TICKS >= most)
    for number in range(0, int(most / unit) + 1, step):
        yield number * unit, f"{number} {name}"


def _area(svg: Svg, stage: StageMemory, line: Timeline, box: Box, most: float) -> None:
    """Draw the memory of one stage over the step."""
    x, y, wide, high = box
    floor = y + high
    for part in STANDING:
        size = stage.parts[part] * high / most
        floor -= size
        title = f"{_words(part)}: {bytes_(stage.parts[part])}"
        svg.box(x, floor, wide, size, COLOURS[part], title)
    blocks = line.blocks[stage.stage]
    points = kept_over_time(stage, blocks)
    scale = wide / line.end
    corners = [(x, floor)]
    before = 0.0
    # Two corners for each change: memory grows and shrinks in steps.
    for time, size in points:
        for level in (before, size):
            corners.append((x + time * scale, floor - level * high / most))
        before = float(size)
    svg.area([*corners, (x + wide, floor)], COLOURS["activations"])
    moment = stage.parts["recompute"] + stage.parts["working"]
    held = max(size for _, size in points)
    at = next(time for time, size in points if size == held)
    # The times of a backward and of the peak are sums in different orders.
    later = (block for block in blocks if not block.forward and block.begin >= at - 1e-9)
    backward = next(later, blocks[-1])
    top = floor - (held + moment) * high / most
    left = x + backward.begin * scale
    svg.box(left, top, 4.0, moment * high / most, COLOURS["working"], "in a backward")


def _schedule(line: Timeline) -> list[str]:
    """Return the planned schedule with its bubble."""
    drawn = "All micro-batches"
    if line.cut is not None:
        drawn = (
            f"The begin and the end of a step of {line.of} micro-batches: of those between, which"
            f" do the same again, {line.of - line.micro} are left out at the break"
        )
    deeper = ""
    if any(block.chunk for stage in line.blocks for block in stage):
        deeper = " A deeper colour is a later chunk of the stage; the picture is scrolled sideways."
    return [
        "<h2>Pipeline schedule</h2>",
        f"<p>{drawn}; a backward takes as long as two forwards and what it computes again. In the"
        f" whole step the busiest stage waits {share(line.bubble)} of the time.{deeper}</p>",
        *schedule_of(line),
    ]


def schedule_of(line: Timeline) -> list[str]:
    """Return a row for each stage: its forwards and backwards, and between them the bubble."""
    rows = len(line.blocks)
    high = 26 if rows <= 16 else 12
    left = 64.0
    gap = 0.0 if line.cut is None else BREAK
    narrow = min(block.end - block.begin for blocks in line.blocks for block in blocks)
    wide = min(MOST_WIDE, max(930.0, LEAST_BLOCK * line.end / narrow))
    svg = Svg(wide + 70, rows * high + 30)
    scale = (wide - gap) / line.end
    for stage, blocks in enumerate(line.blocks):
        y = 4 + stage * high
        svg.text(0, y + high / 2 + 4, f"stage {stage}")
        svg.box(left, y, wide, high - 4, "#8882", f"stage {stage} waits")
        for block in blocks:
            _block(svg, line, block, (left, y, scale, high - 4), gap)
    if line.cut is not None:
        at = left + line.cut * scale
        svg.box(at, 0, gap, rows * high + 4, "Canvas", "what is left out")
        svg.text(at + gap / 2, rows * high + 20, "left out", middle=True)
    chunks = max(block.chunk for stage in line.blocks for block in stage)
    colours = []
    for name, shades in (("forward", FORWARD), ("backward", BACKWARD)):
        for n in range(min(chunks, 3) + 1):
            chunk = f" of chunk {n}" if chunks else ""
            colours.append((f"{name}{chunk}{' and later' if n == 3 < chunks else ''}", shades[n]))
    return [legend([*colours, ("bubble", "#8884")]), svg.markup()]


def _block(svg: Svg, line: Timeline, block: Block, box: Box, gap: float) -> None:
    """Draw a forward or backward pass, moved to the right after the break, and in two parts across
    it; `box` has the left end, the top, the width of a unit of time and the height.
    """
    left, y, scale, high = box
    colours = FORWARD if block.forward else BACKWARD
    number = str(line.number(block))
    shade = min(block.chunk, 3)
    chunk = f", chunk {block.chunk}" if block.chunk else ""
    title = f"{'forward' if block.forward else 'backward'} of micro-batch {number}{chunk}"
    cut = line.end if line.cut is None else line.cut
    before = (block.begin, min(block.end, cut), 0.0)
    after = (max(block.begin, cut), block.end, gap)
    for begin, end, shift in (before, after):
        wide = (end - begin) * scale
        if wide <= 0:
            continue
        x = left + begin * scale + shift
        svg.box(x, y, max(0.4, wide - 0.6), high, colours[shade], title)
        # a digit is about 7.5 wide
        if wide > 7.5 * len(number) and high > 12:
            middle = x + wide / 2
            svg.text(middle, y + high / 2 + 4, number, middle=True, colour=NUMBERS[shade])


def _time(found: Mapping[str, Any]) -> list[str]:
    """Return a bar of a step's time by part, if it is known."""
    time = found["time"]
    if time["step_s"] is None:
        return ["<h2>Time of a step</h2>", f"<p>It is {text_of(no_time(time))}.</p>"]
    parts = {name: value for name, value in time["parts_s"].items() if value}
    total = time["step_s"]
    svg = Svg(PAGE, 44)
    x = 0.0
    rows = []
    for number, (name, value) in enumerate(parts.items()):
        wide = PAGE * value / sum(parts.values())
        svg.box(x, 6, wide, 32, hue(number, len(parts)), f"{name}: {value * 1e3:.1f} ms")
        x += wide
        rows.append((name, duration(value), share(value / total), time["how"][name]))
    return [
        "<h2>Time of a step</h2>",
        f"<p>{total:.3f} s, of the slowest stage.</p>",
        legend((name, hue(n, len(parts))) for n, name in enumerate(parts)),
        svg.markup(),
        table_of(rows, prose=3),
    ]


def _recomputation(ways: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the memory and time of each way to recompute, if times are known."""
    if len(ways) < 2:
        return []
    head = ("recomputed", "peak", "frees", "step", "adds", "of which a GiB costs")
    rows = [
        (
            row["recomputed"] + ", as this run does" * row["chosen"],
            bytes_(row["peak"]),
            bytes_(row["frees"]),
            duration(row["step_s"]),
            share(row["adds_s"] / ways[0]["step_s"]),
            duration(row["s_per_gib"]),
        )
        for row in ways
    ]
    return ["<h2>Recomputation, by the memory that it frees</h2>", table_of(rows, head)]


def grid_of(stages: Sequence[StageMemory]) -> list[str]:
    """Draw machines as rows of devices, coloured by pipeline stage."""
    run = stages[0].run
    grid = RankGrid.of(run)
    devices = run.cluster.devices_per_node or run.parallel.ranks
    columns = min(devices, (PAGE - GAP) // SIDE)
    svg = Svg(PAGE, 18.0)
    for group in machines(grid, devices):
        svg.height = _group(svg, grid, group, devices, columns)
    names = []
    if grid.pp <= 16:
        names = [(f"stage {stage}", hue(stage, grid.pp)) for stage in range(grid.pp)]
    of = f"a row of {devices}" if columns == devices else f"{devices} in rows of {columns}"
    copy = "the ranks with dp 0"
    if grid.ep > 1:
        copy += ", and those with the first copy of each expert"
    return [
        "<h2>Ranks on machines</h2>",
        f"<p>{text_of(grid)}: a square is a device, {of} a machine; the colour is its stage."
        f" Outlined: one copy of the model, {copy}. A square under the pointer says its place.</p>",
        legend(names),
        svg.markup(),
    ]


def _in_a_copy(grid: RankGrid, at: Mapping[str, int]) -> bool:
    """Return whether a rank belongs to the first whole copy, experts included."""
    return at["dp"] == 0 or (grid.sizes["ep"] > 1 and at["edp"] == 0)


def _group(svg: Svg, grid: RankGrid, group: Machines, devices: int, columns: int) -> float:
    """Draw machines of a kind below the picture, devices in rows of `columns`; return the end."""
    y = svg.height
    per_row = max(1, PAGE // (SIDE * columns + GAP))
    high = SIDE * -(-devices // columns) + 6
    drawn = min(group.number, NODES_DRAWN)
    last = group.first + group.number - 1
    name = f"machine {group.first}" if group.number == 1 else f"machines {group.first} to {last}"
    more = f", {drawn} of them drawn" if drawn < group.number else ""
    held = sorted(set(group.stages))
    of = f"stage {held[0]}" if len(held) == 1 else f"stages {held[0]} to {held[-1]}"
    svg.text(0, y - 5, f"{name}{more}: {of}")
    for number in range(drawn):
        left = number % per_row * (SIDE * columns + GAP)
        top = y + number // per_row * high
        for index, stage in enumerate(group.stages):
            rank = (group.first + number) * devices + index
            at = grid.coords(rank)
            axes = ", ".join(f"{axis} {n}" for axis, n in at.items() if grid.sizes[axis] > 1)
            svg.box(
                left + index % columns * SIDE,
                top + index // columns * SIDE,
                SIDE - 2,
                SIDE - 2,
                hue(stage, grid.pp),
                f"rank {rank}: {axes}" if axes else f"rank {rank}",
                outline=_in_a_copy(grid, at),
            )
    return y + -(-drawn // per_row) * high + 24


def _parameters(found: Mapping[str, Any]) -> list[str]:
    numbers = found["parameters"]
    kinds = list(numbers["by_kind"])
    rows = []
    for row in alike(numbers["by_stage"]):
        sizes = (count(row[kind]) if row.get(kind) else "-" for kind in kinds)
        rows.append((row["stage"], row["layers"] or "-", count(row["rank"]), *sizes))
    return ["<h2>Parameters</h2>", table_of(rows, ("stage", "layers", "a rank", *kinds))]
