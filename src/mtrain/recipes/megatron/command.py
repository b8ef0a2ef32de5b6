"""The training command of a script: its launcher, its program, and the program's words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.megatron.arguments import Arguments
from mtrain.recipes.megatron.flags_bert import PROGRAM
from mtrain.recipes.megatron.programs import family_of, is_trainer, other_than_gpt
from mtrain.recipes.megatron.table import known_flags
from mtrain.recipes.shell.gaps import Unread, Word, shown, words_in
from mtrain.recipes.shell.reader import Call, Script

# fewer may be a coincidence: --load or --seed are flags of many programs
FEW_FLAGS = 3
"""Known flags that mark a training command whose program is unknown."""
FLAGS_FIX = "the file of a training script, or of nothing but its flags"
_PLACES = {
    "--node-rank",
    "--machine-rank",
    "--local-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--main-process-ip",
    "--main-process-port",
    "--local-addr",
    "--nodelist",
    "--relative",
    "--host",
    "--hosts",
    "-w",
    "-H",
    "-r",
}
"""Launcher flags that differ between the machines of one training."""
_REMOTE = ("ssh", "pdsh")
_STARTING = (
    "torchrun",
    "python",
    "python3",
    "deepspeed",
    "accelerate",
    "srun",
    "mpirun",
    "mpiexec",
    "env",
    "nohup",
)
_LAUNCHERS = ("torch.distributed", "torch.", "deepspeed", "accelerate")


@dataclass
class TrainingCommand:
    """The command that trains."""

    launcher: list[Word]
    """The words before the program's."""
    words: list[Word]
    notes: list[str]
    family: str = "gpt"
    """The family of the model that it trains, gpt or bert."""
    doubt: str = ""
    """Other commands that the user may mean; empty if there are no others."""


@dataclass(frozen=True)
class _Candidate:
    """A command of a script that may be the one that trains."""

    call: Call
    known_flags: int
    training: TrainingCommand

    @property
    def rank(self) -> tuple[bool, int]:
        """Return the order of preference: unconditional commands first, then many flags."""
        return (not self.call.conditional, self.known_flags)


def training_command(script: Script, source: str) -> TrainingCommand:
    """Return the command with the most known flags, of those that train a GPT or a BERT.

    Raises:
        ConfigError: no command trains, or the commands train other models.
    """
    best: _Candidate | None = None
    others: list[Call] = []
    rivals: list[Call] = []
    refused: list[tuple[int, str, str]] = []
    for call in script.commands:
        launcher, program, words = _parted(call.words)
        arguments = Arguments(words)
        # words that may hold flags count, too: whole commands stand in variables
        count = len((arguments.flags.keys() | arguments.maybe.keys()) & known_flags())
        does = other_than_gpt(program, arguments.flags, source) if count or program else ""
        # other families are refused only if nothing else trains: a script may also evaluate
        family = family_of(does)
        if family is None and program is not None:
            refused.append((count, f"{program} {does}", call.where))
        if family is None:
            continue
        named = program is not None and is_trainer(program, family)
        least = 1 if launcher else FEW_FLAGS
        if not named and count < least:
            continue
        others.append(call)
        if named or count >= FEW_FLAGS:
            rivals.append(call)
        notes = []
        if program is not None and not named:
            notes = [f"{program} is taken for a program that trains a {family.upper()}"]
        candidate = _Candidate(call, count, TrainingCommand(launcher, words, notes, family))
        if best is None or candidate.rank > best.rank:
            best = candidate
    if best is not None:
        return _with_rivals(best, others, rivals)
    if refused:
        _, what, where = max(refused)
        raise ConfigError([not_a_gpt(what, where)])
    return _all_variables(script, source)


def _with_rivals(
    best: _Candidate, others: Sequence[Call], rivals: Sequence[Call]
) -> TrainingCommand:
    """Return the chosen command with notes on the commands that were not chosen."""
    training = best.training
    # the same command in two branches is one command
    rest = [c for c in others if c is not best.call and c.words != best.call.words]
    training.notes += [f"{c.where}: another command with such flags is not read" for c in rest]
    # the commands of several machines are one training
    words = _without_places(best.call.words)
    different = dict.fromkeys(c.where for c in rivals if _without_places(c.words) != words)
    if different:
        training.doubt = (
            f"{best.call.where} is read, and {', '.join([*different][:5])} trains otherwise: which"
            " is meant?"
        )
    if best.call.conditional:
        where = "in a condition, a loop or a function that is not called"
        training.notes.append(f"{best.call.where}: the command stands {where}; it is read once")
    return training


def _all_variables(script: Script, source: str) -> TrainingCommand:
    """Return the flags of a file that only sets variables, for another script to use.

    Raises:
        ConfigError: there are too few flags, or those of another model.
    """
    words = [word for held in script.variables.values() for item in held for word in words_in(item)]
    arguments = Arguments(words)
    if len((arguments.flags.keys() | arguments.maybe.keys()) & known_flags()) < FEW_FLAGS:
        rule = "no flags of Megatron-LM are found in it"
        if os.path.isfile(source):
            fix = f"{program()} recipe import --capture -- bash {source}, which runs it"
        else:
            fix = FLAGS_FIX
        raise ConfigError([Problem("MT701", "", None, rule, fix, source)])
    does = other_than_gpt(None, arguments.flags, source)
    family = family_of(does)
    if family is None:
        raise ConfigError([not_a_gpt(f"it {does}", source)])
    return TrainingCommand(
        [], words, ["no command uses the flags: those of all variables are read"], family
    )


def not_a_gpt(what: str, source: str) -> Problem:
    """Return the problem of a program that trains neither a GPT nor a BERT."""
    rule = f"{what}; only GPTs and BERTs are imported"
    return Problem("MT706", "", None, rule, f"the script of a pretrain_gpt.py or {PROGRAM}", source)


def _without_places(words: Sequence[Word]) -> list[str]:
    """Return a command without the words that differ between machines: ranks and addresses."""
    launcher, _, rest = _parted(words)
    texts = list(map(shown, launcher))
    start = next(
        (i for i, text in enumerate(texts) if i and os.path.basename(text) in _STARTING), 0
    )
    out = list[str]()
    skips = False
    remote = bool(texts) and os.path.basename(texts[0]) in _REMOTE
    for text in texts[start:] if remote else texts:
        name, equals, _ = text.partition("=")
        if name.replace("_", "-") in _PLACES:
            skips = not equals
        elif skips:
            skips = False
        else:
            out.append(text)
    return [*out, *map(shown, rest)]


def _parted(words: Sequence[Word]) -> tuple[list[Word], str | None, list[Word]]:
    """Return the words of the launcher, the training program, and its words."""
    texts = list(map(shown, words))
    for index, text in enumerate(texts):
        # torch.distributed.run starts the program, which comes later
        module = (
            text == "-m" and index + 1 < len(words) and not texts[index + 1].startswith(_LAUNCHERS)
        )
        if module:
            return list(words[: index + 2]), texts[index + 1], list(words[index + 2 :])
        if text.endswith(".py"):
            return list(words[: index + 1]), text, list(words[index + 1 :])
    first = next((i for i, text in enumerate(texts) if text.startswith("--")), len(words))
    # without a program, the flags of a launcher end where the first of Megatron-LM stands
    own = next(
        (i for i, text in enumerate(texts) if text.partition("=")[0] in known_flags()), len(words)
    )
    unread = [
        i
        for i in range(first + 1, own)
        if isinstance(words[i], Unread) and not texts[i - 1].startswith("--")
    ]
    if unread and own < len(words):  # the program is unknown
        return list(words[: unread[-1] + 1]), texts[unread[-1]], list(words[unread[-1] + 1 :])
    if first and (texts[0].isidentifier() or isinstance(words[0], Unread)):
        launcher = list(words[:first])
    else:
        launcher = []
    return launcher, None, list(words[first if first < len(words) else len(launcher) :])
