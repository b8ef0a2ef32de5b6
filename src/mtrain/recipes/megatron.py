"""A script or a command line of Megatron-LM as a configuration, and a configuration as its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from mtrain.config.devices import facts_of
from mtrain.config.dump import spell
from mtrain.config.files import SCRIPT_ENDINGS, read_text
from mtrain.config.load import UNSHOWN, refuse_hidden
from mtrain.config.model import VOCAB_MULTIPLE
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.paths import program
from mtrain.config.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.arguments import Arguments, Draft
from mtrain.recipes.expansion import shown
from mtrain.recipes.flags_bert import PROGRAM, bert_keys, bert_words, is_megatrons
from mtrain.recipes.flags_training import vocabulary
from mtrain.recipes.imported import (
    MARK,
    Imported,
    backend_of,
    blacked_out,
    build,
    leftovers,
    name_of,
    read_flags,
    residue,
    same_shape,
    without_secrets,
)
from mtrain.recipes.launch import World, directives, world_of
from mtrain.recipes.notes import sourced, too_few, undecided, unsaid
from mtrain.recipes.programs import family_of, known, other_than_gpt
from mtrain.recipes.secrets import Secrets
from mtrain.recipes.shell import Command, Script, read_script
from mtrain.recipes.table import known_flags, table
from mtrain.recipes.write import section, unequal

FEW_FLAGS = 3
_SPACE = re.compile(r"\s")
_LAUNCHERS = ("torch.distributed", "torch.", "deepspeed", "accelerate")


def import_scripts(paths: Sequence[Path], extra: Sequence[str] = ()) -> Imported:
    """Reads scripts, or files that hold nothing but flags, the later ones as if they sourced the earlier.

    Nothing of them is run. `extra` are overrides in our own grammar, for what the scripts do not say.

    Raises:
        ConfigError: no flags are found, a required one is missing, or a value is refused.
    """
    return import_texts(read_texts(paths), name_of(paths[-1]), extra)


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Files as texts, each with its name.

    Raises:
        ConfigError: one cannot be read, or has characters that are not shown.
    """
    texts = []
    for path in paths:
        text = read_text(path, str(path), SCRIPT_ENDINGS)
        refuse_hidden(text, str(path), UNSHOWN)
        texts.append((text, str(path)))
    return texts


def import_texts(texts: Sequence[tuple[str, str]], name: str, extra: Sequence[str] = ()) -> Imported:
    """`import_scripts` for texts that were read before, each with its source; `name` is what the model is called."""
    source, whole = texts[-1][1], "\n".join(text for text, _ in texts)
    script = read_script(*texts)
    secrets = Secrets({**script.variables, **_given_as_flags(script)})
    found = _training_command(script, source)
    notes = [*found.notes, *sourced(script), *undecided(script, found.doubtful)]
    world = world_of(found.launcher, directives(whole))
    if world is None and found.launcher:
        notes.append("how many processes it starts is not said: cluster.nodes and cluster.devices_per_node are unset")
    said = residue(whole, source)
    return import_words(found.words, world, name, source, extra, secrets, notes, said, found.family)


def import_words(
    words: Sequence[str],
    world: World | None,
    name: str,
    source: str,
    extra: Sequence[str],
    secrets: Secrets,
    notes: Sequence[str],
    said: Draft,
    family: str = "gpt",
) -> Imported:
    """A configuration of a program's words and the world it is started in.

    Args:
        name: what the model is called.
        extra: overrides in our own grammar; `said`: keys that an export wrote, which have no flag.
        notes: what was found out before.
        family: what the program trains, gpt or bert.
    """
    a, d = read_flags(words, world)
    if family == "bert":
        d |= bert_keys(a, d)
    backend_of(a, d, world)
    without_secrets(d, a, secrets)
    d["model.name"] = name
    notes, left = [*notes, *a.notes], list[str]()
    if "model.vocab_size" not in said:
        left += _vocabulary(d, notes, extra)
    try:
        run = _padding(build(d, a, extra, source, said), said, notes)
    except ConfigError as error:
        raise ConfigError([_with_place(problem, notes) for problem in error.problems]) from None
    notes += unsaid(d | said, run, extra, left)
    notes += too_few(run)
    shown_notes = [secrets.hide(shown(n)) for n in dict.fromkeys(notes)]
    return Imported(run, blacked_out(leftovers(a), secrets), shown_notes, left)


def _with_place(problem: Problem, notes: Sequence[str]) -> Problem:
    """A problem that names a variable, with the condition under which the script sets it."""
    missing = re.search(r"needs (\$\w+), which the script does not set", problem.rule)
    if problem.code != "MT015" or missing is None:
        return problem
    name = re.compile(rf"{re.escape(missing[1])}\b")
    note = next((shown(note) for note in notes if name.search(note)), None)
    if note is None:
        return problem
    where, _, rest = note.partition(": ")
    test = rest.partition(" is not known")[0]
    rule = f"{problem.rule[: missing.end(1)]}, which is set under a condition that is not known: {test} ({where})"
    return replace(problem, rule=rule)


def _given_as_flags(script: Script) -> dict[str, list[str]]:
    """Secrets given as flags: `--wandb-api-key VALUE` under the name of the flag."""
    out: dict[str, list[str]] = {}
    for command in script.commands:
        for flag, values in Arguments(command.words).flags.items():
            if flag not in known_flags():
                out.setdefault(flag, []).extend(values)
    return out


@dataclass
class _Found:
    """The command that trains."""

    launcher: list[str]
    """The words before the program's."""
    words: list[str]
    notes: list[str]
    doubtful: Mapping[str, str]
    """Variables behind its words that are also set under a condition that is not known, with `file:line`."""
    family: str = "gpt"
    """What it trains, gpt or bert."""


def _training_command(script: Script, source: str) -> _Found:
    """The command with the most flags that are known, of those that train a GPT or a BERT.

    Raises:
        ConfigError: there is none, or what there is trains something else.
    """
    best: tuple[bool, int, _Found, Command] | None = None
    others: list[Command] = []
    refused: list[tuple[int, str, str]] = []
    for command in script.commands:
        launcher, program, words = _parted(_unpacked(command.words))
        flags = Arguments(words).flags
        count = len(flags.keys() & known_flags())
        does = other_than_gpt(program, flags, source) if count else ""
        family = family_of(does)
        if family is None and program is not None:
            refused.append((count, f"{shown(program)} {does}", command.where))
        if family is None or count < (1 if launcher else FEW_FLAGS):
            continue
        others.append(command)
        if best is None or (not command.conditional, count) > best[:2]:
            kind = f"program that trains a {family.upper()}"
            notes = [f"{shown(program)} is taken for a {kind}"] if _strange(program, family) else []
            found = _Found(launcher, words, notes, command.doubtful, family)
            best = (not command.conditional, count, found, command)
    if best is not None:
        found = best[2]
        found.notes += [f"{c.where}: another command with such flags is not read" for c in others if c is not best[3]]
        if best[3].conditional:
            where = "in a condition, a loop or a function that is not called"
            found.notes.append(f"{best[3].where}: the command stands {where}; it is read once")
        return found
    if refused:
        _, what, where = max(refused)
        raise ConfigError([not_a_gpt(what, where)])
    return _all_variables(script, source)


def _all_variables(script: Script, source: str) -> _Found:
    """The flags of a file that only sets variables, for another script to use.

    Raises:
        ConfigError: they are too few, or those of another model.
    """
    words = [word for held in script.variables.values() for item in held for word in _unpacked([item])]
    if len({w.partition("=")[0] for w in words} & known_flags()) < FEW_FLAGS:
        rule = "no flags of Megatron-LM are found in it"
        fix = "the file of a training script, or of nothing but its flags"
        raise ConfigError([Problem("MT701", "", None, rule, fix, source)])
    does = other_than_gpt(None, Arguments(words).flags, source)
    family = family_of(does)
    if family is None:
        raise ConfigError([not_a_gpt(f"it {does}", source)])
    note = "no command uses the flags: those of all variables are read"
    return _Found([], words, [note], script.conditional, family)


def not_a_gpt(what: str, source: str) -> Problem:
    """The problem of a program that does something else than to train a GPT or a BERT."""
    rule = f"{what}; only GPTs and BERTs are imported"
    return Problem("MT706", "", None, rule, f"the script of a pretrain_gpt.py or {PROGRAM}", source)


def _strange(program: str | None, family: str) -> TypeGuard[str]:
    return program is not None and not known(program, family)


def _unpacked(words: Sequence[str]) -> list[str]:
    """Words, with a command line that is one of them (`bash -c "..."`) in words of its own."""
    out: list[str] = []
    for word in words:
        if _SPACE.search(word) and " --" in f" {word}" and not word.startswith("--"):
            try:
                out += shlex.split(word)
            except ValueError:
                out += word.split()
        else:
            out.append(word)
    return out


def _parted(words: list[str]) -> tuple[list[str], str | None, list[str]]:
    """What starts the processes, the training program, and what that is given."""
    for index, word in enumerate(words):
        module = word == "-m" and index + 1 < len(words) and not words[index + 1].startswith(_LAUNCHERS)
        if module:
            return words[: index + 2], words[index + 1], words[index + 2 :]
        if word.endswith(".py"):
            return words[: index + 1], word, words[index + 1 :]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:first] if first and words[0].isidentifier() else [], None, words[first:]


def _vocabulary(d: Draft, notes: list[str], extra: Sequence[str]) -> list[str]:
    """The vocabulary, where neither flags nor overrides say it: that of a shipped model of the same shape.

    Where there is none, a number that stands for it is set, and its key returned.
    """
    key = "model.vocab_size"
    if key in d or any(word.startswith((f"{key}=", "model=")) for word in extra):
        return []
    like = same_shape(d)
    if like is None:
        d[key] = VOCAB_MULTIPLE * max(1, d["parallel.tp"])
        notes.append(f"{key} is left to fill in: only the tokenizer knows it, and that is not read")
        return [key]
    size = section("model", like).model_dump()["vocab_size"]
    d[key] = vocabulary(size, VOCAB_MULTIPLE * d["parallel.tp"])
    notes.append(f"the vocabulary of {size} is that of model={like}, which has the same shape; no tokenizer is read")
    return []


def _padding(run: RunConfig, said: Draft, notes: list[str]) -> RunConfig:
    """Megatron-LM's softmax is over the padded vocabulary: `run` says so where there is padding, and only there."""
    key, m = "model.mask_padded_vocab", run.model
    if key in said:
        return run
    if m.vocab_size == m.padded_vocab_size:
        return run.model_copy(update={"model": m.model_copy(update={"mask_padded_vocab": True})})
    if not m.mask_padded_vocab:
        notes.append(f"{m.padding_in_words}, as in Megatron-LM; {key}=true masks it")
    return run


def export_words(run: RunConfig) -> tuple[World, list[list[str]]]:
    """The world of a resolved configuration, and its flags with their values in the order of the table."""
    values = run.flat()
    ranks, nodes = run.parallel.ranks or 1, run.cluster.nodes
    words = ["--distributed-backend", "gloo"] if facts_of(run.cluster.device).on_host else []
    for entry in table():
        words += entry.write(values)
    return World(nodes, max(1, ranks // nodes)), list(_grouped(words))


def _grouped(words: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def export_script(run: RunConfig, by_steps: RunConfig | None = None) -> str:
    """A command line that means what `run` means, and in comments what has no flag.

    The flags are those of `by_steps`, where it is given: the same run with what it does by time counted in steps.
    What no flag says is found out by reading the flags back, so that nothing is lost unsaid.
    """
    world, groups = export_words(by_steps or run)
    groups += bert_words(run)
    program_file = PROGRAM if is_megatrons(run) else "pretrain_gpt.py"
    lines = [" ".join([*world.words(), program_file]), *(" ".join(map(_quoted, group)) for group in groups)]
    text = " \\\n  ".join(lines) + "\n"
    left = leftover_keys(run, text)
    if run.model.padding_in_words and run.model.mask_padded_vocab:
        text += f"# {run.model.padding_in_words} here; Megatron-LM has it in the softmax: its losses are others.\n"
    if run.model.family != "gpt" and not is_megatrons(run):
        text += f"# This command trains a decoder-only model of these sizes, none of the family {run.model.family}.\n"
    name = run.optim.name
    if OPTIMIZERS[name].megatron_name is None:
        text += f"# Megatron-LM has no {name}: this command trains adam with the settings of {name}.\n"
    if left:
        text += f"# What has no flag; `{program()} recipe import` reads these lines.\n"
        text += "".join(f"{MARK}{word}\n" for word in left)
    return text


def _quoted(word: str) -> str:
    """A word of a shell; what a terminal would obey, or a line would end at, as an escape of bash."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (c.isprintable() and c not in "'\\" for c in word)
    codes = (c if ok else "".join(f"\\x{b:02x}" for b in c.encode()) for c, ok in zip(word, plain, strict=True))
    return f"$'{''.join(codes)}'"


def leftover_keys(run: RunConfig, text: str) -> list[str]:
    """Keys with their values that make of the flags in `text` the configuration they were written from."""
    back = import_texts([(text, "export")], "imported").run
    per_node = back.cluster.devices_per_node
    derived = back.parallel.ranks is None and per_node == run.cluster.devices_per_node
    if derived and per_node is not None:  # the number of ranks is resolved from the machines
        whole = back.parallel.model_copy(update={"ranks": back.cluster.nodes * per_node})
        back = back.model_copy(update={"parallel": whole})
    wanted, out = run.flat(), list[str]()
    for key in unequal(back, run):
        above = next((p for p in _above(key) if wanted.get(p, ...) is None), None)
        if above is not None:
            out.append(f"{above}=null")
        elif key in wanted:
            out.append(f"{key}={spell(wanted[key])}")
    for key, value in {"cluster.peak_tflops": run.to_dict()["cluster"]["peak_tflops"]}.items():
        if any(word.startswith(f"{key}.") for word in out):
            out = [word for word in out if not word.startswith(f"{key}.")]
            out.append(f"{key}={spell(value)}")
    return list(dict.fromkeys(out))


def _above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
