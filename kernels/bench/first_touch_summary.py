"""The results of `first_touch.py` as summary.json and as a page of text: each figure next to its
plan and its goal.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from first_touch_results import GOALS, STAGES, WHOLE, Results, Walk, read_yaml

MEMORY = {
    "peak_bytes": ("allocated", "peak_bytes"),
    "reserved_bytes": ("reserved", "reserved_bytes"),
    "driver_bytes": ("driver", "driver_bytes"),
    "driver_peak_bytes": ("driver, sampled", "driver_bytes"),
}
"""The name of each memory that a training measures, and its key in the plan."""
Summary = dict[str, Any]


def write(results: Results, walk: Walk, command: str) -> int:
    """Write summary.json and page.txt next to the results; returns how many units went wrong."""
    made = summary(results, walk, command)
    (results.folder / "summary.json").write_text(json.dumps(made, indent=1) + "\n")
    (results.folder / "page.txt").write_text(page(made))
    return len(made["wrong"])


def summary(results: Results, walk: Walk, command: str) -> Summary:
    """Return all that the results say; of units that were done again, the last."""
    ends = {stage.name: results.ends(stage.name) for stage in STAGES}
    machine = ends["environment"].get("machine", {}).get("result", {})
    name = machine.get("device", "unknown")
    made: Summary = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": {
            "name": name,
            "sm": machine.get("sm"),
            "memory_bytes": machine.get("total_bytes"),
        },
        "commit": machine.get("commit", "unknown"),
        "versions": machine.get("versions", {}),
        "command": command,
        "dry": walk.dry,
        "parity": _parity(ends["parity"]),
        "runs": _outcomes({**ends["gate"], **ends["runs"]}),
    }
    for stage in ("gate", "steps", "train", "profile", "host", "rivals"):
        made[stage] = {
            unit: line["result"] for unit, line in ends[stage].items() if "result" in line
        }
    made["ops"] = _ops(ends["ops"])
    made["plans"] = {
        unit: planned
        for unit, said in made["train"].items()
        if (planned := planned_of(Path(said["run"]))) is not None
    }
    made["notes"] = _notes(made)
    made["figures"] = figures(made)
    made["skipped"] = [
        {"stage": stage, "unit": unit, "why": line["skipped"]}
        for stage, lines in ends.items()
        for unit, line in lines.items()
        if "skipped" in line
    ]
    made["wrong"] = [
        {"stage": stage, "unit": unit, "why": line.get("error") or line["result"]["wrong"]}
        for stage, lines in ends.items()
        for unit, line in lines.items()
        if "error" in line or _is_wrong(line.get("result"))
    ]
    return made


def _notes(made: Summary) -> list[str]:
    """Return the sentences of a page next to its tables."""
    notes = []
    begun = made["gate"].get("launch.py", {}).get("first_step_s")
    if begun is not None:
        notes.append(f"A tiny model takes {begun:.0f} s from the command to its first step.")
    for unit, said in made["host"].items():
        ways = [
            f"{way} {us:.0f} us, {said['count'].get(way, 0):.0f} {said['of']}"
            for way, us in _ways(said)
        ]
        notes.append(f"The host's part of a layer, {unit}: {'; '.join(ways)}.")
    return notes


def _ways(said: Mapping[str, Any]) -> list[tuple[str, float]]:
    return list(said["us_of_a_layer"].items())


def _is_wrong(result: Any) -> bool:
    return isinstance(result, Mapping) and bool(result.get("wrong"))


def _parity(lines: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Count for each op the units that passed and failed, and list the failures."""
    found: dict[str, dict[str, Any]] = {}
    for unit, line in lines.items():
        if "skipped" in line or unit == WHOLE:
            continue
        result = line.get("result", {})
        op = result.get("op") or _op_of(unit)
        told = found.setdefault(op, {"passed": 0, "failed": 0, "failures": []})
        if "error" in line or _is_wrong(result):
            told["failed"] += 1
            told["failures"].append({"unit": unit, "why": line.get("error") or _whys(result)})
        else:
            told["passed"] += 1
    return found


def _whys(result: Mapping[str, Any]) -> str:
    wrong = result["wrong"]
    if isinstance(wrong, Mapping):
        pairs = wrong.items()
    else:
        pairs = ((name, result.get(name, "")) for name in wrong)
    return "; ".join(f"{name}: {why}" for name, why in pairs)


def _op_of(unit: str) -> str:
    """Return the op of a unit that ended with an error."""
    from mtrain_kernels.registry import ops

    case = unit.split()[0]
    return next(
        (name for name, op in ops().items() if any(c.name == case for c in op.cases)), "edges"
    )


def _outcomes(lines: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    failures = [
        {"name": unit, "why": line["error"]} for unit, line in lines.items() if "error" in line
    ]
    passed = [
        unit for unit, line in lines.items() if "result" in line and not _is_wrong(line["result"])
    ]
    return {"passed": len(passed), "failed": len(failures), "failures": failures, "names": passed}


def _ops(lines: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Group the rows of the bench by case and contender."""
    return {
        unit: {row["contender"]: row for row in line["result"]["rows"]}
        for unit, line in lines.items()
        if "rows" in line.get("result", {})
    }


def planned_of(run: Path) -> dict[str, Any] | None:
    """Return what plan.json of a run folder says: seconds of a step, and bytes of each kind of
    memory at its peak.
    """
    path = run / "plan.json"
    plan = json.loads(path.read_text())["planned"] if path.exists() else None
    if plan is None:
        return None
    return {
        "step_s": plan["step_s"],
        **{kind: max(sizes) for kind, sizes in plan["memory_by_stage"].items()},
    }


def figures(made: Summary) -> list[dict[str, Any]]:
    """Return every figure that has a plan or a goal: name, unit, measured, planned, goal, whether
    it is met, the source.
    """
    known = read_yaml(GOALS)
    found = []
    for goal in known["goals"]:
        measured = value_of(made, goal["measured"])
        if "beside" in goal:
            beside = value_of(made, goal["beside"])
            measured = measured / beside if measured is not None and beside else None
        if measured is not None:
            met = measured >= goal["at_least"]
            found.append(
                _figure(
                    goal["name"],
                    measured,
                    None,
                    f"at least {goal['at_least']:g}",
                    met,
                    goal["source"],
                )
            )
    bound = known["kernels"]
    for unit, rows in made.get("ops", {}).items():
        for way in ("forward", "backward"):
            share = rows.get("triton", {}).get(f"{way}_share")
            if share is not None and f"{way}_tflop_per_s" not in rows["triton"]:
                goal = f"at least {bound['at_least']:g}"
                name = f"{unit} {way}: share of the copy rate"
                found.append(
                    _figure(name, share, None, goal, share >= bound["at_least"], bound["source"])
                )
    for unit, plan in made.get("plans", {}).items():
        for key, bound in known["planned"].items():
            measured = _measured(made["train"][unit], key)
            planned = plan.get(key)
            if measured is None or planned is None:
                continue
            met = abs(planned / measured - 1) <= bound["within"]
            goal = f"within {bound['within']:.0%} of the plan"
            found.append(_figure(f"{unit}: {key}", measured, planned, goal, met, bound["source"]))
    return found


def _figure(
    name: str, measured: float, planned: float | None, goal: str, met: bool, source: str
) -> dict[str, Any]:
    return {
        "name": name,
        "measured": measured,
        "planned": planned,
        "goal": goal,
        "met": met,
        "source": source,
    }


def _measured(said: Mapping[str, Any], key: str) -> float | None:
    ranks = [peak for peak in said.get(f"{key}_by_rank", ()) if peak is not None]
    return max(ranks, default=said.get(key))


def value_of(made: Summary, place: str) -> float | None:
    """Return the figure at `STAGE UNIT: KEY`; None where it was not measured."""
    where, key = place.rsplit(": ", 1)
    stage, unit = where.split(" ", 1)
    value = made.get(stage, {}).get(unit, {}).get(key)
    return float(value) if isinstance(value, int | float) else None


def page(made: Summary) -> str:
    """Return the summary as text."""
    known = {
        name: version for name, version in made["versions"].items() if version != "not installed"
    }
    lines = [f"{made['device']['name']}, {made['date']}, commit {made['commit']}"]
    lines += [
        ", ".join(f"{name} {version}" for name, version in known.items()),
        made["command"],
        "",
    ]
    if made.get("dry"):
        lines += ["A dry run on a CPU with tiny shapes: no figure below is about a device.", ""]
    lines += [*_runs_in_words(made["runs"]), *_parity_in_words(made), *made.get("notes", ()), ""]
    lines += _table_of_trainings(made)
    lines += [f"{'figure':<64} {'measured':>12} {'planned':>12}  goal"] if made["figures"] else []
    for figure in made["figures"]:
        measured, planned = (shown(figure[key], figure["name"]) for key in ("measured", "planned"))
        sign = "met" if figure["met"] else "NOT MET"
        lines.append(f"{figure['name']:<64} {measured:>12} {planned:>12}  {figure['goal']}: {sign}")
    lines += ["", *_host_in_words(made.get("host", {}))]
    for kind in ("wrong", "skipped"):
        lines += [f"{kind}:"] if made.get(kind) else []
        lines += [
            f"  {each['stage']} {each['unit']}: {each['why']}"[:400] for each in made.get(kind, ())
        ]
    return "\n".join(lines).rstrip() + "\n"


def shown(value: float | None, name: str) -> str:
    """Return a figure as text, by the unit that its name ends in."""
    if value is None:
        return ""
    return f"{value / 1e9:.2f} GB" if name.endswith("_bytes") else f"{value:.3f}"


def _runs_in_words(runs: Mapping[str, Any]) -> list[str]:
    return [f"small runs: {runs['passed']} of {runs['passed'] + runs['failed']} as they should"]


def totals(made: Summary) -> tuple[int, int]:
    """Return how many units of parity passed and how many ran; as reported, where they were not
    counted here.
    """
    reported = made.get("parity_reported")
    if reported:
        return reported["passed"], reported["of"]
    passed = sum(op["passed"] for op in made["parity"].values())
    return passed, passed + sum(op["failed"] for op in made["parity"].values())


def _parity_in_words(made: Summary) -> list[str]:
    passed, of = totals(made)
    lines = [f"parity: {passed} of {of} units"]
    for op, told in made["parity"].items():
        lines += [
            f"  {op}, {failure['unit']}: {failure['why']}"[:400] for failure in told["failures"]
        ]
    return lines


def _table_of_trainings(made: Summary) -> list[str]:
    """Return each training with its plan, and how busy the device was."""
    rows = [
        f"{'training':<32} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} {'step s':>8} {'planned':>8}"
        f" {'busy':>5}"
    ]
    for unit, said in made["train"].items():
        plan = made.get("plans", {}).get(unit, {})
        busy = made.get("profile", {}).get(unit, {}).get("busy_share")
        numbers = [
            _said(said.get("tokens_per_s"), ",.0f", 10),
            _said(said.get("tflops_per_rank"), ".1f", 8),
            _said(said.get("mfu"), ".1%", 6),
            _said(said.get("step_s"), ".4f", 8),
            _said(plan.get("step_s"), ".4f", 8),
            _said(busy, ".0%", 5),
        ]
        rows.append(f"{unit:<32} {' '.join(numbers)}")
    for unit, said in made.get("steps", {}).items():
        numbers = [
            _said(said.get("tokens_per_s"), ",.0f", 10),
            " " * 15,
            _said(said.get("step_s"), ".4f", 8),
            " " * 8,
            _said(said.get("busy_share"), ".0%", 5),
        ]
        rows.append(f"{unit:<32} {' '.join(numbers)}")
    for unit, said in made.get("rivals", {}).items():
        rows.append(f"{unit:<32} {_said(said.get('tokens_per_s'), ',.0f', 10)}")
    return [*rows, *_memory_in_words(made), ""]


def _memory_in_words(made: Summary) -> list[str]:
    """Return the memory of each training: what tensors took, what the allocator held, and what the
    driver says.
    """
    lines = []
    for unit, said in made["train"].items():
        plan = made.get("plans", {}).get(unit, {})
        known = []
        for key, (name, of_plan) in MEMORY.items():
            measured = _measured(said, key)
            if measured is not None:
                planned = shown(plan.get(of_plan), "_bytes") or "unknown"
                known.append(f"{name} {shown(measured, '_bytes')} (planned {planned})")
        if known:
            lines.append(f"memory, {unit}: {', '.join(known)}")
    return lines


def _said(value: float | None, form: str, width: int) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"


def _host_in_words(host: Mapping[str, Any]) -> list[str]:
    lines = []
    for unit, said in host.items():
        lines.append(
            f"host, {unit}: a step is {said['count']['step']} {said['of']}; most of its time is in"
        )
        lines += [
            f"  {row['us']:>9.0f} us {row['calls']:>7.0f} x  {row['module']}.{row['function']}"
            for row in said["functions"]
        ]
        lines.append("")
    return lines
