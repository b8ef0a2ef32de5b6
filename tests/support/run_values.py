"""The values of a run folder, and what a report makes of them, made again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import unquote

from mtrain.cli.compare import tolerances
from mtrain.cli.html import short_of
from mtrain.config.compose.lock_file import read_run_file
from mtrain.errors import show
from mtrain.events.read import events
from mtrain.goodput.account import Account, account
from mtrain.plan.compare import planned
from mtrain.plan.rank import stage_memories
from mtrain.plan.timeline import timeline
from mtrain.report.causes import WORKING, loaded
from mtrain.report.differing import compare, digest_of_numbers
from mtrain.report.folder import read
from mtrain.report.profiled import last_profile
from mtrain.views.profiles import pieces

Values = list[float | str]
FIRST = 3
"""Steps at the begin of a run that medians leave out."""


class Folder:
    """The values of a run folder, and what a page makes of them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.runs: dict[str, Folder] = {home.name: self}
        """The runs of the page by name."""
        self.config = read_run_file(home / "run.yaml")
        self.record = read(home)
        self.lines = [json.loads(line) for line in (home / "metrics.jsonl").open()]
        self.steps = {line["step"]: line for line in self.lines if "lr" in line}
        self.evaluations = {line["step"]: line for line in self.lines if "valid_loss" in line}
        self.events = list(events(home))

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def json(self, name: str) -> Any:
        return json.loads((self.home / name).read_text())

    def curve(self, key: str) -> dict[int, float]:
        """Return the finite values of a key over the steps."""
        lines = self.evaluations if key == "valid_loss" else self.steps
        found = {step: line.get(key) for step, line in sorted(lines.items())}
        return {
            step: float(value)
            for step, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    @cached_property
    def life(self) -> Account:
        return account(self.home)

    @cached_property
    def wall_s(self) -> float:
        """Return the seconds that costs are shares of."""
        whole = self.life.wall_s if (self.home / "life.jsonl").is_file() else 0.0
        return max(whole, sum(self.curve("step_s").values()))

    @property
    def rates(self) -> dict[float, float]:
        """Return the highest median of tokens/s of the runs of a page, by ranks."""
        found: dict[float, float] = {}
        for run in sorted(self.runs.values(), key=lambda run: run.config.parallel.ranks or 1):
            ranks = float(run.config.parallel.ranks or 1)
            (rate,) = run.expected("metrics.jsonl:tokens_per_s:median")
            found[ranks] = max(float(rate), found.get(ranks, 0.0))
        return found

    def expected(self, sources: str) -> Values:
        """Return the values that sources stand for."""
        values: Values = []
        for word in sources.split():
            if word == "off":
                planned, measured = values[-2:]
                known = isinstance(planned, float) and isinstance(measured, float)
                values.append(measured / planned - 1 if known else "-")  # type: ignore[operator]
            elif word == "share":
                values.append(float(values[-1]) / self.life.wall_s)
            elif word == "price":
                rates, seconds = self.curve("tokens_per_s"), self.curve("step_s")
                tokens = sum(rate * seconds[step] for step, rate in rates.items())
                values.append(tokens / (self.wall_s - float(values[-1])) - tokens / self.wall_s)
            elif word == "compared":
                values += self._compared(*(self.runs[str(name)] for name in values))
                values = values[2:]
            elif word == "ideal":
                ranks, rate = float(values[0]), float(values[2])
                fewest = min(self.rates)
                values.append(rate / ranks * fewest / self.rates[fewest])
            elif ":" not in word:
                values.append(unquote(word.partition("/")[0]))
            else:
                file, key, how = [*word.split(":"), "", ""][:3]
                name, slash, file = file.rpartition("/")
                run = self.runs[unquote(name)] if slash else self
                values += getattr(run, f"_{file.partition('.')[0]}")(unquote(key), how)
        return values

    def _compared(self, one: Folder, other: Folder) -> Values:
        """Return what a sentence says of two runs."""
        found = compare(one.record, other.record, tolerances(one.record, other.record))
        if found.first is None:
            return [len(one.steps.keys() & other.steps.keys())]
        key, step = found.first.what, found.first.first
        assert step is not None
        a, b = one.curve(key)[step], other.curve(key)[step]
        error = float(f"{abs(a - b) / abs(a):.1e}")
        return [step, show(a), show(b), error, found.first.tolerance]

    def _metrics(self, key: str, how: str) -> Values:
        values = list(self.curve(key).values())
        if not values:
            return ["-"]
        if how in ("end", "value"):
            whole = self._metrics(key, {"end": "tail", "value": "last"}[how])
            return whole[: {"end": 2, "value": 1}[how]]
        if how == "last":
            step, value = max(self.curve(key).items())
            return [value] if key == "step" else [value, step]
        if how == "tail":
            tail = values[-max(10, round(len(values) / 10)) :]
            squares = [(b - a) ** 2 for a, b in pairwise(tail)]
            noise = math.sqrt(fmean(squares) / 2 / len(tail))
            # The page prints one digit of it.
            return [fmean(tail), float(f"{noise:.1g}"), len(tail)]
        if how == "usual":
            return [self._usual(key)]
        if how == "slower":
            return [self._slower(values[FIRST:])]
        return [{"median": lambda: median(values[FIRST:]), "sum": lambda: sum(values)}[how]()]

    def _usual(self, key: str) -> float:
        """Return the median of the steps since the last resume that no profile made longer."""
        resumed = self.json("plan.json")["resumed_from"] if self._has("plan.json") else None
        begun = int(resumed.rpartition("_")[2]) if resumed else 0
        lines = [line for line in self.lines if "step_s" in line and line["step"] > begun][FIRST:]
        return median(line[key] for line in lines if not line.get("profiled"))

    def _slower(self, times: list[float]) -> float:
        some = max(FIRST, len(times) // 10)
        first, second = median(times[:some]), median(times[some : 2 * some])
        rise = max(0.0, second - first) / some
        early = max(first / 2, first - rise * (FIRST + some / 2))
        return sum(max(0.0, time - early) for time in times)

    def _has(self, name: str) -> bool:
        return (self.home / name).is_file()

    def _run(self, key: str, how: str) -> Values:
        run = self.config
        if key == "data.blend_weights":
            names = run.data.blend or [run.data.path or ""]
            weights = run.data.blend_weights or [1.0] * len(names)
            return [names[int(how)], weights[int(how)] / sum(weights)]
        if how == "planned":
            return [timeline(stage_memories(run), whole=True).bubble]
        if how == "layout":
            return [run.model.name, self.layout, run.parallel.ranks, run.precision.words]
        if how == "numbers":
            return [digest_of_numbers(self.record)]
        if how == "digest":
            return [run.digest()]
        return [len(self.record.values)] if how == "keys" else [self.record.values[key]]

    @property
    def layout(self) -> str:
        run = self.config.parallel
        axes = {axis: getattr(run, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
        return " ".join(f"{axis}{n}" for axis, n in axes.items() if n > 1) or "one rank"

    def _life(self, key: str, how: str) -> Values:
        life = self.life
        if how == "attempt" or key == "attempt":
            row = life.report()["attempts"][int(how) - 1]
            end = short_of(f"{row['end']} {row['why']}")
            return [int(how), row["began"], row["machine"], row["step"], end]
        if how == "line":
            others = sorted((s for c, s in life.seconds.items() if c != "stepping"), reverse=True)
            shares = [s / life.wall_s for s in others if s > 0.0005 * life.wall_s]
            return [
                life.seconds["stepping"] / life.wall_s,
                life.wall_s,
                len(life.attempts),
                *shares,
            ]
        if how == "last":
            return [life.attempts[-1].end]
        if how == "share":
            return [life.seconds[key] / life.wall_s]
        return [life.wall_s if how == "sum" else life.seconds[key]]

    def _events(self, key: str, how: str) -> Values:
        slow: Mapping[str, Any] = max(
            self.of_kind("straggler"), key=lambda e: e["own_s"] / e["usual_s"], default={}
        )
        if how == "slowest":
            return [slow["rank"], slow["machine"], slow["step"], slow["own_s"], slow["usual_s"]]
        if how == "excess":
            keys = self.config.resilience
            first = min(event["step"] for event in self.of_kind("straggler"))
            before = (keys.straggler_interval or 1) * keys.straggler_reports
            since = [step for step in sorted(self.steps) if step > first - before]
            slower = slow["own_s"] / slow["usual_s"]
            excess = (slow["own_s"] - slow["usual_s"]) * len(since)
            return [slow["rank"], slow["machine"], slower, since[0], excess]
        if how == "skewed":
            loads = [event["rank_loads"] for event in self.events if event.get("rank_loads")]
            by_step = [
                fmean(max(ranks) * len(ranks) / sum(ranks) for ranks in layers.values())
                for layers in loads
            ]
            load = fmean(by_step)
            saved = 1 - 1 / loaded(self.config, load)
            return [load, median(self._computing()) * saved * len(self.steps)]
        if how == "uneven":
            reports = [event["own_s"] for event in self.of_kind("own_time")]
            by_rank = [median(values) for values in zip(*reports, strict=True)]
            return self._uneven(by_rank, len(by_rank) // self.config.parallel.pp)
        return self._growth()

    def _growth(self) -> Values:
        for key in ("allocated_bytes", "host_rss_bytes"):
            found = [event["by_rank"][key] for event in self.of_kind("memory")]
            sizes = [max(each) for each in found]
            part = len(sizes) // 4
            middle = [median(sizes[part * n : part * (n + 1)]) for n in (1, 2, 3)] if part else []
            if middle and middle == sorted(set(middle)) and sizes[-1] > 1.05 * middle[0]:
                return [found[-1].index(sizes[-1]), middle[0], sizes[-1]]
        return []

    def _computing(self) -> list[float]:
        usual = [line for line in self.steps.values() if not line.get("profiled")]
        return [line["forward_backward_s"] for line in usual]

    def _uneven(self, by_rank: list[float], each: int) -> Values:
        own = [median(by_rank[at : at + each]) for at in range(0, len(by_rank), each)]
        run = self.config
        units = run.trainer.batch // (run.trainer.micro * run.parallel.dp) * run.parallel.vpp
        excess = (max(own) - fmean(own)) * (units - 1) / units * len(self.steps)
        return [own.index(max(own)), max(own) / fmean(own), excess]

    def _profiles(self, key: str, how: str) -> Values:
        profile = last_profile(self.home)
        assert profile is not None
        if key == "step":
            return [profile.step]
        if how == "uneven":
            whole = max(sum(one.parts.values()) for one in profile.ranks)
            usual = [line for line in self.steps.values() if not line.get("profiled")]
            scale = median(line["step_s"] for line in usual) / whole
            own = [scale * sum(one.parts[part] for part in WORKING) for one in profile.ranks]
            return self._uneven(own, len(own) // self.config.parallel.pp)
        found = [pieces(one.events) for one in profile.ranks]
        begin = min(piece.begin for each in found for piece in each)
        end = max(piece.end for each in found for piece in each)
        busy = max(sum(piece.end - piece.begin for piece in each) for each in found)
        return [1 - busy / (end - begin)]

    def _plan(self, key: str, how: str) -> Values:
        # Without the file, the page plans the run anew.
        found = self._has("plan.json")
        value: Any = self.json("plan.json") if found else {"planned": planned(self.config)}
        *way, last = key.split(".")
        for name in way:
            value = value[name]
        if last.isdecimal():
            return [int(last), float(value[int(last)])]
        if value[last] is None:
            return ["-"]
        tokens = self.config.trainer.batch * self.config.data.length
        return [tokens / value[last] if how == "rate" else float(value[last])]

    def _memory(self, key: str, how: str) -> Values:
        peaks = self.json("memory.json")[key]
        if how == "most":
            return [max(peaks), peaks.index(max(peaks))]
        each = len(peaks) // self.config.parallel.pp
        stage = int(how.removeprefix("stage"))
        return [float(max(peaks[stage * each : (stage + 1) * each]))]

    def _checkpoints(self, key: str, how: str) -> Values:
        newest = max((self.home / "checkpoints").glob("step_*"), default=None)
        if newest is None:
            return ["-"]
        return [float(sum(file.stat().st_size for file in newest.iterdir() if file.is_file()))]

    def _env(self, key: str, how: str) -> Values:
        return [key, self.json("env.json")["versions"][key.removeprefix("version of ")]]

    @cached_property
    def marks(self) -> set[tuple[str, ...]]:
        """Return the step, kind and text of what happened."""
        made: set[tuple[str, ...]] = set()
        for event in self.events:
            at, kind = str(event["step"]), event["kind"]
            if kind == "start" and event["attempt"] > 1:
                made.add((at, "resume", f"attempt {event['attempt']}"))
            elif kind == "alert":
                made.add((at, kind, f"{event['name']}: {event['text']}"))
            elif kind == "warning":
                made.add((at, kind, event["text"]))
            elif kind == "restart":
                made.add((at, kind, event["facts"]["error"]))
            elif kind == "end" and event["how"] == "failed":
                made.add((at, "failure", event["why"]))
        losses = self.curve("loss")
        for step in self.steps:
            before = [loss for at, loss in losses.items() if at < step][-64:]
            if step not in losses:
                made.add((str(step), "spike", "the loss is not finite"))
            elif before:
                text = f"loss {losses[step]:.4g}, usually {median(before):.4g}"
                made.add((str(step), "spike", text))
            if self.steps[step].get("skipped"):
                made.add((str(step), "skipped update", "the update was skipped"))
        return {(at, kind, text[:300]) for at, kind, text in made}

    def points(self, files: str, name: str) -> dict[int, float]:
        """Return what a chart draws: a metric, or the most memory of all ranks in GiB."""
        if files != "events":
            return self.curve(name)
        found = {event["step"]: event["by_rank"].get(name) for event in self.of_kind("memory")}
        return {step: max(sizes) / 2**30 for step, sizes in sorted(found.items()) if sizes}

    def rows(self, kind: str, column: str) -> dict[str, dict[int, float]]:
        """Return the rows of a heat map by step."""
        table: dict[str, dict[int, float]] = {}
        for event in self.of_kind("statistics"):
            if event["of"] == kind:
                at = event["columns"].index(column)
                for name, values in event["rows"].items():
                    if values[at] is not None:
                        table.setdefault(name, {})[event["step"]] = values[at]
        return table
