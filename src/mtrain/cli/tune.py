"""`tune`: the fastest layouts of a model on a cluster by the plan, a comparison with a named
layout, and the best of them as a file; without torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.cli.output import require_new, write_new
from mtrain.config.compose.composer import Composed, Rejected, compose
from mtrain.config.compose.dump import override, spell
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import program
from mtrain.config.messages.problem import plain, value_at
from mtrain.config.resolve.resolution import Machine, world_size_of
from mtrain.config.rules import check, findings
from mtrain.config.rules.finding import Finding
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import ConfigError, say_page, visible
from mtrain.loading import checkpoints
from mtrain.plan.rank import worst_stage
from mtrain.plan.time import step_time
from mtrain.plan.time.report import Accuracy, accuracy_of, mfu_by_peak
from mtrain.plan.tune.choose import cleared, reason, refuse, said_of, search
from mtrain.plan.tune.search import BEST, FAMILY, Found, Layout, Task
from mtrain.plan.tune.space import KEYS, SPLIT, changed
from mtrain.processes import without_collecting
from mtrain.recipes.diff import overrides_of
from mtrain.units import GIB, bytes_, devices

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
        composed = checkpoints.composed(words)
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
    """Return whether predicted times of a layout and the first differ by less than the error."""
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
    """Return a layout as a user types it after `words` without their layout."""
    before = _composed(words, PLAINEST)
    told = {**_chosen(layout), **_other(layout, task, before)}
    return " ".join(
        [f"parallel={PLAINEST}", *(override(key, plain(value)) for key, value in told.items())]
    )


def left_of(words: Sequence[str]) -> list[str]:
    """Return `words` without settings of a layout."""
    return [
        word for word in words if word.partition("=")[0].lstrip("+~") not in {"parallel", *KEYS}
    ]


def _composed(words: Sequence[str], choice: str) -> UnresolvedRun:
    """Compose `words` with a choice of `parallel` in place of their layout.

    Raises:
        ConfigError: they cannot be composed without it.
    """
    try:
        return checkpoints.composed([*left_of(words), f"parallel={choice}"]).run
    except Rejected as error:
        raise ConfigError(error.problems) from None


def _chosen(layout: Layout) -> dict[str, Any]:
    """Return the chosen keys, without derived ones and without defaults."""
    # Overlap follows from the sharding of the state when nobody sets it.
    left = {key for key, value in layout.change.items() if value is None or "overlap" in key}
    left |= {"optim.cpu_offload"} if not layout.run.optim.cpu_offload else set()
    return {key: value for key, value in layout.change.items() if key not in left}


def _other(layout: Layout, task: Task, before: UnresolvedRun) -> dict[str, Any]:
    """Return the keys of the layout whose values in `before` differ."""
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


# The origin of a key that a choice sets begins so; that of a recipe does not.
SHIPPED = "conf/"
# Parts of the memory that an answer names where the memory does not suffice.
LARGEST = 3


@dataclass(frozen=True)
class Mine:
    """A layout that was named, against the first of a search."""

    named: str
    """Name of the layout: the user's spelling, or its source."""
    first: Layout
    room: float
    """Bytes that a layout may take."""
    broken: tuple[Finding, ...] = ()
    """Errors of rules."""
    layout: Layout | None = None
    """None where a rule is broken."""
    completed: Layout | None = None
    """The fastest fitting layout of the same degrees; None: it does not exist, or is `layout`."""

    @property
    def fits(self) -> bool:
        """Return whether a device holds it."""
        return self.layout is not None and self.layout.memory.peak <= self.room

    def data(self) -> dict[str, Any]:
        """Return as JSON has it."""
        found: dict[str, Any] = {
            "named": self.named,
            "broken": [
                {"code": one.code, "path": one.path, "rule": one.rule} for one in self.broken
            ],
            "fits": self.fits,
            "room_bytes": None if self.room == float("inf") else round(self.room),
        }
        for name, layout in (("as_named", self.layout), ("completed", self.completed)):
            found[name] = None if layout is None else _data(layout, self.first)
        return found

    def lines(self, accuracy: Accuracy | None) -> Iterator[str]:
        """Yield the same as text."""
        if self.layout is None:
            yield f"{self.named}: no layout of this run, because it breaks a rule"
            yield from (f"  {one.code} {one.path}: {one.rule}" for one in self.broken)
        else:
            yield f"{self.named}: {self.layout.words}: {self._why(self.layout, accuracy)}"
        if self.completed is not None:
            cut = " ".join(
                f"{key.partition('.')[2]} {value_at(self.completed.run, key)}" for key in FAMILY
            )
            yield (
                f"  the fastest with {cut}: {self.completed.words}:"
                f" {self._why(self.completed, accuracy)}"
            )

    def _why(self, layout: Layout, accuracy: Accuracy | None) -> str:
        memory = layout.memory
        if memory.peak > self.room:
            parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:LARGEST]
            of = ", ".join(f"{name.replace('_', ' ')} {bytes_(size)}" for name, size in parts)
            where = (
                f"stage {memory.stage} needs {bytes_(memory.peak)} of the"
                f" {bytes_(round(self.room))} that may be"
            )
            return f"does not fit: {where} taken of a device: {of}"
        if layout.words == self.first.words:
            return "it is the first"
        slower = layout.seconds / self.first.seconds - 1
        near = accuracy is not None and abs(slower) <= accuracy.median
        doubt = "; the model of time does not tell them apart" if near else ""
        return f"{reason(layout, self.first)}{doubt}"


def _data(layout: Layout, first: Layout) -> dict[str, Any]:
    return {
        "layout": layout.words,
        "seconds": layout.seconds,
        "slower": layout.seconds / first.seconds - 1,
        "peak_bytes": layout.memory.peak,
        "parts_bytes": layout.memory.parts,
        "why": reason(layout, first),
    }


def named_words(text: str) -> list[str]:
    """Return the overrides of a layout as it is named: `tp8pp6`, and keys behind it."""
    words = shlex.split(text)
    return [word if "=" in word else f"parallel={word}" for word in words]


def mine(named: str, composed: Composed, first: Layout, task: Task) -> Mine:
    """Compare the layout of a composed run, with the batch and ranks of the search."""
    # Times are comparable only with the same batch on the same ranks.
    batch = {"trainer.global_batch_size": task.raw.trainer.global_batch_size}
    ranks = {} if composed.run.parallel.ranks else {"parallel.ranks": task.raw.parallel.ranks}
    raw = changed(composed.run, {**batch, **ranks, "parallel.auto": False})
    run = task.resolve(raw)
    broken = tuple(found for found in findings(run) if found.severity == "error")
    if broken:
        return Mine(named, first, task.room(), broken)
    layout = Layout(run, {}, step_time(run), worst_stage(run))
    said = {key: value_at(run, key) for key in FAMILY}
    found, _ = search(
        changed(raw, {"parallel.ranks": run.parallel.ranks}),
        said,
        Machine.here(),
        world_size_of(),
        1,
    )
    best = found.best[0] if found.best else None
    # The named layout is the best of its family: there is nothing to add.
    if best is not None and best.words == layout.words:
        best = None
    return Mine(named, first, task.room(), (), layout, best)


def mine_of(text: str, left: Sequence[str], first: Layout, task: Task) -> Mine:
    """Compare a layout as `--why-not` names it; `left` are the words without layout keys.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return mine(text, compose([*left, *named_words(text)]), first, task)
    except Rejected as error:
        raise ConfigError(error.problems) from None


def mine_in(words: Sequence[str], first: Layout, task: Task) -> Mine | None:
    """Compare the layout of a recipe among the words; return None without one."""
    recipe = next((word for word in words if word.startswith("recipe=")), None)
    if recipe is None:
        return None
    composed = compose(words)
    origins = {
        key: composed.origins[key]
        for key in said_of(composed.run, composed.origins, command_line=False)
    }
    theirs = {
        key
        for key, origin in origins.items()
        if origin != COMMAND_LINE and not origin.startswith(SHIPPED)
    }
    return mine(recipe, composed, first, task) if theirs else None
