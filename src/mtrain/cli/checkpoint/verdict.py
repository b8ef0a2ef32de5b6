"""`checkpoint verdict`: can a run continue from a checkpoint? Answers in a second without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain.api import load
from mtrain.ckpt import folder
from mtrain.ckpt.index import filled
from mtrain.ckpt.sources import address_of
from mtrain.cli.output import problem_report, say_json
from mtrain.config.compose.paths import CHECKPOINTS, RUN_FILE, program
from mtrain.config.resolve.resolution import Machine, resolve, world_size_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData, MtrainError, Problem, message, say_page
from mtrain.launching.verdict import data, figures, judge
from mtrain.layout.grid import RankGrid
from mtrain.loading.checkpoints import beneath, newest, quoted, relaid, run_file, target_of
from mtrain.loading.checkpoints import composed as compose_with_weights
from mtrain.object_store import is_remote
from mtrain.processes import without_collecting
from mtrain.units import bytes_, number_of

SAME = "same"
RESHARDED = "resharded"
IMPOSSIBLE = "impossible"
USAGE = "checkpoint verdict CHECKPOINT [KEY=VALUE ...]"
INSTEAD = "another checkpoint, or a copy of this one from where it is whole"
BASES = ("run", "recipe")
"""Words that name a whole configuration, in place of that of the checkpoint."""
MOST_NAMED = 6
MOST_RANKS = 16
"""Ranks whose bytes are listed one by one."""


@dataclass
class Answer:
    """The verdict on one checkpoint, in the parts that are printed."""

    checkpoint: Path
    problems: list[Problem] = field(default_factory=list)
    exit_code: int = 0
    run: RunConfig | None = None
    manifest: dict[str, Any] | None = None
    judgement: judge.Judgement = field(default_factory=judge.Judgement)
    reading: figures.Reading | None = None
    memory: figures.Memory | None = None
    stands_for: bool = False
    """True if the run folder was made for an address, and is gone afterwards."""
    data: str = ""
    """The result of comparing the data."""

    def by_address(self, text: str) -> str:
        """Return a text with the address that the checkpoint is read from, if it has one."""
        url = address_of(self.checkpoint)
        if url is None:
            return text
        text = text.replace(str(self.checkpoint), url)
        home = self.checkpoint.parent.parent
        return text.replace(str(home), url.rpartition("/")[0]) if self.stands_for else text

    @property
    def impossible(self) -> bool:
        """Return whether any problem is an error."""
        return any(problem.severity == "error" for problem in self.problems)

    @property
    def outcome(self) -> str:
        """Return the verdict in a word."""
        if self.impossible:
            return IMPOSSIBLE
        return RESHARDED if self.resharded else SAME

    @property
    def resharded(self) -> bool:
        """Return whether ranks read other parts than ranks wrote."""
        assert self.run is not None
        assert self.manifest is not None
        assert self.reading is not None
        grid = self.manifest["state"].get("grid", {})
        return bool(self.reading.resharded) or grid != RankGrid.of(self.run).sizes

    @property
    def bitwise(self) -> bool:
        """Return whether the run ends in the bits of an uninterrupted one."""
        judged = self.judgement
        return self.outcome == SAME and not (judged.numbers or judged.resets)


@without_collecting()
def verdict(words: Sequence[str], *, as_json: bool) -> int:
    """Print whether a run can continue from a checkpoint; return the exit code that it would end
    with.

    Raises:
        ConfigError: no checkpoint is named, or there is none.
    """
    answer = answered(words)
    if as_json:
        say_json(report(answer))
    else:
        say_page("\n".join(page(answer)))
    return answer.exit_code


def answered(words: Sequence[str]) -> Answer:
    """Return the verdict on the checkpoint that the first word names, under the other words.

    Raises:
        ConfigError: no checkpoint is named, or there is none.
    """
    target, checkpoint, overrides = located(words)
    answer = Answer(checkpoint, stands_for=is_remote(words[0]))
    try:
        answer.manifest = folder.parse_manifest(checkpoint)
    except MtrainError as error:
        return _refused(answer, error)
    lines = judge.damage(checkpoint, answer.manifest)
    if not judge.speaks_of(lines, target / RUN_FILE):
        _compose(answer, configuration(target, checkpoint, overrides))
    _judge(answer, lines)
    if answer.run is not None and not answer.impossible:
        answer.reading = figures.reading(answer.run, filled(checkpoint, answer.manifest))
        answer.memory = figures.memory(answer.run, Machine.here())
    # A folder replaces the checkpoint of an address.
    answer.problems = [
        replace(one, detail=answer.by_address(one.detail), source=answer.by_address(one.source))
        for one in answer.problems
    ]
    return answer


def located(words: Sequence[str]) -> tuple[Path, Path, list[str]]:
    """Return the folder that the first word names, its checkpoint, and the other words.

    Raises:
        ConfigError: the checkpoint does not exist.
    """
    usage = f"{program()} {USAGE}"
    local = bool(words) and "=" not in words[0] and not is_remote(words[0])
    named = Path(words[0]).expanduser() if local else None
    # A checkpoint that lost its run.yaml is damaged, and not missing.
    if named is not None and folder.is_checkpoint(named):
        return named, named, list(words[1:])
    target, overrides = target_of(list(words), "checkpoint verdict", usage)
    if target.parent.name == CHECKPOINTS:
        return target, target, overrides
    return target, newest(target, usage), overrides


def configuration(target: Path, checkpoint: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command line of the continued run: the folder's configuration unless named."""
    resume = f"checkpoint.resume={quoted(checkpoint)}"
    if any(word.partition("=")[0] in BASES for word in overrides):
        return [*overrides, resume]
    own = beneath(relaid(target, overrides), overrides)
    return [f"run={run_file(target)}", *own, resume]


def _compose(answer: Answer, argv: list[str]) -> None:
    """Validate the run, and where rules refuse it, still resolve it as far as that goes."""
    try:
        loaded = load(argv, to_run=False)
    except ConfigError as error:
        answer.problems += error.problems
        answer.exit_code = error.exit_code
        with suppress(MtrainError, ValueError):
            composed = compose_with_weights(argv)
            answer.run = resolve(composed.run, Machine.here(), world_size_of(os.environ))
    else:
        answer.run = loaded.run
        answer.problems += loaded.warnings


def _judge(answer: Answer, lines: Sequence[str]) -> None:
    """Compare the run with the checkpoint, and its data; `lines` are of damage, for a checkpoint
    whose configuration cannot be composed.
    """
    assert answer.manifest is not None
    try:
        if answer.run is None:
            answer.judgement = judge.Judgement(damage=tuple(lines))
        else:
            answer.judgement = judge.examined(answer.run, answer.checkpoint)
    except MtrainError as error:
        _refused(answer, error)
        return
    judged = answer.judgement
    answer.problems += [_damaged(line) for line in judged.damage]
    known = {(problem.code, problem.path) for problem in answer.problems}
    answer.problems += [p for p in judged.problems if (p.code, p.path) not in known]
    if answer.run is not None and not judged.damage:
        _compare_data(answer, answer.run)
    if judged.damage:
        answer.exit_code = CorruptData.exit_code
    elif answer.impossible:
        answer.exit_code = answer.exit_code or ConfigError.exit_code


def _compare_data(answer: Answer, run: RunConfig) -> None:
    assert answer.manifest is not None
    if run.data.kind == "mock":
        answer.data = "made from the seed"
    elif run.checkpoint.accept_changes:
        answer.data = "not compared, since changes are accepted"
    else:
        try:
            splits = data.opened(run, answer.checkpoint)
        except MtrainError as error:
            _refused(answer, error)
            return
        if splits is None:
            answer.data = "compared when the run prepares it, before any rank starts"
            return
        found = data.problems(run, answer.manifest, splits)
        answer.problems += found
        answer.data = "another corpus or order" if found else "the same corpus in the same order"


def _refused(answer: Answer, error: MtrainError) -> Answer:
    """Take an error that a run would end with for the verdict."""
    if isinstance(error, ConfigError):
        answer.problems += error.problems
    elif isinstance(error, CorruptData):
        answer.problems += [_damaged(line) for line in str(error).splitlines()]
    else:
        answer.problems.append(Problem("MT001", "", None, str(error), ""))
    answer.exit_code = error.exit_code
    return answer


def _damaged(line: str) -> Problem:
    return Problem("MT513", "", None, line, INSTEAD)


def report(answer: Answer) -> dict[str, Any]:
    """Return the verdict as data for JSON."""
    judged = answer.judgement
    read = answer.reading
    ram = answer.memory
    manifest = answer.manifest
    digest = None if answer.run is None else answer.run.digest()
    found = problem_report(answer.problems, digest)
    return {
        "outcome": answer.outcome,
        "bitwise": answer.bitwise,
        "checkpoint": answer.by_address(str(answer.checkpoint)),
        "step": None if manifest is None else manifest["step"],
        "problems": found["problems"],
        "changes": list(judged.changes),
        "numbers": list(judged.numbers),
        "resets": list(judged.resets),
        "data": answer.data,
        "tensors": None if read is None else read.tensors,
        "resharded": None if read is None else list(read.resharded),
        "unknown": None if read is None else read.unknown,
        "bytes_by_rank": None if read is None else read.by_rank,
        "memory": None if ram is None else {"peak": ram.peak, "has": ram.holds, "fits": ram.fits},
        "digest": digest,
    }


def page(answer: Answer) -> Iterator[str]:
    """Yield the lines of the verdict."""
    yield f"{answer.by_address(str(answer.checkpoint))}: {_headline(answer)}"
    if answer.problems:
        yield message(ConfigError(answer.problems))
    if answer.impossible:
        return
    rows = [(name, text) for name, texts in _rows(answer) for text in texts]
    width = max(len(name) for name, _ in rows)
    last = ""
    for name, text in rows:
        yield f"  {'' if name == last else name:<{width}}  {text}"
        last = name


def _headline(answer: Answer) -> str:
    if answer.impossible:
        return IMPOSSIBLE
    if answer.outcome == RESHARDED:
        return "resharded"
    return "the same layout, bitwise" if answer.bitwise else "the same layout, with other numbers"


def _rows(answer: Answer) -> Iterator[tuple[str, Sequence[str]]]:
    run = answer.run
    manifest = answer.manifest
    assert run is not None
    assert manifest is not None
    state = manifest["state"]
    judged = answer.judgement
    wrote = number_of(int(manifest.get("ranks", 1)), "rank")
    yield "saved", [f"step {manifest['step']} by {wrote}, format {manifest['format']}"]
    yield (
        "run",
        [f"{run.model.name} on {number_of(run.parallel.ranks, 'rank')}: {RankGrid.of(run)}"],
    )
    yield "reads", list(_reads(answer))
    if not state.get("weights_only"):
        left = run.trainer.steps - int(manifest["step"])
        until = f"{left} of {run.trainer.steps} steps are left" if left > 0 else "no step is left"
        yield (
            "continues",
            [
                f"optimizer and schedule at step {state.get('schedule_steps')}; {until}",
                f"data after {state.get('consumed_samples')} samples",
            ],
        )
    yield "resets", judged.resets or ["nothing"]
    yield (
        "numbers",
        judged.numbers
        or (["sums are added in another order"] if answer.resharded else ["unchanged"]),
    )
    yield "data", [answer.data]
    yield "memory", [_memory(answer)]


def _reads(answer: Answer) -> Iterator[str]:
    read = answer.reading
    assert read is not None
    if read.unknown:
        yield f"{read.tensors} tensors; bytes and parts are not predicted: {read.unknown}"
        return
    sizes = list(read.by_rank.values())
    if len(sizes) > MOST_RANKS or len(set(sizes)) == 1:
        span = [bytes_(min(sizes)), bytes_(max(sizes))]
        by = span[0] if len(set(sizes)) == 1 else " to ".join(span)
        some = f" (of {len(sizes)} of {read.ranks} ranks)" if len(sizes) < read.ranks else ""
        yield f"{by} a rank{some}"
    else:
        yield ", ".join(f"rank {rank} {bytes_(size)}" for rank, size in read.by_rank.items())
    if read.resharded:
        named = ", ".join(read.resharded[:MOST_NAMED])
        more = ", ..." if len(read.resharded) > MOST_NAMED else ""
        yield f"{len(read.resharded)} of {read.tensors} tensors in other parts: {named}{more}"
    else:
        yield f"{read.tensors} tensors, in the parts that were written"


def _memory(answer: Answer) -> str:
    ram = answer.memory
    assert ram is not None
    if ram.peak is None:
        return "not planned for this kind of model"
    text = f"{bytes_(ram.peak)} at the peak of a rank, by the plan"
    if ram.fits is None:
        return text
    where = f"{number_of(ram.ranks, 'rank')} on this machine of" if ram.on_host else "a device has"
    return f"{text}; {where} {bytes_(ram.holds)}: {'fits' if ram.fits else 'does not fit'}"
