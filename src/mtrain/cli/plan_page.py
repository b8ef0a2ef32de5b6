"""The page of `plan --html`: one file without scripts, that opens without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from mtrain.cli.plan_pictures import share
from mtrain.cli.svg import COLOURS, Svg, bar, hue, legend
from mtrain.errors import in_a_line, visible
from mtrain.layout.grid import Machines, RankGrid, machines
from mtrain.plan.rank import StageMemory
from mtrain.plan.report import alike, headline
from mtrain.plan.time.report import no_time
from mtrain.plan.timeline import Block, Timeline, kept_over_time
from mtrain.units import GIB, MIB, bytes_, count, duration, in_unit, seconds, short

STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto 5rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.8rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 60rem; } .dim { opacity: .7; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; min-width: 8rem; }
.card b { display: block; font-size: 1.25rem; } .card span { opacity: .7; font-size: .85rem; }
.bad b { color: #d1242f; }
svg { width: 100%; height: auto; display: block; } svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; font-weight: normal; }
th { opacity: .7; } td:first-child, th:first-child { text-align: left; padding-left: 0; } td.how { text-align: left; }
svg .halo { paint-order: stroke; stroke: Canvas; stroke-width: 4px; stroke-linejoin: round; }
.pic { overflow-x: auto; }
@media (max-width: 900px) { .pic svg { width: 1000px; } td.how { min-width: 18rem; } }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; margin: .4rem 0; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin-right: .35rem; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
ROW = 26
BREAK = 24.0
"""Of a schedule, where micro-batches are left out."""
LEAST_BLOCK = 18.0
MOST_WIDE = 8000.0
"""Of the shortest block of a schedule, so that its number can be read, and of the picture."""
TICKS = 5
"""Of an axis of memory, at most."""
STAGES_DRAWN = 16
"""Stages whose memory over time is drawn; of more, the first and the last ones."""
NODES_DRAWN = 12
"""Machines of a kind that are drawn; the others are alike."""
SIDE = 15
GAP = 26
"""Of a device and between machines, in a picture that is 1000 wide."""
STANDING = (
    "context",
    "communication",
    "reserve",
    "weights",
    "gradients",
    "low_precision",
    "optimizer",
)
"""Parts of the memory that do not change in a step, from below."""


def page_of(found: Mapping[str, Any], stages: Sequence[StageMemory], line: Timeline | None) -> str:
    """Return the page of a report, with its pictures; without `line` those over time
    are left out.
    """
    parts = [
        "<!doctype html>",
        (
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
            ' content="width=device-width">'
        ),
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>plan of {_text(found['model'])}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(found['model'])}</h1><p>{_text(headline(found))}</p>",
        _cards(found),
        *_memory(found),
        *(_over_time(found, stages, line) if line else []),
        *(_schedule(line) if line else []),
        *_time(found),
        *_grid(stages),
        *_parameters(found),
        *(
            ["<h2>What this assumes</h2>", *(f"<p>{_text(note)}</p>" for note in found["notes"])]
            * bool(found["notes"])
        ),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _cards(found: Mapping[str, Any]) -> str:
    memory = found["memory"]
    numbers = found["parameters"]
    batch = found["batch"]
    length = found["seq_length"]
    cards = [
        ("parameters", count(numbers["total"]), ""),
        (f"batch, in micro-batches of {found['micro_batch']}", f"{batch} samples", ""),
        ("sequence length", f"{length} tokens", ""),
        ("tokens of a step", count(batch * length), ""),
    ]
    if numbers["active"] != numbers["total"]:
        cards.append(("active for a token", count(numbers["active"]), ""))
    cards.append(
        (f"peak memory, stage {memory['peak']['stage']}", bytes_(memory["peak"]["bytes"]), "")
    )
    if memory["headroom"] is not None:
        left = memory["headroom"]
        said = "left on a device" if left >= 0 else "too little on a device"
        cards.append((said, bytes_(abs(left)), "" if left >= 0 else "bad"))
    cards += [(name, value, "") for name, value in _speed(found["time"], found["device_word"])]
    cards.append(("checkpoint", bytes_(found["checkpoint"]["bytes"]), ""))
    made = (
        f'<div class="card {kind}"><b>{_text(value)}</b><span>{_text(name)}</span></div>'
        for name, value, kind in cards
    )
    return f'<div class="cards">{"".join(made)}</div>'


def _speed(time: Mapping[str, Any], word: str) -> list[tuple[str, str]]:
    """Return the cards of a step and of the whole run, if known; `word` names a device."""
    if time["step_s"] is None:
        return []
    whole = time["run"]
    cards = [
        ("a step", duration(time["step_s"])),
        (f"tokens/s per {word}", count(time["tokens_per_s_per_device"])),
        *(
            (f"MFU of {of['peak_tflops']:g} TFLOP/s in {of['format']}", share(of["causal"]))
            for of in time["mfu_by_peak"]
        ),
        ("the whole run", seconds(whole["seconds"])),
        (f"{word} hours", short(whole["device_hours"])),
    ]
    return cards if whole["cost"] is None else [*cards, ("cost", f"{whole['cost']:,.0f}")]


def _memory(found: Mapping[str, Any]) -> list[str]:
    """Return a bar for each stage, of its parts, against the memory of a device."""
    memory = found["memory"]
    rows = alike(memory["stages"])
    device = memory["device"]
    most = max([memory["peak"]["bytes"], device or 0]) * 1.02
    parts = [part for part in memory["how"] if any(row["parts"][part] for row in rows)]
    svg = Svg(1000, ROW * len(rows) + 50)
    peaks = list[tuple[float, float, str]]()
    for number, row in enumerate(rows):
        y = 8.0 + number * ROW
        at = 0.0
        svg.text(0, y + 15, f"stage {row['stage']}")
        for part in parts:
            size = row["parts"][part]
            title = (
                f"stage {row['stage']}, {part.replace('_', ' ')}: {bytes_(size)}."
                f" {memory['how'][part]}"
            )
            svg.box(110 + 790 * at / most, y, 790 * size / most, ROW - 6, COLOURS[part], title)
            at += size
        peaks.append((116 + 790 * at / most, y + 15, bytes_(row["peak"])))
    if device:
        svg.rule(110 + 790 * device / most, 2, ROW * len(rows) + 28, f"device: {bytes_(device)}")
    for size, words in _ticks(most):
        at = 110 + 790 * size / most
        svg.line(at, ROW * len(rows) + 8, at, ROW * len(rows) + 12, "currentColor")
        svg.text(at, ROW * len(rows) + 26, words, middle=True)
    for x, y, peak in peaks:  # above the line, which would strike them through
        svg.text(x, y, peak, halo=True)
    return [
        "<h2>Memory of a rank at its peak</h2>",
        f"<p>The peak is on stage {memory['peak']['stage']}, {_text(memory['peak']['where'])}.</p>",
        legend((part.replace("_", " "), COLOURS[part]) for part in parts),
        svg.markup(),
    ]


def _over_time(
    found: Mapping[str, Any], stages: Sequence[StageMemory], line: Timeline
) -> list[str]:
    """Draw the memory of each stage over the step: static memory, and saved activations on top."""
    device = found["memory"]["device"]
    peak = found["memory"]["peak"]["bytes"]
    most = max(peak, device or 0) * 1.05
    wide = 430
    high = 96
    shown = _ends(len(stages), STAGES_DRAWN)
    svg = Svg(1000, -(-len(shown) // 2) * (high + 34) + 4)
    for number, index in enumerate(shown):
        stage = stages[index]
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
            svg.line(
                x,
                y + high - high * device / most,
                x + wide,
                y + high - high * device / most,
                "#d1242f",
            )
        svg.text(x, y - 6, f"stage {stage.stage}: peak {bytes_(stage.peak)}")
    unit = GIB if peak >= 4 * GIB else MIB
    said = f"Each picture is {in_unit(round(most), unit)} {'GiB' if unit == GIB else 'MiB'} high"
    said += "; the red line is the memory of a device." if device else "."
    if line.cut is not None:
        said += (
            f" Of {line.of} micro-batches the begin and the end of the step are drawn, with a break"
            " between."
        )
    if len(shown) < len(stages):
        more = f" {len(stages) - len(shown)} stages between them are not drawn."
    else:
        more = ""
    colours = [
        ("what autograd keeps", COLOURS["activations"]),
        ("at the peak, for a moment", COLOURS["working"]),
    ]
    names = [
        (part.replace("_", " "), COLOURS[part])
        for part in STANDING
        if any(s.parts[part] for s in stages)
    ]
    return [
        "<h2>Memory over a step</h2>",
        f"<p>{said}{more}</p>",
        legend([*names, *colours]),
        svg.markup(),
    ]


def _ticks(most: float) -> Iterator[tuple[float, str]]:
    """Round sizes up to `most` bytes, in GiB or MiB."""
    unit, name = (GIB, "GiB") if most >= 4 * GIB else (MIB, "MiB")
    step = next(step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power)
                if step * unit * TICKS >= most)  # fmt: skip
    for number in range(0, int(most / unit) + 1, step):
        yield number * unit, f"{number} {name}"


def _area(
    svg: Svg,
    stage: StageMemory,
    line: Timeline,
    box: tuple[float, float, float, float],
    most: float,
) -> None:
    x, y, wide, high = box
    below = 0.0
    for part in STANDING:
        size = stage.parts[part] * high / most
        svg.box(
            x,
            y + high - below - size,
            wide,
            size,
            COLOURS[part],
            f"{part.replace('_', ' ')}: {bytes_(stage.parts[part])}",
        )
        below += size
    points = kept_over_time(stage, line.blocks[stage.stage])
    blocks = line.blocks[stage.stage]
    scale = wide / line.end
    corners = []
    before = 0.0
    for time, size in points:
        corners += [(x + time * scale, y + high - below - before * high / most)]
        before = float(size)
        corners += [(x + time * scale, y + high - below - before * high / most)]
    svg.area(
        [(x, y + high - below), *corners, (x + wide, y + high - below)], COLOURS["activations"]
    )
    moment = stage.parts["recompute"] + stage.parts["working"]
    held = max(size for _, size in points)
    at = next(time for time, size in points if size == held)
    backward = next(
        (block for block in blocks if not block.forward and block.begin >= at - 1e-9), blocks[-1]
    )
    top = y + high - below - (held + moment) * high / most
    svg.box(
        x + backward.begin * scale,
        top,
        max(2.0, 4.0),
        moment * high / most,
        COLOURS["working"],
        "in a backward",
    )


def _schedule(line: Timeline) -> list[str]:
    """Return a row for each stage: its forwards and backwards, and between them the bubble."""
    rows = len(line.blocks)
    high = 26 if rows <= 16 else 12
    left = 64.0
    gap = 0.0 if line.cut is None else BREAK
    narrow = min(block.end - block.begin for blocks in line.blocks for block in blocks)
    # wider than the page it is scrolled
    wide = min(MOST_WIDE, max(930.0, LEAST_BLOCK * line.end / narrow))
    svg = Svg(wide + 70, rows * high + 30)
    scale = (wide - gap) / line.end
    for stage, blocks in enumerate(line.blocks):
        y = 4 + stage * high
        svg.text(0, y + high / 2 + 4, f"stage {stage}")
        svg.box(left, y, wide, high - 4, "#8882", f"stage {stage} waits")
        for block in blocks:
            _block(svg, line, block, (left, y, high - 4, scale), gap)
    if line.cut is not None:
        svg.box(left + line.cut * scale, 0, gap, rows * high + 4, "Canvas", "what is left out")
        svg.text(left + line.cut * scale + gap / 2, rows * high + 20, "left out", middle=True)
    drawn = "all micro-batches"
    if line.cut is not None:
        drawn = (
            f"the begin and the end of a step of {line.of} micro-batches: of those between, which"
            " do the same "
        )
        drawn += f"again, {line.of - line.micro} are left out at the break"
    chunks = max(block.chunk for stage in line.blocks for block in stage)
    if chunks:
        said = " A deeper colour is a later chunk of the stage; the picture is scrolled sideways."
    else:
        said = ""
    key = [(f"{name}{f' of chunk {n}' if chunks else ''}{' and later' * (n == 3 < chunks)}", colours[n])
           for name, colours in (("forward", FORWARD), ("backward", BACKWARD))
           for n in range(min(chunks, 3) + 1)]  # fmt: skip
    return [
        "<h2>Pipeline schedule</h2>",
        (
            f"<p>{drawn[0].upper()}{drawn[1:]}; a backward takes as long as two forwards and what"
            f" it computes again. In the whole step the busiest stage waits {share(line.bubble)} of"
            f" the time.{said}</p>"
        ),
        legend([*key, ("bubble", "#8884")]),
        svg.markup(),
    ]


FORWARD = ("#7aa3d4", "#5b86bd", "#4069a0", "#2c5084")
BACKWARD = ("#93c7a0", "#6dab7c", "#478657", "#377247")
NUMBERS = ("#10202f", "#10202f", "#fff", "#fff")
"""Of the first chunks of a stage and later ones: colours of a block, and of what is written on it.
"""


def _block(
    svg: Svg, line: Timeline, block: Block, box: tuple[float, float, float, float], gap: float
) -> None:
    """Draw a forward or backward pass, moved to the right after the break, and in two parts across it."""
    left, y, high, scale = box
    colours = FORWARD if block.forward else BACKWARD
    number = line.number(block)
    colour = colours[min(block.chunk, 3)]
    chunk = f", chunk {block.chunk}" if block.chunk else ""
    title = f"{'forward' if block.forward else 'backward'} of micro-batch {number}{chunk}"
    cut = line.end if line.cut is None else line.cut
    for begin, end, shift in (
        (block.begin, min(block.end, cut), 0.0),
        (max(block.begin, cut), block.end, gap),
    ):
        wide = (end - begin) * scale
        if wide <= 0:
            continue
        x = left + begin * scale + shift
        svg.box(x, y, max(0.4, wide - 0.6), high, colour, title)
        if wide > 7.5 * len(str(number)) and high > 12:
            svg.text(
                x + wide / 2,
                y + high / 2 + 4,
                str(number),
                middle=True,
                colour=NUMBERS[min(block.chunk, 3)],
            )


def _time(found: Mapping[str, Any]) -> list[str]:
    """Return a bar of the time of a step by part, where there is one."""
    time = found["time"]
    if time["step_s"] is None:
        return ["<h2>Time of a step</h2>", f"<p>It is {_text(no_time(time))}.</p>"]
    parts = {name: value for name, value in time["parts_s"].items() if value}
    total = time["step_s"]
    svg = Svg(1000, 44)
    rows = []
    svg.add(
        bar(
            0,
            6,
            1000,
            32,
            [
                (value, hue(n, len(parts)), f"{name}: {value * 1e3:.1f} ms")
                for n, (name, value) in enumerate(parts.items())
            ],
        )
    )
    for name, value in parts.items():
        cells = (name, duration(value), share(value / total), time["how"][name])
        *numbers, how = map(_text, cells)
        rows.append(
            f"<tr>{''.join(f'<td>{number}</td>' for number in numbers)}<td"
            f" class=how>{how}</td></tr>"
        )
    return [
        "<h2>Time of a step</h2>",
        f"<p>{total:.3f} s, of the slowest stage.</p>",
        legend((name, hue(n, len(parts))) for n, name in enumerate(parts)),
        svg.markup(),
        f'<div class="pic"><table>{"".join(rows)}</table></div>',
    ]


def _grid(stages: Sequence[StageMemory]) -> list[str]:
    """Machines as rows of devices, coloured by pipeline stage."""
    run = stages[0].run
    grid = RankGrid.of(run)
    devices = run.cluster.devices_per_node or run.parallel.ranks
    groups = machines(grid, devices)
    columns = min(devices, (1000 - GAP) // SIDE)
    svg = Svg(1000, 0)
    y = 18.0
    for group in groups:
        y = _group(svg, grid, group, devices, columns, y)
    svg.height = y
    if grid.pp <= 16:
        names = [(f"stage {stage}", hue(stage, grid.pp)) for stage in range(grid.pp)]
    else:
        names = []
    of = f"a row of {devices}" if columns == devices else f"{devices} in rows of {columns}"
    return [
        "<h2>Ranks on machines</h2>",
        (
            f"<p>{_text(str(grid))}: a square is a device, {of} a machine; the colour is its stage."
            f" Outlined: one copy of the model, {_copy_words(grid)}. A square under the pointer"
            " says its place.</p>"
        ),
        legend(names),
        svg.markup(),
    ]


def _in_a_copy(grid: RankGrid, at: Mapping[str, int]) -> bool:
    """Return whether a rank is of the first whole copy: experts lie on ranks of several
    data-parallel indices.
    """
    return at["dp"] == 0 or (grid.sizes["ep"] > 1 and at["edp"] == 0)


def _copy_words(grid: RankGrid) -> str:
    if grid.ep > 1:
        return "the ranks with dp 0, and those with the first copy of each expert"
    return "the ranks with dp 0"


def _group(
    svg: Svg, grid: RankGrid, group: Machines, devices: int, columns: int, y: float
) -> float:
    """Draw machines of a kind from `y` on, the devices of each in rows of `columns`; returns where
    they end.
    """
    per_row = max(1, 1000 // (SIDE * columns + GAP))
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
            title = f"rank {rank}: " + ", ".join(
                f"{axis} {n}" for axis, n in at.items() if grid.sizes[axis] > 1
            )
            x = left + index % columns * SIDE
            down = top + index // columns * SIDE
            svg.box(
                x,
                down,
                SIDE - 2,
                SIDE - 2,
                hue(stage, grid.pp),
                title,
                outline=_in_a_copy(grid, at),
            )
    return y + -(-drawn // per_row) * high + 24


def _parameters(found: Mapping[str, Any]) -> list[str]:
    numbers = found["parameters"]
    kinds = list(numbers["by_kind"])
    head = "".join(f"<th>{_text(name)}</th>" for name in ("stage", "layers", "a rank", *kinds))
    rows = [
        "".join(
            f"<td>{_text(count(cell) if isinstance(cell, int) else cell or '-')}</td>"
            for cell in (
                str(row["stage"]),
                row["layers"],
                row["rank"],
                *(row.get(kind) for kind in kinds),
            )
        )
        for row in alike(numbers["by_stage"])
    ]
    return [
        "<h2>Parameters</h2>",
        (
            "<div"
            f' class="pic"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'
        ),
    ]


def _ends(number: int, most: int) -> list[int]:
    """Return indices of so many at most, from both ends."""
    if number <= most:
        return list(range(number))
    return [*range(most // 2), *range(number - most // 2, number)]


def _text(value: Any) -> str:
    """Return text for a page: what cannot be printed becomes its code, and nothing in
    it is markup.
    """
    return escape(visible(in_a_line(str(value))))
