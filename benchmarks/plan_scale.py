"""Megatron-LM's published scaling of GPT on H100 against the plan's prediction by `plan --scale`.

    python benchmarks/plan_scale.py [--write]

The published figures and their sources are benchmarks/data/megatron_strong_scaling.csv (177B, 1,152
samples, 96 to 4,608 GPUs) and megatron_weak_scaling.csv (1.7B to 462B, 48 to 6,144 GPUs). Two
things are predicted of each point:

    as published  tensor and pipeline parallelism as published (for the strong scaling they are
                  published only for 2,304 GPUs, and used for all), micro-batches of one sample;
                  virtual stages and recomputation, which are not published, as tune chooses them;
                  by the efficiencies that benchmarks/plan_time.py fits for megatron-core 0.8. The
                  error is that of this prediction.
    tune          the layout that tune chooses among all, by the efficiencies of mtrain

TFLOP/s are model FLOPs with attention to every key, as Megatron-LM counts them. `--write` saves
benchmarks/results/plan_scale.json, and the tables of docs/reference/scaling.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.cli.plan_scale import scaled
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import Machine
from mtrain.plan.time import step_time
from mtrain.plan.time.efficiencies import Efficiencies, of
from mtrain.plan.tune.choose import search

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data"
RESULTS = ROOT / "benchmarks" / "results" / "plan_scale.json"
DOCS = ROOT / "docs" / "reference" / "scaling.md"
SOFTWARE = "core 0.8"
"""The software whose efficiencies predict the published points."""
PEAK = 989.0
"""TFLOP/s of an H100 in bf16."""
BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
COMMON = ("cluster=h100", "data=mock", "data.seq_length=4096")
KEPT = {
    "parallel.cp": 1,
    "trainer.micro_batch_size": 1,
    "parallel.fsdp": "none",
    "optim.cpu_offload": 0.0,
}
FITTED = ("gpt_1.7b", "gpt_16b", "gpt_70b", "gpt_177b", "gpt_462b")
"""Models whose weak points are among the rows that the efficiencies were fitted on
(published_throughput.csv).
"""
Row = dict[str, Any]


def _read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def strong() -> list[Row]:
    """Return the published points of 177B."""
    return [
        {
            "model": "gpt_177b",
            "gpus": int(row["gpus"]),
            "batch": 1152,
            "tp": 8,
            "pp": 6,
            "published": float(row["petaflops"]) * 1000 / int(row["gpus"]),
        }
        for row in _read("megatron_strong_scaling.csv")
    ]


def weak() -> list[Row]:
    """Return the published points of models that grow with the number of GPUs."""
    names = ("gpus", "batch", "tp", "pp")
    return [
        {
            "model": row["model"],
            **{name: int(row[name]) for name in names},
            "published": float(row["tflops"]),
        }
        for row in _read("megatron_weak_scaling.csv")
    ]


def megatron_efficiencies() -> Efficiencies:
    """Return the efficiencies of megatron-core 0.8 that benchmarks/plan_time.py stored."""
    stored = json.loads((ROOT / "benchmarks" / "results" / "plan_time.json").read_text())
    return of(stored["efficiencies"][SOFTWARE])


def as_published(row: Mapping[str, Any], reached: Efficiencies) -> Row:
    """Return the prediction of a point in its published layout."""
    words = [
        f"model={row['model']}",
        *COMMON,
        f"cluster.nodes={row['gpus'] // 8}",
        "kernels.loss=megatron",
    ]
    raw = compose([*words, f"trainer.global_batch_size={row['batch']}"]).run
    fixed = {
        **KEPT,
        "parallel.tp": row["tp"],
        "parallel.pp": row["pp"],
        "parallel.sequence_parallel": row["tp"] > 1,
    }
    best = search(raw, fixed, BIG, None, 1)[0].best[0]
    predicted = step_time(best.run, reached).mfu_all_keys * PEAK
    return {
        "layout": best.words,
        "predicted": predicted,
        "error": predicted / row["published"] - 1,
    }


def table(rows: Sequence[Row], words: Sequence[str], *, is_weak: bool) -> list[Row]:
    """Return every point with both predictions."""
    reached = megatron_efficiencies()
    counts = [row["gpus"] for row in rows]
    each = [
        [[*words, f"model={row['model']}", f"trainer.global_batch_size={row['batch']}"], []]
        for row in rows
    ]
    for words_, row in zip(each, rows, strict=True):
        words_[1] = [f"model={row['model']}", f"trainer.global_batch_size={row['batch']}"]
    points = scaled(each, counts, weak=is_weak).points
    out = []
    for row, point in zip(rows, points, strict=True):
        assert point.layout is not None, point.why
        time = point.layout.time
        tuned = {"layout": point.layout.words, "tflops": time.mfu_all_keys * PEAK}
        tuned |= {"tokens_per_s_per_gpu": time.tokens_per_second_per_device}
        out.append({**row, "as_published": as_published(row, reached), "tune": tuned})
    return out


def results() -> dict[str, list[Row]]:
    """Return both tables, with four decimals."""
    made = {
        "strong": table(strong(), COMMON, is_weak=False),
        "weak": table(weak(), COMMON, is_weak=True),
    }
    return {name: [_rounded(row) for row in rows] for name, rows in made.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def markdown(name: str, rows: Sequence[Row]) -> str:
    """Return a table of the documentation."""
    head = [
        "GPUs",
        *["model", "batch"] * (name == "weak"),
        "published",
        "predicted",
        "error",
        "layout",
    ]
    head += ["tune predicts", "its layout"]
    lines = [head, ["---"] * len(head)]
    first = rows[0]
    for row in rows:
        own = row["as_published"]
        tuned = row["tune"]
        cells = [f"{row['gpus']:,}"]
        mark = "*" if row["model"] in FITTED else ""
        cells += [f"{row['model']}{mark}", f"{row['batch']:,}"] if name == "weak" else []
        cells += [
            _rate(row["published"], first["published"]),
            _rate(own["predicted"], first["as_published"]["predicted"]),
        ]
        cells += [
            f"{own['error']:+.1%}",
            own["layout"],
            _rate(tuned["tflops"], first["tune"]["tflops"]),
        ]
        lines.append([*cells, tuned["layout"]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rate(tflops: float, first: float) -> str:
    """Return TFLOP/s of a GPU, MFU, and the share of the first point, as text."""
    return f"{tflops:.0f}, {tflops / PEAK:.1%}, {tflops / first:.0%}"


def summary(rows: Sequence[Row]) -> str:
    """Return the errors of a table in a line."""
    errors = sorted(abs(row["as_published"]["error"]) for row in rows)
    middle = len(errors) // 2
    median = errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    worst = max(rows, key=lambda row: abs(row["as_published"]["error"]))
    of_worst = worst["as_published"]["error"]
    return (
        f"Errors: {median:.1%} in the median, {of_worst:+.1%} at worst ({worst['model']} on"
        f" {worst['gpus']:,})."
    )


def written(text: str, found: Mapping[str, Sequence[Row]]) -> str:
    """Return the page with its tables, each between its marks."""
    for name, rows in found.items():
        inner = f"<!-- {name} -->\n{markdown(name, rows)}\n\n{summary(rows)}\n<!-- /{name} -->"
        marked = re.findall(rf"<!-- {name} -->.*?<!-- /{name} -->", text, flags=re.S)
        if len(marked) == 1:
            text = text.replace(marked[0], inner)
        else:
            raise SystemExit(
                f"{DOCS}: needs one table between <!-- {name} --> and <!-- /{name} -->"
            )
    return text


def main() -> int:
    """Predict, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="save the results and the page of the documentation"
    )
    options = parser.parse_args()
    found = results()
    for name, rows in found.items():
        print(f"{name}\n{markdown(name, rows)}\n{summary(rows)}\n")
    if options.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        DOCS.write_text(written(DOCS.read_text(), found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
