"""The numbers of a report's page, each with the value that its run folder has for it.

An element names the sources of its numbers in their order (`data-from`): files, keys, and how a
value is made of those in the file. Here they are read and made again. In a chart, the mark of an
axis must stand where the curve, at its coordinates, has that value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import unquote

from mtrain.cli.html import short_of
from mtrain.config.compose.lock_file import read_run_file
from mtrain.errors import show
from mtrain.events.read import events
from mtrain.goodput.account import Account, account
from mtrain.plan.compare import planned
from mtrain.plan.rank import stage_memories
from mtrain.plan.timeline import timeline
from mtrain.report.causes import WORKING, loaded
from mtrain.report.differing import digest_of_numbers
from mtrain.report.folder import read
from mtrain.report.profiled import last_profile
from mtrain.views.profiles import pieces

Values = list[float | str]
SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 0.01, "ms": 1e-3, "s": 1.0, " s": 1.0}
SCALES |= {" ms": 1e-3, " B": 1.0} | {f" {p}iB": 1024.0**n for n, p in enumerate("KMGT", 1)}
UNITS = "|".join(re.escape(unit) for unit in sorted(SCALES, key=len, reverse=True))
NUMBER = re.compile(
    r"(?:(?<![\w.-])[-+])?(?:(?P<a>\d+)(?P<big>[hm])(?P<b>\d\d)[ms]"
    rf"|(?P<digits>\d+(?:\.(?P<decimals>\d+))?)(?:e(?P<power>[-+]\d+))?(?P<unit>(?:{UNITS})(?!\w))?)"
)
FIRST = 3
"""Steps at the begin of a run that medians leave out."""


@dataclass
class Element:
    """An element of a page."""

    tag: str
    facts: dict[str, str] = field(default_factory=dict)
    inside: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the texts inside, those of inner elements apart."""
        parts = (part if isinstance(part, str) else part.text for part in self.inside)
        return "\n".join(part for part in parts if part)

    def all(self, *tags: str) -> Iterator[Element]:
        """Yield the elements inside that have one of some tags, in order."""
        for part in self.inside:
            if isinstance(part, Element):
                if part.tag in tags:
                    yield part
                yield from part.all(*tags)


class Tree(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = [Element("page")]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(made)
        if tag != "meta":
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.open[-1].inside.append(data.replace("\n", " "))


@dataclass(frozen=True)
class Shown:
    """A text of the page with numbers, and the test that they are those of the folder."""

    where: str
    text: str
    holds: Callable[[str], bool]

    def wrong(self) -> Iterator[str]:
        """Yield the text with another last digit in each of its numbers."""
        for found in re.finditer(r"\d(?!\d)", self.text):
            other = (int(found[0]) + 5) % 10
            yield f"{self.text[: found.start()]}{other}{self.text[found.end() :]}"


def agrees(text: str, expected: Sequence[float | str]) -> bool:
    """Return whether a text has these numbers, as far as it prints them, and these words, in this
    order, and no other digits.
    """
    at = 0
    for value in expected:
        if isinstance(value, str):
            begin = text.find(value, at)
            if begin < 0 or re.search(r"\d", text[at:begin]):
                return False
            at = begin + len(value)
        else:
            found = NUMBER.search(text, at)
            if found is None or not is_printed(found, value):
                return False
            at = found.end()
    return not re.search(r"\d", text[at:])


def is_printed(found: re.Match[str], value: float) -> bool:
    """Return whether a printed number is a value, rounded as it is printed."""
    if found["big"]:
        unit = {"h": 3600, "m": 60}[found["big"]]
        printed = (int(found["a"]) * 60 + int(found["b"])) * unit / 60
        return printed <= value < printed + unit / 60
    scale = SCALES[found["unit"] or ""] if found["unit"] else 1.0
    scale *= 10.0 ** int(found["power"] or 0)
    sign = -1 if found[0].startswith("-") else 1
    last = 10.0 ** -len(found["decimals"] or "")
    return abs(sign * float(found["digits"]) - value / scale) <= last / 2 + 1e-9 * abs(
        value / scale
    )


class Folder:
    """The values of a run folder, and what a page makes of them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config = read_run_file(home / "run.yaml")
        self.record = read(home)
        self.lines = [json.loads(line) for line in (home / "metrics.jsonl").open()]
        self.steps = {line["step"]: line for line in self.lines if "lr" in line}
        self.evaluations = {line["step"]: line for line in self.lines if "valid_loss" in line}
        self.events = list(events(home))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def json(self, name: str) -> Any:
        return json.loads((self.home / name).read_text())

    def curve(self, key: str) -> dict[int, float]:
        """Return the finite values of a key over the steps."""
        lines = self.evaluations if key == "valid_loss" else self.steps
        found = {step: line.get(key) for step, line in sorted(lines.items())}
        return {
            step: float(value)
            for step, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    @cached_property
    def life(self) -> Account:
        return account(self.home)

    @cached_property
    def wall_s(self) -> float:
        """Return the seconds that costs are shares of."""
        whole = self.life.wall_s if (self.home / "life.jsonl").is_file() else 0.0
        return max(whole, sum(self.curve("step_s").values()))

    def expected(self, sources: str) -> Values:
        """Return the values that sources stand for."""
        values: Values = []
        for word in sources.split():
            if word == "off":
                planned, measured = values[-2:]
                known = isinstance(planned, float) and isinstance(measured, float)
                values.append(measured / planned - 1 if known else "-")  # type: ignore[operator]
            elif word == "share":
                values.append(float(values[-1]) / self.life.wall_s)
            elif word == "price":
                rates, seconds = self.curve("tokens_per_s"), self.curve("step_s")
                tokens = sum(rate * seconds[step] for step, rate in rates.items())
                values.append(tokens / (self.wall_s - float(values[-1])) - tokens / self.wall_s)
            else:
                file, key, how = [*word.split(":"), "", ""][:3]
                values += getattr(self, f"_{file.partition('.')[0]}")(unquote(key), how)
        return values

    def _metrics(self, key: str, how: str) -> Values:
        values = list(self.curve(key).values())
        if how == "last":
            step, value = max(self.curve(key).items())
            return [value] if key == "step" else [value, step]
        if how == "tail":
            tail = values[-max(10, round(len(values) / 10)) :]
            squares = [(b - a) ** 2 for a, b in pairwise(tail)]
            noise = math.sqrt(fmean(squares) / 2 / len(tail))
            # The page prints one digit of it.
            return [fmean(tail), float(f"{noise:.1g}"), len(tail)]
        if how == "usual":
            return [self._usual(key)]
        if how == "slower":
            return [self._slower(values[FIRST:])]
        return [{"median": lambda: median(values[FIRST:]), "sum": lambda: sum(values)}[how]()]

    def _usual(self, key: str) -> float:
        """Return the median of the steps since the last resume that no profile made longer."""
        resumed = self.json("plan.json")["resumed_from"] if self._has("plan.json") else None
        begun = int(resumed.rpartition("_")[2]) if resumed else 0
        lines = [line for line in self.lines if "step_s" in line and line["step"] > begun][FIRST:]
        return median(line[key] for line in lines if not line.get("profiled"))

    def _slower(self, times: list[float]) -> float:
        some = max(FIRST, len(times) // 10)
        first, second = median(times[:some]), median(times[some : 2 * some])
        rise = max(0.0, second - first) / some
        early = max(first / 2, first - rise * (FIRST + some / 2))
        return sum(max(0.0, time - early) for time in times)

    def _has(self, name: str) -> bool:
        return (self.home / name).is_file()

    def _run(self, key: str, how: str) -> Values:
        run = self.config
        if key == "data.blend_weights":
            names = run.data.blend or [run.data.path or ""]
            weights = run.data.blend_weights or [1.0] * len(names)
            return [names[int(how)], weights[int(how)] / sum(weights)]
        if how == "planned":
            return [timeline(stage_memories(run), whole=True).bubble]
        if how == "layout":
            return [run.model.name, self.layout, run.parallel.ranks, run.precision.words]
        if how == "numbers":
            return [digest_of_numbers(self.record)]
        if how == "digest":
            return [run.digest()]
        return [len(self.record.values)] if how == "keys" else [self.record.values[key]]

    @property
    def layout(self) -> str:
        run = self.config.parallel
        axes = {axis: getattr(run, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
        return " ".join(f"{axis}{n}" for axis, n in axes.items() if n > 1) or "one rank"

    def _life(self, key: str, how: str) -> Values:
        life = self.life
        if how == "attempt" or key == "attempt":
            row = life.report()["attempts"][int(how) - 1]
            end = short_of(f"{row['end']} {row['why']}")
            return [int(how), row["began"], row["machine"], row["step"], end]
        if how == "line":
            others = sorted((s for c, s in life.seconds.items() if c != "stepping"), reverse=True)
            shares = [s / life.wall_s for s in others if s > 0.0005 * life.wall_s]
            return [
                life.seconds["stepping"] / life.wall_s,
                life.wall_s,
                len(life.attempts),
                *shares,
            ]
        if how == "last":
            return [life.attempts[-1].end]
        if how == "share":
            return [life.seconds[key] / life.wall_s]
        return [life.wall_s if how == "sum" else life.seconds[key]]

    def _events(self, key: str, how: str) -> Values:
        slow = max(self.of_kind("straggler"), key=lambda e: e["own_s"] / e["usual_s"], default={})
        if how == "slowest":
            return [slow["rank"], slow["machine"], slow["step"], slow["own_s"], slow["usual_s"]]
        if how == "excess":
            keys = self.config.resilience
            first = min(event["step"] for event in self.of_kind("straggler"))
            before = (keys.straggler_interval or 1) * keys.straggler_reports
            since = [step for step in sorted(self.steps) if step > first - before]
            slower = slow["own_s"] / slow["usual_s"]
            excess = (slow["own_s"] - slow["usual_s"]) * len(since)
            return [slow["rank"], slow["machine"], slower, since[0], excess]
        if how == "skewed":
            loads = [event["rank_loads"] for event in self.events if event.get("rank_loads")]
            by_step = [
                fmean(max(ranks) * len(ranks) / sum(ranks) for ranks in layers.values())
                for layers in loads
            ]
            load = fmean(by_step)
            saved = 1 - 1 / loaded(self.config, load)
            return [load, median(self._computing()) * saved * len(self.steps)]
        if how == "uneven":
            reports = [event["own_s"] for event in self.of_kind("own_time")]
            by_rank = [median(values) for values in zip(*reports, strict=True)]
            return self._uneven(by_rank, len(by_rank) // self.config.parallel.pp)
        return self._growth()

    def _growth(self) -> Values:
        for key in ("allocated_bytes", "host_rss_bytes"):
            found = [event["by_rank"][key] for event in self.of_kind("memory")]
            sizes = [max(each) for each in found]
            part = len(sizes) // 4
            middle = [median(sizes[part * n : part * (n + 1)]) for n in (1, 2, 3)] if part else []
            if middle and middle == sorted(set(middle)) and sizes[-1] > 1.05 * middle[0]:
                return [found[-1].index(sizes[-1]), middle[0], sizes[-1]]
        return []

    def _computing(self) -> list[float]:
        usual = [line for line in self.steps.values() if not line.get("profiled")]
        return [line["forward_backward_s"] for line in usual]

    def _uneven(self, by_rank: list[float], each: int) -> Values:
        own = [median(by_rank[at : at + each]) for at in range(0, len(by_rank), each)]
        run = self.config
        units = run.trainer.batch // (run.trainer.micro * run.parallel.dp) * run.parallel.vpp
        excess = (max(own) - fmean(own)) * (units - 1) / units * len(self.steps)
        return [own.index(max(own)), max(own) / fmean(own), excess]

    def _profiles(self, key: str, how: str) -> Values:
        profile = last_profile(self.home)
        assert profile is not None
        if key == "step":
            return [profile.step]
        if how == "uneven":
            whole = max(sum(one.parts.values()) for one in profile.ranks)
            usual = [line for line in self.steps.values() if not line.get("profiled")]
            scale = median(line["step_s"] for line in usual) / whole
            own = [scale * sum(one.parts[part] for part in WORKING) for one in profile.ranks]
            return self._uneven(own, len(own) // self.config.parallel.pp)
        found = [pieces(one.events) for one in profile.ranks]
        begin = min(piece.begin for each in found for piece in each)
        end = max(piece.end for each in found for piece in each)
        busy = max(sum(piece.end - piece.begin for piece in each) for each in found)
        return [1 - busy / (end - begin)]

    def _plan(self, key: str, how: str) -> Values:
        # Without the file, the page plans the run anew.
        found = self._has("plan.json")
        value = self.json("plan.json") if found else {"planned": planned(self.config)}
        *way, last = key.split(".")
        for name in way:
            value = value[name]
        if last.isdecimal():
            return [int(last), float(value[int(last)])]
        return ["-"] if value[last] is None else [float(value[last])]

    def _memory(self, key: str, how: str) -> Values:
        peaks = self.json("memory.json")[key]
        if how == "most":
            return [max(peaks), peaks.index(max(peaks))]
        each = len(peaks) // self.config.parallel.pp
        stage = int(how.removeprefix("stage"))
        return [float(max(peaks[stage * each : (stage + 1) * each]))]

    def _checkpoints(self, key: str, how: str) -> Values:
        newest = max((self.home / "checkpoints").glob("step_*"), default=None)
        if newest is None:
            return ["-"]
        return [float(sum(file.stat().st_size for file in newest.iterdir() if file.is_file()))]

    def _env(self, key: str, how: str) -> Values:
        return [key, self.json("env.json")["versions"][key.removeprefix("version of ")]]

    @cached_property
    def marks(self) -> set[tuple[str, ...]]:
        """Return the step, kind and text of what happened."""
        made: set[tuple[str, ...]] = set()
        for event in self.events:
            at, kind = str(event["step"]), event["kind"]
            if kind == "start" and event["attempt"] > 1:
                made.add((at, "resume", f"attempt {event['attempt']}"))
            elif kind == "alert":
                made.add((at, kind, f"{event['name']}: {event['text']}"))
            elif kind == "warning":
                made.add((at, kind, event["text"]))
            elif kind == "restart":
                made.add((at, kind, event["facts"]["error"]))
            elif kind == "end" and event["how"] == "failed":
                made.add((at, "failure", event["why"]))
        losses = self.curve("loss")
        for step in self.steps:
            before = [loss for at, loss in losses.items() if at < step][-64:]
            if step not in losses:
                made.add((str(step), "spike", "the loss is not finite"))
            elif before:
                text = f"loss {losses[step]:.4g}, usually {median(before):.4g}"
                made.add((str(step), "spike", text))
            if self.steps[step].get("skipped"):
                made.add((str(step), "skipped update", "the update was skipped"))
        return {(at, kind, text[:300]) for at, kind, text in made}

    def points(self, files: str, name: str) -> dict[int, float]:
        """Return what a chart draws: a metric, or the most memory of all ranks in GiB."""
        if files != "events":
            return self.curve(name)
        found = {event["step"]: event["by_rank"].get(name) for event in self.of_kind("memory")}
        return {step: max(sizes) / 2**30 for step, sizes in sorted(found.items()) if sizes}

    def rows(self, kind: str, column: str) -> dict[str, dict[int, float]]:
        """Return the rows of a heat map by step."""
        table: dict[str, dict[int, float]] = {}
        for event in self.of_kind("statistics"):
            if event["of"] == kind:
                at = event["columns"].index(column)
                for name, values in event["rows"].items():
                    if values[at] is not None:
                        table.setdefault(name, {})[event["step"]] = values[at]
        return table


def shown_in(page: str, home: Path) -> list[Shown]:
    """Return every text of a page that has digits."""
    folder = Folder(home)
    found: list[Shown] = []
    for top in Tree(page).open[0].all("body"):
        for part in top.inside:
            assert isinstance(part, Element)
            if part.tag == "h1":
                found.append(Shown("title", part.text, home.name.__eq__))
            else:
                found += _texts(part, folder)
                found += _pictures(part, folder)
    return [one for one in found if re.search(r"\d", one.text)]


def _texts(element: Element, folder: Folder) -> Iterator[Shown]:
    """Yield the texts of an element with sources of its own, or of those inside."""
    source = element.facts.get("data-from", "")
    if source.endswith(":marks"):
        cells = [cell.text for cell in element.all("td")]
        yield Shown(source, "\n".join(cells), lambda t: tuple(t.split("\n")) in folder.marks)
    elif ":" in source:
        expected = folder.expected(source)
        yield Shown(f"{source} = {expected}", element.text, lambda t: agrees(t, expected))
    elif element.tag == "svg" or element.facts.get("class") == "key":
        return
    elif element.tag == "tr":
        cells = [cell.text for cell in element.all("td")]
        yield Shown("table", "\n".join(cells), lambda t: _is_key(folder, t.split("\n")))
    else:
        for part in element.inside:
            if isinstance(part, Element):
                yield from _texts(part, folder)
            else:
                yield Shown(element.tag, part, lambda t: _is_layout(folder, t))


def _is_key(folder: Folder, cells: list[str]) -> bool:
    """Return whether cells are a key and a value of `run.yaml`, or the folder."""
    if cells[0] == "folder":
        return cells[1] == str(folder.home)
    key, value = [*cells, ""][:2]
    return key in folder.record.values and value == short_of(show(folder.record.values[key]))


def _is_layout(folder: Folder, text: str) -> bool:
    run = folder.config
    devices = run.cluster.devices_per_node or run.parallel.ranks
    return agrees(text, [folder.layout, devices, "dp 0"])


def _pictures(part: Element, folder: Folder) -> Iterator[Shown]:
    """Yield the texts of the pictures of a part, and of the legends."""
    title = ""
    names: list[str] = []
    for element in part.all("h2", "div", "svg"):
        if element.tag == "h2":
            title = element.text
            yield Shown("heading", title, lambda t, title=title: title == t and t in _names(folder))
        elif element.facts.get("class") == "key":
            names = [span.text for span in element.all("span")]
        elif element.tag == "svg":
            kind, _, column = title.partition(": ")
            if title in DRAWN:
                yield from DRAWN[title](element, names, folder)
            elif column:
                yield from _heat(element, names, folder.rows(kind, column))
            else:
                points = [folder.points(part.facts["data-from"], name) for name in names]
                yield from _chart(element, points, folder)


def _names(folder: Folder) -> set[str]:
    return {key for line in folder.lines for key in line}


def _titles(svg: Element) -> list[str]:
    return [title.text for title in svg.all("title")]


def _exactly(where: str, texts: Sequence[str], expected: Sequence[str]) -> Iterator[Shown]:
    """Yield texts that must be those expected, in their order."""
    assert len(texts) == len(expected), (where, texts, expected)
    for text, wanted in zip(texts, expected, strict=True):
        yield Shown(where, text, wanted.__eq__)


def _labels(svg: Element) -> list[tuple[float, float, str]]:
    """Return the texts of a picture with their places."""
    return [(float(t.facts["x"]), float(t.facts["y"]), t.text) for t in svg.all("text")]


def _chart(svg: Element, curves: Sequence[dict[int, float]], folder: Folder) -> Iterator[Shown]:
    """Yield the marks of the axes, which must agree with the coordinates of the curves."""
    lines = [path.facts["d"] for path in svg.all("path") if "stroke-linejoin" in path.facts]
    drawn = [points for points in curves if len(points) > 1]
    places = [[tuple(map(float, p.split())) for p in d[1:].split("L")] for d in lines]
    pairs = [
        (step, value, place)
        for points, placed in zip(drawn, places, strict=True)
        for (step, value), place in zip(points.items(), placed, strict=True)
    ]
    labels = _labels(svg)
    below = max(y for _, y, text in labels if re.search(r"\d", text))
    fits = {
        "x": Axis.through([(step, place[0]) for step, _, place in pairs], [False]),
        "y": Axis.through([(value, place[1]) for _, value, place in pairs], [False, True]),
    }
    for x, y, text in labels:
        # The words of a vertical mark begin 4 below its line.
        axis, at = ("x", x) if y == below else ("y", y - 4)
        fit = fits[axis]
        yield Shown(f"mark of {axis}", text, lambda t, fit=fit, at=at: fit.has(t, at))
    texts = {f"step {at}, {kind}: {text}" for at, kind, text in folder.marks}
    for title in _titles(svg):
        yield Shown("flag", title, {short_of(text) for text in texts}.__contains__)


@dataclass(frozen=True)
class Axis:
    """The values of an axis at its coordinates."""

    lowest: tuple[float, float]
    highest: tuple[float, float]
    logarithmic: bool = False

    @classmethod
    def through(cls, pairs: Sequence[tuple[float, float]], kinds: Sequence[bool]) -> Axis:
        """Return the axis on which all values stand at their coordinates."""
        for kind in kinds:
            axis = cls(min(pairs), max(pairs), kind)
            if all(abs(axis.at(value) - place) < 0.16 for value, place in pairs):
                return axis
        raise AssertionError("the curve is not that of the folder")

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        (low, first), (high, last) = self.lowest, self.highest
        if low == high:
            return first
        if self.logarithmic:
            if min(low, value) <= 0:
                return math.inf
            return first + (last - first) * math.log(value / low) / math.log(high / low)
        return first + (last - first) * (value - low) / (high - low)

    def has(self, text: str, at: float) -> bool:
        """Return whether a mark of a coordinate has its value."""
        found = NUMBER.fullmatch(text)
        if found is None:
            return False
        value = float(found["digits"]) * 10.0 ** int(found["power"] or 0)
        value *= (SCALES[found["unit"]] if found["unit"] else 1.0) * (-1) ** text.startswith("-")
        if self.lowest[0] == self.highest[0]:
            return is_printed(found, self.lowest[0])
        unit = 10.0 ** (math.floor(math.log10((self.highest[0] - self.lowest[0]) / 5)) - 1)
        if not self.logarithmic and abs(value / unit - round(value / unit)) > 1e-6:
            return False
        # Coordinates have one decimal, and curves may be short.
        pixels = abs(self.highest[1] - self.lowest[1])
        return abs(self.at(value) - at) < 0.16 * max(1.0, 190 / pixels)


def _heat(svg: Element, names: list[str], rows: dict[str, dict[int, float]]) -> Iterator[Shown]:
    steps = sorted({step for points in rows.values() for step in points})
    values = [abs(v) for points in rows.values() for v in points.values() if abs(v) > 1e-30]
    low, high = min(values), max(values)
    for number, name in enumerate(names):
        edge = low * (high / low) ** (number / 8)
        yield Shown(f"shade {edge}", name, lambda t, edge=edge: agrees(t, [edge]))
    *labels, first, last = [text for _, _, text in _labels(svg)]
    assert len(labels) == len(rows)
    for label, name in zip(labels, rows, strict=True):
        whole = name.removesuffix(".weight")
        yield Shown(name, label, lambda t, whole=whole: whole.endswith(t))
    yield from _exactly("steps", [first, last], [f"step {steps[0]}", f"step {steps[-1]}"])


def _goodput(svg: Element, _: list[str], folder: Folder) -> Iterator[Shown]:
    spent = [seconds for seconds in folder.life.seconds.values() if seconds]
    for title, seconds in zip(_titles(svg), spent, strict=True):
        yield Shown("goodput", title, lambda t, seconds=seconds: agrees(t, [seconds]))


def _by_rank(svg: Element, _: list[str], folder: Folder) -> Iterator[Shown]:
    last = len(folder.json("memory.json")["peak_bytes_by_rank"]) - 1
    texts = [text for _, _, text in _labels(svg)]
    yield from _exactly("ranks", texts[:2], ["rank 0", f"rank {last}"])


def _schedule(svg: Element, names: list[str], folder: Folder) -> Iterator[Shown]:
    run = folder.config
    micro = run.trainer.batch // (run.trainer.micro * run.parallel.dp)
    titles = _titles(svg)
    stages = [f"stage {stage}" for stage in range(run.parallel.pp)]
    yield from _exactly(
        "stages", [t for t in titles if "waits" in t], [f"{s} waits" for s in stages]
    )
    for way in ("forward", "backward"):
        expected = [f"{way} of micro-batch {n}" for _ in stages for n in range(micro)]
        yield from _exactly(way, [t for t in titles if t.startswith(way)], expected)
    # The number on a block is that of the rectangle before it.
    boxed = ""
    numbers = []
    for element in svg.all("rect", "text"):
        if element.tag == "rect":
            boxed = "".join(title.text for title in element.all("title"))
        elif not element.text.startswith("stage"):
            numbers.append((element.text, boxed.rpartition(" ")[2]))
    yield from _exactly("blocks", [a for a, _ in numbers], [b for _, b in numbers])
    yield from _exactly("rows", [t for _, _, t in _labels(svg) if "stage" in t], stages)


def _machines(svg: Element, names: list[str], folder: Folder) -> Iterator[Shown]:
    run = folder.config.parallel
    last = run.pp - 1
    of = f"stages 0 to {last}" if last else "stage 0"
    yield from _exactly("machines", [t for _, _, t in _labels(svg)], [f"machine 0: {of}"])
    yield from _exactly("stages", names, [f"stage {stage}" for stage in range(run.pp)])
    titles = _titles(svg)
    sizes = {"tp": run.tp, "cp": run.cp, "dp": run.dp, "pp": run.pp}
    for rank, title in enumerate(titles):
        rest = rank
        places = {}
        for axis, size in sizes.items():
            rest, places[axis] = divmod(rest, size)
        etp = run.etp or run.tp
        here = rank % (run.tp * run.cp * run.dp)
        experts = {"etp": etp, "ep": run.ep, "edp": run.tp * run.cp * run.dp // (etp * run.ep)}
        for axis, size in experts.items():
            here, places[axis] = divmod(here, size)
        several = {axis for axis, size in (sizes | experts).items() if size > 1}
        own = {f"{axis} {place}" for axis, place in places.items() if axis in several}
        wanted = {f"rank {rank}", *own}
        yield Shown("rank", title, lambda t, w=wanted: set(t.replace(": ", ", ").split(", ")) == w)
    assert len(titles) == run.ranks


DRAWN: dict[str, Callable[[Element, list[str], Folder], Iterator[Shown]]] = {
    "Goodput": _goodput,
    "Memory by rank": _by_rank,
    "Pipeline schedule": _schedule,
    "Ranks on machines": _machines,
}
