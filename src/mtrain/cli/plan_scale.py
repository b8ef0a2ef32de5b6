"""`plan --scale COUNTS [--weak]`: tokens a second, MFU and efficiency over numbers of devices, as
a table and as the page of `--html`; without torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any

from mtrain.cli.html import PAGE, Svg, html_page, legend, table_of, text_of
from mtrain.cli.output import new_page, refusal, say_json, table, write_page
from mtrain.config.compose.composer import Composed, Rejected, compose
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.overrides import jobs
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.errors import ConfigError, Problem, say_page, visible
from mtrain.plan.scale import BATCH, Point, Scale, batches, misfit, on, point
from mtrain.plan.time.report import accuracy_of
from mtrain.plan.tune.choose import cleared, said_of
from mtrain.processes import without_collecting
from mtrain.units import GIB, duration, short

SCALE = "--scale"
WEAK = "--weak"
DOTS = "..."
EXAMPLE = f"plan {SCALE} 96,192,{DOTS},4608"
# Numbers of devices at most: each is a search.
MOST = 64
LARGEST = 1 << 20
# Cells of a bar on a terminal.
BAR = 40


@dataclass(frozen=True)
class Asked:
    """The configuration of a number of devices."""

    devices: int
    composed: Composed
    differs: str
    """The swept values."""
    batch: int | None
    """Global batch size, if the sweep varies it; None: it follows from the first configuration."""


def run(
    argv: Sequence[str],
    scale: str | None,
    *,
    weak: bool,
    others: Sequence[str],
    as_json: bool,
    draw: bool,
    html: str | None,
) -> int:
    """Print the table of the device counts in `scale`, or draw it; return the exit code.

    `others` are the flags of the command line that ask for another answer.

    Raises:
        ConfigError: with every problem of the counts and the configuration; or nothing fits on any
            count.
    """
    counts, problems = _counts(scale, others)
    words, more = _zipped(argv, counts)
    if problems or more:
        raise ConfigError([*problems, *more, *_rejected(argv)])
    to = None
    if html is not None:
        to = new_page(Path(html).expanduser())
    with without_collecting():
        found = scaled(words, counts, weak=weak)
    if not any(one.layout for one in found.points):
        _refuse(found)
    if as_json:
        say_json(report(found))
    elif to is None:
        lines = [*page(found), *(_bars(found) if draw else ())]
        say_page("\n".join(map(visible, lines)))
    if to is not None:
        write_page(to, page_of(found, title(found), cells(found), report(found)))
        say_page(f"{title(found)}: {to}", error=as_json)
    return 0


def _counts(text: str | None, others: Sequence[str]) -> tuple[list[int], list[Problem]]:
    """Return the numbers of devices that `--scale` lists, and every problem of the list."""
    if text is None:
        return [], [_bad(f"{WEAK}: says how {SCALE} counts, which is missing", f"{EXAMPLE} {WEAK}")]
    problems = [_bad(f"{SCALE} and {flag}: plan answers one of them", EXAMPLE) for flag in others]
    counts: list[int] = []
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    for place, part in enumerate(parts):
        if part == DOTS:
            problems += _dots(parts, place, counts)
        elif re.fullmatch(r"\d+", part) and 0 < int(part) <= LARGEST:
            counts.append(int(part))
        else:
            rule = f"{SCALE}: {part or 'nothing'} is no number of devices from 1 to {LARGEST}"
            problems.append(_bad(rule, EXAMPLE))
    for one, two in itertools.pairwise(counts):
        if two <= one:
            rule = f"{SCALE}: {two} after {one}: numbers of devices must increase"
            problems.append(_bad(rule, f"{SCALE} {','.join(map(str, sorted(set(counts))))}"))
            break
    if len(counts) > MOST:
        problems.append(
            _bad(f"{SCALE}: {len(counts)} numbers of devices; at most {MOST}", "fewer of them")
        )
    return counts, problems


def _dots(parts: Sequence[str], place: int, counts: list[int]) -> list[Problem]:
    """Fill in the numbers for `...`, which continue the ratio of the two before it."""
    rule = (
        f"{SCALE}: {DOTS} stands between two numbers, the second a multiple of the first, and the"
        " last"
    )
    last = parts[place + 1] if place + 2 == len(parts) else ""
    if len(counts) < 2 or not last.isdigit() or not 0 < int(last) <= LARGEST:
        return [_bad(rule, EXAMPLE)]
    # `...` continues a ratio, not a difference: the axes of the page are logarithmic.
    times, rest = divmod(counts[-1], counts[-2])
    if rest or times < 2:
        return [_bad(f"{rule}; {counts[-1]} is no multiple of {counts[-2]}", EXAMPLE)]
    while counts[-1] * times < int(last):
        counts.append(counts[-1] * times)
    return []


def _rejected(arguments: Sequence[str]) -> list[Problem]:
    """Return the problems of the words that have one value."""
    try:
        compose([word for word in arguments if "," not in word.partition("=")[2]])
    except Rejected as error:
        return list(error.problems)
    return []


def _zipped(
    arguments: Sequence[str], counts: Sequence[int]
) -> tuple[list[list[Any]], list[Problem]]:
    """Return the words of each device count, and a problem for each key with more or fewer values
    than counts.
    """
    problems = list[Problem]()
    columns = list[tuple[list[str], bool]]()
    for word in arguments:
        try:
            found = [job.argv[0] for job in jobs([word])]
        except ConfigError as error:
            problems += error.problems
            continue
        if len(found) not in (1, len(counts)):
            key = word.partition("=")[0]
            number = len(counts)
            rule = f"{key} has {len(found)} values, and {SCALE} {number} numbers of devices"
            problems.append(_bad(rule, f"one value of {key}, or {number}"))
        columns.append((found * len(counts) if len(found) == 1 else found, len(found) > 1))
    rows = (
        zip(*(values for values, _ in columns), strict=False) if columns else ([] for _ in counts)
    )
    swept = [several for _, several in columns]
    words = [
        [list(row), [word for word, several in zip(row, swept, strict=True) if several]]
        for row in rows
    ]
    return words, problems


def scaled(words: Sequence[Sequence[Any]], counts: Sequence[int], *, weak: bool) -> Scale:
    """Return the points of several numbers of devices.

    Raises:
        ConfigError: a configuration cannot be composed, a number is no machines of its cluster, a
            batch is not whole.
    """
    asked = _composed(words, counts)
    machine = Machine.here()
    first = asked[0]
    said = said_of(first.composed.run, first.composed.origins, command_line=True)
    size = (
        first.batch
        or resolve(
            cleared(on(first.composed.run, first.devices), said), machine, None
        ).trainer.batch
    )
    sizes = [one.batch or size for one in asked]
    if any(one.batch is None for one in asked):
        grown = batches(size, counts, weak=weak)
        wrong = [str(number) for number, batch in zip(counts, grown, strict=True) if batch is None]
        if wrong:
            rule = (
                f"{WEAK}: a batch of {size} on {counts[0]} devices is no whole one on"
                f" {', '.join(wrong)}"
            )
            fix = f"{BATCH}={-(-size // counts[0]) * counts[0]}"
            raise refusal(rule, fix, "MT010", BATCH, size)
        sizes = [each or size for each in grown]
    points = []
    for one, batch in zip(asked, sizes, strict=True):
        kept = said_of(one.composed.run, one.composed.origins, command_line=True)
        points.append(point(one.composed.run, kept, machine, one.devices, batch, one.differs))
    return Scale(tuple(points), weak)


def _composed(words: Sequence[Sequence[Any]], counts: Sequence[int]) -> list[Asked]:
    """Raise ConfigError with the problems of all of them, each once."""
    known: dict[tuple[str, ...], Composed] = {}
    problems: dict[str, Problem] = {}
    out = []
    for (row, swept), devices in zip(words, counts, strict=True):
        try:
            composed = known.get(tuple(row)) or compose(row)
        except Rejected as error:
            problems |= {problem.render(): problem for problem in error.problems}
            continue
        # Without swept keys all counts have the same words: they are composed once.
        known[tuple(row)] = composed
        if why := misfit(composed.run, devices):
            problems[why] = _bad(f"{SCALE}: {why}", f"{SCALE} with one of these in its place")
        others = [word for word in swept if not word.startswith(f"{BATCH}=")]
        batch = composed.run.trainer.global_batch_size if len(others) < len(swept) else None
        out.append(Asked(devices, composed, " ".join(others), batch))
    if problems:
        raise ConfigError(list(problems.values()))
    return out


def _refuse(found: Scale) -> None:
    """Raise ConfigError: nothing fits on any number of devices."""
    raise ConfigError(
        [
            Problem(
                "MT257",
                "parallel.auto",
                True,
                one.why,
                "more devices, or devices with more memory",
                COMMAND_LINE,
            )
            for one in found.points
        ]
    )


def _bad(rule: str, fix: str) -> Problem:
    return Problem("MT010", "", None, rule, fix, COMMAND_LINE)


def title(found: Scale) -> str:
    """Return the title: the model and the kind of scaling."""
    first = next(one for one in found.points if one.layout is not None)
    assert first.layout is not None
    run = first.layout.run
    several = any(one.differs for one in found.points)
    name = "" if several else f"{run.model.name}, {run.precision.words}, "
    # The name of a cluster ends with its devices, of which there are several here.
    kind = re.sub(r"(?<=.[a-z0-9])x\d+$", "", run.cluster.name)
    sizes = {one.batch for one in found.points}
    if len(sizes) == 1:
        batch = f"strong scaling: {first.batch} samples"
    elif found.weak and len({one.batch / one.devices for one in found.points}) == 1:
        batch = f"weak scaling: {first.batch / first.devices:g} samples a device"
    else:
        batch = "a batch for each number of devices, samples"
    return f"{name}{batch} of {run.data.length} tokens, on {kind}"


def report(found: Scale) -> dict[str, Any]:
    """Return the JSON report."""
    first = found.first
    assert first is not None
    assert first.layout is not None
    accuracy = accuracy_of(first.layout.run.cluster)
    return {
        "title": title(found),
        "weak": found.weak,
        "error": None if accuracy is None else asdict(accuracy),
        "points": [_data(found, one) for one in found.points],
    }


def _data(found: Scale, one: Point) -> dict[str, Any]:
    data: dict[str, Any] = {
        "devices": one.devices,
        "differs": one.differs,
        "global_batch_size": one.batch,
    }
    if one.layout is None:
        return {**data, "layout": None, "why": one.why}
    time = one.layout.time
    return {
        **data,
        "model": one.layout.run.model.name,
        "layout": one.layout.words,
        "step_s": one.layout.seconds,
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_s_per_device": time.tokens_per_second_per_device,
        "mfu": time.mfu,
        "mfu_all_keys": time.mfu_all_keys,
        "efficiency": found.efficiency(one),
        "peak_bytes": one.layout.memory.peak,
    }


def page(found: Scale) -> Iterator[str]:
    """Yield the same as text."""
    first = found.first
    assert first is not None
    assert first.layout is not None
    yield title(found)
    yield from table(cells(found), left=0, ragged=(len(cells(found)[0]) - 1,))
    run = first.layout.run
    form = run.precision.multiplies_in
    accuracy = accuracy_of(run.cluster)
    peak = run.cluster.peak_tflops[form]
    yield f"MFU with causal attention, of {peak:g} TFLOP/s in {form}; in brackets with all keys"
    yield (
        f"efficiency: model FLOP/s of a device against those on {first.devices}; each layout is the"
        " first of tune"
    )
    if accuracy is not None:
        yield accuracy.words


def cells(found: Scale) -> list[list[str]]:
    """Return the table, its head first."""
    batch = found.weak or len({one.batch for one in found.points}) > 1
    differs = any(p.differs for p in found.points)
    head = [
        "devices",
        *["what"] * differs,
        *["batch"] * batch,
        "step",
        "tokens/s",
        "per device",
        "MFU",
        "efficiency",
    ]
    rows = [[*head, "peak", "layout"]]
    for one in found.points:
        row = [str(one.devices), *[one.differs] * differs, *[str(one.batch)] * batch]
        if one.layout is None:
            rows.append([*row, *["-"] * 6, f"none: {one.why}"])
            continue
        time = one.layout.time
        row += [
            duration(one.layout.seconds),
            short(one.tokens_per_s),
            short(time.tokens_per_second_per_device),
        ]
        row += [f"{time.mfu:.1%} ({time.mfu_all_keys:.1%})", f"{found.efficiency(one):.1%}"]
        rows.append([*row, f"{one.layout.memory.peak / GIB:.1f} GiB", one.layout.words])
    return rows


def _bars(found: Scale) -> Iterator[str]:
    """Yield the efficiency as bars."""
    yield ""
    yield "efficiency"
    most = max(1.0, *(found.efficiency(one) for one in found.points))
    for one in found.points:
        share = found.efficiency(one)
        yield f"  {one.devices:>7}  {'#' * round(BAR * share / most):<{BAR}} {share:.1%}"


# the frame of a picture
LEFT = 90.0
WIDE = 860.0
HIGH = 240.0
TOP = 14.0
LINE = "#3b6ea5"
IDEAL = "#888888"


def page_of(
    found: Scale, title: str, cells: Sequence[Sequence[str]], report: Mapping[str, Any]
) -> str:
    """Return the page of a scale; `cells` are its table, the head first."""
    error = report["error"]
    off = ""
    if error is not None:
        off = f" Predicted rates are off by {error['median']:.1%} in the median."
    body = [
        f"<h1>{text_of(title)}</h1><p>Each row has the layout that tune chooses.{off}</p>",
        table_of(cells[1:], cells[0]),
        "<h2>Tokens/s of all devices</h2>",
        legend([("predicted", LINE), ("in proportion to the devices", IDEAL)]),
        _rates(found),
        "<h2>MFU with causal attention</h2>",
        _shares(found, lambda one: 0.0 if one.layout is None else one.layout.time.mfu),
        "<h2>Efficiency against the first</h2>",
        _shares(found, found.efficiency),
    ]
    return html_page(title, "plan.css", body)


def _places(found: Scale) -> dict[int, float]:
    """Return the horizontal place of each device count, on a logarithmic scale."""
    low = log(found.points[0].devices)
    high = log(found.points[-1].devices)
    return {
        one.devices: LEFT + WIDE * (log(one.devices) - low) / ((high - low) or 1.0)
        for one in found.points
    }


def _frame(found: Scale) -> Svg:
    svg = Svg(PAGE, TOP + HIGH + 30)
    svg.line(LEFT, TOP + HIGH, LEFT + WIDE, TOP + HIGH, IDEAL)
    for devices, x in _places(found).items():
        svg.text(x, TOP + HIGH + 18, str(devices), middle=True)
    return svg


def _rates(found: Scale) -> str:
    """Draw tokens a second over devices; both axes are logarithmic."""
    first = found.first
    places = _places(found)
    svg = _frame(found)
    assert first is not None
    fitting = [one for one in found.points if one.layout is not None]
    ideal = {one.devices: first.tokens_per_s * one.devices / first.devices for one in fitting}
    values = [*ideal.values(), *(one.tokens_per_s for one in fitting)]
    low = log(min(values))
    high = log(max(values))

    def y(value: float) -> float:
        return TOP + 10 + (HIGH - 20) * (1 - (log(value) - low) / ((high - low) or 1.0))

    for one, two in itertools.pairwise(fitting):
        x = places[one.devices]
        to_x = places[two.devices]
        svg.line(x, y(ideal[one.devices]), to_x, y(ideal[two.devices]), IDEAL)
        svg.line(x, y(one.tokens_per_s), to_x, y(two.tokens_per_s), LINE)
    for one in fitting:
        _dot(svg, places[one.devices], y(one.tokens_per_s), short(one.tokens_per_s), one)
    return svg.markup()


def _shares(found: Scale, value: Callable[[Point], float]) -> str:
    """Draw a share over devices, from 0 on."""
    places = _places(found)
    svg = _frame(found)
    fitting = [one for one in found.points if one.layout is not None]
    most = max(1e-9, *(value(one) for one in fitting)) * 1.15

    def y(share: float) -> float:
        return TOP + HIGH * (1 - share / most)

    for one, two in itertools.pairwise(fitting):
        svg.line(places[one.devices], y(value(one)), places[two.devices], y(value(two)), LINE)
    for one in fitting:
        _dot(svg, places[one.devices], y(value(one)), f"{value(one):.1%}", one)
    return svg.markup()


def _dot(svg: Svg, x: float, y: float, said: str, one: Point) -> None:
    assert one.layout is not None
    svg.box(x - 4, y - 4, 8, 8, LINE, f"{one.devices} devices: {one.layout.words}")
    svg.text(x, y - 9, said, middle=True, halo=True)
