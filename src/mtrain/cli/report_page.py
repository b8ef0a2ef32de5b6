"""The page of `report` about one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mtrain.cli.charts import ROWS, TICK_COLOUR, Axes, Flag, bars, chart, heat
from mtrain.cli.goodput import is_owned
from mtrain.cli.html import (
    PAGE,
    Svg,
    html_page,
    hue,
    legend,
    short_of,
    source,
    sourced,
    table_of,
)
from mtrain.cli.plan_page import grid_of, schedule_of
from mtrain.cli.plan_pictures import share
from mtrain.config.compose.paths import ENVIRONMENT
from mtrain.config.disk.files import read_bytes
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import MtrainError, show
from mtrain.events.log import RESTART, WARNING
from mtrain.goodput.account import Account, account
from mtrain.layout.grid import RankGrid
from mtrain.pages import text_of
from mtrain.plan.compare import (
    ALLOCATED,
    MEASURED,
    MOST_BYTES,
    PLAN,
    Row,
    by_rank_of,
    counts_memory,
    lines_of_run,
    peaks_in,
    planned,
    rows,
    saved_in,
)
from mtrain.plan.rank import stage_memories
from mtrain.plan.timeline import timeline
from mtrain.report.causes import Found, causes
from mtrain.report.costs import Cost, Excess, costs, grown
from mtrain.report.differing import digest_of_numbers
from mtrain.report.folder import Record, curve, number
from mtrain.report.profiled import Profile, last_profile
from mtrain.report.story import (
    ALERT,
    FAILURE,
    RESUME,
    SAVE,
    SKIP,
    SPIKE,
    Story,
    by_layer,
    slowest,
    tell,
)
from mtrain.report.tail import end_of, usual
from mtrain.units import GIB, bytes_, count, duration, number_of, seconds, short

STYLE = "plan.css"
COLOURS = {
    RESUME: "#8866bb",
    RESTART: "#bb4477",
    SPIKE: "#d1242f",
    SKIP: "#eebb44",
    ALERT: "#ee8855",
    FAILURE: "#d1242f",
}
MOST_FLAGS = 150
MOST_TOLD = 100
MOST_KEYS = 1500
BEST = 5
CURVES = {
    "Loss": ("loss", "valid_loss"),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("lr",),
    "Tokens per second": ("tokens_per_s",),
    "Seconds of a step": ("step_s", "planned_step_s", "forward_backward_s", "data_wait_s"),
}
SHOWN = frozenset(key for keys in CURVES.values() for key in keys)
APART = frozenset(
    {"step", "samples", "batch_size", "tokens", "data_s", "optimizer_s", "data_wait_share"}
    | {"model_flops", "planned_forward_backward_s", "planned_optimizer_s", "planned_peak_bytes"}
)
"""Keys of a step that need no chart of their own."""
MOST_FURTHER = 12
LOGARITHMIC = ("Gradient norm",)


def page_of(record: Record, *, tune: bool = False) -> str:
    """Return the page; parts without numbers in the folder are omitted."""
    story = tell(record)
    life = _life(record)
    compared = _compared(record)
    what = f"<p{sourced('run.yaml::layout')}>{text_of(_what(record))}</p>"
    body = [f"<h1>{text_of(record.name)}</h1>", what]
    if record.problem:
        body.append(
            f"<p>run.yaml cannot be read by this version: {text_of(short_of(record.problem))}</p>"
        )
    if not record.steps:
        body.append("<p>The run has made no step.</p>")
    profile = last_profile(record.home)
    found = costs(record, story, life, compared, _causes(record, story, profile))
    body += _from("metrics.jsonl life.jsonl run.yaml", [_cards(record, life)])
    body += _from("metrics.jsonl events", _curves(record, story))
    body += _from("events metrics.jsonl", _told(story))
    body += _from(
        "metrics.jsonl life.jsonl events profiles plan.json run.yaml", _slowed(found, story)
    )
    body += _from("run.yaml plan.json metrics.jsonl", _faster(record) if tune else ())
    body += _from("plan.json metrics.jsonl memory.json checkpoints run.yaml", _planned(compared))
    body += _from("profiles run.yaml", _schedules(record, profile))
    body += _from("memory.json plan.json run.yaml", _by_rank(record))
    body += _from("events", _memory(story))
    body += _from("life.jsonl", _goodput(life))
    body += _from("events", _statistics(story))
    body += _from("metrics.jsonl", _further(record))
    body += _from("run.yaml", _layout(record))
    body += _from("run.yaml metrics.jsonl", _data(record))
    body += _from("run.yaml env.json", _recipe(record))
    return html_page(f"run {record.name}", STYLE, body)


def _from(files: str, made: Iterable[str]) -> Iterator[str]:
    """Yield parts of the page in an element that names the files of their numbers; elements inside
    name keys of them.
    """
    parts = list(made)
    if parts:
        yield f'<div data-from="{files}">'
        yield from parts
        yield "</div>"


def _what(record: Record) -> str:
    config = record.config
    if config is None:
        return str(record.home)
    layout = _or_none(lambda: str(RankGrid.of(config))) or "an unknown layout"
    ranks = number_of(config.parallel.ranks, f"{config.cluster.device} rank")
    return f"{config.model.name}, {layout} on {ranks}, {config.precision.words}"


def _or_none(make: Callable[[], Any]) -> Any:
    """Return a value; None where the configuration or a file does not give it."""
    with suppress(MtrainError, OSError, ValueError, ArithmeticError, KeyError, TypeError):
        return make()
    return None


def _life(record: Record) -> Account | None:
    found = _or_none(lambda: account(record.home, alive=is_owned(record.home)))
    return found if isinstance(found, Account) else None


def plan_of(record: Record) -> dict[str, Any] | None:
    """Return the measurable values of the plan: those in `plan.json`, or of a plan made now."""
    config = record.config
    if config is None:
        return None
    text = _or_none(lambda: read_bytes(record.home / PLAN, PLAN, MOST_BYTES))
    held = _or_none(lambda: json.loads(text)["planned"]) if text is not None else None
    made = _or_none(lambda: planned(config))
    if not isinstance(made, dict):
        return None
    return held if _is_alike(held, made) else made


def _is_alike(value: Any, model: Any) -> bool:
    """Return whether a value of a file has the keys of `model`, and numbers or null in them."""
    if isinstance(model, dict):
        same = isinstance(value, dict) and value.keys() == model.keys()
        return same and all(_is_alike(value[key], model[key]) for key in model)
    if isinstance(model, list):
        same = isinstance(value, list) and len(value) == len(model)
        return same and all(number(item) is not None for item in value)
    return value is None or number(value) is not None


def _compared(record: Record) -> list[Row]:
    config = record.config
    plan = plan_of(record)
    if config is None or plan is None:
        return []

    def made() -> list[Row]:
        home = record.home
        return rows(config, plan, lines_of_run(home), peaks_in(home), saved_in(home))

    return _or_none(made) or []


def _cards(record: Record, life: Account | None) -> str:
    steps = f"{max(record.steps, default=0)}"
    of_steps = "metrics.jsonl:step:last"
    if record.config is not None:
        steps += f" of {record.config.trainer.steps}"
        of_steps += " run.yaml:trainer.train_iters"
    cards = [("steps", steps, of_steps)]
    end = end_of([value for _, value in curve(record.steps, "loss")])
    if end is not None:
        words = f"loss, mean of the last {end.steps} steps"
        cards.append((words, f"{end.mean:.4f} ± {end.noise:.1g}", "metrics.jsonl:loss:tail"))
    last = curve(record.evaluations, "valid_loss")
    if last:
        words = f"validation loss at step {last[-1][0]}"
        cards.append((words, f"{last[-1][1]:.4f}", "metrics.jsonl:valid_loss:last"))
    for key, words in (("tokens_per_s", "tokens/s, median"), ("mfu", "MFU, median")):
        value = usual(record.steps, key)
        if value is not None:
            shown = share(value) if key == "mfu" else short(value)
            cards.append((words, shown, f"metrics.jsonl:{key}:median"))
    if life is not None:
        cards.append(("goodput", share(life.goodput), "life.jsonl:stepping:share"))
        cards.append(("lived", seconds(life.wall_s), "life.jsonl::sum"))
        cards.append(("state", life.attempts[-1].end, "life.jsonl:end:last"))
    made = (
        f'<div class="card"{sourced(of)}><b>{text_of(value)}</b><span>{text_of(name)}</span></div>'
        for name, value, of in cards
    )
    return f'<div class="cards">{"".join(made)}</div>'


def _curves(record: Record, story: Story) -> Iterator[str]:
    flags = [
        Flag(mark.step, colour, f"step {mark.step}, {mark.kind}: {mark.text}")
        for kind, colour in COLOURS.items()
        for mark in story.of(kind)[:MOST_FLAGS]
    ]
    saves = story.of(SAVE)
    for title, keys in CURVES.items():
        lines = {
            key: curve(record.evaluations if key == "valid_loss" else record.steps, key)
            for key in keys
        }
        axes = Axes("step", logarithmic=title in LOGARITHMIC)
        if "loss" in keys:
            axes = Axes("step", flags=flags, ticks=[mark.step for mark in saves])
        if drawn := chart(lines, axes):
            yield f"<h2>{title}</h2>"
            if axes.flags or axes.ticks:
                kinds = [(kind, colour) for kind, colour in COLOURS.items() if story.of(kind)]
                yield legend([*kinds, *([(SAVE, TICK_COLOUR)] if saves else [])])
            yield drawn


def _further(record: Record) -> Iterator[str]:
    """Yield charts of further metrics, such as those of an objective."""
    names = dict.fromkeys(key for line in record.steps.values() for key in line)
    further = [key for key in names if key not in SHOWN | APART]
    drawn = ((key, chart({key: curve(record.steps, key)}, Axes("step"))) for key in further)
    for key, picture in [pair for pair in drawn if pair[1]][:MOST_FURTHER]:
        yield f"<h2>{text_of(short_of(key))}</h2>"
        yield picture


def _told(story: Story) -> Iterator[str]:
    """Yield a table of what happened, without saves."""
    marks = [mark for mark in story.marks if mark.kind != SAVE]
    if not marks:
        return
    grave = [mark for mark in marks if mark.kind != WARNING]
    shown = sorted([*grave, *story.of(WARNING)][:MOST_TOLD], key=lambda mark: mark.step)
    left = len(marks) - len(shown)
    yield "<h2>What happened</h2>"
    of = [_source_of(mark.kind) for mark in shown]
    yield table_of([(m.step, m.kind, m.text) for m in shown], ("step", "", "what"), 2, of)
    if left:
        yield f"<p>and {left} more</p>"


def _source_of(kind: str) -> str:
    """Return the source of a mark."""
    keys = {SPIKE: "loss", SKIP: "skipped"}
    return f"metrics.jsonl:{keys[kind]}:marks" if kind in keys else "events:kind:marks"


def _causes(record: Record, story: Story, profile: Profile | None) -> list[Excess]:
    config = record.config
    if config is None:
        return []
    peaks = (_or_none(lambda: peaks_in(record.home)) or {}) if counts_memory(config) else {}
    peak = max((size for size in peaks.get(ALLOCATED, ()) if size is not None), default=None)
    samples = story.memory.get("host_free_bytes")
    free = samples[-1][1] if samples else None
    return list(causes(Found(record, config, story, profile, peak, free)))


def _slowed(found: Sequence[Cost], story: Story) -> Iterator[str]:
    slow = slowest(story)
    if not found and slow is None:
        return
    yield "<h2>What slowed it</h2>"
    yield (
        "<p>Tokens/s that each cause cost, over the whole life of the run. Causes may overlap, so"
        " they do not add up.</p>"
    )
    yield table_of(
        ((one.cause, seconds(one.seconds), short(one.rate)) for one in found),
        ("cause", "time", "tokens/s"),
        sources=[f"{one.source} price" for one in found],
    )
    if slow is not None:
        own = sourced("events:straggler:slowest")
        yield (
            f"<p{own}>The slowest rank was {slow.rank} on"
            f" {text_of(slow.machine)}: at step {slow.step} its own work took"
            f" {duration(slow.own_s)} a step, and that of its pipeline stage"
            f" {duration(slow.usual_s)}.</p>"
        )


def _faster(record: Record) -> Iterator[str]:
    """Yield the layouts that `tune` plans to be faster, in tokens/s of this run."""
    from mtrain.plan.tune.choose import search

    config = record.config
    rate = usual(record.steps, "tokens_per_s")
    plan = plan_of(record)
    yield "<h2>What would be faster</h2>"
    if config is None or rate is None or plan is None or not plan["step_s"]:
        yield "<p>The time of a step is not planned for these devices.</p>"
        return
    try:
        raw = UnresolvedRun.model_validate(config.to_dict())
        best = search(raw, {}, Machine.here(), None, BEST)[0].best
    except MtrainError as error:
        yield f"<p>tune finds no layout: {text_of(error)}</p>"
        return
    gains = [(one, rate * (plan["step_s"] / one.seconds - 1)) for one in best]
    table = [
        (one.words, duration(one.seconds), f"+{short(gain)}") for one, gain in gains if gain > 0
    ]
    if not table:
        yield "<p>tune finds no layout with a shorter step than this one.</p>"
        return
    yield (
        f"<p>The plan of this layout is {duration(plan['step_s'])} a step. If the others deviate"
        " from their plans as it did, they change tokens/s by:</p>"
    )
    yield table_of(table, ("layout", "planned step", "tokens/s"))


def _planned(compared: Sequence[Row]) -> Iterator[str]:
    known = [row for row in compared if row.planned is not None or row.measured is not None]
    if not known:
        return
    table = []
    of = []
    for row in known:
        of.append(_sources_of_row(row))
        say = duration if row.kind == "time" else bytes_
        pair = ["-" if value is None else say(value) for value in (row.planned, row.measured)]
        off = "-" if row.off is None else f"{row.off:+.1%}"
        table.append((row.part, *pair, off, "beyond its bound" if row.beyond else ""))
    yield "<h2>Planned and measured</h2>"
    yield table_of(table, ("part", "planned", "measured", "off", ""), sources=of)


def _sources_of_row(row: Row) -> str:
    """Return the sources of a planned and a measured value, and of their quotient."""
    if row.kind == "time":
        key = f"{row.part.replace(' and ', '_')}_s"
        return f"plan.json:planned.{key} metrics.jsonl:{key}:usual off"
    if row.kind == "size":
        return "plan.json:planned.checkpoint_bytes checkpoints:bytes:newest off"
    name, _, stage = row.part.rpartition(" ")
    prefix = name.removesuffix("memory of stage")
    key = next(key for key, word in MEASURED.items() if word == prefix)
    plan = f"memory_by_stage.{key}" if row.kind == "memory" else "peak_bytes_by_stage"
    peaks = f"memory.json:{by_rank_of(key)}:stage{stage}"
    return f"plan.json:planned.{plan}.{stage} {peaks} off"


def _schedules(record: Record, profile: Profile | None) -> Iterator[str]:
    """Yield the schedule of the pipeline as a profile measured it, and as it was planned."""
    config = record.config
    measured = _or_none(lambda: profile.schedule) if profile is not None else None
    if config is None or config.parallel.pp < 2 or profile is None or measured is None:
        return
    yield "<h2>Pipeline schedule</h2>"
    yield (
        f"<p{sourced('profiles:step profiles:bubble')}>Measured in step {profile.step}, which a"
        f" profile made longer: the busiest stage waits {share(measured.bubble)} of the time"
        " between the first forward and the last backward.</p>"
    )
    yield from schedule_of(measured)
    planned = _or_none(lambda: timeline(stage_memories(config), whole=True))
    if planned is not None:
        yield f"<p{sourced('run.yaml:parallel.pp:planned')}>Planned by the FLOPs of stages: it"
        yield f" waits {share(planned.bubble)}.</p>"
        yield from schedule_of(planned)


def _memory(story: Story) -> Iterator[str]:
    """Yield the samples of memory over the steps, the most of all ranks."""
    kinds = {
        key: [(step, size / GIB) for step, size in points]
        for key, points in story.memory.items()
        if key.endswith("_bytes") and not key.startswith("host_free") and key != "host_bytes"
    }
    drawn = chart(kinds, Axes("step"))
    if drawn:
        yield "<h2>Memory over the steps</h2>"
        words = grown(story)
        warns = f" It never stopped growing:{words.partition(':')[2]}." if words else ""
        own = sourced("events:memory:growth" if words else "")
        yield f"<p{own}>GiB, of the rank with the most.{text_of(warns)}</p>"
        yield drawn


def _by_rank(record: Record) -> Iterator[str]:
    """Yield the peak memory of each rank, with the planned one of its stage."""
    peaks = _or_none(lambda: peaks_in(record.home)) or {}
    found = peaks.get(ALLOCATED, [])
    config = record.config
    plan = plan_of(record)
    marks: list[float] = []
    if config is not None and plan is not None and len(found) == config.parallel.ranks:
        by_stage = plan["peak_bytes_by_stage"]
        if counts_memory(config):
            by_stage = plan["memory_by_stage"][ALLOCATED]
        each = max(1, len(found) // max(1, len(by_stage)))
        marks = [by_stage[min(rank // each, len(by_stage) - 1)] for rank in range(len(found))]
    say = "peak of each rank; red: planned" if marks else "peak of each rank"
    drawn = bars([None if value is None else float(value) for value in found], marks, say)
    if drawn:
        most = max(value for value in found if value is not None)
        yield "<h2>Memory by rank</h2>"
        own = sourced(f"memory.json:{by_rank_of(ALLOCATED)}:most")
        yield f"<p{own}>The most is {bytes_(most)}, on rank {found.index(most)}.</p>"
        yield drawn


def _statistics(story: Story) -> Iterator[str]:
    for (kind, column), found in story.statistics.items():
        table = by_layer(found, column) if len(found) > ROWS else found
        if drawn := heat(table):
            yield f"<h2>{text_of(short_of(kind))}: {text_of(short_of(column))}</h2>"
            if len(table) > ROWS:
                yield f"<p>The first {ROWS} of {len(table)} rows.</p>"
            yield drawn


def _goodput(life: Account | None) -> Iterator[str]:
    if life is None or not life.wall_s:
        return
    spent = {cause: value for cause, value in life.seconds.items() if value}
    svg = Svg(PAGE, 44)
    x = 0.0
    for place, (cause, value) in enumerate(spent.items()):
        wide = PAGE * value / life.wall_s
        svg.box(x, 6, wide, 32, hue(place, len(spent)), f"{cause}: {seconds(value)}")
        x += wide
    yield "<h2>Goodput</h2>"
    yield f"<p{sourced('life.jsonl::line')}>{text_of(life.line())}</p>"
    yield legend((cause, hue(place, len(spent))) for place, cause in enumerate(spent))
    yield svg.markup()
    yield table_of(
        ((cause, seconds(v), share(v / life.wall_s)) for cause, v in spent.items()),
        sources=[f"life.jsonl:{cause} share" for cause in spent],
    )
    attempts = []
    for place, one in enumerate(life.report()["attempts"], 1):
        end = short_of(f"{one['end']} {one['why']}")
        attempts.append((place, one["began"], short_of(one["machine"]), one["step"], end))
    shown = attempts[-MOST_TOLD:]
    head = ("attempt", "began", "machine", "to step", "end")
    yield table_of(shown, head, 4, [f"life.jsonl:attempt:{row[0]}" for row in shown])


def _layout(record: Record) -> list[str]:
    config = record.config
    if config is None:
        return []
    return _or_none(lambda: grid_of(stage_memories(config))) or []


def _data(record: Record) -> Iterator[str]:
    """Yield the sources of the data with their weights."""
    values = record.values
    names = values.get("data.blend") or [values.get("data.path")]
    weights = values.get("data.blend_weights") or []
    if not isinstance(names, list) or not any(names):
        return
    consumed = sum(value for _, value in curve(record.steps, "tokens"))
    shares = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0]
    total = sum(w for w in shares if isinstance(w, int | float)) or 1.0
    table = []
    for place, name in enumerate(names):
        weight = shares[place] if len(shares) == len(names) else None
        of = "-" if not isinstance(weight, int | float) else share(weight / total)
        table.append((short_of(name), of))
    of_weights = [f"run.yaml:data.blend_weights:{place}" for place in range(len(table))]
    yield "<h2>Data by source</h2>"
    own = sourced("metrics.jsonl:tokens:sum")
    yield f"<p{own}>{count(consumed)} tokens were predicted in the steps above.</p>"
    yield table_of(table, ("source", "share by weight"), sources=of_weights)


def _recipe(record: Record) -> Iterator[str]:
    text = _or_none(lambda: read_bytes(record.home / ENVIRONMENT, ENVIRONMENT, MOST_BYTES))
    environment = _or_none(lambda: json.loads(text)) if text is not None else None
    versions = environment.get("versions") if isinstance(environment, dict) else None
    facts: dict[str, Any] = {"folder": record.home, "numbers": digest_of_numbers(record)}
    if record.config is not None:
        facts["digest"] = record.config.digest()
    if isinstance(versions, Mapping):
        facts |= {
            short_of(f"version of {name}"): short_of(version)
            for name, version in list(versions.items())[:MOST_TOLD]
        }
    own = {"folder": "", "numbers": "run.yaml::numbers", "digest": "run.yaml::digest"}
    of = [own.get(name, source("env.json", name)) for name in facts]
    yield "<h2>Recipe and versions</h2>"
    yield table_of(facts.items(), (), 1, of)
    keys = list(record.values.items())[:MOST_KEYS]
    amount = number_of(len(keys), "key")
    yield f"<details><summary{sourced('run.yaml::keys')}>{amount} of run.yaml</summary>"
    yield table_of(((key, short_of(show(value))) for key, value in keys), prose=1)
    yield "</details>"
