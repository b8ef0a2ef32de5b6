"""A script or a command line of Megatron-LM as a configuration, and a configuration as its command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtrain.config.dump import spell
from mtrain.config.files import SCRIPT_ENDINGS, read_text
from mtrain.config.load import UNSHOWN, refuse_hidden
from mtrain.config.model import VOCAB_MULTIPLE
from mtrain.config.run import RunConfig
from mtrain.errors import BadInput, Problem
from mtrain.recipes.arguments import Arguments, Draft
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
from mtrain.recipes.secrets import Secrets
from mtrain.recipes.shell import UNKNOWN, Command, Script, read_script, shown
from mtrain.recipes.table import known_flags, table
from mtrain.recipes.write import section, unequal

FEW_FLAGS = 3
SLURM_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def import_scripts(paths: Sequence[Path], extra: Sequence[str] = ()) -> Imported:
    """Reads scripts, or files that hold nothing but flags, the later ones as if they sourced the earlier.

    Nothing of them is run. `extra` are overrides in our own grammar, for what the scripts do not say.

    Raises:
        BadInput: no flags are found, a required one is missing, or a value is refused.
    """
    texts = []
    for path in paths:
        text = read_text(path, str(path), SCRIPT_ENDINGS)
        refuse_hidden(text, str(path), UNSHOWN)
        texts.append((text, str(path)))
    return import_texts(texts, name_of(paths[-1]), extra)


def import_texts(texts: Sequence[tuple[str, str]], name: str, extra: Sequence[str] = ()) -> Imported:
    """`import_scripts` for texts that were read before, each with its source; `name` is what the model is called."""
    source, whole = texts[-1][1], "\n".join(text for text, _ in texts)
    script = read_script(*texts)
    secrets = Secrets({**script.variables, **_given_as_flags(script)})
    launcher, words, notes = _training_command(script, source)
    world = world_of(launcher, directives(whole))
    a, d = read_flags(words, world)
    if world is None and launcher:
        notes.append("how many processes it starts is not said: cluster.nodes and cluster.devices_per_node are unset")
    notes += a.notes
    backend_of(a, d, world)
    without_secrets(d, a, secrets)
    d["model.name"] = name
    said = residue(whole, source)
    if "model.vocab_size" not in said:
        _vocabulary(d, notes, extra, source)
    run = _padding(build(d, a, extra, source, said), said, notes)
    notes += _unsaid(d | said, run, extra)
    notes += [f"{where}: {flag} is added only under a condition, and is left out" for flag, where in script.left_out]
    notes += [
        f"{c.where}: {c.words[1]} is not read; give it before this file if it sets what is missing"
        for c in script.commands
        if c.words[0] in ("source", ".") and len(c.words) > 1
    ]
    used = {what.strip("${}") for word in words for what in UNKNOWN.findall(word)}
    notes += [f"{where}: ${v} is set only under a condition" for v, where in script.conditional.items() if v in used]
    return Imported(run, blacked_out(leftovers(a), secrets), [secrets.hide(shown(n)) for n in dict.fromkeys(notes)])


def _given_as_flags(script: Script) -> dict[str, list[str]]:
    """Secrets given as flags: `--wandb-api-key VALUE` under the name of the flag."""
    out: dict[str, list[str]] = {}
    for command in script.commands:
        for flag, values in Arguments(command.words).flags.items():
            if flag not in known_flags():
                out.setdefault(flag, []).extend(values)
    return out


def _training_command(script: Script, source: str) -> tuple[list[str], list[str], list[str]]:
    """The launcher's words and the training script's, of the command with the most flags that are known."""
    best: tuple[int, bool, list[str], list[str], Command] | None = None
    others: list[Command] = []
    for command in script.commands:
        launcher, words = _parted(_unpacked(command.words))
        count = len({w.partition("=")[0] for w in words} & known_flags())
        if count < (1 if launcher else FEW_FLAGS):
            continue
        others.append(command)
        if best is None or (not command.conditional, count) > (best[1], best[0]):
            best = (count, not command.conditional, launcher, words, command)
    if best is not None:
        notes = [f"{c.where}: another command with such flags is not read" for c in others if c is not best[4]]
        if best[4].conditional:
            notes.append(f"{best[4].where}: the command stands in a condition or a loop; it is read once")
        return best[2], best[3], notes
    words = [word for held in script.variables.values() for item in held for word in _unpacked([item])]
    if len({w.partition("=")[0] for w in words} & known_flags()) >= FEW_FLAGS:
        return [], words, ["no command uses the flags: those of all variables are read"]
    rule = "no flags of Megatron-LM are found in it"
    fix = "the file of a training script, or of nothing but its flags"
    raise BadInput([Problem("MT701", "", None, rule, fix, source)])


def _unpacked(words: Sequence[str]) -> list[str]:
    """Words, with a command line that is one of them (`bash -c "..."`) in words of its own."""
    out: list[str] = []
    for word in words:
        if any(sign.isspace() for sign in word) and " --" in f" {word}" and not word.startswith("--"):
            try:
                out += shlex.split(word)
            except ValueError:
                out += word.split()
        else:
            out.append(word)
    return out


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """What starts the processes, and what the training script is given."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return words[: index + 1], words[index + 1 :]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:first] if first and words[0].isidentifier() else [], words[first:]


def _vocabulary(d: Draft, notes: list[str], extra: Sequence[str], source: str) -> None:
    """The vocabulary, where neither flags nor overrides say it: that of a shipped model of the same shape."""
    key = "model.vocab_size"
    if key in d or any(word.startswith((f"{key}=", "model=")) for word in extra):
        return
    like = same_shape(d)
    if like is None:
        rule = "the size of the vocabulary is known only to the tokenizer, which is not read"
        raise BadInput([Problem("MT702", key, None, rule, f"{key}=32000", source)])
    size = section("model", like).model_dump()["vocab_size"]
    d[key] = vocabulary(size, VOCAB_MULTIPLE * d["parallel.tp"])
    notes.append(f"the vocabulary of {size} is that of model={like}, which has the same shape; no tokenizer is read")


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


def _unsaid(d: Draft, run: RunConfig, extra: Sequence[str]) -> list[str]:
    """Notes on what Megatron-LM insists on being told and was not."""
    keys = ("trainer.train_iters", "optim.lr", "data.seq_length", "trainer.global_batch_size")
    values = run.flat()
    missing = [key for key in keys if key not in d and not any(word.startswith(f"{key}=") for word in extra)]
    return [f"{key} is not said; it is {spell(values[key])}" for key in missing]


def export_words(run: RunConfig) -> tuple[World, list[list[str]]]:
    """The world of a resolved configuration, and its flags with their values in the order of the table."""
    values = run.flat()
    ranks, nodes = run.parallel.ranks or 1, run.cluster.nodes
    words = ["--distributed-backend", "gloo"] if run.cluster.device == "cpu" else []
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


def export_script(run: RunConfig) -> str:
    """A command line that means what `run` means, and in comments what has no flag.

    What no flag says is found out by reading the flags back, so that nothing is lost unsaid.
    """
    world, groups = export_words(run)
    lines = [" ".join([*world.words(), "pretrain_gpt.py"]), *(" ".join(map(_quoted, group)) for group in groups)]
    text = " \\\n  ".join(lines) + "\n"
    left = leftover_keys(run, text)
    if run.model.padding_in_words and run.model.mask_padded_vocab:
        text += f"# {run.model.padding_in_words} here; Megatron-LM has it in the softmax: its losses are others.\n"
    if left:
        text += "# What has no flag; `mtrain recipe import` reads these lines.\n"
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
