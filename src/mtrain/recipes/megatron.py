"""A script or a command line of Megatron-LM as a configuration, and a configuration as its command
line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtrain.config.compose.dump import spell
from mtrain.config.compose.overrides import read_overrides
from mtrain.config.compose.paths import program
from mtrain.config.compose.yaml_reader import UNSHOWN, refuse_hidden
from mtrain.config.disk.files import SCRIPT_ENDINGS, read_text
from mtrain.config.machine.devices import facts_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.model import VOCAB_MULTIPLE
from mtrain.config.schema.run import RunConfig
from mtrain.recipes.arguments import Arguments, Draft
from mtrain.recipes.command import training_command
from mtrain.recipes.flags_bert import PROGRAM, bert_keys, bert_words, is_megatrons
from mtrain.recipes.flags_training import vocabulary
from mtrain.recipes.gaps import Word, shown
from mtrain.recipes.imported import (
    MARK,
    WHOLE,
    Imported,
    absent_words,
    backend_of,
    blacked_out,
    build,
    changing,
    leave_open,
    leftovers,
    name_of,
    read_flags,
    residue,
    same_shape,
    unread_words,
    without_secrets,
)
from mtrain.recipes.launch import Asked, World, asked_of, directives, starts_several
from mtrain.recipes.notes import too_few
from mtrain.recipes.notes import unsaid as unsaid_keys
from mtrain.recipes.secrets import Secrets
from mtrain.recipes.shell import Opener, Script, read_script
from mtrain.recipes.table import known_flags, table
from mtrain.recipes.write import section, unequal

VOCABULARY = "model.vocab_size"


def import_scripts(paths: Sequence[Path], extra: Sequence[str] = ()) -> Imported:
    """Read scripts, or files that hold nothing but flags, the later ones as if they sourced the
    earlier.

    Nothing of them is run. `extra` are overrides in our own grammar, for what the scripts do not
    say.

    Raises:
        ConfigError: no flags are found, a required one is missing, or a value is refused.
    """
    return import_texts(read_texts(paths), name_of(paths[-1]), extra, opener=open_neighbour)


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return files as texts, each with its name.

    Raises:
        ConfigError: one cannot be read, or has characters that are not shown.
    """
    texts = []
    for path in paths:
        text = read_text(path, str(path), SCRIPT_ENDINGS)
        refuse_hidden(text, str(path), UNSHOWN)
        texts.append((text, str(path)))
    return texts


def open_neighbour(path: str, script: str) -> tuple[str, str] | None:
    """Return the text and the name of a file that a script sources, where it is one beside it; None
    of any other file.
    """
    for folder in dict.fromkeys((Path(), Path(script).parent)):
        found = Path(os.path.realpath(folder / path))
        inside = os.path.realpath(folder) in map(str, found.parents)
        if (
            inside
            and found.suffix in SCRIPT_ENDINGS
            and found.is_file()
            and not os.path.isabs(path)
        ):
            return read_texts([folder / path])[0]
    return None


def import_texts(
    texts: Sequence[tuple[str, str]],
    name: str,
    extra: Sequence[str] = (),
    *,
    opener: Opener | None = None,
) -> Imported:
    """`import_scripts` for texts that were read before, each with its source; `name` is what the
    model is called.
    """
    whole = "\n".join(text for text, _ in texts)
    script = read_script(*texts, opener=opener)
    return import_commands(
        script, name, texts[-1][1], extra, directives(whole), residue(whole, texts[-1][1])
    )


def import_commands(
    script: Script,
    name: str,
    source: str,
    extra: Sequence[str] = (),
    asked: Mapping[str, str] = MappingProxyType({}),
    said: Mapping[str, Any] = MappingProxyType({}),
) -> Imported:
    """Return the configuration of the command, among those of a script, that trains.

    Args:
        script: the commands; `source`: what holds them.
        name: what the model is called.
        extra: overrides in our own grammar.
        asked: the directives of a batch script.
        said: keys that an export wrote, which have no flag.

    Raises:
        ConfigError: no flags are found, a required one is missing, or a value is refused.
    """
    secrets = Secrets(
        {n: _known(words) for n, words in {**script.secrets, **_given_as_flags(script)}.items()}
    )
    found = training_command(script, source)
    launched = asked_of(found.launcher, asked)
    notes = [*found.notes, *script.notes]
    unsaid = launched.why if launched.world is None and found.launcher else ""
    several = starts_several(found.launcher)
    if unsaid and not several:
        notes.append(f"{unsaid}: cluster.nodes and cluster.devices_per_node are unset")
    if _alone(found.launcher):
        unsaid = ""
    world = launched if launched.world is not None or several else None
    return import_words(
        found.words,
        world,
        name,
        source,
        extra,
        secrets,
        notes,
        dict(said),
        unsaid,
        family=found.family,
        doubt=found.doubt,
    )


def import_words(
    words: Sequence[Word],
    launched: Asked | None,
    name: str,
    source: str,
    extra: Sequence[str],
    secrets: Secrets,
    notes: Sequence[str],
    said: Draft,
    unsaid: str = "",
    *,
    family: str = "gpt",
    doubt: str = "",
) -> Imported:
    """Return a configuration of a program's words and the world it is started in.

    Args:
        words: what stands behind the program.
        launched: the processes that are started, None where nothing starts several; `unsaid`: why
            they are not known.
        name: what the model is called.
        source: what holds the words.
        extra: overrides in our own grammar; `said`: keys that an export wrote, which have no flag.
        secrets: what is shown nowhere.
        notes: what was found out before.
        family: what the program trains, gpt or bert.
        doubt: why the words may not be those that are meant.
    """
    a, d, left = read_flags(words, launched.world if launched is not None else None, unsaid)
    if family == "bert":
        d |= bert_keys(a, d, left)
    backend_of(a, d, launched, left)
    without_secrets(d, a, secrets)
    d["model.name"] = name
    notes = [*notes, *absent_words(a), *a.notes]
    leave_open(a, d, left)
    if VOCABULARY not in said:
        _vocabulary(d, notes, extra, left)
    run = _padding(build(d, a, extra, source, said), said, notes)
    unplaced = blacked_out([*leftovers(a), *unread_words(a)], secrets)
    doubts = [*filter(None, [left.get(WHOLE), doubt]), *changing(unplaced)]
    if doubts:
        left[WHOLE] = "; ".join(doubts)
    given = read_overrides(extra)
    left = {
        key: secrets.hide(why)
        for key, why in left.items()
        if key not in said
        and key not in given.values
        and key.partition(".")[0] not in given.choices
    }
    notes += unsaid_keys(d | said, run, extra, list(left))
    notes += [] if any(key.startswith(("parallel.", "cluster.")) for key in left) else too_few(run)
    return Imported(run, unplaced, [secrets.hide(note) for note in dict.fromkeys(notes)], left)


def _alone(launcher: Sequence[Word]) -> bool:
    """Return whether a program is started by Python itself, in one process."""
    return (
        bool(launcher)
        and shown(launcher[0]).rpartition("/")[2].startswith("python")
        and "-m" not in launcher
    )


def _known(words: Sequence[Word]) -> list[str]:
    """Return the texts of words, as far as they are known."""
    pieces = (
        piece for word in words for piece in ((word,) if isinstance(word, str) else word.pieces)
    )
    return [piece for piece in pieces if isinstance(piece, str)]


def _given_as_flags(script: Script) -> dict[str, list[Word]]:
    """Secrets given as flags: `--wandb-api-key VALUE` under the name of the flag."""
    out: dict[str, list[Word]] = {}
    for command in script.commands:
        for flag, values in Arguments(command.words).flags.items():
            if flag not in known_flags():
                out.setdefault(flag, []).extend(values)
    return out


def _vocabulary(d: Draft, notes: list[str], extra: Sequence[str], left: dict[str, str]) -> None:
    """The vocabulary, where neither flags nor overrides say it: that of a shipped model of the same
    shape.

    Where there is none, or a flag says it that is not known, a number stands for it and the key is
    left open.
    """
    if any(word.startswith((f"{VOCABULARY}=", "model=")) for word in extra):
        return
    if VOCABULARY in d and VOCABULARY not in left:
        return
    open_shape = any(key.startswith("model.") for key in left)
    like = None if open_shape else same_shape(d)
    if like is None:
        d.setdefault(VOCABULARY, VOCAB_MULTIPLE * max(1, d["parallel.tp"]))
        left.setdefault(VOCABULARY, "only the tokenizer knows it, and that is not read")
        notes.append(f"{VOCABULARY} is left to fill in: {left[VOCABULARY]}")
        return
    size = section("model", like).model_dump()["vocab_size"]
    d[VOCABULARY] = vocabulary(size, VOCAB_MULTIPLE * d["parallel.tp"])
    notes.append(
        f"the vocabulary of {size} is that of model={like}, which has the same shape; no tokenizer"
        " is read"
    )


def _padding(run: RunConfig, said: Draft, notes: list[str]) -> RunConfig:
    """Megatron-LM's softmax is over the padded vocabulary: `run` says so where there is padding,
    and only there.
    """
    key = "model.mask_padded_vocab"
    m = run.model
    if key in said:
        return run
    if m.vocab_size == m.padded_vocab_size:
        return run.model_copy(update={"model": m.model_copy(update={"mask_padded_vocab": True})})
    if not m.mask_padded_vocab:
        notes.append(f"{m.padding_in_words}, as in Megatron-LM; {key}=true masks it")
    return run


def export_words(run: RunConfig) -> tuple[World, list[list[str]]]:
    """Return the world of a resolved configuration, and its flags with their values in the order of
    the table.
    """
    values = run.flat()
    ranks = run.parallel.world
    nodes = run.cluster.nodes
    words = ["--distributed-backend", "gloo"] if facts_of(run.cluster.device).on_host else []
    for entry in table():
        words += entry.write(values)
    return World(nodes, max(1, ranks // nodes)), list(_grouped(words))


def _grouped(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def export_script(run: RunConfig, by_steps: RunConfig | None = None) -> str:
    """Return a command line that means what `run` means, and in comments what has no flag.

    The flags are those of `by_steps`, where it is given: the same run with what it does by time
    counted in steps. What no flag says is found out by reading the flags back, so that nothing is
    lost unsaid.
    """
    world, groups = export_words(by_steps or run)
    groups += bert_words(run)
    program_file = PROGRAM if is_megatrons(run) else "pretrain_gpt.py"
    lines = [
        " ".join([*world.words(), program_file]),
        *(" ".join(map(_quoted, group)) for group in groups),
    ]
    text = " \\\n  ".join(lines) + "\n"
    left = leftover_keys(run, text)
    if run.model.padding_in_words and run.model.mask_padded_vocab:
        text += (
            f"# {run.model.padding_in_words} here; Megatron-LM has it in the softmax: its losses"
            " are others.\n"
        )
    if run.model.family != "gpt" and not is_megatrons(run):
        text += (
            "# This command trains a decoder-only model of these sizes, none of the family"
            f" {run.model.family}.\n"
        )
    name = run.optim.name
    if OPTIMIZERS[name].megatron_name is None:
        text += (
            f"# Megatron-LM has no {name}: this command trains adam with the settings of {name}.\n"
        )
    if left:
        text += f"# What has no flag; `{program()} recipe import` reads these lines.\n"
        text += "".join(f"{MARK}{word}\n" for word in left)
    return text


def _quoted(word: str) -> str:
    """Return a word of a shell; what a terminal would obey, or a line would end at, as an
    escape of bash.
    """
    if word.isprintable():
        return shlex.quote(word)
    plain = (c.isprintable() and c not in "'\\" for c in word)
    codes = (
        c if ok else "".join(f"\\x{b:02x}" for b in c.encode())
        for c, ok in zip(word, plain, strict=True)
    )
    return f"$'{''.join(codes)}'"


def leftover_keys(run: RunConfig, text: str) -> list[str]:
    """Return keys with their values that make of the flags in `text` the configuration they were
    written from.
    """
    back = import_texts([(text, "export")], "imported").run
    per_node = back.cluster.devices_per_node
    derived = back.parallel.ranks is None and per_node == run.cluster.devices_per_node
    if derived and per_node is not None:  # the number of ranks is resolved from the machines
        whole = back.parallel.model_copy(update={"ranks": back.cluster.nodes * per_node})
        back = back.model_copy(update={"parallel": whole})
    wanted = run.flat()
    out = list[str]()
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
