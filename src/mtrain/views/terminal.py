"""A frame of text that shows one run, or several side by side, and the terminal that redraws it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.errors import visible
from mtrain.goodput.account import RUNNING, percent
from mtrain.goodput.meter import STEPPING
from mtrain.units import bytes_, count, duration, seconds
from mtrain.views.watched import STARTING, Watched, number

LABEL = 8
"""Columns of a row's name."""
GAP = 3
"""Columns between two runs."""
NARROWEST = 24
"""Columns of a run; where runs would be narrower, the others stand below."""
WIDEST = 100
BAR = 24
SPARKS = 32
STYLES = {
    "run": "bold",
    "alert": "yellow",
    "slow": "yellow",
    "failed": "bold red",
    "killed": "bold red",
}
"""Name of a row, or state of a run -> its style."""


@dataclass(frozen=True)
class Glyphs:
    """The characters of pictures."""

    spark: str
    """Heights, the lowest first."""
    full: str
    rest: str
    mark: str
    is_ascii: bool = False

    def text(self, text: str) -> str:
        """Return a text in one line that these characters' terminal can show."""
        text = visible(text)
        return text.encode("ascii", "backslashreplace").decode() if self.is_ascii else text


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "█", "░", "│")
ASCII = Glyphs("_.-~=+*#", "#", "-", "|", is_ascii=True)


def redraws() -> bool:
    """Return whether standard output is a terminal that can draw in the same place again."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def glyphs_of(encoding: str | None) -> Glyphs:
    """Return the characters that an encoding has."""
    try:
        (UNICODE.spark + UNICODE.full + UNICODE.rest + UNICODE.mark).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def sparkline(values: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """Return a line of at most `width` characters; each is the mean of its share of the values, and
    `!` where one of these is no number.
    """
    width = min(width, len(values))
    parts = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    means = [None if None in part else sum(map(float, part)) / len(part) for part in parts]  # type: ignore[arg-type]
    known = [mean for mean in means if mean is not None]
    low = min(known, default=0.0)
    each = (max(known, default=0.0) - low) / (len(glyphs.spark) - 1) or 1.0
    return "".join(
        "!" if mean is None else glyphs.spark[round((mean - low) / each)] for mean in means
    )


def bar(share: float, width: int, glyphs: Glyphs, mark: float | None = None) -> str:
    """Return a bar that is full to a share, with a mark at another share."""
    full = round(min(1.0, max(0.0, share)) * width)
    cells = list(glyphs.full * full + glyphs.rest * (width - full))
    if mark is not None and 0 <= mark <= 1:
        cells[min(width - 1, int(mark * width))] = glyphs.mark
    return f"[{''.join(cells)}]"


def rows(run: Watched, width: int, glyphs: Glyphs) -> Iterator[tuple[str, str]]:
    """Yield the rows of a run: the name of each, and its text of at most `width` characters."""
    facts = Facts(run, width, glyphs)
    yield "run", glyphs.text(run.name)[:width]
    for name, parts in (
        ("state", facts.state()),
        ("step", facts.steps()),
        ("loss", facts.loss()),
        ("grad", facts.gradient()),
        ("rate", facts.rate()),
        ("memory", facts.memory()),
        ("save", facts.save()),
        ("goodput", facts.goodput()),
    ):
        if text := fitted(parts, width):
            yield name, text
    for rank, (step, ratio) in sorted(run.slow.items()):
        where = glyphs.text(rank)
        yield "slow", fitted([f"{where}: {ratio} x the others", f"at step {step}"], width)
    for step, text in run.alerts:
        yield "alert", cut(f"step {step}: {glyphs.text(text)}", width)


class Facts:
    """The facts of a run in words: of each row the parts, the most important one first."""

    def __init__(self, run: Watched, width: int, glyphs: Glyphs) -> None:
        self.run = run
        self.width = width
        self.glyphs = glyphs
        self.values = run.values

    def state(self) -> Iterator[str]:
        """Yield how the run is."""
        run = self.run
        yield run.state
        if run.place.attempt > 1:
            yield f"attempt {run.place.attempt}"
        if run.life is not None:
            yield f"{seconds(run.life.wall_s)} so far" if not run.over else seconds(run.life.wall_s)
        if run.fault:
            yield f"cannot be read now: {self.glyphs.text(run.fault)}"

    def steps(self) -> Iterator[str]:
        """Yield the steps made and left."""
        run = self.run
        if run.goal is None:
            yield str(run.step)
            return
        share = run.step / run.goal
        yield f"{run.step}/{run.goal}"
        if run.state == RUNNING and run.left_s is not None:
            yield f"ETA {seconds(run.left_s)}"
        yield percent(share)
        yield bar(share, min(BAR, self.width // 3), self.glyphs)

    def loss(self) -> Iterator[str]:
        """Yield the loss, its course, and that of the last evaluation."""
        points = [value for _, value in self.run.losses.points]
        if points:
            last = number(self.values.get("loss"))
            yield "not finite" if last is None else f"{last:.4f}"
            yield sparkline(points, min(SPARKS, self.width // 2), self.glyphs)
        if self.run.evaluation is not None:
            step, loss = self.run.evaluation
            yield f"valid {loss:.4f} at {step}"

    def gradient(self) -> Iterator[str]:
        """Yield the norm of the gradient and the learning rate."""
        for name, form in (("grad_norm", "norm {:.3f}"), ("lr", "lr {:.2e}")):
            value = number(self.values.get(name))
            if value is not None:
                yield form.format(value)
        if self.values.get("skipped") is True:
            yield "update skipped"

    def rate(self) -> Iterator[str]:
        """Yield rates of the last step that was not profiled."""
        rate = number(self.values.get("tokens_per_s"))
        if rate is not None:
            yield f"{count(rate)} tokens/s"
        mfu = number(self.values.get("mfu"))
        if mfu is not None:
            yield f"MFU {percent(mfu)}"
        if self.run.step_s is not None:
            yield f"{duration(self.run.step_s)}/step"
        planned = number(self.values.get("planned_step_s"))
        if planned is not None:
            yield f"planned {duration(planned)}"
        wait = number(self.values.get("data_wait_share"))
        if wait is not None:
            yield f"data wait {percent(wait)}"

    def memory(self) -> Iterator[str]:
        """Yield the peak of a rank next to the planned one."""
        peak, planned, size = self.run.memory
        most = size or max(peak or 0.0, planned or 0.0)
        if not most:
            return
        words = "" if peak is None else f"peak {bytes_(peak)}"
        words += "" if size is None or peak is None else f" of {bytes_(size)}"
        if words:
            yield words
        if planned is not None:
            yield f"planned {bytes_(planned)}"
        if peak is not None:
            mark = None if planned is None else planned / most
            yield bar(peak / most, min(BAR, self.width // 3), self.glyphs, mark)

    def save(self) -> Iterator[str]:
        """Yield the next checkpoint and the last one."""
        after = None if self.run.state not in (RUNNING, STARTING) else self.run.next_save
        if after is not None:
            step, left = after
            where = "next" if step is None else f"next at {step}"
            yield where if left is None else f"{where} in {seconds(left)}"
        if self.run.saved is not None:
            yield f"last at {self.run.saved[0]}"

    def goodput(self) -> Iterator[str]:
        """Yield the share of time spent in steps, and the largest other cause."""
        life = self.run.life
        if life is None or not life.wall_s:
            return
        yield percent(life.goodput)
        others = [(spent, name) for name, spent in life.seconds.items() if name != STEPPING]
        for spent, name in sorted(others, reverse=True)[:3]:
            if spent > 0.0005 * life.wall_s:
                yield f"{name.replace('_', ' ')} {percent(spent / life.wall_s)}"


def fitted(parts: Iterable[str], width: int) -> str:
    """Return as many parts as fit into a width; the first is cut."""
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else cut(part, width)
        if len(longer) <= width:
            text = longer
    return text


def cut(text: str, width: int) -> str:
    """Return a text of at most `width` characters."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def lines(runs: Sequence[Watched], width: int, glyphs: Glyphs) -> list[list[tuple[str, str]]]:
    """Return the frame, lines of texts with styles; runs stand side by side in `width` columns."""
    room = width - LABEL
    most = max(1, (room + GAP) // (NARROWEST + GAP))
    found: list[list[tuple[str, str]]] = []
    for begin in range(0, len(runs), most):
        group = runs[begin : begin + most]
        each = min(WIDEST, (room + GAP) // len(group) - GAP)
        if found:
            found.append([("", "")])
        found += _table([list(rows(run, each, glyphs)) for run in group], each, group)
    return found


def _table(
    columns: list[list[tuple[str, str]]], each: int, group: Sequence[Watched]
) -> Iterator[list[tuple[str, str]]]:
    from rich.cells import set_cell_size

    order = ("run", "state", "step", "loss", "grad", "rate", "memory", "save", "goodput")
    for name in (*order, "slow", "alert"):
        texts = [[text for label, text in column if label == name] for column in columns]
        for i in range(max(map(len, texts))):
            line = [(f"{name if not i else '':<{LABEL}}", "dim")]
            for run, cells in zip(group, texts, strict=True):
                style = STYLES.get(run.state if name == "state" else name, "")
                text = cells[i] if i < len(cells) else ""
                line += [(set_cell_size(text, each), style), (" " * GAP, "")]
            yield line


class Screen:
    """The frames of runs on a terminal, each in the place of the one before."""

    def __init__(self) -> None:
        # Some tenths of a second, for a terminal only.
        from rich.console import Console
        from rich.live import Live

        self.console = Console(highlight=False, markup=False)
        self.live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        self.glyphs = glyphs_of(self.console.encoding)
        self.styled = not os.environ.get("NO_COLOR")

    def start(self) -> None:
        """Begin to draw."""
        self.live.start()

    def show(self, runs: Sequence[Watched]) -> None:
        """Draw the runs as they are."""
        self.live.update(self.frame(runs), refresh=True)

    def print(self, text: str) -> None:
        """Print a line above the frame."""
        self.console.print(text, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last frame where it is, and the terminal as it was."""
        self.live.stop()

    def frame(self, runs: Sequence[Watched]) -> Any:
        """Return the frame for rich."""
        from rich.text import Text

        drawn = lines(runs, self.console.width, self.glyphs)
        if not self.styled:
            drawn = [[(text, "") for text, _ in line] for line in drawn]
        return Text("\n").join(Text.assemble(*line) for line in drawn)


def plain(runs: Sequence[Watched], width: int, encoding: str | None) -> str:
    """Return a frame without styles."""
    drawn = lines(runs, width, glyphs_of(encoding))
    return "\n".join("".join(text for text, _ in line).rstrip() for line in drawn)
