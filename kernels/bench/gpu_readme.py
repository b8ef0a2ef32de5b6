"""Writes the measurements on a GPU into pages, from the newest results under
benchmarks/results/gpu.

    python kernels/bench/gpu_readme.py            # writes them between the markers of the pages
    python kernels/bench/gpu_readme.py --check    # exit code 1 where a page says something else
    python kernels/bench/gpu_readme.py --add OUT  # first keeps OUT's summary.json and page.txt

README.md has the headline figures, docs/reference/gpu.md all of them, and kernels/README.md those
of parity.
A folder of results is named DATE_DEVICE_COMMIT. Results of a dry run are refused.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from first_touch_results import ROOT
from first_touch_summary import Summary, shown, totals

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
COMMIT = 8
"""Characters of a commit in the name of a folder."""
MODELS = {"1b": "Llama 3.2 1B", "8b": "a model of 8 layers with the widths of Llama 3 8B"}
"""The names of the shapes of `first_touch_train.py` in words."""


def folder_of(summary: Summary) -> str:
    """Return the name of the folder that holds a summary."""
    device = re.sub(r"[^a-z0-9]+", "_", summary["device"]["name"].lower()).strip("_")
    return f"{summary['date']}_{device}_{summary['commit'][:COMMIT]}"


def add(out: Path, results: Path = RESULTS) -> Path:
    """Keep the summary and the page of a call; returns their folder.

    Raises:
        ValueError: they are of a dry run, or their device or commit is unknown.
    """
    summary = json.loads((out / "summary.json").read_text())
    if summary.get("dry"):
        raise ValueError(f"{out} is of a dry run, which measures nothing")
    for what, known in (("device", summary["device"]["name"]), ("commit", summary["commit"])):
        if known == "unknown":
            raise ValueError(
                f"{out}/summary.json does not say the {what}; without git, write it into a file"
                " COMMIT"
            )
    kept = results / folder_of(summary)
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "page.txt"):
        shutil.copyfile(out / name, kept / name)
    return kept


def newest(results: Path = RESULTS) -> tuple[Path, Summary]:
    """Return the folder with the latest date that has a summary, and that summary."""
    file = max(results.glob("*/summary.json"), key=lambda path: path.parent.name)
    return file.parent, json.loads(file.read_text())


def sections(folder: Path, summary: Summary) -> dict[tuple[str, str], str]:
    """Return text by file and marker."""
    return {
        ("README.md", "gpu"): _headline(summary),
        ("docs/reference/gpu.md", "gpu"): _measured(folder, summary),
        ("kernels/README.md", "gpu-parity"): _parity(folder, summary),
    }


def _place(folder: Path, summary: Summary) -> str:
    """Return device, date, commit, versions, and the path of the results."""
    versions = {
        name: version for name, version in summary["versions"].items() if version != "not installed"
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    source = f"; {summary['source']}" if summary.get("source") else ""
    where = f"`benchmarks/results/gpu/{folder.name}`"
    begin = (
        f"On one {summary['device']['name']}, {summary['date']}, commit"
        f" {summary['commit'][:COMMIT]}"
    )
    return f"{begin} ({known}; {where}{source})"


def _headline(summary: Summary) -> str:
    """Return a few sentences: what passed, the rate of bf16 next to transformers, how many goals
    are reached.
    """
    runs = summary["runs"]
    figures = summary["figures"]
    passed, of = totals(summary)
    place = (
        f"On one {summary['device']['name']} ({summary['date']}, commit"
        f" {summary['commit'][:COMMIT]})"
    )
    small = f"{runs['passed']} of {runs['passed'] + runs['failed']} small runs"
    lines = [
        f"{place}, {small} and {passed} of {of} comparisons of kernels with their definitions"
        " passed."
    ]
    for shape, model in MODELS.items():
        # A call that had no time for `launch.py` at these shapes trained them in one process.
        in_one = summary.get("steps", {}).get(f"{shape} bf16")
        ours = summary["train"].get(f"{shape} bf16 triton", in_one)
        theirs = summary["rivals"].get(f"{shape} transformers")
        if ours is not None:
            mfu = f" (MFU {ours['mfu']:.1%})" if ours.get("mfu") is not None else ""
            if theirs is not None:
                beside = f"; transformers trains it at {theirs['tokens_per_s']:,.0f}"
            else:
                beside = ""
            lines.append(
                f"In bf16, mtrain trains {model} at {ours['tokens_per_s']:,.0f}"
                f" tokens/s{mfu}{beside}."
            )
    met = sum(figure["met"] for figure in figures)
    lines.append(
        f"{met} of {len(figures)} figures reach their goals."
        " [docs/reference/gpu.md](docs/reference/gpu.md) has every figure."
    )
    return "\n".join(lines)


def _facts(folder: Path, summary: Summary) -> list[str]:
    """Return a table of device, date, commit, versions, command, and where the results lie."""
    versions = {
        name: version for name, version in summary["versions"].items() if version != "not installed"
    }
    facts = {
        "device": f"one {summary['device']['name']}",
        "date": summary["date"],
        "commit": summary["commit"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "command": f"`{summary['command']}`",
        "results": f"`benchmarks/results/gpu/{folder.name}`",
        "source": summary.get("source"),
    }
    return [
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {fact} |" for name, fact in facts.items() if fact),
    ]


def _measured(folder: Path, summary: Summary) -> str:
    runs = summary["runs"]
    passed, of = totals(summary)
    lines = [*_facts(folder, summary), ""]
    lines.append(
        f"- {runs['passed']} of {runs['passed'] + runs['failed']} small runs did what they"
        f" must{_named(runs)}."
    )
    lines.append(
        f"- {passed} of {of} units of parity passed; `kernels/README.md` names the others."
    )
    lines += [f"- {note}" for note in summary.get("notes", ())]
    lines += ["", "| training | tokens/s | TFLOP/s | MFU | step, s | planned, s | device busy |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for unit, said in summary["train"].items():
        plan = summary["plans"].get(unit, {})
        busy = summary["profile"].get(unit, {}).get("busy_share")
        cells = [
            (said.get("tokens_per_s"), ",.0f"),
            (said.get("tflops_per_rank"), ".0f"),
            (said.get("mfu"), ".1%"),
            (said.get("step_s"), ".3f"),
            (plan.get("step_s"), ".3f"),
            (busy, ".0%"),
        ]
        texts = ["" if value is None else format(value, form) for value, form in cells]
        lines.append(f"| {unit} | {' | '.join(texts)} |")
    lines += [
        f"| {unit}, in one process | {said['tokens_per_s']:,.0f} | | | {said['step_s']:.3f} | |"
        f" {said.get('busy_share', 0):.0%} |"
        for unit, said in summary.get("steps", {}).items()
    ]
    lines += [
        f"| {unit} | {said['tokens_per_s']:,.0f} | | | | | |"
        for unit, said in summary["rivals"].items()
    ]
    lines += ["", "| figure | measured | planned | goal | |", "| --- | ---: | ---: | --- | --- |"]
    for figure in summary["figures"]:
        measured, planned = (shown(figure[key], figure["name"]) for key in ("measured", "planned"))
        met = "met" if figure["met"] else "not met"
        lines.append(f"| {figure['name']} | {measured} | {planned} | {figure['goal']} | {met} |")
    return "\n".join(lines)


def _named(runs: dict[str, Any]) -> str:
    failures = "; ".join(f"{each['name']}: {each['why']}" for each in runs["failures"])
    return f" (not {failures})" if failures else ""


def _parity(folder: Path, summary: Summary) -> str:
    passed, of = totals(summary)
    lines = [f"{_place(folder, summary)}, {passed} of {of} units of parity passed."]
    note = summary.get("parity_reported", {}).get("note")
    lines += [f"{note[0].upper()}{note[1:]}.", ""] if note else [""]
    lines += ["| op | units | passed | failed |", "| --- | ---: | ---: | --- |"]
    for op, told in summary["parity"].items():
        failures = "; ".join(f"{each['unit']}: {each['why']}" for each in told["failures"])
        lines.append(
            f"| {op} | {told['passed'] + told['failed']} | {told['passed']} | {failures} |"
        )
    return "\n".join(lines)


def filled(text: str, marker: str, content: str) -> str:
    """Return a page with what stands between `<!-- marker -->` and `<!-- /marker -->` replaced.

    Raises:
        ValueError: the page has no such place.
    """
    begin = f"<!-- {marker} -->"
    end = f"<!-- /{marker} -->"
    if begin not in text or end not in text:
        raise ValueError(f"there are no markers {begin} and {end}")
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Write or compare the statements; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", type=Path, metavar="OUT")
    chosen = parser.parse_args(arguments)
    if chosen.add:
        print(add(chosen.add))
    differs = []
    for (name, marker), content in sections(*newest()).items():
        path = ROOT / name
        text = path.read_text()
        wanted = filled(text, marker, content)
        if wanted != text:
            differs.append(name)
            if not chosen.check:
                path.write_text(wanted)
    for name in differs:
        print(f"{name}: {'differs from the newest results' if chosen.check else 'written'}")
    return 1 if differs and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
