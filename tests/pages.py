"""Generated parts of the pages: `python -m tests.pages` writes them, `--check` compares them.

A page holds the commands, and this module fills in what they print:

- a block ```` ```console ```` whose command is one of `PRINTED`, which print the same text on every
  machine;
- a table of plans and their commands, between `<!-- plans` with one row `label | overrides` a line
  and `<!-- /plans -->`;
- `docs/images/plan.svg`, the pictures of `plan --html` for `PICTURED`, in one file.

Reference pages that mtrain prints itself (`schema fields`, `schema codes`) are written as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from mtrain.cli.main import main as mtrain_main
from mtrain.units import GIB, count, duration
from tests.support.commands import ROOT

PRINTED = ("check", "plan", "show", "explain", "choices", "render")
"""Verbs that print the same on every machine, if a command names its cluster."""
PICTURED = "recipe=llama3/70b_h100x64"
PICTURE = ROOT / "docs/images/plan.svg"
SCHEMAS = {"fields": "docs/reference/fields.md", "codes": "docs/reference/codes.md"}
"""Words after `schema` -> the page that they print."""
CONSOLE = re.compile(r"```console\n\$ (python launch\.py .*)\n((?:(?!```).*\n)*)```")
PLANS = re.compile(r"<!-- plans\n(.*?)-->\n(.*?)<!-- /plans -->", re.DOTALL)
HEADS = ("layout", "peak, GiB", "left, GiB", "step", "tokens/s per GPU", "MFU")
INK = "#1f2328"
PAPER = "#ffffff"
WIDE = 1040.0
MARGIN = 20.0
SECTIONS = ("Ranks on machines", "Memory of a rank at its peak", "Pipeline schedule")
"""Headings of the page of `plan --html` whose pictures are taken, in this order."""
LEGEND_CHARACTER = 7.0
"""Width of a character of a legend, with some room."""


def pages() -> list[Path]:
    """Return README.md, CONTRIBUTING.md and every page of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def is_printed(command: str) -> bool:
    """Return whether the output of `python launch.py ...` does not depend on the machine."""
    return command.split()[2] in PRINTED


def printed(command: str) -> str:
    """Return what a command line prints in a shell, errors included; mtrain runs in this process,
    and a shell runs what follows a pipe.
    """
    words, _, filters = command.partition(" | ")
    output = io.StringIO()
    with (
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        mtrain_main(shlex.split(words)[2:])
    if not filters:
        return output.getvalue()
    done = subprocess.run(
        ["bash", "-c", filters], input=output.getvalue(), stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def planned(overrides: str) -> dict[str, float | str]:
    """Return layout, peak and free bytes, step time, tokens/s and MFU of a plan."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        code = mtrain_main(["plan", *overrides.split(), "--json"])
    assert code == 0, f"plan {overrides} ended with {code}"
    plan = json.loads(output.getvalue())
    return {
        "peak": plan["memory"]["peak"]["bytes"],
        "left": plan["memory"]["headroom"],
        "step_s": plan["time"]["step_s"],
        "tokens_per_s": plan["time"]["tokens_per_s_per_device"],
        "mfu": plan["time"]["mfu_by_peak"][0]["causal"],
    }


def plan_row(row: str) -> str:
    """Return the row of a table for `label | overrides`."""
    label, overrides = (part.strip() for part in row.split("|"))
    plan = planned(overrides)
    left = float(plan["left"]) / GIB
    cells = [label, f"{float(plan['peak']) / GIB:.1f}"]
    if left < 0:
        cells += ["does not fit", "-", "-", "-"]
    else:
        cells += [
            f"{left:.1f}",
            duration(float(plan["step_s"])),
            count(float(plan["tokens_per_s"])),
            f"{float(plan['mfu']):.1%}",
        ]
    return f"| {' | '.join(cells)} |"


def plan_table(rows: str) -> str:
    """Return the table of the rows of a block, and the commands that print their plans."""
    lines = [row for row in rows.splitlines() if row.strip()]
    commands = [f"python launch.py plan {row.split('|')[1].strip()}" for row in lines]
    return "\n".join(
        [
            f"| {' | '.join(HEADS)} |",
            "|---|---:|---:|---:|---:|---:|",
            *(plan_row(row) for row in lines),
            "",
            "```",
            *commands,
            "```",
            "",
        ]
    )


def generated(text: str) -> str:
    """Return a page with its generated parts made again."""

    def console(block: re.Match[str]) -> str:
        if not is_printed(block[1]):
            return block[0]
        return f"```console\n$ {block[1]}\n{printed(block[1])}```"

    def plans(block: re.Match[str]) -> str:
        return f"<!-- plans\n{block[1]}-->\n{plan_table(block[1])}<!-- /plans -->"

    return PLANS.sub(plans, CONSOLE.sub(console, text))


def picture() -> str:
    """Return the pictures of a plan, below each other, as one SVG on a white page."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        with contextlib.redirect_stdout(io.StringIO()):
            assert mtrain_main(["plan", PICTURED, "--html", str(page)]) == 0
        html = page.read_text()
    headline = re.search(r"<h1>.*?</h1><p>(.*?)</p>", html)
    assert headline is not None
    parts = [_text(MARGIN, 34, unescape(headline[1]), size=17, bold=True)]
    y = 52.0
    for name in SECTIONS:
        section = re.search(rf"<h2>{name}</h2>(.*?)(?=<h2>|</body>)", html, re.DOTALL)
        assert section is not None, f"the page of plan --html has no section {name}"
        y += 26
        parts.append(_text(MARGIN, y, name, size=14, bold=True))
        legend = re.search(r'<div class="key">(.*?)</div>', section[1])
        if legend is not None:
            y += 24
            parts += _legend(legend[1], y)
        svg = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', section[1], re.DOTALL)
        assert svg is not None, f"{name} has no picture"
        wide, high = float(svg[1]), float(svg[2])
        scale = min(1.0, (WIDE - 2 * MARGIN) / wide)
        inside = re.sub(r"<title>.*?</title>", "", svg[3]).replace("Canvas", PAPER)
        parts.append(f'<g transform="translate({MARGIN:.0f} {y + 10:.0f}) scale({scale:.3f})">')
        parts.append(f"{inside}</g>")
        y += 10 + high * scale
    style = (
        f"text{{fill:{INK};font:12px system-ui,sans-serif}}"
        f".halo{{paint-order:stroke;stroke:{PAPER};stroke-width:4px}}"
    )
    high = y + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE:.0f} {high:.0f}"'
        f' color="{INK}" role="img"><title>A layout and its plan</title><style>{style}</style>'
        f'<rect width="{WIDE:.0f}" height="{high:.0f}" rx="8" fill="{PAPER}"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _text(x: float, y: float, text: str, *, size: int, bold: bool = False) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    weight = ";font-weight:600" if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" style="font-size:{size}px{weight}">{escaped}</text>'


def _legend(html: str, y: float) -> Iterator[str]:
    """Yield the squares and names of a legend, in a row."""
    x = MARGIN
    for colour, name in re.findall(r'<i style="background:([^"]+)"></i>([^<]*)', html):
        yield f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="11" height="11" fill="{colour}"/>'
        yield _text(x + 16, y, unescape(name), size=12)
        x += 34 + LEGEND_CHARACTER * len(unescape(name))


def contents() -> Iterator[tuple[Path, str]]:
    """Yield each file with generated parts, and its text as it should be."""
    for words, name in SCHEMAS.items():
        yield ROOT / name, printed(f"python launch.py schema {words}")
    yield PICTURE, picture()
    for path in pages():
        if str(path.relative_to(ROOT)) not in SCHEMAS.values():
            yield path, generated(path.read_text())


def main(arguments: list[str]) -> int:
    """Write the files whose generated parts differ; with `--check` only name them and return 1."""
    differs = []
    for path, text in contents():
        if not path.exists() or path.read_text() != text:
            differs.append(path)
            if "--check" not in arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for path in differs:
        print(f"{path.relative_to(ROOT)}: {'differs' if '--check' in arguments else 'written'}")
    return 1 if differs and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
