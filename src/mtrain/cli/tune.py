"""`tune`: the fastest layouts of a model on a cluster by the plan, and the best of them as a file;
without torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.cli.output import require_new, write_new
from mtrain.cli.tune_mine import Mine, mine_in, mine_of
from mtrain.config.compose.composer import Rejected
from mtrain.config.compose.dump import override, spell
from mtrain.config.compose.paths import program
from mtrain.config.messages.problem import plain, value_at
from mtrain.config.resolve.resolution import Machine, world_size_of
from mtrain.config.rules import check
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import ConfigError, say_page, visible
from mtrain.loading import initial_weights
from mtrain.plan.time.accuracy import Accuracy, accuracy_of
from mtrain.plan.time.report import mfu_by_peak
from mtrain.plan.tune.choose import cleared, refuse, said_of, search
from mtrain.plan.tune.search import BEST, Found, Layout, Task
from mtrain.plan.tune.space import KEYS, SPLIT, changed
from mtrain.plan.tune.words import reason
from mtrain.processes import without_collecting
from mtrain.recipes.diff import overrides_of
from mtrain.units import GIB, devices

# tune prints a layout as changes to this choice of `parallel`.
PLAINEST = "single"


def run(words: list[str], *, out: str | None, why_not: str | None, as_json: bool) -> int:
    """Print the best layouts of the configuration that `words` describe; return the exit code.

    Raises:
        ConfigError: the configuration has errors, nothing fits, too little is known of the devices,
            or the file `out` exists already.
        BadEnvironment: that file cannot be written.
    """
    words = overrides_of(words)
    path: Path | None = None
    if out is not None:
        path = Path(out if out.endswith((".yaml", ".yml")) else f"{out}.yaml")
        # A search takes seconds to minutes: a file in the way must not show only after it.
        require_new(path)
    with without_collecting():
        found, task = tuned(words)
        asked = Asked(*_asked(words, why_not, found, task))
    if path is not None:
        write_new(path, choice(found.best[0]))
    if as_json:
        say_page(strict_json.dumps({**report(found, task, words), **asked.data(found)}, indent=2))
        return 0
    say_page("\n".join(map(visible, [*page(found, task, words), *asked.lines(found)])))
    if path is not None:
        say_page(_as_file(found.best[0], task, words, path))
    return 0


@dataclass(frozen=True)
class Asked:
    """Further answers next to the list of layouts."""

    mine: Mine | None
    """A layout that is named by `--why-not`, or that a recipe has."""
    free: Layout | None
    """The fastest layout without the layout keys of the command line; None: it has none."""

    def data(self, found: Found) -> dict[str, Any]:
        """Return as JSON has it."""
        free: dict[str, Any] | None = None
        if self.free is not None:
            free = {"layout": self.free.words, "seconds": self.free.seconds}
            free |= {
                "slower": found.best[0].seconds / self.free.seconds - 1,
                "why": reason(found.best[0], self.free),
            }
        return {"mine": None if self.mine is None else self.mine.data(), "without_kept": free}

    def lines(self, found: Found) -> Iterator[str]:
        """Yield the same as text."""
        if self.mine is not None:
            yield from ("", *self.mine.lines(accuracy_of(found.best[0].run.cluster)))
        if self.free is not None:
            yield ""
            yield f"without what is kept: {self.free.words}, {self.free.seconds:.4g} s"
            yield f"what is kept, against that: {reason(found.best[0], self.free)}"


def _asked(
    words: Sequence[str], named: str | None, found: Found, task: Task
) -> tuple[Mine | None, Layout | None]:
    first = found.best[0]
    left = left_of(words)
    mine = mine_in(words, first, task) if named is None else mine_of(named, left, first, task)
    kept = [word for word in words if word not in left and word != "parallel=auto"]
    if not kept or not task.said:
        return mine, None
    batch = [
        f"trainer.global_batch_size={first.run.trainer.batch}",
        f"parallel.ranks={first.run.parallel.ranks}",
    ]
    more = [
        word for word in batch if not any(one.startswith(word.partition("=")[0]) for one in left)
    ]
    # The same batch and ranks, or the answer would be of another run.
    free = tuned([*left, *more])[0].best[0]
    return mine, free if free.words != first.words else None


def tuned(words: Sequence[str]) -> tuple[Found, Task]:
    """Return the best layouts of a command line, which has at least one.

    Raises:
        ConfigError: there is no layout.
    """
    machine = Machine.here()
    world_size = world_size_of()
    try:
        composed = initial_weights.composed(words)
    except Rejected as error:
        raise ConfigError(error.problems) from None
    raw = composed.run
    said = said_of(raw, composed.origins, command_line=True)
    found, task = search(raw, said, machine, world_size, BEST)
    if not found.best:
        refuse(
            found, task, lambda more: search(changed(raw, more), said, machine, world_size, 1)[0]
        )
        # `refuse` leaves it to the rules where no layout is to blame.
        problems = check(task.resolve(cleared(raw, said)), composed.origins, raw=cleared(raw, said),
                         resolve=task.resolve, to_run=False)  # fmt: skip
        raise ConfigError(problems)
    return found, task


def report(found: Found, task: Task, words: Sequence[str]) -> dict[str, Any]:
    """Return the JSON report."""
    best = found.best
    first = found.best[0]
    run = first.run
    accuracy = accuracy_of(first.run.cluster)
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
        "error": None if accuracy is None else asdict(accuracy),
        "layouts": [
            {
                "layout": layout.words,
                "seconds": layout.seconds,
                "tokens_per_second_per_device": layout.time.tokens_per_second_per_device,
                "mfu": layout.time.mfu,
                "mfu_by_peak": mfu_by_peak(layout.run, layout.time),
                "parts": dict(layout.time.parts),
                "within_error": within(layout, first, accuracy),
                "peak_bytes": layout.memory.peak,
                "headroom": None if task.holds is None else task.holds - layout.memory.peak,
                "why": reason(layout, first),
                "keys": {key: plain(value) for key, value in layout.change.items()},
                "overrides": overrides(layout, task, words),
            }
            for layout in best
        ],
    }


def page(found: Found, task: Task, words: Sequence[str]) -> Iterator[str]:
    """Yield the same as text."""
    first = found.best[0]
    accuracy = accuracy_of(found.best[0].run.cluster)
    run = first.run
    tokens = f"{run.trainer.batch} samples of {run.data.length} tokens"
    yield (
        f"{run.model.name}, {run.precision.words}, {tokens} on"
        f" {devices(run.parallel.ranks, run.cluster.name)}"
    )
    if task.said:
        yield f"kept: {' '.join(override(key, plain(value)) for key, value in task.said.items())}"
    rows = [("", "step", "tokens/s", "MFU", "peak", "left", "layout")]
    for number, layout in enumerate(found.best, 1):
        left = "-" if task.holds is None else f"{(task.holds - layout.memory.peak) / GIB:.1f} GiB"
        cells = (
            f"{layout.seconds:.4g} s",
            _rate(layout.time.tokens_per_second_per_device),
            f"{layout.time.mfu:.1%}",
        )
        near = number > 1 and within(layout, first, accuracy)
        rows.append(
            (
                f"{'~' * near}{number}",
                *cells,
                f"{layout.memory.peak / GIB:.1f} GiB",
                left,
                layout.words,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *texts, layout_words in rows:
        aligned = (text.rjust(width) for text, width in zip(texts, widths, strict=True))
        yield "  ".join([*aligned, layout_words]).rstrip()
    yield from ("", f" 1  {reason(first, first)}")
    yield from (
        f"{number:2}  {reason(layout, first)}" for number, layout in enumerate(found.best[1:], 2)
    )
    yield ""
    form = run.precision.multiplies_in
    yield from _told_apart(accuracy)
    yield (
        f"tokens/s of a device; MFU of {run.cluster.peak_tflops[form]:g} TFLOP/s in {form}, with"
        " causal attention"
    )
    yield f"{found.looked_at} layouts and parts of them bounded, {found.planned} planned"
    command = [program(), *map(shlex.quote, left_of(words)), overrides(first, task, words)]
    yield f"the first: {' '.join(command)}"


def within(layout: Layout, first: Layout, accuracy: Accuracy | None) -> bool:
    """Return whether the model of time does not tell a layout from the first: it is mostly off by
    more.
    """
    return accuracy is not None and layout.seconds / first.seconds - 1 <= accuracy.median


def _told_apart(accuracy: Accuracy | None) -> Iterator[str]:
    """Yield the notes on the accuracy of the list."""
    yield "each is the best of its family, which are all layouts with its tp, pp, cp and ep"
    if accuracy is None:
        yield "how far predicted rates are off is not known of a cluster whose rates were measured"
    else:
        yield f"~ not distinguishable from the first: {accuracy.words}"


def _rate(tokens: float) -> str:
    """Format a rate with four digits, and without a power of ten."""
    return f"{tokens:.0f}" if tokens >= 1000 else f"{tokens:.4g}"


def overrides(layout: Layout, task: Task, words: Sequence[str]) -> str:
    """Return a layout as a user types it behind what is left of `words`, whatever a recipe among
    them says of layouts.
    """
    told = _told(layout, task, _composed(words, PLAINEST))
    return " ".join(
        [f"parallel={PLAINEST}", *(override(key, plain(value)) for key, value in told.items())]
    )


def left_of(words: Sequence[str]) -> list[str]:
    """Return `words` without those that set a layout."""
    return [
        word for word in words if word.partition("=")[0].lstrip("+~") not in {"parallel", *KEYS}
    ]


def _composed(words: Sequence[str], choice: str) -> UnresolvedRun:
    """Compose `words` with a choice of `parallel` in place of their layout.

    Raises:
        ConfigError: they cannot be composed without it.
    """
    try:
        return initial_weights.composed([*left_of(words), f"parallel={choice}"]).run
    except Rejected as error:
        raise ConfigError(error.problems) from None


def _told(layout: Layout, task: Task, before: UnresolvedRun) -> dict[str, Any]:
    """Return the keys that say it: those of a layout, but for what follows from others, and what
    `before` says otherwise.
    """
    return {**_chosen(layout), **_other(layout, task, before)}


def _chosen(layout: Layout) -> dict[str, Any]:
    """Return the chosen keys, without derived ones and without defaults."""
    # Overlap follows from the sharding of the state when nobody sets it.
    left = {key for key, value in layout.change.items() if value is None or "overlap" in key}
    left |= {"optim.cpu_offload"} if not layout.run.optim.cpu_offload else set()
    return {key: value for key, value in layout.change.items() if key not in left}


def _other(layout: Layout, task: Task, before: UnresolvedRun) -> dict[str, Any]:
    """Return keys of the layout that `before` has otherwise; what it leaves open follows from
    others as it did here.
    """
    wanted = changed(task.raw, layout.change)
    found = dict[str, Any]()
    parallel = type(wanted.parallel).model_fields.keys() - {"recompute", "ranks"}
    for key in dict.fromkeys([*KEYS, *SPLIT, *sorted(f"parallel.{name}" for name in parallel)]):
        value = value_at(wanted, key)
        old = value_at(before, key)
        if old != value and not (old is None and "overlap" in key):
            found[key] = value
    again = task.resolve(changed(before, found))
    # A recipe may name ranks or a batch that the layout was not searched for.
    if again.parallel.ranks != layout.run.parallel.ranks:
        found["parallel.ranks"] = layout.run.parallel.ranks
    if again.trainer.batch != layout.run.trainer.batch:
        found["trainer.global_batch_size"] = layout.run.trainer.batch
    return found


def _as_file(first: Layout, task: Task, words: Sequence[str], path: Path) -> str:
    """Describe how to use the file: with the keys that a recipe overrides."""
    word = f"parallel={path if path.is_absolute() else f'./{path}'}"
    more = _other(first, task, _composed(words, str(path.absolute())))
    if not more:
        return f"wrote {path}: {word}"
    said = " ".join(override(key, plain(value)) for key, value in more.items())
    why = "the keys after the file are those that the recipe, which takes precedence, overrides"
    return f"wrote {path}: {word} {said}\n{why}"


def choice(layout: Layout) -> str:
    """Return a layout as the file of a choice of `parallel`."""
    run = layout.run
    lines = [
        "# @package _global_",
        (
            f"# {run.model.name} on {devices(run.parallel.ranks, run.cluster.name)},"
            f" {run.trainer.batch} samples of {run.data.length} tokens: {layout.words}."
        ),
        (
            f"# Chosen by tune: by the plan {_rate(layout.time.tokens_per_second_per_device)}"
            f" tokens/s a device, {layout.memory.peak / GIB:.1f} GiB."
        ),
    ]
    sections: dict[str, list[str]] = {}
    again: list[str] = []
    for key, value in _chosen(layout).items():
        section = key.split(".")[0]
        name = key.rpartition(".")[2]
        if "recompute" in key:
            again.append(f"    {name}: {spell(plain(value))}")
        else:
            sections.setdefault(section, []).append(f"  {name}: {spell(plain(value))}")
    for section, inner in sections.items():
        lines += [f"{section}:", *inner]
        lines += ["  recompute:", *again] if section == "parallel" and again else []
    return "\n".join(lines) + "\n"
