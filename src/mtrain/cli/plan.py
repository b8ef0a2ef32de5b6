"""`plan`: parameters, operations, memory and time of a configuration, counted in about a second,
and a comparison with the values that a run measured; without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from os.path import expanduser
from pathlib import Path
from typing import Any

from mtrain import api, strict_json
from mtrain.api import Loaded, load
from mtrain.cli.output import new_page, refusal, say_json, table, write_page
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import RUN_FILE, program
from mtrain.config.schema.run import RunConfig
from mtrain.errors import CorruptData, say_page, say_styled, visible
from mtrain.plan.compare import BOUNDS, Row, lines_of_run, peaks_in, planned, rows, saved_in
from mtrain.plan.report import alike, headline
from mtrain.plan.time.report import no_time, time_report
from mtrain.processes import without_collecting
from mtrain.units import GIB, MIB, bytes_, count, duration, in_unit, seconds, short

# Smaller parts of a step are not shown.
LEAST_SHARE = 0.001

# Part of the memory -> head of its column.
HEADS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "low_precision": "low",
    "activations": "activ",
    "loss": "loss",
    "recompute": "again",
    "working": "work",
    "graphs": "graphs",
    "communication": "comm",
    "context": "context",
    "reserve": "reserve",
}


def plan(
    words: list[str],
    *,
    as_json: bool,
    draw: bool,
    html: str | None,
    compare: str | None,
    scale: str | None,
    weak: bool,
    trace: bool,
    calibrate: bool,
) -> int:
    """Print the plan of a configuration, or the answer that a flag asks for.

    Raises:
        ConfigError: several flags ask for different answers.
    """
    flags = {
        "--compare": compare is not None,
        "--trace": trace,
        "--calibrate": calibrate,
        "--html": html is not None,
        "--draw": draw,
    }
    wanted = [flag for flag, is_wanted in flags.items() if is_wanted]
    if scale is not None or weak:
        from mtrain.cli import plan_scale

        # --scale draws itself, on the terminal or as a page; all other flags exclude it.
        others = [flag for flag in wanted if flag not in ("--html", "--draw")]
        return plan_scale.run(
            words, scale, weak=weak, others=others, as_json=as_json, draw=draw, html=html
        )
    if as_json and wanted == ["--draw"]:
        wanted.append("--json")
    if len(wanted) > 1:
        raise refusal(f"{' and '.join(wanted)}: plan answers one of them", f"plan {wanted[0]}")
    if compare is not None:
        return compare_run(compare, words, as_json=as_json)
    if trace:
        from mtrain.cli import trace as traced

        return traced.run(words, as_json=as_json)
    if calibrate:
        from mtrain.cli import calibrate as fitted

        return fitted.run(words, as_json=as_json)
    return run(words, as_json=as_json, draw=draw, html=html)


@without_collecting()
def run(
    argv: Sequence[str], *, as_json: bool = False, draw: bool = False, html: str | None = None
) -> int:
    """Print the plan of the configuration that `argv` describes, with pictures if `draw`, or write
    the page `html`; return the exit code.

    Raises:
        ConfigError: the configuration has errors, or the page cannot be written.
    """
    loaded = load(argv, to_run=False)
    to = None if html is None else new_page(Path(html).expanduser())
    found = api.plan(loaded)
    if as_json:
        say_json(found)
    elif to is None:
        say_page(page(loaded, found))
    if draw or to is not None:
        _draw(loaded, found, to, beside=as_json)
    return 0


def _draw(loaded: Loaded, found: dict[str, Any], to: Path | None, *, beside: bool) -> None:
    """Draw the pictures, on the terminal or as a page."""
    from mtrain.plan.rank import stage_memories
    from mtrain.plan.timeline import timeline

    stages = stage_memories(loaded.run)
    line = timeline(stages) if stages[0].chunks else None
    if to is None:
        from mtrain.cli.plan_pictures import pictures

        if not beside:
            say_styled([("", "")], *pictures(found, stages, line))
        return
    from mtrain.cli.plan_page import page_of

    write_page(to, page_of(found, stages, line))
    if not beside:
        say_page(f"plan of {found['model']}: {to}")


def page(loaded: Loaded, found: dict[str, Any]) -> str:
    """Return the plan as text."""
    lines = [
        *_head(loaded, found),
        "",
        *_parameters(found["parameters"]),
        "",
        *_memory(found["memory"]),
    ]
    lines += _recomputation(found["memory"])
    lines += ["", *_time(found["time"], found["device_word"])]
    lines += ["", *(f"note: {note}" for note in found["notes"])] if found["notes"] else []
    return "\n".join([*(problem.render() for problem in loaded.warnings), *map(visible, lines)])


def _head(loaded: Loaded, found: dict[str, Any]) -> Iterator[str]:
    r = loaded.run
    numbers = found["parameters"]
    flops = found["flops_per_token"]
    yield headline(found)
    active = "" if numbers["active"] == numbers["total"] else f", {count(numbers['active'])} active"
    frozen = f", {count(numbers['frozen'])} frozen" if numbers["frozen"] else ""
    yield f"  parameters   {count(numbers['total'])}{active}{frozen}"
    causal, every = (f"{flops[key] / 1e9:.4g}" for key in ("causal", "all_keys"))
    yield f"  operations   {_conventions(causal, every, ' GFLOP a token')}"
    tokens = r.trainer.micro * r.data.length
    batch = r.trainer.batch * r.data.length
    yield f"  batch        {r.trainer.batch} x {r.data.length} = {count(batch)} tokens a step"
    yield f"  micro-batch  {r.trainer.micro} x {r.data.length} = {count(tokens)} tokens"
    saved = found["checkpoint"]
    most = f", up to {saved['at_once']} at once: {bytes_(saved['disk_bytes'])}"
    copies = f"; copies of {bytes_(saved['staged_bytes'])} in the host memory of a rank"
    exports = f"; all exports: {bytes_(saved['export_bytes'])}"
    more = most * (saved["at_once"] > 1) + copies * bool(saved["staged_bytes"])
    more += exports * bool(saved["export_bytes"])
    yield f"  checkpoint   {bytes_(saved['bytes'])}{more}"
    if "local_sent_bytes" in saved:
        sent = bytes_(saved["local_sent_bytes"])
        yield f"  local        up to {bytes_(saved['local_disk_bytes'])} on the disk of a machine"
        yield f"               up to {sent} sent and as many received, each local_interval"


def _conventions(causal: str, every: str, unit: str = "") -> str:
    """Return a figure by both conventions; once where they are the same, as of an encoder."""
    both = f"{causal}{unit} with causal attention, {every} with attention to every key"
    return both if causal != every else f"{causal}{unit}"


def _parameters(numbers: dict[str, Any]) -> list[str]:
    kinds = list(numbers["by_kind"])
    rows = [["stage", "layers", "a rank", *kinds]]
    for row in alike(numbers["by_stage"]):
        rows.append(
            [
                row["stage"],
                row["layers"],
                count(row["rank"]),
                *(_count(row.get(kind, 0)) for kind in kinds),
            ]
        )
    rows.append(
        ["all", "", count(numbers["total"]), *(_count(n) for n in numbers["by_kind"].values())]
    )
    return ["parameters", *table(rows, left=2)]


def _count(number: int) -> str:
    return count(number) if number else "-"


def _memory(memory: dict[str, Any]) -> list[str]:
    stages = alike(memory["stages"])
    parts = [part for part in HEADS if any(stage["parts"][part] for stage in stages)]
    holds = memory["device"]
    # Small models in GiB would show only zeros.
    unit = GIB if peak_bytes(memory) >= 4 * GIB else MIB
    rows = [
        [
            "stage",
            "in flight",
            *(HEADS[part] for part in parts),
            "peak",
            *(["left"] if holds else []),
        ]
    ]
    for stage in stages:
        flying = _runs(stage["in_flight_by_chunk"])
        left = [in_unit(holds - stage["peak"], unit)] if holds else []
        sizes = [*(stage["parts"][part] for part in parts), stage["peak"]]
        rows.append([stage["stage"], flying, *(in_unit(size, unit) for size in sizes), *left])
    peak = memory["peak"]
    lines = [f"memory of a rank, {'GiB' if unit == GIB else 'MiB'}", *table(rows, left=2)]
    lines.append(f"  peak {bytes_(peak['bytes'])} on stage {peak['stage']}, {peak['where']}")
    lines.append(f"  with {', '.join(memory['assumes'])}")
    if holds:
        left = memory["headroom"]
        lines.append(
            f"  the device has {bytes_(holds)}: {bytes_(abs(left))}"
            f" {'left' if left >= 0 else 'too little'}"
        )
    names = {HEADS[part]: memory["how"][part] for part in parts}
    width = max(map(len, names))
    return [*lines, *(f"  {name.ljust(width)}  {how}" for name, how in names.items())]


def _recomputation(memory: dict[str, Any]) -> list[str]:
    """Return each way's freed memory and cost after an empty line; nothing without times."""
    ways = memory["recompute"]
    if len(ways) < 2:
        return []
    rows = [["recomputed", "peak", "frees", "step", "adds", "of which a GiB costs", ""]]
    for row in ways:
        adds = row["adds_s"] / ways[0]["step_s"]
        rows.append(
            [
                row["recomputed"],
                bytes_(row["peak"]),
                bytes_(row["frees"]) if row["frees"] else "-",
                duration(row["step_s"]),
                f"{adds:.1%}" if row["frees"] else "-",
                duration(row["s_per_gib"]) if row["frees"] else "-",
                "this run" if row["chosen"] else "",
            ]
        )
    return ["", "recomputation, by the memory that it frees", *table(rows, left=1, ragged=(6,))]


def _runs(numbers: Sequence[int]) -> str:
    """Return numbers in words, three or more equal ones in a row as `4x19`."""
    words: list[str] = []
    for number, group in groupby(numbers):
        times = len(list(group))
        words += [f"{number}x{times}"] if times > 2 else [str(number)] * times
    return " ".join(words)


def _time(time: dict[str, Any], word: str) -> Iterator[str]:
    """Yield a step by part, and the whole run; `word`: what a device is called."""
    if time["step_s"] is None:
        yield f"time of a step: {no_time(time)}"
        return
    step = time["step_s"]
    whole = time["run"]
    yield f"time of a step, {duration(step)}"
    if time["error"] is not None:
        yield f"  {time['error']['words']}"
    parts = {name: value for name, value in time["parts_s"].items() if value >= LEAST_SHARE * step}
    rows = [
        [name, duration(value), f"{value / step:.1%}", time["how"][name]]
        for name, value in parts.items()
    ]
    yield from table(rows, left=1, ragged=(3,))
    rate = time["tokens_per_s_per_device"]
    all_ranks = time["tokens_per_s"]
    yield f"  {count(rate)} tokens/s per {word}, {count(all_ranks)} in all"
    for of in time["mfu_by_peak"]:
        mfu = _conventions(f"{of['causal']:.1%}", f"{of['all_keys']:.1%}")
        yield f"  MFU {mfu}, of {of['peak_tflops']:g} TFLOP/s in {of['format']}"
    cost = "" if whole["cost"] is None else f", cost {whole['cost']:,.0f}"
    hours = f"{short(whole['device_hours'])} {word} hours"
    yield (
        f"  {whole['steps']} steps, {count(whole['tokens'])} tokens: {seconds(whole['seconds'])},"
        f" {hours}{cost}"
    )
    if (described := time["statistics"]) is not None:
        yield (
            f"  log.statistics adds {duration(described['described_s'])} to each step that it"
            f" describes, {described['share']:.2%} of the time of steps at interval"
            f" {described['interval']}"
        )
    if time["save_s"] is not None:
        yield f"  a checkpoint is written in {seconds(time['save_s'])}"


def peak_bytes(memory: dict[str, Any]) -> int:
    """Return the peak of the rank that needs most."""
    return int(memory["peak"]["bytes"])


def compare_run(folder: str, argv: Sequence[str], *, as_json: bool) -> int:
    """Print the comparison; return the exit code.

    Raises:
        ConfigError: the folder is no run, or further words are given.
        CorruptData: a file of the run cannot be read.
    """
    home = Path(expanduser(folder))
    # Settings would describe another run than the measured one.
    if argv:
        rule = f"--compare: a run is what it was; {argv[0]} changes nothing in it"
        raise refusal(rule, f"{program()} plan --compare {folder}")
    try:
        if (home / RUN_FILE).is_file():
            lacks = ""
        else:
            if home.exists():
                lacks = f"has no {RUN_FILE}"
            else:
                lacks = "does not exist"
    except OSError as error:
        lacks = f"cannot be read: {error.strerror}"
    if lacks:
        fix = f"{program()} plan --compare RUN_FOLDER"
        raise refusal(f"{home} {lacks}; --compare needs a run folder", fix, "MT502")
    made = read_run_file(home / RUN_FILE)
    found = compared(made, home)
    if as_json:
        say_page(
            strict_json.dumps({"run": str(home), "parts": [row.data() for row in found]}, indent=2)
        )
    else:
        say_page("\n".join(_lines(made, found)))
    return 0


def compared(made: RunConfig, home: Path) -> list[Row]:
    """Return the parts of the plan of a run, with the values measured in its folder.

    Raises:
        ConfigError: the model of the run cannot be counted.
        CorruptData: a file of the run cannot be read.
    """
    plan = planned(made)
    if plan is None:
        rule = f"the family {made.model.family} does not say which weights a stage has"
        raise refusal(rule, "a family that says so", "MT254", "model.family", made.model.family)
    try:
        lines = lines_of_run(home)
        saved = saved_in(home)
    except OSError as error:
        raise CorruptData(f"{home}: cannot be read: {error}") from None
    return rows(made, plan, lines, peaks_in(home), saved)


def _lines(made: RunConfig, found: Sequence[Row]) -> list[str]:
    cells = [["", "planned", "measured", "off", ""]]
    for row in found:
        say = duration if row.kind == "time" else bytes_
        planned_, measured = (
            "-" if value is None else say(value) for value in (row.planned, row.measured)
        )
        off = "-" if row.off is None else f"{row.off:+.1%}"
        cells.append([row.part, planned_, measured, off, "beyond its bound" if row.beyond else ""])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    out = [f"{made.model.name} on {made.cluster.name}"]
    for part, *others in cells:
        *numbers, said = (text.rjust(w) for text, w in zip(others, widths[1:], strict=True))
        out.append(f"  {part.ljust(widths[0])}  {'  '.join(numbers)}  {said.strip()}".rstrip())
    if all(row.planned is None for row in found if row.kind == "time"):
        out.append(f"the time of a step is {no_time(time_report(made, 0))}")
    bounds = ", ".join(f"{kind} {bound:.0%}" for kind, bound in BOUNDS.items())
    if any(row.kind == "process" for row in found):
        bounds += "; memory of a process has every library in it"
    return [
        *out,
        (
            f"bounds: {bounds}; times are medians without the first steps, memory is that of the"
            " largest rank"
        ),
    ]
