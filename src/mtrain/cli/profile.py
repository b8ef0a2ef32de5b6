"""`profile`: a profile of a running job on demand, and the time of a step by part."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.cli.goodput import is_owned, run_folder
from mtrain.cli.output import refusal, say_json, table
from mtrain.config.compose.paths import program
from mtrain.errors import say, say_page
from mtrain.goodput.account import percent
from mtrain.units import duration, number_of
from mtrain.views.profiles import (
    CONTENT,
    FACTS,
    FOLDER,
    MOST_STEPS,
    PARTS,
    REQUEST,
    Profiled,
    deviations,
    facts_file,
    measure,
    merge,
    snapshot_file,
    trace_file,
    traces,
)
from mtrain.views.watched import Watched

SHOW = "show"
LOOK_S = 0.3
SLOWEST = 10


def run(words: Sequence[str], *, as_json: bool) -> int:
    """Profile a running job, or show a profile.

    Raises:
        ConfigError: the words name no run or no profile, or the run has ended.
        CorruptData: a file of the profile is damaged.
    """
    usage = f"{program()} profile runs/NAME"
    shows = list(words[:1]) == [SHOW]
    rest = list(words[1:] if shows else words)
    keys = dict(word.partition("=")[::2] for word in rest if "=" in word)
    names = [word for word in rest if "=" not in word]
    known = {"step"} if shows else {"steps", "ranks", "content"}
    if len(names) != 1 or set(keys) - known:
        rule = f"cannot profile because it takes one run folder and {', '.join(sorted(known))}"
        raise refusal(rule, usage, "MT002")
    home = run_folder(names[0], usage)
    folder = _found(home, keys.get("step")) if shows else _made(home, _request(keys))
    ranks = traces(folder)
    measure(ranks)
    merged = merge(folder, ranks) if ranks else None
    if as_json:
        say_json(_report(folder, ranks))
    else:
        say_page("\n".join(_lines(home, folder, ranks, merged)))
    return 0


def _request(keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the request that the words describe.

    Raises:
        ConfigError: a value is not an allowed number or name.
    """
    steps = keys.get("steps", "1")
    if not steps.isdigit() or not 1 <= int(steps) <= MOST_STEPS:
        rule = f"cannot profile so many steps because it takes 1 to {MOST_STEPS}"
        raise refusal(rule, "steps=1", "MT381", "steps", steps)
    ranks = keys.get("ranks")
    listed = None if ranks is None else ranks.split(",")
    if listed is not None and not all(rank.isdigit() for rank in listed):
        rule = "cannot profile these ranks because they are numbers from 0 on"
        raise refusal(rule, "ranks=0,1", "MT381", "ranks", ranks)
    content = keys.get("content", "torch").split(",")
    if set(content) - set(CONTENT):
        rule = f"cannot record this because a profile has {', '.join(CONTENT)}"
        raise refusal(rule, "content=torch", "MT381", "content", keys["content"])
    numbers = None if listed is None else [int(rank) for rank in listed]
    return {"id": uuid.uuid4().hex, "steps": int(steps), "ranks": numbers, "content": content}


def _made(home: Path, request: Mapping[str, Any]) -> Path:
    """Ask the run for a profile, and return its folder once it is whole.

    Raises:
        ConfigError: the run does not run, ended before, or has another request.
    """
    watched = Watched(home, is_owned)
    watched.look()
    if watched.over:
        rule = f"{home} has ended ({watched.state})"
        raise refusal(rule, f"{program()} profile show {home}", "MT380")
    file = home / REQUEST
    draft = home / f".{REQUEST}.{request['id']}"
    draft.write_text(strict_json.dumps(request))
    try:
        # Of two commands, the first one is served.
        os.link(draft, file)
    except FileExistsError:
        rule = f"another request waits for {home}"
        raise refusal(rule, f"the command again, or remove {file}", "MT380") from None
    except OSError:  # a file system without hard links
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    say(f"asked {home} for a profile of its next steps")
    try:
        return _awaited(home, request, watched)
    finally:
        with suppress(OSError, ValueError, KeyError):
            # Another command's request stays.
            if json.loads(file.read_text())["id"] == request["id"]:
                file.unlink()


def _awaited(home: Path, request: Mapping[str, Any], watched: Watched) -> Path:
    asked = watched.place.attempt
    while True:
        watched.look()
        # The next attempt of a run that failed knows nothing of the request.
        over = watched.over or watched.place.attempt != asked
        for folder, facts in _profiles(home):
            if facts.get("id") == request["id"] and _is_whole(folder, facts):
                return folder
        if over:
            rule = f"{home} ended before ({watched.state})"
            raise refusal(rule, f"{program()} watch {home}", "MT380")
        time.sleep(LOOK_S)


def _is_whole(folder: Path, facts: Mapping[str, Any]) -> bool:
    traced = set(facts["content"]) - {"nsys"}
    of = trace_file if traced else facts_file
    return all(of(folder, rank).is_file() for rank in facts["ranks"])


def _profiles(home: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the profiles of a run, the first one first."""
    for file in sorted((home / FOLDER).glob(f"step_*/{FACTS}")):
        with suppress(OSError, ValueError):  # it is being written
            yield file.parent, json.loads(file.read_text())


def _found(home: Path, step: str | None) -> Path:
    """Return the folder of a profile, by default the last whole one.

    Raises:
        ConfigError: the profile does not exist.
    """
    whole = [(folder, facts) for folder, facts in _profiles(home) if _is_whole(folder, facts)]
    found = [folder for folder, facts in whole if step in (None, str(facts["first"]))]
    if not found:
        have = ", ".join(str(facts["first"]) for _, facts in whole) or "none"
        rule = f"steps with one: {have}"
        raise refusal(rule, f"{program()} profile {home}, while it runs", "MT382")
    return found[-1]


def _report(folder: Path, ranks: Sequence[Profiled]) -> dict[str, Any]:
    return {
        "profile": str(folder),
        "ranks": [
            {
                "rank": one.rank,
                "step_s": one.step_s,
                "clock_error_s": None if one.error_us is None else one.error_us / 1e6,
                "parts_s": {part: spent / 1e6 for part, spent in one.parts.items()},
                "operations_s": {name: spent / 1e6 for name, spent in _slowest(one)},
            }
            for one in ranks
        ],
    }


def _slowest(one: Profiled) -> list[tuple[str, float]]:
    return sorted(one.operations.items(), key=lambda item: -item[1])[:SLOWEST]


def _lines(
    home: Path, folder: Path, ranks: Sequence[Profiled], merged: Path | None
) -> Iterator[str]:
    if not ranks:
        yield f"{folder}: no trace; the ranges are in the report of Nsight Systems"
        return
    yield f"{folder}: {number_of(len(ranks), 'rank')}"
    planned = _planned(home)
    slowest = max(ranks, key=lambda one: sum(one.parts.values()) - one.parts["waiting"])
    mean = {part: sum(one.parts[part] for one in ranks) / len(ranks) for part in PARTS}
    total = sum(mean.values()) or 1.0
    head = ["part", "mean", "share", f"rank {slowest.rank}", "planned"]
    rows = [head]
    for part in PARTS:
        plan = planned.get({"update": "optimizer"}.get(part, part))
        if mean[part] or plan:
            spent = [duration(mean[part] / 1e6), percent(mean[part] / total)]
            own = duration(slowest.parts[part] / 1e6)
            rows.append([part, *spent, own, "-" if plan is None else duration(plan)])
    rows.append(["all", duration(total / 1e6), "", duration(sum(slowest.parts.values()) / 1e6), ""])
    yield from table(rows, left=1)
    waits = sum(mean[part] for part in ("tp", "cp", "pp", "ep", "dp", "bubble", "waiting"))
    yield f"communication that nothing hides: {percent(waits / total)} of the step"
    yield f"the operations of rank {slowest.rank} that took longest:"
    yield from table([[name, duration(spent / 1e6)] for name, spent in _slowest(slowest)], left=1)
    off = deviations(slowest, planned)
    most = sorted(off, key=lambda name: -abs(off[name]))[:SLOWEST]
    if most:
        yield "those that deviate most from the plan, each by its share of what its part does:"
        rows = [[name, slowest.part_of[name], f"{1e3 * off[name]:+.3g} ms"] for name in most]
        yield from table(rows, left=2)
    yield from _snapshots(folder, ranks)
    errors = [one.error_us for one in ranks if one.error_us is not None]
    if len(errors) < len(ranks):
        yield "the clocks of some ranks could not be compared: their traces may be apart"
    yield f"all ranks on one clock (within {max(errors, default=0.0) / 1e3:.2f} ms): {merged}"


def _snapshots(folder: Path, ranks: Sequence[Profiled]) -> Iterator[str]:
    """Yield where the allocator's snapshots are, or why there are none."""
    with suppress(OSError, ValueError, KeyError):
        if "memory" not in json.loads((folder / FACTS).read_text())["content"]:
            return
    found = [snapshot_file(folder, one.rank) for one in ranks]
    there = [str(file) for file in found if file.is_file()]
    if there:
        yield f"snapshots of the allocator, for pytorch.org/memory_viz: {', '.join(there)}"
    else:
        yield "no snapshot of an allocator: a CPU has none, or its torch cannot write one"


def _planned(home: Path) -> Mapping[str, float]:
    """Return the planned seconds of each part, as far as this version plans the run."""
    from mtrain.config.compose.lock_file import read_run_file
    from mtrain.config.compose.paths import RUN_FILE
    from mtrain.errors import ConfigError
    from mtrain.plan.time.report import time_report

    try:
        return dict(time_report(read_run_file(home / RUN_FILE), 0).get("parts_s", {}))
    except (ConfigError, ValueError):
        return {}
