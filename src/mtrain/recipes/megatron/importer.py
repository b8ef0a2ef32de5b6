"""A script or a command line of Megatron-LM as a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtrain.config.compose.dump import spell
from mtrain.config.compose.overrides import read_overrides
from mtrain.config.compose.yaml_reader import UNSHOWN, refuse_hidden
from mtrain.config.disk.files import SCRIPT_ENDINGS, read_text
from mtrain.config.machine.devices import AUTO
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.resolve.watch import read_from, touches
from mtrain.config.schema.model import VOCAB_MULTIPLE
from mtrain.config.schema.run import UnresolvedRun
from mtrain.recipes.delta import section
from mtrain.recipes.imported import (
    WHOLE,
    Imported,
    build,
    exported_keys,
    name_of,
    numeric_changes,
    same_shape,
)
from mtrain.recipes.megatron.arguments import Arguments, Draft
from mtrain.recipes.megatron.command import training_command
from mtrain.recipes.megatron.flags_model import bert_keys
from mtrain.recipes.megatron.flags_training import vocabulary
from mtrain.recipes.megatron.processes import Requested, directives, requested_by, starts_several
from mtrain.recipes.megatron.reading import (
    absent_words,
    blacked_out,
    leave_open,
    read_flags,
    set_cluster,
    unplaced_flags,
    unread_words,
    without_secrets,
)
from mtrain.recipes.megatron.table import known_flags
from mtrain.recipes.secrets import Secrets
from mtrain.recipes.shell.gaps import Word, pieces_of, shown
from mtrain.recipes.shell.reader import Opener, Script, read_script

VOCABULARY = "model.vocab_size"
# an import gives the same recipe on every machine
_NO_MACHINE = Machine(cpu_cores=1, memory_bytes=0)


def import_scripts(paths: Sequence[Path], extra: Sequence[str] = ()) -> Imported:
    """Read scripts, or files that hold only flags, the later ones as if they sourced the earlier.

    Nothing is run. `extra` are overrides in our own grammar, for values that the scripts do not
    set.

    Raises:
        ConfigError: no flags are found, a required one is missing, or a value is refused.
    """
    return import_texts(read_texts(paths), name_of(paths[-1]), extra, opener=open_neighbour)


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return files as texts, each with its name.

    Raises:
        ConfigError: one cannot be read, or has invisible characters.
    """
    texts = []
    for path in paths:
        text = read_text(path, str(path), SCRIPT_ENDINGS)
        refuse_hidden(text, str(path), UNSHOWN)
        texts.append((text, str(path)))
    return texts


def open_neighbour(path: str, script: str) -> tuple[str, str] | None:
    """Return text and name of a sourced file if it lies next to the script, else None."""
    for folder in dict.fromkeys((Path(), Path(script).parent)):
        # no link leads out of the folder: a foreign script names what is read
        file = Path(os.path.realpath(folder / path))
        inside = os.path.realpath(folder) in map(str, file.parents)
        is_script = file.suffix in SCRIPT_ENDINGS and file.is_file()
        if inside and is_script and not os.path.isabs(path):
            return read_texts([folder / path])[0]
    return None


def import_texts(
    texts: Sequence[tuple[str, str]],
    name: str,
    extra: Sequence[str] = (),
    *,
    opener: Opener | None = None,
) -> Imported:
    """Import scripts from texts, each with its source; `name` is the name of the model."""
    whole = "\n".join(text for text, _ in texts)
    script = read_script(*texts, opener=opener)
    return import_commands(
        script, name, texts[-1][1], extra, directives(whole), exported_keys(whole, texts[-1][1])
    )


def import_commands(
    script: Script,
    name: str,
    source: str,
    extra: Sequence[str] = (),
    options: Mapping[str, str] = MappingProxyType({}),
    exported: Mapping[str, Any] = MappingProxyType({}),
) -> Imported:
    """Return the configuration of the training command of a script.

    Args:
        script: the commands; `source`: the file that holds them.
        name: the name of the model.
        extra: overrides in our own grammar.
        options: the directives of a batch script.
        exported: keys without a flag, from the lines that an export wrote.

    Raises:
        ConfigError: no flags are found, a required one is missing, or a value is refused.
    """
    # unknown flags, too: Megatron-LM has no --wandb-api-key
    secrets = Secrets(
        {n: _known(words) for n, words in {**script.secrets, **_given_as_flags(script)}.items()}
    )
    command = training_command(script, source)
    launched = requested_by(command.launcher, options)
    notes = [*command.notes, *script.notes]
    why_unknown = launched.why if launched.world is None and command.launcher else ""
    several = starts_several(command.launcher)
    if why_unknown and not several:
        notes.append(f"{why_unknown}: cluster.nodes and cluster.devices_per_node are unset")
    # `python pretrain_gpt.py` is a training on one GPU
    if _starts_one_process(command.launcher):
        why_unknown = ""
    world = launched if launched.world is not None or several else None
    return import_words(
        command.words,
        world,
        name,
        source,
        extra,
        secrets,
        notes,
        dict(exported),
        why_unknown,
        family=command.family,
        doubt=command.doubt,
    )


def import_words(
    words: Sequence[Word],
    launched: Requested | None,
    name: str,
    source: str,
    extra: Sequence[str],
    secrets: Secrets,
    notes: Sequence[str],
    exported: Draft,
    why_unknown: str = "",
    *,
    family: str = "gpt",
    doubt: str = "",
) -> Imported:
    """Return the configuration of a program's words and the processes that run it.

    Args:
        words: the words after the program.
        launched: the started processes, None if nothing starts several; `why_unknown`: why they
            are unknown.
        name: the name of the model.
        source: the file that holds the words.
        extra: overrides in our own grammar; `exported`: keys without a flag, from an export.
        secrets: values that are never shown.
        notes: earlier notes.
        family: the family that the program trains, gpt or bert.
        doubt: why the user may mean other words.
    """
    arguments, draft, left = read_flags(
        words, launched.world if launched is not None else None, why_unknown
    )
    if family == "bert":
        # over the keys of GPTs, which share most flags
        draft |= bert_keys(arguments, draft, left)
    set_cluster(arguments, draft, launched, left)
    # before anything is written or shown
    without_secrets(draft, arguments, secrets)
    draft["model.name"] = name
    notes = [*notes, *absent_words(arguments), *arguments.notes]
    leave_open(arguments, draft, left)
    if VOCABULARY not in exported:
        _vocabulary(draft, notes, extra, left)
    run = _padding(build(draft, arguments, extra, source, exported), exported, notes)
    unplaced = blacked_out([*unplaced_flags(arguments), *unread_words(arguments)], secrets)
    doubts = [*filter(None, [left.get(WHOLE), doubt]), *numeric_changes(unplaced)]
    if doubts:
        left[WHOLE] = "; ".join(doubts)
    given = read_overrides(extra)
    left = {
        key: secrets.hide(why)
        for key, why in left.items()
        if key not in exported
        and key not in given.values
        and key.partition(".")[0] not in given.choices
    }
    notes += _unset_keys(draft | exported, run, extra, list(left))
    # with open keys, the layout is not known yet
    if not any(key.startswith(("parallel.", "cluster.")) for key in left):
        notes += _too_few(run)
    return Imported(run, unplaced, [secrets.hide(note) for note in dict.fromkeys(notes)], left)


def _starts_one_process(launcher: Sequence[Word]) -> bool:
    """Return whether Python itself starts the program, in one process."""
    return (
        bool(launcher)
        and shown(launcher[0]).rpartition("/")[2].startswith("python")
        and "-m" not in launcher
    )


def _known(words: Sequence[Word]) -> list[str]:
    """Return the known pieces of words."""
    return [piece for word in words for piece in pieces_of(word) if isinstance(piece, str)]


def _given_as_flags(script: Script) -> dict[str, list[Word]]:
    """Return secrets given as flags: `--wandb-api-key VALUE` under the name of the flag."""
    out: dict[str, list[Word]] = {}
    for command in script.commands:
        for flag, values in Arguments(command.words).flags.items():
            if flag not in known_flags():
                out.setdefault(flag, []).extend(values)
    return out


def _vocabulary(draft: Draft, notes: list[str], extra: Sequence[str], left: dict[str, str]) -> None:
    """Set a vocabulary that neither flags nor overrides set: that of a shipped model of the same
    shape.

    If there is no such model, or an unknown flag sets it, a number stands in and the key is left
    open.
    """
    if any(word.startswith((f"{VOCABULARY}=", "model=")) for word in extra):
        return
    if VOCABULARY in draft and VOCABULARY not in left:
        return
    # a model of unknown shape has no lookalike
    open_shape = any(key.startswith("model.") for key in left)
    lookalike = None if open_shape else same_shape(draft)
    if lookalike is None:
        draft.setdefault(VOCABULARY, VOCAB_MULTIPLE * max(1, draft["parallel.tp"]))
        left.setdefault(VOCABULARY, "only the tokenizer knows it, and that is not read")
        notes.append(f"{VOCABULARY} is left to fill in: {left[VOCABULARY]}")
        return
    size = section("model", lookalike).model_dump()["vocab_size"]
    draft[VOCABULARY] = vocabulary(size, VOCAB_MULTIPLE * draft["parallel.tp"])
    notes.append(
        f"the vocabulary of {size} is that of model={lookalike}, which has the same shape; no"
        " tokenizer is read"
    )


def _padding(run: UnresolvedRun, exported: Draft, notes: list[str]) -> UnresolvedRun:
    """Set the mask of padded ids: Megatron-LM's softmax includes the padding."""
    key = "model.mask_padded_vocab"
    m = run.model
    if key in exported:
        return run
    if m.vocab_size == m.padded_vocab_size:
        # true is the default, which a recipe does not repeat
        return run.model_copy(update={"model": m.model_copy(update={"mask_padded_vocab": True})})
    if not m.mask_padded_vocab:
        notes.append(f"{m.padding_in_words}, as in Megatron-LM; {key}=true masks it")
    return run


def _unset_keys(
    draft: Draft, run: UnresolvedRun, extra: Sequence[str], left: Sequence[str]
) -> list[str]:
    """Return notes on keys that Megatron-LM requires and the script does not set: their values, and
    why.

    `left` are keys that are still to be filled in; values that depend on them, or on the machine,
    are unknown.
    """
    keys = ("trainer.train_iters", "optim.lr", "data.seq_length", "trainer.global_batch_size")
    made_from: dict[str, frozenset[str]] = {}
    why: dict[str, str] = {}
    unknown = [*left]
    if run.cluster.device == AUTO:
        unknown.append("cluster.device")
    values = resolve(run, _NO_MACHINE, made_from=made_from, why=why).flat()

    def becomes(key: str) -> str:
        if touches(read_from([key], made_from), unknown):
            return "chosen where it runs"
        return spell(values[key]) + (f", {why[key]}" if key in why else "")

    missing = [
        key
        for key in keys
        if key not in [*draft, *left] and not any(word.startswith(f"{key}=") for word in extra)
    ]
    return [f"{key} is not set; it is {becomes(key)}" for key in missing]


def _too_few(run: UnresolvedRun) -> list[str]:
    """Return a note if the script starts fewer processes than its layout has."""
    p = run.parallel
    per_node = run.cluster.devices_per_node
    ranks = p.ranks or (run.cluster.nodes * per_node if per_node else None)
    etp = p.etp or p.tp
    needed, axes = max(
        (p.model_ranks, f"tp {p.tp} x cp {p.cp} x pp {p.pp}"),
        (p.ep * etp * p.pp, f"ep {p.ep} x etp {etp} x pp {p.pp}"),
        key=lambda pair: pair[0],
    )
    if ranks is None or ranks >= needed:
        return []
    nodes = f": set cluster.nodes={-(-needed // per_node)}" if per_node else ""
    return [
        f"the script starts {ranks} processes, and its layout has at least {axes} = {needed}{nodes}"
    ]
