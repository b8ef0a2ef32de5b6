"""The folder with a teacher's likeliest tokens: what it was made of, and which runs may read it.

This module reads a small file, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from mtrain import strict_json
from mtrain.config.compose.paths import program
from mtrain.config.resolve.batches import samples_of, stages
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem

KEY = "objective.teacher_file"
FACTS = "teacher.json"
"""Name of the file with the facts of a folder; it is written last."""
VERSION = 1
PARTS = ("train", "validation")


@dataclass(frozen=True)
class TeacherFacts:
    """The facts of a folder of `data distil`."""

    samples: Mapping[str, int]
    """Part -> its samples, from the first one that a run reads."""
    seq_length: int
    seed: int
    """`trainer.seed`, which the order of samples follows from."""
    vocab_size: int
    distil_top_k: int
    temperature: float
    teacher: str
    """The name of the teacher, as the run had it."""
    teacher_digest: str
    """The hash of its files; empty if its weights are drawn."""
    corpus: str | None = None
    """The fingerprint of the corpus; None for synthetic tokens."""
    tokenizer: str | None = None
    """The hash of the tokenizer that made its tokens; None if it is unknown."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the ids and log-probabilities of a sample."""
        return _row_bytes(self.seq_length, self.distil_top_k)

    @property
    def hash(self) -> bytes:
        """Return a hash of these facts, which those of all rows begin with."""
        return sha256(strict_json.dumps(asdict(self), sort_keys=True).encode()).digest()

    def write(self, folder: Path) -> None:
        """Write the facts of a folder whose rows are whole."""
        text = strict_json.dumps({"version": VERSION, **asdict(self)}, indent=2)
        (folder / FACTS).write_text(text + "\n", encoding="utf-8")


def samples_read(run: RunConfig) -> dict[str, int]:
    """Return the samples of each part that a resolved run reads."""
    t = run.trainer
    return {"train": samples_of(stages(run), t.steps), "validation": t.eval_iters * t.batch}


def bytes_of_rows(run: RunConfig) -> int:
    """Return the bytes of the ids and log-probabilities of all samples of a run that distils."""
    k = run.objective.distil_top_k or 0
    return sum(samples_read(run).values()) * _row_bytes(run.data.length, k)


def _row_bytes(length: int, k: int) -> int:
    return length * (4 * k + 4 * (k + 1))


def read_facts(folder: Path) -> TeacherFacts:
    """Return the facts of a folder.

    Raises:
        ConfigError: it has none, or those of another version.
    """
    try:
        body = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if body.pop("version") != VERSION:
            raise ValueError(f"{FACTS} is not of version {VERSION}")
        return TeacherFacts(**body)
    except FileNotFoundError:
        why = f"{folder} has no {FACTS}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{folder / FACTS}: {error}"
    fix = f"{program()} data distil out={folder} with the other words of this command"
    raise ConfigError.of("MT494", KEY, str(folder), why, fix)


def facts_problems(run: RunConfig, facts: TeacherFacts, origin: str = "") -> list[Problem]:
    """Return a problem for each key of a run that a folder was made with another value of."""
    o = run.objective
    pairs: dict[str, tuple[object, object]] = {
        "data.seq_length": (run.data.length, facts.seq_length),
        "trainer.seed": (run.trainer.seed, facts.seed),
        "objective.distil_top_k": (o.distil_top_k, facts.distil_top_k),
        "objective.temperature": (o.temperature, facts.temperature),
        "model.vocab_size": (run.model.loss_vocab_size, facts.vocab_size),
    }
    if o.draws:
        pairs["objective.teacher"] = (o.teacher, facts.teacher)
    found = [
        _problem(run, f"{key} is {_said(mine)}, the file has {theirs}", f"{key}={theirs}", origin)
        for key, (mine, theirs) in pairs.items()
        if mine != theirs
    ]
    for part, wanted in samples_read(run).items():
        held = facts.samples.get(part, 0)
        if held < wanted:
            why = f"the run reads {wanted} samples of {part}, and the file has {held}"
            found.append(_problem(run, why, "a file of as many steps", origin))
    return found


def files_problems(
    run: RunConfig, facts: TeacherFacts, corpus: str | None, tokenizer: str | None, digest: str
) -> list[Problem]:
    """Return a problem for each of corpus, tokenizer and teacher that is another one.

    `digest` is the hash of the teacher that the run names, and empty without one.
    """
    pairs = {
        "corpus": (corpus, facts.corpus),
        "tokenizer": (tokenizer, facts.tokenizer),
        "teacher": (digest or facts.teacher_digest, facts.teacher_digest),
    }
    return [
        _problem(
            run,
            f"it was made with another {what} ({str(theirs)[:12]}, here {str(mine)[:12]})",
            f"a file of this {what}: {program()} data distil",
        )
        for what, (mine, theirs) in pairs.items()
        if mine != theirs
    ]


def _said(value: object) -> object:
    return "null" if value is None else value


def _problem(run: RunConfig, why: str, fix: str, origin: str = "") -> Problem:
    return Problem("MT493", KEY, run.objective.teacher_file, why, fix, origin)
