"""`recipe new`: a recipe written from a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from mtrain.cli.command import needed
from mtrain.config.compose.choices import is_path
from mtrain.config.compose.composer import Composed, Rejected
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.overrides import read_overrides
from mtrain.config.compose.paths import program
from mtrain.config.resolve.resolution import Machine, resolve, world_size_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, Problem, say
from mtrain.layout.grid import RankGrid
from mtrain.loading import initial_weights
from mtrain.loading.configuration import (
    also_wrong,
    resolved_origins,
    say_replaced,
    settled,
    validate,
)
from mtrain.recipes.delta import Delta, delta, recipe_text
from mtrain.recipes.diff import overrides_of

NOT_HERE = ("MT305", "MT306", "MT307", "MT433")
"""Codes of files and folders that are missing on this machine, and need not be on another."""


def new(argv: Sequence[str]) -> int:
    """Write the configuration of the overrides as a recipe of at most 12 lines; never
    over a file.
    """
    path = Path(needed(argv, "recipe new my.yaml model=llama3_8b parallel=tp2"))
    named = path.suffix in (".yaml", ".yml")
    if not named and "=" in path.name:
        rule = f"{argv[0]} stands where the file of the recipe is to stand"
        fix = f"recipe new my.yaml {shlex.join(argv)}"
        raise ConfigError([Problem("MT010", "", None, rule, fix, COMMAND_LINE)])
    if not named:
        path = path.with_name(f"{path.name}.yaml")
    words = overrides_of(argv[1:])
    loaded, run = for_elsewhere(words)
    about = describe(run, f"mtrain recipe new {path.name} {shlex.join(words)}".strip())
    text = recipe_text(said(loaded, words), about, short=True)
    write_new(path, text)
    say(f"wrote {path}: {program()} recipe={path}")
    say(f"for an editor that completes keys: {program()} schema recipe -o {path.parent}")
    return 0


def for_elsewhere(words: Sequence[str]) -> tuple[Composed, RunConfig]:
    """Return a configuration and what it is resolved to, validated but for files that another
    machine may have.

    Raises:
        ConfigError: it breaks a rule that holds on every machine.
    """
    machine = Machine.here()
    world_size = world_size_of()
    try:
        composed = initial_weights.composed(words)
    except Rejected as error:
        raise ConfigError([*error.problems, *also_wrong(error, machine, world_size)]) from None
    say_replaced(composed)
    chosen, why = settled(composed, machine, world_size)
    run = resolve(chosen.run, machine, world_size, why=why)
    problems = validate(chosen, run, resolved_origins(chosen, run, why), machine, world_size)
    here = [p for p in problems if p.code in NOT_HERE]
    wrong = [p for p in problems if p not in here and p.severity == "error"]
    if wrong:
        raise ConfigError(problems)
    for problem in here:
        say(f"note: {problem.path} = {problem.value}: {problem.rule}", error=True)
    return composed, run


def said(loaded: Composed, words: Sequence[str]) -> Delta:
    """Return the delta of a recipe for a command line: its choices are kept unless it starts from a
    whole run file.

    A recipe names no path: what the file says is written out. The model of the weights that it
    names comes with them.
    """
    if read_overrides(words).run is not None:
        return delta(loaded.run)
    brought = initial_weights.brought(loaded)
    named = {group: choice for group, choice in loaded.choices.items() if not is_path(choice)}
    if brought is not None:
        named.pop("model", None)
    return delta(loaded.run, named, brought)


def describe(run: RunConfig, source: str) -> dict[str, str]:
    """Return the words of a new recipe about itself."""
    p = run.parallel
    cluster = run.cluster
    per_node = p.ranks // cluster.nodes
    try:
        layout = str(RankGrid.of(run))
    except ValueError:  # fewer ranks than the layout has, of a script that is imported as it is
        layout = f"tp{p.tp} cp{p.cp} pp{p.pp} on {p.ranks} ranks"
    return {
        "title": f"{run.model.name} with {layout}",
        "purpose": "Say here when to pick it.",
        "hardware": f"{cluster.nodes} x {per_node} {cluster.device} ({cluster.name})",
        "source": source,
        "verified": "composes and passes every rule; not trained",
    }


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        ConfigError: it is there.
        BadEnvironment: it cannot be written.
    """
    with _refusals(path), path.open("x", encoding="utf-8") as file:
        file.write(text)


def require_new(path: Path) -> None:
    """Refuse before a long work the file that `write_new` would refuse behind it.

    Raises:
        ConfigError: it is there.
        BadEnvironment: its folder is not there, or nothing can be written into it.
    """
    with _refusals(path):
        with suppress(FileNotFoundError):
            path.lstat()
            raise FileExistsError
        TemporaryFile(dir=path.parent).close()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        fix = str(path.with_name(f"{path.stem}_2{path.suffix}"))
        raise ConfigError(
            [Problem("MT704", "", None, f"{path} is there already; nothing is written over", fix)]
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadEnvironment(f"{path} cannot be written: {why}") from None
