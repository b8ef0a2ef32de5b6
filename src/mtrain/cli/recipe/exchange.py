"""`recipe import` and `recipe export`: Megatron-LM's flags and Hugging Face's config.json."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from mtrain.cli.output import needed, refusal, say_json, write_new
from mtrain.cli.recipe.capture import TIMEOUT_S
from mtrain.cli.recipe.capture import capture as record
from mtrain.cli.recipe.files import describe, for_elsewhere
from mtrain.config.compose.paths import program
from mtrain.config.compose.yaml_reader import UNSHOWN, refuse_hidden
from mtrain.config.disk.files import STDIN, download_of, read_stdin
from mtrain.config.messages.validate import MISSING, OPEN, unfilled
from mtrain.config.resolve.resolution import Machine, resolve, world_size_of
from mtrain.config.resolve.watch import read_from, touches
from mtrain.config.rules import check
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import Problem, say_page, visible
from mtrain.plan.time.report import in_steps
from mtrain.recipes.delta import delta, left_open, recipe_text
from mtrain.recipes.diff import overrides_of
from mtrain.recipes.huggingface.importer import import_config
from mtrain.recipes.imported import WHOLE, Imported, name_of
from mtrain.recipes.megatron.exporter import export_script
from mtrain.recipes.megatron.importer import (
    import_commands,
    import_scripts,
    import_texts,
    read_texts,
)
from mtrain.recipes.megatron.yaml_configs import import_yaml, is_yaml
from mtrain.recipes.shell.reader import read_calls

CAPTURE = "--capture"
CONFIG = "config.json"
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
FILES = (*SCRIPTS, ".txt", ".args", ".conf", ".json", ".yaml", ".yml")
_ORDER = ("secret", "unreadable", "unknown", "not supported", "derived here", "no effect")
# The exit code of a recipe with keys to fill in.
INCOMPLETE = 2
UNFILLED = "MT702"
USAGE = (
    "recipe import train.sh [-o my.yaml] [overrides]; also a model_config.yaml, a config.json, or"
    " -- FLAGS"
)


def import_(
    words: Sequence[str],
    *,
    capture: bool,
    timeout: str | None,
    output: str | None,
    as_json: bool,
    command: Sequence[str] | None = None,
) -> int:
    """Print a recipe, or write it to `output`; list every setting without a place on stderr.

    `command` are the words after `--`.
    """
    files = [word for word in words if "=" not in word]
    extra = [word for word in words if "=" in word]
    if capture:
        found = _captured(files, extra, command, timeout)
        # The recipe names its sources: of a command, the words that are files.
        named = [word for word in command or () if Path(word).is_file()]
    else:
        found = _read(files, extra, command)
        named = files
    raw = found.run
    run, problems = _validated(raw, found.open)
    sources = ", ".join(Path(name).name for name in named) or "a command line"
    text = recipe_text(left_open(delta(raw), found.open), _about(found, run, sources, problems))
    if output is not None:
        write_new(Path(output), text)
    if as_json:
        say_json(_facts(found, text, problems, run.digest()))
        return INCOMPLETE if found.open else 0
    done = f"wrote {output}: {program()} check recipe={output}"
    say_page(text if output is None else visible(done))
    for line in _report(found, problems):
        say_page(line, error=True)
    return INCOMPLETE if found.open else 0


def _file_of(name: str) -> str:
    """Return the file that a word names: in a folder its config.json, or the one script in it.

    Raises:
        ConfigError: the folder holds neither, or the word is the name of a model on Hugging Face.
    """
    path = Path(name)
    if path.is_dir():
        if (path / CONFIG).is_file():
            found = [path / CONFIG]
        else:
            found = sorted(p for p in path.iterdir() if p.suffix in SCRIPTS)
        if len(found) == 1:
            return str(found[0])
        rule = f"{name} is a folder with {len(found)} scripts and no {CONFIG}; one file is imported"
        named = " or ".join(f"recipe import {p}" for p in found[:3])
        fix = named or "name the script, or the folder of a model"
        raise refusal(rule, fix, "MT002")
    download = download_of(name, CONFIG)
    if download is not None and not Path(name).suffix.endswith(FILES):
        rule = (
            f"there is no file {name}; if it is the name of a model on Hugging Face, nothing is"
            " downloaded here"
        )
        fix = f"{download[0]}, then recipe import {download[1]}"
        raise refusal(rule, fix, "MT002")
    return name


def _captured(
    files: Sequence[str], extra: Sequence[str], command: Sequence[str] | None, timeout: str | None
) -> Imported:
    """Run a command with recorders in place of launchers, and import the recorded command."""
    if files or not command:
        # Words before `--` were likely meant as the command; a bare script needs its shell.
        script = [] if files and not os.path.isfile(files[0]) else ["bash"]
        words = shlex.join([*script, *(files or ["pretrain.sh"])])
        rule = f"{CAPTURE} runs the command after --"
        fix = f"recipe import {CAPTURE} -- {words}"
        raise refusal(rule, fix)
    seconds = str(TIMEOUT_S) if timeout is None else timeout
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", seconds) or float(seconds) <= 0:
        raise refusal(f"--timeout {seconds}: takes seconds", "--timeout 600")
    return record(command, extra, float(seconds))


def _read(files: Sequence[str], extra: Sequence[str], words: Sequence[str] | None) -> Imported:
    if words is not None:
        refuse_hidden(shlex.join(words), "command line", UNSHOWN)
        return import_commands(
            read_calls([(words, "command line")]), "imported", "command line", extra
        )
    needed(files, USAGE)
    if list(files) == [STDIN]:
        text = read_stdin()
        refuse_hidden(text, "stdin", UNSHOWN)
        if is_yaml(text):
            return import_yaml([(text, "stdin")], "imported", extra)
        return import_texts([(text, "stdin")], "imported", extra)
    files = [_file_of(name) for name in files]
    configs = [name for name in files if name.endswith(".json")]
    if not configs:
        paths = [Path(name) for name in files]
        if paths[-1].suffix in (".yaml", ".yml"):
            return import_yaml(read_texts(paths), name_of(paths[-1]), extra)
        return import_scripts(paths, extra)
    if len(files) > 1:
        rule = "a config.json describes a whole model, so no other file may be given"
        raise refusal(rule, f"recipe import {configs[0]}")
    return import_config(Path(configs[0]), extra)


def _about(
    found: Imported, run: RunConfig, sources: str, problems: Sequence[Problem]
) -> dict[str, str]:
    """Return the words of a recipe about itself, without those that are still open."""
    words = describe(run, f"imported from {sources} by mtrain recipe import")
    broken = ", ".join(
        dict.fromkeys(p.code for p in problems if p.severity == "error" and p.code != UNFILLED)
    )
    report = (
        f"does not pass here: {broken}" if broken else "composes and passes every rule; not trained"
    )
    if WHOLE in found.open:
        report = MISSING
    elif found.open:
        report = f"not complete: {', '.join(found.open)} left to fill in"
    if any(key.startswith(("parallel.", "cluster.")) for key in found.open):
        words |= {
            "title": f"{run.model.name}, not complete",
            "hardware": "Say here what it is for.",
        }
    return {**words, "verified": report}


def _validated(raw: UnresolvedRun, left: Mapping[str, str]) -> tuple[RunConfig, list[Problem]]:
    """Return the resolved configuration and its problems; keys `left` open have only that one."""
    machine = Machine.here()
    world_size = world_size_of()
    made_from: dict[str, frozenset[str]] = {}
    run = resolve(raw, machine, world_size, made_from)

    def hidden(reads: AbstractSet[str]) -> bool:
        return touches(read_from(reads, made_from), left)

    problems = check(run, raw=raw, resolve=lambda r: resolve(r, machine, world_size), hidden=hidden)
    return run, [*(_unfilled(key, why) for key, why in left.items()), *problems]


def _unfilled(key: str, why: str) -> Problem:
    """Return the problem of a key that a person must fill in."""
    if key in OPEN:
        return unfilled(key, "recipe")
    fix = f"write its value there, or import again with {key}=VALUE"
    if key == WHOLE:
        fix = "correct what is named here, and write at recipe.verified what the recipe is"
    return Problem(UNFILLED, key, MISSING, why, fix, "recipe")


def _report(found: Imported, problems: Sequence[Problem]) -> list[str]:
    """Return the lines for a person: notes, settings without a place, and problems."""
    lines = [visible(f"note: {note}") for note in found.notes]
    if found.unplaced:
        lines.append(f"{len(found.unplaced)} not taken over:")
    together: dict[tuple[str, str], list[str]] = {}
    for u in sorted(found.unplaced, key=lambda u: _ORDER.index(u.why)):
        together.setdefault((u.why, u.text), []).append(f"{u.flag} {u.value}".strip())
    for (why, text), flags in together.items():
        lines.append(visible(f"  {why}: {', '.join(flags)}: {text}"))
    return [*lines, *(problem.render() for problem in problems)]


def _facts(
    found: Imported, text: str, problems: Sequence[Problem], digest: str
) -> dict[str, object]:
    unplaced = [
        {"flag": u.flag, "value": u.value, "why": u.why, "text": u.text} for u in found.unplaced
    ]
    broken = [
        {"code": p.code, "path": p.path, "rule": p.rule, "fix": p.fix, "severity": p.severity}
        for p in problems
    ]
    return {
        "recipe": text,
        "digest": digest,
        "open": list(found.open),
        "unplaced": unplaced,
        "notes": found.notes,
        "problems": broken,
    }


def export(words: Sequence[str], *, megatron: bool, as_json: bool) -> int:
    """Print the command line of Megatron-LM that means the same, and in comments what has no flag.

    `megatron` may be set or not: there is no other form.
    """
    _, run = for_elsewhere(overrides_of(words))
    text = export_script(run, in_steps(run))
    if as_json:
        say_json({"script": text, "digest": run.digest()})
    else:
        say_page(text)
    return 0
