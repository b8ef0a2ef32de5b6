"""The page of `report` about several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from mtrain.cli.charts import Axes, chart
from mtrain.cli.compare import end_words, tolerances, verdict
from mtrain.cli.html import html_page, short_of, sourced, table_of
from mtrain.cli.plan_pictures import share
from mtrain.cli.report_page import STYLE, plan_of
from mtrain.errors import show
from mtrain.pages import text_of
from mtrain.report.differing import compare
from mtrain.report.folder import Record, curve
from mtrain.report.story import totals
from mtrain.report.tail import usual
from mtrain.units import number_of, seconds, short

AXES = {
    "steps": "",
    "tokens": "tokens",
    "seconds of steps": "step_s",
    "FLOPs of the model": "model_flops",
}
"""Words below a chart -> the key that is added up; empty: the step itself."""
MOST_KEYS = 200


def page_of(records: Sequence[Record]) -> str:
    """Return the page; runs are compared with the first."""
    names = _names(records)
    first = records[0]
    body = [f"<h1>{number_of(len(records), 'run')}</h1>"]
    body.append(table_of(((n, r.home) for n, r in zip(names, records, strict=True)), prose=1))
    body += [*_ends(records, names)]
    for name, other in zip(names[1:], records[1:], strict=True):
        found = compare(first, other, tolerances(first, other))
        body.append(f"<h2>{text_of(names[0])} and {text_of(name)}</h2>")
        own = sourced(f"{_metrics(names[0])} {_metrics(name)} compared")
        body.append(f"<p{own}>{text_of(verdict(found))}.</p>")
        if keys := found.differences[:MOST_KEYS]:
            table = ((d.key, short_of(show(d.left)), short_of(show(d.right)), d.kind) for d in keys)
            body.append(table_of(table, ("key", names[0], name, "changes")))
    body += [*_curves(records, names), *_scaling(records, names)]
    return html_page(f"{number_of(len(records), 'run')}: {', '.join(names)}", STYLE, body)


def _names(records: Sequence[Record]) -> list[str]:
    """Return the names of folders, with a number where several have one name."""
    names: list[str] = []
    for record in records:
        name = record.name
        number = 2
        while name in names:
            name = f"{record.name} ({number})"
            number += 1
        names.append(name)
    return names


def _quoted(name: str) -> str:
    """Return the name of a run as a source, and before those of its files."""
    return quote(name, safe="")


def _metrics(name: str) -> str:
    return f"{_quoted(name)}/metrics.jsonl"


def _ends(records: Sequence[Record], names: Sequence[str]) -> Iterator[str]:
    rows = []
    for name, record in zip(names, records, strict=True):
        valid = curve(record.evaluations, "valid_loss")
        rate = usual(record.steps, "tokens_per_s")
        mfu = usual(record.steps, "mfu")
        spent = sum(value for _, value in curve(record.steps, "step_s"))
        rows.append(
            (
                name,
                max(record.steps, default=0),
                end_words(record, "loss"),
                f"{valid[-1][1]:.4f}" if valid else "-",
                end_words(record, "grad_norm"),
                "-" if rate is None else short(rate),
                "-" if mfu is None else share(mfu),
                seconds(spent),
            )
        )
    head = ("run", "steps", "loss", "validation loss", "norm", "tokens/s", "MFU", "time of steps")
    yield "<h2>At the end</h2>"
    yield (
        "<p>Loss and norm are means of the last tenth of the steps, with the standard error of the"
        " mean.</p>"
    )
    keys = (
        ("step", "last"),
        ("loss", "end"),
        ("valid_loss", "value"),
        ("grad_norm", "end"),
        ("tokens_per_s", "median"),
        ("mfu", "median"),
        ("step_s", "sum"),
    )
    sources = [
        " ".join([_quoted(name), *(f"{_metrics(name)}:{key}:{how}" for key, how in keys)])
        for name in names
    ]
    yield table_of(rows, head, sources=sources)


def _curves(records: Sequence[Record], names: Sequence[str]) -> Iterator[str]:
    for below, key in AXES.items():
        lines = {}
        for name, record in zip(names, records, strict=True):
            points = curve(record.steps, "loss")
            at = totals(record, key) if key else {step: float(step) for step, _ in points}
            lines[name] = [(at[step], loss) for step, loss in points if step in at]
        if drawn := chart(lines, Axes(below)):
            yield f"<h2>Loss over {below}</h2>"
            yield drawn


def _scaling(records: Sequence[Record], names: Sequence[str]) -> Iterator[str]:
    """Yield tokens/s and MFU over ranks: measured, planned, and ideal from the fewest ranks."""
    rows = []
    measured = dict[float, float]()
    planned = dict[float, float]()
    for name, record in zip(names, records, strict=True):
        config = record.config
        rate = usual(record.steps, "tokens_per_s")
        if config is None:
            continue
        ranks = config.parallel.ranks
        plan = plan_of(record)
        expected = None
        if plan is not None and plan["step_s"]:
            expected = config.trainer.batch * config.data.length / plan["step_s"]
            planned[ranks] = expected
        if rate is not None:
            measured[ranks] = max(rate, measured.get(ranks, 0.0))
        mfu = usual(record.steps, "mfu")
        rows.append((ranks, name, rate, expected, mfu))
    if len({row[0] for row in rows}) < 2 or not measured:
        return
    fewest = min(measured)
    each = measured[fewest] / fewest
    lines: dict[str, list[tuple[float, float]]] = {
        "measured": sorted(measured.items()),
        "planned": sorted(planned.items()),
        "ideal": [(ranks, each * ranks) for ranks in sorted({row[0] for row in rows})],
    }
    yield "<h2>Scaling</h2>"
    rows.sort(key=lambda row: row[:2])
    own = sourced(f"{_quoted(rows[0][1])}/run.yaml:parallel.ranks")
    yield f"<p{own}>The ideal line goes through the fewest ranks that ran, {fewest:.0f}.</p>"
    yield chart(lines, Axes("ranks", from_zero=True))
    yield table_of(
        (
            (
                ranks,
                name,
                "-" if rate is None else short(rate),
                "-" if expected is None else short(expected),
                "-" if rate is None else share(rate / (each * ranks)),
                "-" if mfu is None else share(mfu),
            )
            for ranks, name, rate, expected, mfu in rows
        ),
        ("ranks", "run", "tokens/s", "planned", "of ideal", "MFU"),
        sources=[_of_scaling(_quoted(row[1])) for row in rows],
    )


def _of_scaling(name: str) -> str:
    """Return the sources of a row about scaling."""
    rate = f"{name}/metrics.jsonl:tokens_per_s:median"
    planned = f"{name}/plan.json:planned.step_s:rate"
    mfu = f"{name}/metrics.jsonl:mfu:median"
    return f"{name}/run.yaml:parallel.ranks {name} {rate} {planned} ideal {mfu}"
