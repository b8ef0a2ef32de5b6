"""Pictures as SVG: boxes with a text under the pointer, lines, areas and the names of colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = {
    "weights": "#4477aa",
    "gradients": "#66bbdd",
    "optimizer": "#228866",
    "low_precision": "#99aa33",
    "activations": "#ee8855",
    "loss": "#bb4477",
    "recompute": "#cc6644",
    "working": "#eebb44",
    "communication": "#8866bb",
    "context": "#777788",
    "reserve": "#aaaabb",
}
"""Part of the memory -> its colour."""


PAGE = 1000
"""Of a picture that is as wide as its page; a wider one is scrolled, and none is made smaller than
it can be read.
"""


class Svg:
    """A picture, in units that are no smaller than a pixel."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def add(self, parts: Iterable[str]) -> None:
        """Elements as they are."""
        self._parts += parts

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
        """Draw a rectangle, unless it has no size."""
        if wide > 0 and high > 0:
            self._parts.append(_box(x, y, wide, high, colour, title, outline))

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
        more = (' text-anchor="middle"' if middle else "") + (
            f' style="fill:{colour}"' if colour else ""
        )
        more += ' class="halo"' if halo else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        """Draw a thin line."""
        self._parts.append(
            f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}"'
            ' stroke-width="1.5"/>'
        )

    def rule(self, x: float, y: float, to_y: float, text: str) -> None:
        """Draw a limit: a red line downwards, with its name below."""
        self.line(x, y, x, to_y, "#d1242f")
        self._parts.append(
            f'<text x="{x:.1f}" y="{to_y + 14:.1f}" text-anchor="middle">{escape(text)}</text>'
        )

    def area(self, corners: Sequence[tuple[float, float]], colour: str) -> None:
        """Draw a polygon."""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def markup(self) -> str:
        """Return the element."""
        inside = "".join(self._parts)
        wide = f' style="min-width:{self.width:.0f}px"' if self.width > PAGE else ""
        box = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        return f'<div class="pic"><svg {box}{wide} role="img">{inside}</svg></div>'


def _box(
    x: float, y: float, wide: float, high: float, colour: str, title: str, outline: bool = False
) -> str:
    edge = ' stroke="currentColor" stroke-width="1.5"' if outline else ""
    said = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
        f' fill="{colour}"{edge}>{said}</rect>'
    )


def bar(
    x: float, y: float, wide: float, high: float, parts: Iterable[tuple[float, str, str]]
) -> list[str]:
    """Boxes side by side, as wide as their shares: of each its number, its colour and the text
    under the pointer.
    """
    parts = list(parts)
    total = sum(number for number, _, _ in parts) or 1.0
    out = list[str]()
    for number, colour, title in parts:
        out.append(_box(x, y, wide * number / total, high, colour, title))
        x += wide * number / total
    return out


def hue(number: int, of: int) -> str:
    """Return colour `number` of `of` distinct ones."""
    turn = number * 360 / max(1, of)
    return f"hsl({(turn + 210) % 360:.0f}, 55%, {52 + 8 * (number % 2)}%)"


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Return the legend of the colours."""
    made = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names
    )
    return f'<div class="key">{"".join(made)}</div>'
