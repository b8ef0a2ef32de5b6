"""The numbers of a report's page, each with the value that its run folder has for it.

An element names the sources of its numbers in their order (`data-from`): files, keys, and how a
value is made of those in the file. Here they are read and made again. In a chart, the mark of an
axis must stand where the curve, at its coordinates, has that value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

from mtrain.cli.html import short_of
from mtrain.errors import show
from tests.support.run_values import Folder

SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 0.01, "ms": 1e-3, "s": 1.0, " s": 1.0}
SCALES |= {" ms": 1e-3, " B": 1.0} | {f" {p}iB": 1024.0**n for n, p in enumerate("KMGT", 1)}
UNITS = "|".join(re.escape(unit) for unit in sorted(SCALES, key=len, reverse=True))
NUMBER = re.compile(
    r"(?:(?<![\w.-])[-+])?(?:(?P<a>\d+)(?P<big>[hm])(?P<b>\d\d)[ms]"
    rf"|(?P<digits>\d+(?:\.(?P<decimals>\d+))?)(?:e(?P<power>[-+]\d+))?(?P<unit>(?:{UNITS})(?!\w))?)"
)


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


def shown_in(page: str, *homes: Path) -> list[Shown]:
    """Return every text with digits of a page about runs."""
    folders = [Folder(home) for home in homes]
    first = folders[0]
    first.runs = {folder.home.name: folder for folder in folders}
    (body,) = Tree(page).open[0].all("body")
    found: list[Shown] = []
    if len(homes) > 1:
        found += _several(body, first)
    for part in body.inside if len(homes) == 1 else ():
        assert isinstance(part, Element)
        if part.tag == "h1":
            found.append(Shown("title", part.text, first.home.name.__eq__))
        else:
            found += _texts(part, first)
            found += _pictures(part, first)
    return [one for one in found if re.search(r"\d", one.text)]


def _several(body: Element, first: Folder) -> Iterator[Shown]:
    """Yield the texts of a page about several runs."""
    title = ""
    runs = first.runs
    others = iter(list(runs.values())[1:])
    pair = [first]
    for part in body.inside:
        assert isinstance(part, Element)
        if part.tag == "h1":
            yield Shown("title", part.text, lambda t: agrees(t, [len(runs)]))
        elif part.tag == "h2":
            title = part.text
            if " and " in title:
                pair = [first, next(others)]
                wanted = f"{first.home.name} and {pair[1].home.name}"
                yield Shown("heading", title, wanted.__eq__)
        elif any(part.all("svg")):
            (svg,) = part.all("svg")
            yield from _chart(svg, _over(title.removeprefix("Loss over "), runs), first)
        elif part.facts.get("class") == "key" and title != "Scaling":
            yield from _exactly("legend", [s.text for s in part.all("span")], list(runs))
        elif any(row.facts.get("data-from") for row in part.all("tr")) or part.tag == "p":
            for row in part.all("tr") if part.tag == "div" else [part]:
                if "data-from" in row.facts:
                    yield from _texts(row, first)
        else:
            for row in part.all("tr"):
                cells = [cell.text for cell in row.all("td", "th")]
                two = tuple(pair)
                yield Shown("keys", "\n".join(cells), partial(_is_difference, pair=two, runs=runs))


def _is_difference(text: str, pair: Sequence[Folder], runs: dict[str, Folder]) -> bool:
    """Return whether cells are a run and its folder, or a key and its values in two runs."""
    key, *cells = text.split("\n")
    if key in runs:
        return cells == [str(runs[key].home)]
    if key == "key":
        return cells == [*(run.home.name for run in pair), "changes"]
    values = [short_of(show(run.record.values.get(key))) for run in pair]
    known = all(key in run.record.values for run in pair)
    return known and cells[:2] == values and not re.search(r"\d", "".join(cells[2:]))


def _over(axis: str, runs: dict[str, Folder]) -> list[dict[float, float]]:
    """Return the losses of runs over steps, or over the sum of a key, or the chart of scaling."""
    if axis == "Scaling":
        rates = next(iter(runs.values())).rates
        fewest = min(rates)
        return [rates, {ranks: rates[fewest] / fewest * ranks for ranks in rates}]
    keys = {"tokens": "tokens", "seconds of steps": "step_s", "FLOPs of the model": "model_flops"}
    found = []
    for run in runs.values():
        losses = run.curve("loss")
        sums = accumulate(run.curve(keys[axis]).values()) if axis in keys else map(float, losses)
        found.append(dict(zip(sums, losses.values(), strict=True)))
    return found


def _texts(element: Element, folder: Folder) -> Iterator[Shown]:
    """Yield the texts of an element with sources of its own, or of those inside."""
    source = element.facts.get("data-from", "")
    if source.endswith(":marks"):
        cells = [cell.text for cell in element.all("td")]
        yield Shown(source, "\n".join(cells), lambda t: tuple(t.split("\n")) in folder.marks)
    elif ":" in source or source.endswith("compared"):
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


def _is_heading(text: str, title: str, folder: Folder) -> bool:
    return text == title and text in _names(folder)


def _is_place(text: str, wanted: set[str]) -> bool:
    return set(text.replace(": ", ", ").split(", ")) == wanted


def _pictures(part: Element, folder: Folder) -> Iterator[Shown]:
    """Yield the texts of the pictures of a part, and of the legends."""
    title = ""
    names: list[str] = []
    for element in part.all("h2", "div", "svg"):
        if element.tag == "h2":
            title = element.text
            yield Shown("heading", title, partial(_is_heading, title=title, folder=folder))
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


def _chart(svg: Element, curves: Sequence[Mapping[Any, float]], folder: Folder) -> Iterator[Shown]:
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
        yield Shown(f"mark of {axis}", text, partial(fit.has, at=at))
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
        yield Shown(f"shade {edge}", name, partial(agrees, expected=[edge]))
    *labels, first, last = [text for _, _, text in _labels(svg)]
    assert len(labels) == len(rows)
    for label, name in zip(labels, rows, strict=True):
        whole = name.removesuffix(".weight")
        yield Shown(name, label, whole.endswith)
    yield from _exactly("steps", [first, last], [f"step {steps[0]}", f"step {steps[-1]}"])


def _goodput(svg: Element, _: list[str], folder: Folder) -> Iterator[Shown]:
    spent = [seconds for seconds in folder.life.seconds.values() if seconds]
    for title, seconds in zip(_titles(svg), spent, strict=True):
        yield Shown("goodput", title, partial(agrees, expected=[seconds]))


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
        yield Shown("rank", title, partial(_is_place, wanted=wanted))
    assert len(titles) == run.ranks


DRAWN: dict[str, Callable[[Element, list[str], Folder], Iterator[Shown]]] = {
    "Goodput": _goodput,
    "Memory by rank": _by_rank,
    "Pipeline schedule": _schedule,
    "Ranks on machines": _machines,
}
