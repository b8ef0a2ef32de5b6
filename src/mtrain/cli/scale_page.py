"""The page of `plan --scale --html`: the table, and tokens a second, MFU and efficiency as
pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any

from mtrain.cli.html import PAGE, Svg, html_page, legend, table_of, text_of
from mtrain.plan.scale import Point, Scale
from mtrain.units import short

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
