"""`recipe lock` and `recipe verify`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mtrain import strict_json
from mtrain.cli.command import needed
from mtrain.cli.recipe.new import for_elsewhere, write_new
from mtrain.config.compose.lock_file import read_lock
from mtrain.config.compose.paths import conf_dir, program, recipes_dir, user_path
from mtrain.config.disk.files import YAML_ENDINGS, kind_of, read_bytes
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData, say, say_page
from mtrain.recipes.diff import overrides_of
from mtrain.recipes.lock import lock_text, mismatches

ENVIRONMENT = 3
DATA = 4
MAX_TOKENIZER_BYTES = 1 << 28


def lock(words: Sequence[str], *, output: str | None) -> int:
    """Print the resolved configuration with versions and digests, or write it to `output`."""
    needed(words, "recipe lock NAME [-o FILE]")
    composed, run = for_elsewhere(overrides_of(words))
    text = lock_text(run, digests(run), sources(composed.files), Machine.here())
    if output is None:
        say_page(text)
        return 0
    write_new(Path(output), text)
    verify_it = f"{program()} recipe verify {output}"
    say(f"wrote {output}: it runs with run={output}, and `{verify_it}` compares")
    return 0


def verify(words: Sequence[str], *, as_json: bool) -> int:
    """Print the differences between a lock and this machine; return 0 for none, 3 for versions or
    devices, 4 for the file or data.
    """
    path = Path(needed(words, "recipe verify FILE"))
    held = read_lock(path)
    found = mismatches(
        held, digests(held.run), sources(_places(held.sources, path)), Machine.here()
    )
    if any(m.damaged for m in found):
        code = DATA
    else:
        code = ENVIRONMENT if found else 0
    if as_json:
        rows = [{"what": m.what, "name": m.name, "locked": m.locked, "here": m.here} for m in found]
        say_page(
            strict_json.dumps(
                {"ok": not found, "digest": held.run.digest(), "differences": rows}, indent=2
            )
        )
        return code
    for m in found:
        say(f"{m.what} {m.name}: {m.locked} then, {m.here} here")
    if not found:
        say(f"verified: {path} is as it was locked, digest {held.run.digest()}")
    return code


def sources(files: Mapping[str, Path]) -> dict[str, str]:
    """Digests of the files that a configuration is composed from, by their names; of those that are
    here.
    """
    out: dict[str, str] = {}
    for name, path in files.items():
        with suppress(ConfigError):
            out[name] = hashlib.sha256(read_bytes(path, name, endings=YAML_ENDINGS)).hexdigest()
    return out


def _places(names: Iterable[str], lock: Path) -> dict[str, Path]:
    """Return the paths of a lock's files: shipped ones as installed, others here or next to the
    lock.
    """
    shipped = {"conf": conf_dir(), "recipes": recipes_dir()}
    out: dict[str, Path] = {}
    for name in names:
        first, _, rest = name.partition("/")
        places = [shipped[first] / rest] if first in shipped else []
        places += [Path(name), lock.parent / name]
        out[name] = next((place for place in places if place.is_file()), places[0])
    return out


def digests(run: RunConfig) -> dict[str, str]:
    """Digests of the data and the tokenizer that a configuration names, of those that are here.

    Only plain files are opened; of a text corpus names and sizes count, not what is in the files.
    """
    out: dict[str, str] = {}
    if run.data.tokenizer is not None:
        path = user_path(run.data.tokenizer)
        with suppress(ConfigError):
            out["tokenizer"] = hashlib.sha256(
                read_bytes(path, str(path), MAX_TOKENIZER_BYTES)
            ).hexdigest()
    if run.data.kind == "indexed":
        data = _tokens(run)
    else:
        if run.data.kind == "text":
            data = _text(run)
        else:
            data = None
    return out | ({"data": data} if data else {})


def _plain(path: Path) -> bool:
    try:
        return not kind_of(path)
    except (OSError, ValueError):
        return False


def _tokens(run: RunConfig) -> str | None:
    """Return the fingerprint that a checkpoint keeps of `.bin/.idx`; None where they are not here
    or cannot be read.
    """
    named = run.data.without_excluded().blend or (
        (run.data.path,) if run.data.path is not None else ()
    )
    prefixes = [user_path(prefix) for prefix in named]
    files = [
        prefix.with_name(prefix.name + suffix) for prefix in prefixes for suffix in (".bin", ".idx")
    ]
    if not files or not all(_plain(file) for file in files):
        return None
    from mtrain.data.store.corpus import joint_fingerprint
    from mtrain.data.store.indexed import IndexedDataset

    try:
        return joint_fingerprint([IndexedDataset(prefix) for prefix in prefixes])
    except (CorruptData, OSError):
        return "unreadable"


def _text(run: RunConfig) -> str | None:
    from mtrain.data.text.tokenize import open_corpus

    try:
        text = open_corpus(run.data)
    except (ConfigError, OSError):
        return None
    digest = hashlib.sha256()
    for file in text.files:
        digest.update(f"{file.name}\0{file.stamp[0]}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
