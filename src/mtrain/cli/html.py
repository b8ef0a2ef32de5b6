"""Pages of one file without scripts, and their pictures as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from mtrain.errors import in_a_line, visible
from mtrain.pages import html_page as html_page
from mtrain.pages import text_of

# part of the memory -> its colour
COLOURS = {
    "weights": "#4477aa",
    "gradients": "#66bbdd",
    "optimizer": "#228866",
    "low_precision": "#99aa33",
    "activations": "#ee8855",
    "loss": "#bb4477",
    "recompute": "#cc6644",
    "working": "#eebb44",
    "graphs": "#55aaaa",
    "communication": "#8866bb",
    "context": "#777788",
    "reserve": "#aaaabb",
}
LIMIT = "#d1242f"
# A picture this wide fills its page. A wider one scrolls: shrunk, it could not be read.
PAGE = 1000
LONGEST = 200


def plain(value: Any) -> str:
    """Return text of bounded length for pictures and legends, which escape it themselves."""
    return visible(in_a_line(short_of(value)))


def short_of(value: Any) -> str:
    """Return the text of a value, cut at `LONGEST` characters."""
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def source(file: str, key: str, how: str = "") -> str:
    """Return the source of a number: a file of the run folder, a key in it, and how the number is
    made of its values; empty: it is the value.
    """
    return ":".join([file, quote(short_of(key), safe=""), *([how] if how else [])])


def sourced(sources: str) -> str:
    """Return the attributes of an element that name the sources of its numbers, in their order;
    none without sources.
    """
    words = text_of(sources)
    return f' data-from="{words}" title="from {words}"' if words else ""


def table_of(
    rows: Iterable[Sequence[Any]],
    head: Sequence[str] = (),
    prose: int = -1,
    sources: Sequence[str] = (),
) -> str:
    """Return a table of texts; the column `prose` holds sentences, and `sources` has the source of
    each row.
    """
    lines = []
    if head:
        lines.append(f"<tr>{''.join(f'<th>{text_of(cell)}</th>' for cell in head)}</tr>")
    for number, row in enumerate(rows):
        cells = (
            f"<td{' class=how' if place == prose else ''}>{text_of(cell)}</td>"
            for place, cell in enumerate(row)
        )
        own = sourced(sources[number]) if sources else ""
        lines.append(f"<tr{own}>{''.join(cells)}</tr>")
    return f'<div class="pic"><table>{"".join(lines)}</table></div>'


class Svg:
    """A picture, in units that are no smaller than a pixel."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        colour: str,
        title: str = "",
        *,
        outline: bool = False,
    ) -> None:
        """Draw a rectangle with a text under the pointer, unless it has no size."""
        if wide <= 0 or high <= 0:
            return
        # currentColor follows the light or dark scheme of the browser.
        edge = ' stroke="currentColor" stroke-width="1.5"' if outline else ""
        pointed = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
            f' fill="{colour}"{edge}>{pointed}</rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        middle: bool = False,
        colour: str = "",
        halo: bool = False,
    ) -> None:
        """Draw text that starts or is centred at `x`; with a `halo`, over other shapes."""
        attributes = f'x="{x:.1f}" y="{y:.1f}"'
        attributes += ' text-anchor="middle"' if middle else ""
        attributes += f' style="fill:{colour}"' if colour else ""
        attributes += ' class="halo"' if halo else ""
        self._parts.append(f"<text {attributes}>{escape(text)}</text>")

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        """Draw a thin line."""
        self._parts.append(
            f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}"'
            ' stroke-width="1.5"/>'
        )

    def area(self, corners: Sequence[tuple[float, float]], colour: str) -> None:
        """Draw a polygon."""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def curve(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Draw a curve through points; a single one as a dot."""
        if len(points) == 1:
            ((x, y),) = points
            self.box(x - 2, y - 2, 4, 4, colour)
            return
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.3"'
            ' stroke-linejoin="round"/>'
        )

    def boxes(
        self, corners: Iterable[tuple[float, float]], wide: float, high: float, colour: str
    ) -> None:
        """Draw many rectangles of one size and colour as one shape."""
        path = "".join(f"M{x:.1f} {y:.1f}h{wide:.2f}v{high:.1f}h-{wide:.2f}z" for x, y in corners)
        self._parts.append(f'<path d="{path}" fill="{colour}"/>')

    def columns(self, bars: Iterable[tuple[float, float, float]], wide: float, colour: str) -> None:
        """Draw many bars of one width and colour as one shape; each has left, top and height."""
        path = "".join(f"M{x:.1f} {y:.1f}h{wide:.2f}v{z:.1f}h-{wide:.2f}z" for x, y, z in bars)
        self._parts.append(f'<path d="{path}" fill="{colour}"/>')

    def markup(self) -> str:
        """Return the element."""
        # CSS scales every picture to the page; this one keeps its size and scrolls.
        wide = f' style="min-width:{self.width:.0f}px"' if self.width > PAGE else ""
        box = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        inside = "".join(self._parts)
        return f'<div class="pic"><svg {box}{wide} role="img">{inside}</svg></div>'


def hue(number: int, of: int) -> str:
    """Return colour `number` of `of` distinct ones."""
    # A third of a turn from red, the colour of limits; neighbours differ in brightness too.
    turn = number * 360 / max(1, of)
    return f"hsl({(turn + 210) % 360:.0f}, 55%, {52 + 8 * (number % 2)}%)"


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Return the legend of the colours."""
    made = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names
    )
    return f'<div class="key">{"".join(made)}</div>'
