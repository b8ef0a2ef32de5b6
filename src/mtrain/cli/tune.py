"""`tune`: the fastest layouts of a model on a cluster by the plan, and the best of them as a file; without torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.cli.options import read_options
from mtrain.cli.recipe.new import write_new
from mtrain.collecting import without_collecting
from mtrain.config.compose import Rejected, compose
from mtrain.config.dump import override, spell
from mtrain.config.paths import program
from mtrain.config.problem import plain
from mtrain.config.resolve import Machine, world_size_of
from mtrain.config.rules import check
from mtrain.errors import ConfigError, say_page, visible
from mtrain.plan.tune.choose import cleared, refuse, said_of, search
from mtrain.plan.tune.search import BEST, Found, Layout, Task
from mtrain.plan.tune.space import changed
from mtrain.plan.tune.words import reason
from mtrain.recipes.diff import overrides_of
from mtrain.units import GIB


def run(argv: list[str], *, debug: bool) -> int:
    """Prints the best layouts of the configuration that `argv` describes; the exit code.

    Raises:
        ConfigError: the configuration has errors, nothing fits, or too little is known of the devices.
    """
    options = read_options(argv, valued={"--out": "--out", "-o": "--out"})
    words = overrides_of(options.words)
    with without_collecting():
        found, task = tuned(words)
    out = options.values.get("--out")
    if out is not None:
        path = Path(out) if out.endswith((".yaml", ".yml")) else Path(f"{out}.yaml")
        write_new(path, choice(found.best[0]))
    if options.as_json:
        say_page(strict_json.dumps(report(found, task), indent=2))
        return 0
    say_page("\n".join(map(visible, page(found, task, words))))
    if out is not None:
        say_page(f"wrote {path}: parallel={path if path.is_absolute() else f'./{path}'}")
    return 0


def tuned(words: Sequence[str]) -> tuple[Found, Task]:
    """The best layouts of a command line, which has at least one.

    Raises:
        ConfigError: there is none.
    """
    machine, world_size = Machine.here(), world_size_of()
    try:
        composed = compose(words)
    except Rejected as error:
        raise ConfigError(error.problems) from None
    raw = composed.run
    said = said_of(raw, composed.origins, command_line=True)
    found, task = search(raw, said, machine, world_size, BEST)
    if not found.best:
        refuse(found, task, lambda more: search(changed(raw, more), said, machine, world_size, 1)[0])
        problems = check(task.resolve(cleared(raw, said)), composed.origins, raw=cleared(raw, said),
                         resolve=task.resolve, to_run=False)  # fmt: skip
        raise ConfigError(problems)
    return found, task


def report(found: Found, task: Task) -> dict[str, Any]:
    """What a machine reads."""
    best, first = found.best, found.best[0]
    run = first.run
    return {
        "model": run.model.name,
        "cluster": run.cluster.name,
        "ranks": run.parallel.ranks,
        "global_batch_size": run.trainer.batch,
        "seq_length": run.data.length,
        "kept": {key: plain(value) for key, value in task.said.items()},
        "device_bytes": task.holds,
        "bounded": found.looked_at,
        "planned": found.planned,
        "layouts": [
            {
                "layout": layout.words,
                "seconds": layout.seconds,
                "tokens_per_second_per_device": layout.time.tokens_per_second_per_device,
                "mfu": layout.time.mfu,
                "parts": dict(layout.time.parts),
                "peak_bytes": layout.memory.peak,
                "headroom": None if task.holds is None else task.holds - layout.memory.peak,
                "why": reason(layout, first),
                "keys": {key: plain(value) for key, value in layout.change.items()},
                "overrides": overrides(layout),
            }
            for layout in best
        ],
    }


def page(found: Found, task: Task, words: Sequence[str]) -> Iterator[str]:
    """The same as text."""
    first = found.best[0]
    run = first.run
    tokens = f"{run.trainer.batch} samples of {run.data.length} tokens"
    yield f"{run.model.name}, {run.precision.format}, {tokens} on {run.parallel.ranks} x {run.cluster.name}"
    if task.said:
        yield f"kept: {' '.join(override(key, plain(value)) for key, value in task.said.items())}"
    rows = [("", "step", "tokens/s", "MFU", "peak", "left", "layout")]
    for number, layout in enumerate(found.best, 1):
        left = "-" if task.holds is None else f"{(task.holds - layout.memory.peak) / GIB:.1f} GiB"
        cells = f"{layout.seconds:.4g} s", _rate(layout.time.tokens_per_second_per_device), f"{layout.time.mfu:.1%}"
        rows.append((str(number), *cells, f"{layout.memory.peak / GIB:.1f} GiB", left, layout.words))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *texts, layout_words in rows:
        aligned = (text.rjust(width) for text, width in zip(texts, widths, strict=True))
        yield "  ".join([*aligned, layout_words]).rstrip()
    yield from ("", f" 1  {reason(first, first)}")
    yield from (f"{number:2}  {reason(layout, first)}" for number, layout in enumerate(found.best[1:], 2))
    yield ""
    yield f"tokens/s of a device; {found.looked_at} layouts and parts of them bounded, {found.planned} planned"
    mine = [word for word in words if word.partition("=")[0] not in {"parallel", *first.change}]
    yield f"the first: {program()} {' '.join([*map(shlex.quote, mine), overrides(first)])}"


def _rate(tokens: float) -> str:
    """With four digits, and never a power of ten."""
    return f"{tokens:.0f}" if tokens >= 1000 else f"{tokens:.4g}"


def overrides(layout: Layout) -> str:
    """A layout as a user types it."""
    return " ".join(["parallel=single", *(override(key, plain(value)) for key, value in _told(layout).items())])


def _told(layout: Layout) -> dict[str, Any]:
    """The keys that say it, whatever a recipe says; without what follows from others."""
    left = {key for key, value in layout.change.items() if value is None or "overlap" in key}
    left |= {"optim.cpu_offload"} if not layout.run.optim.cpu_offload else set()
    return {key: value for key, value in layout.change.items() if key not in left}


def choice(layout: Layout) -> str:
    """A layout as the file of a choice of `parallel`."""
    run = layout.run
    lines = [
        "# @package _global_",
        f"# {run.model.name} on {run.parallel.ranks} x {run.cluster.name}, {run.trainer.batch} samples of "
        f"{run.data.length} tokens: {layout.words}.",
        f"# Chosen by tune: by the plan {_rate(layout.time.tokens_per_second_per_device)} tokens/s a device, "
        f"{layout.memory.peak / GIB:.1f} GiB.",
    ]
    sections: dict[str, list[str]] = {}
    again: list[str] = []
    for key, value in _told(layout).items():
        section, name = key.split(".")[0], key.rpartition(".")[2]
        if "recompute" in key:
            again.append(f"    {name}: {spell(plain(value))}")
        else:
            sections.setdefault(section, []).append(f"  {name}: {spell(plain(value))}")
    for section, inner in sections.items():
        lines += [f"{section}:", *inner]
        lines += ["  recompute:", *again] if section == "parallel" and again else []
    return "\n".join(lines) + "\n"
