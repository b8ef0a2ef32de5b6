"""`recipe list`, `show`, `new`, `diff`, `lock` and `verify`: configurations as files."""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mtrain.cli import show as show_verb
from mtrain.cli.output import needed, refusal, say_json, write_new
from mtrain.config.compose.choices import is_path
from mtrain.config.compose.composer import Composed, Rejected, compose
from mtrain.config.compose.dump import spell
from mtrain.config.compose.lock_file import read_lock
from mtrain.config.compose.overrides import read_overrides
from mtrain.config.compose.paths import (
    conf_dir,
    display,
    program,
    recipe_names,
    recipes_dir,
    user_path,
)
from mtrain.config.compose.recipe import find_recipe
from mtrain.config.compose.yaml_reader import load, parse
from mtrain.config.disk.files import YAML_ENDINGS, kind_of, read_bytes, read_text
from mtrain.config.resolve.resolution import Machine, resolve, world_size_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData, say, say_page, visible
from mtrain.layout.grid import RankGrid
from mtrain.loading import checkpoints
from mtrain.loading.configuration import (
    also_wrong,
    resolved_origins,
    say_replaced,
    settled,
    validate,
)
from mtrain.recipes.delta import Delta, delta, recipe_text
from mtrain.recipes.diff import ABSENT, Difference, differences, overrides_of
from mtrain.recipes.lock import lock_text, mismatches
from mtrain.units import number_of

WORDS = ("title", "purpose", "hardware", "source", "verified")
# files and folders that are missing on this machine, and need not be on another
NOT_HERE = ("MT305", "MT306", "MT307", "MT433")
# The exit code of `diff` for files that differ is 1; `verify` follows mtrain's own codes.
DIFFERENT = 1
ENVIRONMENT = 3
DATA = 4
MAX_TOKENIZER_BYTES = 1 << 28


def list_(words: Sequence[str], *, as_json: bool) -> int:
    """Print every shared recipe in a line: name, layout, title; as JSON its whole description."""
    cards = [_card(name) for name in recipe_names()]
    if as_json:
        say_json(cards)
        return 0
    names, layouts = (max(len(card[key]) for card in cards) for key in ("name", "layout"))
    for card in cards:
        say(f"{card['name']:<{names}}  {card['layout']:<{layouts}}  {card['title']}")
    return 0


def _card(name: str) -> dict[str, str]:
    block = load(find_recipe(name)).values.get("recipe", {})
    run = resolve(compose([f"recipe={name}"]).run, Machine.here())
    grid = RankGrid.of(run)
    degrees = "auto" if run.parallel.auto else grid
    layout = f"{degrees} on {number_of(grid.world, 'rank')}"
    words = {key: str(block.get(key, "")) for key in WORDS}
    return {"name": name, **words, "model": run.model.name, "layout": layout}


def show(words: Sequence[str], *, resolved: bool, as_json: bool) -> int:
    """Print a recipe as it is written, or if `resolved` the file that `run=` reads."""
    name = needed(words, "recipe show NAME [--resolved]")
    if resolved or as_json or len(words) > 1:
        return show_verb.run(overrides_of(words), resolved=resolved, as_json=as_json)
    path = find_recipe(name)
    text = read_text(path, display(path))
    # refuse what cannot be read as data before a terminal gets it
    parse(text, display(path))
    say_page(text)
    return 0


def new(words: Sequence[str]) -> int:
    """Write the overrides' configuration as a new recipe of at most 12 lines."""
    path = Path(needed(words, "recipe new my.yaml model=llama3_8b parallel=tp2"))
    named = path.suffix in (".yaml", ".yml")
    if not named and "=" in path.name:
        rule = f"{words[0]} stands where the file of the recipe is to stand"
        raise refusal(rule, f"recipe new my.yaml {shlex.join(words)}")
    if not named:
        path = path.with_name(f"{path.name}.yaml")
    overrides = overrides_of(words[1:])
    composed, run = for_elsewhere(overrides)
    about = describe(run, f"mtrain recipe new {path.name} {shlex.join(overrides)}".strip())
    write_new(path, recipe_text(_delta_of(composed, overrides), about, short=True))
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
        composed = checkpoints.composed(words)
    except Rejected as error:
        raise ConfigError([*error.problems, *also_wrong(error, machine, world_size)]) from None
    say_replaced(composed)
    chosen, why = settled(composed, machine, world_size)
    run = resolve(chosen.run, machine, world_size, why=why)
    problems = validate(chosen, run, resolved_origins(chosen, run, why), machine, world_size)
    # A recipe for a cluster is written on a laptop that has neither its data nor its checkpoints.
    if any(p.code not in NOT_HERE and p.severity == "error" for p in problems):
        raise ConfigError(problems)
    for problem in problems:
        if problem.code in NOT_HERE:
            say(f"note: {problem.path} = {problem.value}: {problem.rule}", error=True)
    return composed, run


def _delta_of(composed: Composed, words: Sequence[str]) -> Delta:
    """Return the delta of a recipe for a command line, with its choices unless it starts from a
    whole run file.

    A recipe names no path, so the keys of a choice that is a file are written out. The model of
    initial weights comes with them.
    """
    if read_overrides(words).run is not None:
        return delta(composed.run)
    brought = checkpoints.brought(composed)
    named = {group: choice for group, choice in composed.choices.items() if not is_path(choice)}
    if brought is not None:
        named.pop("model", None)
    return delta(composed.run, named, brought)


def describe(run: RunConfig, source: str) -> dict[str, str]:
    """Return the words of a new recipe about itself."""
    p = run.parallel
    cluster = run.cluster
    per_node = p.ranks // cluster.nodes
    try:
        layout = str(RankGrid.of(run))
    except ValueError:
        # An imported script may set fewer ranks than its layout has.
        layout = f"tp{p.tp} cp{p.cp} pp{p.pp} on {p.ranks} ranks"
    return {
        "title": f"{run.model.name} with {layout}",
        "purpose": "Say here when to pick it.",
        "hardware": f"{cluster.nodes} x {per_node} {cluster.device} ({cluster.name})",
        "source": source,
        "verified": "composes and passes every rule; not trained",
    }


def diff(words: Sequence[str], *, as_json: bool) -> int:
    """Print the differences of two configurations, each with its kind; return 1 if any, else 0."""
    if len(words) != 2:
        rule = f"cannot compare because it takes two configurations, not {len(words)}"
        raise refusal(rule, "recipe diff llama3/8b_h100x8 runs/NAME")
    left, right = map(_resolved, words)
    found = differences(left, right)
    if as_json:
        rows = [
            {"key": d.key, "left": _plain(d.left), "right": _plain(d.right), "kind": d.kind}
            for d in found
        ]
        digests = {"left": left.digest(), "right": right.digest()}
        say_json({"equal": not found, "digests": digests, "differences": rows})
    elif found:
        say_page(table(found))
    else:
        say(f"equal: {words[0]} and {words[1]} are the same run")
    return DIFFERENT if found else 0


def _resolved(word: str) -> RunConfig:
    machine = Machine.here()
    composed = checkpoints.composed(overrides_of([word]))
    return resolve(settled(composed, machine, None)[0].run, machine)


def _plain(value: object) -> object:
    return None if value is ABSENT else value


def table(found: Sequence[Difference]) -> str:
    """Return a line for each difference, and their number by kind."""
    rows = [
        (f"{n}.", d.key, f"{_spelled(d.left)} -> {_spelled(d.right)}", d.kind)
        for n, d in enumerate(found, 1)
    ]
    number, key, values = (max(len(row[i]) for row in rows) for i in range(3))
    # A long list would push the kind of every difference out of sight.
    values = min(60, values)
    lines = [visible(f"{n:>{number}} {k:<{key}}  {v:<{values}}  {kind}") for n, k, v, kind in rows]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(d.kind for d in found).items())
    lines.append(f"{number_of(len(found), 'difference')}: {kinds}")
    return "\n".join(lines)


def _spelled(value: object) -> str:
    return ABSENT if value is ABSENT else spell(value)


def lock(words: Sequence[str], *, output: str | None) -> int:
    """Print the resolved configuration with versions and digests, or write it to `output`."""
    needed(words, "recipe lock NAME [-o FILE]")
    composed, run = for_elsewhere(overrides_of(words))
    text = lock_text(run, digests(run), _sources(composed.files), Machine.here())
    if output is None:
        say_page(text)
        return 0
    write_new(Path(output), text)
    verify_it = f"{program()} recipe verify {output}"
    say(f"wrote {output}: it runs with run={output}, and `{verify_it}` compares")
    return 0


def verify(words: Sequence[str], *, as_json: bool) -> int:
    """Print differences of a lock from this machine; return 0, 3 (versions, device) or 4 (data)."""
    path = Path(needed(words, "recipe verify FILE"))
    held = read_lock(path)
    here = _sources(_places(held.sources, path))
    found = mismatches(held, digests(held.run), here, Machine.here())
    code = ENVIRONMENT if found else 0
    if any(m.damaged for m in found):
        code = DATA
    digest = held.run.digest()
    if as_json:
        rows = [{"what": m.what, "name": m.name, "locked": m.locked, "here": m.here} for m in found]
        say_json({"ok": not found, "digest": digest, "differences": rows})
        return code
    for m in found:
        say(f"{m.what} {m.name}: {m.locked} then, {m.here} here")
    if not found:
        say(f"verified: {path} is as it was locked, digest {digest}")
    return code


def _sources(files: Mapping[str, Path]) -> dict[str, str]:
    """Return digests of the existing files that a configuration is composed from."""
    out: dict[str, str] = {}
    for name, path in files.items():
        with suppress(ConfigError):
            out[name] = hashlib.sha256(read_bytes(path, name, endings=YAML_ENDINGS)).hexdigest()
    return out


def _places(names: Iterable[str], lock: Path) -> dict[str, Path]:
    """Return the paths of a lock's files: shipped ones as installed, others near the lock."""
    shipped = {"conf": conf_dir(), "recipes": recipes_dir()}
    out: dict[str, Path] = {}
    for name in names:
        first, _, rest = name.partition("/")
        places = [shipped[first] / rest] if first in shipped else []
        # A lock may be sent with its files, or be run where they were.
        places += [Path(name), lock.parent / name]
        out[name] = next((place for place in places if place.is_file()), places[0])
    return out


def digests(run: RunConfig) -> dict[str, str]:
    """Return digests of the data and the tokenizer that a configuration names, if they are here.

    Only plain files are opened; a text corpus counts by the names and sizes of its files.
    """
    out: dict[str, str] = {}
    if run.data.tokenizer is not None:
        path = user_path(run.data.tokenizer)
        with suppress(ConfigError):
            content = read_bytes(path, str(path), MAX_TOKENIZER_BYTES)
            out["tokenizer"] = hashlib.sha256(content).hexdigest()
    kinds = {"indexed": _digest_of_tokens, "text": _digest_of_text}
    data = kinds[run.data.kind](run) if run.data.kind in kinds else None
    return out | ({"data": data} if data else {})


def _is_plain(path: Path) -> bool:
    try:
        return not kind_of(path)
    except (OSError, ValueError):
        return False


def _digest_of_tokens(run: RunConfig) -> str | None:
    """Return the fingerprint that a checkpoint keeps of `.bin/.idx`; None: they are not here."""
    named = run.data.without_excluded().blend or (run.data.path,)
    prefixes = [user_path(prefix) for prefix in named if prefix is not None]
    files = [p.with_name(p.name + suffix) for p in prefixes for suffix in (".bin", ".idx")]
    if not files or not all(map(_is_plain, files)):
        return None
    from mtrain.data.store.corpus import joint_fingerprint
    from mtrain.data.store.indexed import IndexedDataset

    try:
        return joint_fingerprint([IndexedDataset(prefix) for prefix in prefixes])
    # A damaged corpus differs from the locked one: the lock must fail, not the command.
    except (CorruptData, OSError):
        return "unreadable"


def _digest_of_text(run: RunConfig) -> str | None:
    from mtrain.data.text.tokenize import open_corpus

    try:
        text = open_corpus(run.data)
    except (ConfigError, OSError):
        return None
    digest = hashlib.sha256()
    for file in text.files:
        # names of files need not be UTF-8
        digest.update(f"{file.name}\0{file.stamp[0]}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
