"""The table of host time in `kernels/README.md`, from two runs of `host_cost.py`.

    python benchmarks/host_cost_page.py

Write it between the marks of that page, from `results/host_cost_cpu.json` and, for the commit
before, `results/host_cost_before_cpu.json`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "kernels/README.md"
RESULTS = ROOT / "benchmarks/results"
BEGIN = "<!-- host-cost -->"
END = "<!-- /host-cost -->"
HEAD = (
    "| layer | trained by | microseconds, forward / backward | both | of transformers |"
    " Triton launches | torch launches |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
)


def main() -> int:
    """Write the table, and return the exit code."""
    before, after = (
        json.loads((RESULTS / name).read_text())
        for name in ("host_cost_before_cpu.json", "host_cost_cpu.json")
    )
    page = PAGE.read_text()
    text = section(before, after)
    found = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
    if not found.search(page):
        raise SystemExit(f"{PAGE} has no {BEGIN}")
    PAGE.write_text(found.sub(lambda _: f"{BEGIN}\n{text}\n{END}", page))
    return 0


def section(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the text between the marks: circumstances and a row for each contender."""
    versions = ", ".join(f"{name} {version}" for name, version in after["versions"].items())
    text = [
        f"`{after['command']}` at {after['commit'][:8]}, and in brackets the same at"
        f" {before['commit'][:8]}; {after['device']}, {versions}.",
        "",
        *HEAD,
    ]
    for kind, result in after["kinds"].items():
        old = before["kinds"].get(kind, {}).get("contenders", {})
        theirs = (old.get("transformers"), result["contenders"].get("transformers"))
        for name, one in result["contenders"].items():
            text.append(_row(kind, name, (old.get(name), one), theirs))
    return "\n".join(text)


def _row(kind: str, name: str, found: tuple[Any, Any], theirs: tuple[Any, Any]) -> str:
    """Return a row; each figure is followed by that of the commit before."""
    figures = [_figures(one, them) for one, them in zip(found, theirs, strict=True)]
    cells = [f"{after} ({before})" for before, after in zip(*figures, strict=True)]
    return f"| {' | '.join([kind, name, *cells])} |"


def _figures(one: Any, theirs: Any) -> list[str]:
    """Return the figures of a contender as text; dashes where it was not measured."""
    if one is None:
        return ["-"] * 5
    ways = one["forward"], one["backward"]
    return [
        " / ".join(f"{way['us']:,.0f}" for way in ways),
        f"{one['us']:,.0f}",
        f"{one['us'] / theirs['us']:.2f}" if theirs else "-",
        f"{sum(way['triton_launches'] for way in ways):.4g}",
        f"{sum(way['torch_launches'] for way in ways):.4g}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
