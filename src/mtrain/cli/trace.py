"""`plan --trace`: a step of one rank on shapes only, compared with the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mtrain import strict_json
from mtrain.api import load
from mtrain.cli.output import refusal, table
from mtrain.config.machine.devices import CPU
from mtrain.config.schema.run import RunConfig
from mtrain.errors import first_line, say_page, visible
from mtrain.layout.grid import RankGrid
from mtrain.units import GIB, MIB, bytes_, count, in_unit

RANK = "rank="
# Rows of a table on the page; --json has all.
MOST_LINES = 16


def run(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Trace the configuration that `argv` describes; return the exit code.

    `rank=R` chooses the rank, by default the first.

    Raises:
        ConfigError: the configuration has errors, its layout has no such rank, or it cannot be
            traced.
    """
    words = [word for word in argv if word.startswith(RANK)]
    loaded = load([word for word in argv if not word.startswith(RANK)], to_run=False)
    rank = _rank(words, RankGrid.of(loaded.run).world)
    found = _traced(loaded.run, rank)
    if as_json:
        say_page(strict_json.dumps(found, indent=1))
    else:
        say_page(
            "\n".join(
                [*(problem.render() for problem in loaded.warnings), *map(visible, page(found))]
            )
        )
    return 0


def _rank(words: Sequence[str], world: int) -> int:
    text = words[-1].removeprefix(RANK) if words else "0"
    if len(words) > 1 or not text.isdecimal() or int(text) >= world:
        rule = f"{' '.join(words)}: the layout has the ranks 0 to {world - 1}"
        raise refusal(rule, "rank=0")
    return int(text)


def _traced(run: RunConfig, rank: int) -> dict[str, Any]:
    """Trace a step of a rank; raise ConfigError for a step that needs values."""
    from mtrain import mcore
    from mtrain.devices import registry

    # Tensors without data need no device, so any machine traces any cluster.
    mcore.install(registry.get(CPU.name))
    from mtrain.train.trace.report import trace_report
    from mtrain.train.trace.trace import trace

    _require_plan(run)
    try:
        return trace_report(run, trace(run, rank))
    except RuntimeError as error:
        if not _asks_for_values(error):
            raise
        # torch appends a page about its dispatcher to the first line.
        first = first_line(error)
        rule = f"its step does not run on shapes only: {first}"
        raise refusal(
            rule, "plan, without --trace", "MT255", "model.name", run.model.name
        ) from error


def _asks_for_values(error: RuntimeError) -> bool:
    """Return whether torch reports an operation that needs values; any other error is a defect."""
    from torch._subclasses import fake_tensor

    says_so = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    # the words of torch's dispatcher, and no "metadata"
    of_meta = re.compile(r"\b(register_)?meta\b", re.IGNORECASE)
    no_kernel = isinstance(error, NotImplementedError) and of_meta.search(str(error)) is not None
    return isinstance(error, says_so) or no_kernel


def _require_plan(run: RunConfig) -> None:
    from mtrain.plan.rank import stage_memories

    try:
        stage_memories(run)
    except ValueError as error:
        family = run.model.family
        fix = "a family that says so"
        raise refusal(str(error), fix, "MT254", "model.family", family) from None


def page(found: dict[str, Any]) -> list[str]:
    """Return the trace as lines."""
    peak = found["peak"]
    unit = GIB if peak["bytes"] >= 4 * GIB else MIB
    return [
        *_head(found),
        "",
        *_parts(found, unit),
        "",
        *_timeline(found, unit),
        "",
        *_operations(found),
        "",
        *(f"note: {note}" for note in found["notes"]),
    ]


def _head(found: dict[str, Any]) -> Iterator[str]:
    layout = " ".join(
        f"{a}{n}" for a, n in found["layout"].items() if n > 1 and a not in ("etp", "edp")
    )
    form = found["format"]
    asked = found["asked"]
    form += f" in place of {asked}" if asked != form else ""
    yield (
        f"{found['model']}, {form}, {layout or 'one rank'}: a step of rank {found['rank']}, traced"
    )
    m = found["microbatches"]
    peak = found["peak"]
    yield (
        f"  micro-batches  {m['traced']} of the {m['of_a_step']} of a step: more change nothing at"
        " the peak"
    )
    times = sum(o["times"] for o in found["operations"])
    yield f"  operations     {count(found['flops'])} FLOP in {times} operations"
    where = f"in the {peak['phase']}" if peak["phase"] else "between forward and backward"
    micro = f" of micro-batch {peak['microbatch']}" if peak["microbatch"] >= 0 else ""
    yield (
        f"  peak           {bytes_(peak['bytes'])} {where}{micro},"
        f" {peak['module'] or 'outside of the model'}"
    )
    if found["host"]:
        yield (
            f"  host memory    {bytes_(found['host'])} in addition: offloaded weights, moments and"
            " gradients"
        )


def _parts(found: dict[str, Any], unit: int) -> list[str]:
    from mtrain.train.trace.report import traced_parts

    planned = found["plan"]["parts"]
    traced = traced_parts(found["peak"]["parts"])
    rows = [["", "trace", "plan", "plan is off by"]]
    for name, size in traced.items():
        rows.append(
            [name, in_unit(size, unit), in_unit(planned[name], unit), _percent(found, name)]
        )
    both = in_unit(found["peak"]["bytes"], unit), in_unit(found["plan"]["bytes"], unit)
    rows.append(["peak", *both, _percent(found, "peak")])
    return [f"memory at the peak, {'GiB' if unit == GIB else 'MiB'}", *table(rows, left=1)]


def _percent(found: dict[str, Any], name: str) -> str:
    percent = found["difference_percent"][name]
    return "-" if percent is None else f"{percent:+.2f}%"


def _timeline(found: dict[str, Any], unit: int) -> list[str]:
    every = found["timeline"]
    rows = [["phase", "micro-batch", "before", "peak", "after", "where"]]
    shown = every if len(every) <= MOST_LINES else _around(every)
    for one in shown:
        micro = "-" if one["microbatch"] < 0 else f"{one['microbatch']}"
        micro += f" of chunk {one['chunk']}" if one["chunk"] else ""
        sizes = (in_unit(one[name], unit) for name in ("before", "peak", "after"))
        rows.append([one["phase"], micro, *sizes, one["module"]])
    more = [f"  {len(every) - len(shown)} more: --json"] if len(shown) < len(every) else []
    return ["timeline", *table(rows, left=2), *more]


def _around(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first ones, those around the peak, the last one."""
    top = max(range(len(every)), key=lambda i: every[i]["peak"])
    half = MOST_LINES // 4
    chosen = {*range(2 * half), *range(top - half, top + half), len(every) - 1}
    return [one for number, one in enumerate(every) if number in chosen]


def _operations(found: dict[str, Any]) -> list[str]:
    rows = [["phase", "module", "operation", "shapes", "times", "GFLOP each"]]
    for one in found["operations"][:MOST_LINES]:
        shapes = " ".join("x".join(map(str, shape)) for shape in one["shapes"][:3])
        gflop = f"{one['flops'] / 1e9:.4g}"
        rows.append(
            [
                one["phase"],
                one["module"],
                one["op"].removeprefix("aten."),
                shapes,
                str(one["times"]),
                gflop,
            ]
        )
    return ["operations with the most FLOPs", *table(rows, left=4)]
