"""A configuration as a command line of Megatron-LM, with comments for keys without a flag."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from mtrain.config.compose.dump import spell
from mtrain.config.compose.paths import program
from mtrain.config.machine.devices import facts_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.run import RunConfig
from mtrain.recipes.delta import unequal
from mtrain.recipes.imported import MARK
from mtrain.recipes.megatron.flags_model import PROGRAM, bert_words, is_megatrons
from mtrain.recipes.megatron.importer import import_texts
from mtrain.recipes.megatron.processes import World
from mtrain.recipes.megatron.table import table


def export_words(run: RunConfig) -> tuple[World, list[list[str]]]:
    """Return the world of a resolved configuration, and its flags with their values."""
    values = run.flat()
    ranks = run.parallel.ranks
    nodes = run.cluster.nodes
    # on CPUs, Megatron-LM has no other backend
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
    """Return a command line equivalent to `run`, with comments for keys without a flag.

    The flags are those of `by_steps`, if given: the same run with its time-based intervals counted
    in steps. Keys without a flag are found by reading the flags back, so that none is lost
    silently.
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
            " differ.\n"
        )
    if run.model.family != "gpt" and not is_megatrons(run):
        text += (
            "# This command trains a decoder-only model of these sizes, not one of the family"
            f" {run.model.family}.\n"
        )
    name = run.optim.name
    if OPTIMIZERS[name].megatron_name is None:
        text += (
            f"# Megatron-LM has no {name}: this command trains adam with the settings of {name}.\n"
        )
    if left:
        text += f"# Keys without a flag; `{program()} recipe import` reads these lines.\n"
        text += "".join(f"{MARK}{word}\n" for word in left)
    return text


def _quoted(word: str) -> str:
    """Return a word quoted for a shell, with odd characters as escapes of bash."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (c.isprintable() and c not in "'\\" for c in word)
    codes = (
        c if ok else "".join(f"\\x{b:02x}" for b in c.encode())
        for c, ok in zip(word, plain, strict=True)
    )
    return f"$'{''.join(codes)}'"


def leftover_keys(run: RunConfig, text: str) -> list[str]:
    """Return the values that complete the flags in `text` to their configuration."""
    # a user gets the result of reading it back
    back = import_texts([(text, "export")], "imported").run
    per_node = back.cluster.devices_per_node
    derived = back.parallel.ranks is None and per_node == run.cluster.devices_per_node
    if derived and per_node is not None:  # the number of ranks follows from the machines
        whole = back.parallel.model_copy(update={"ranks": back.cluster.nodes * per_node})
        back = back.model_copy(update={"parallel": whole})
    wanted = run.flat()
    out = list[str]()
    for key in unequal(back, run):
        # one line for a section that is null instead of one for each of its keys
        above = next((p for p in _above(key) if wanted.get(p, ...) is None), None)
        if above is not None:
            out.append(f"{above}=null")
        elif key in wanted:
            out.append(f"{key}={spell(wanted[key])}")
    # a line replaces a mapping as a whole
    for key, value in {"cluster.peak_tflops": run.to_dict()["cluster"]["peak_tflops"]}.items():
        if any(word.startswith(f"{key}.") for word in out):
            out = [word for word in out if not word.startswith(f"{key}.")]
            out.append(f"{key}={spell(value)}")
    return list(dict.fromkeys(out))


def _above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
