"""`checkpoint list`, `inspect` and `verify`: the contents of checkpoints and their integrity."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtrain import strict_json
from mtrain.ckpt import folder
from mtrain.ckpt.index import filled
from mtrain.ckpt.remote.place import Place, uncommitted
from mtrain.ckpt.remote.transfer import described
from mtrain.ckpt.remote.transfer import strangers as foreign
from mtrain.ckpt.remote.transfer import verified as verified_there
from mtrain.ckpt.sources import address_of
from mtrain.ckpt.verification import verified
from mtrain.cli.output import refusal, say_json, table
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, RUN_FILE, program
from mtrain.config.messages.keys import effect_of
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, first_line, say, say_page
from mtrain.launching.verdict.damage import strangers
from mtrain.launching.verdict.figures import nbytes
from mtrain.loading.checkpoints import newest
from mtrain.object_store import is_remote
from mtrain.units import bytes_, number_of

DIGITS = 12
AXES = ("tp", "cp", "dp", "pp", "ep")


def one_word(words: Sequence[str], usage: str) -> str:
    """Return the only word, which names a folder or an address.

    Raises:
        ConfigError: it is missing, or there are more.
    """
    if len(words) != 1 or ("=" in words[0] and not is_remote(words[0])):
        rule = f"cannot {usage.split()[0]} because it takes one folder"
        raise refusal(rule, f"{program()} checkpoint {usage}", "MT002")
    return words[0]


def one_folder(words: Sequence[str], usage: str) -> Path:
    """Return the only word, which is a folder.

    Raises:
        ConfigError: it or its folder is missing, or several match.
    """
    path = Path(one_word(words, usage)).expanduser()
    if not path.is_dir():
        rule = f"{path} does not exist" if not path.exists() else f"{path} is no folder"
        raise refusal(rule, f"{program()} checkpoint {usage}", "MT502")
    return path


def one_checkpoint(words: Sequence[str], usage: str) -> Path:
    """Return the checkpoint that the only word names; of a run folder, the newest.

    Raises:
        ConfigError: there is none.
    """
    path = one_folder(words, usage)
    if (path / CHECKPOINTS).is_dir():
        return newest(path, f"{program()} checkpoint {usage}")
    return path


def one_address(name: str, usage: str) -> Place:
    """Return the checkpoint at an address; of a run's address, the newest.

    Raises:
        ConfigError: there is none.
        CorruptData: it was not committed.
        BadEnvironment: the store does not answer.
    """
    place = Place(name)
    found = place.newest()
    if found is None:
        if place.is_checkpoint:
            raise uncommitted(place)
        rule = f"{place} has no checkpoint"
        raise refusal(rule, f"{program()} checkpoint {usage}", "MT502")
    return found


def list_(words: Sequence[str], *, as_json: bool) -> int:
    """Print the checkpoints of a run, a line each: step, size, state, layout, model."""
    name = one_word(words, "list RUN")
    home: Path | str
    if is_remote(name):
        home = name
        rows = list(_remote_rows(Place(name)))
    else:
        home = one_folder(words, "list RUN")
        root = home / CHECKPOINTS if (home / CHECKPOINTS).is_dir() else home
        drafts = sorted(root.glob(".saving-step_*"))
        rows = [_row(path) for path in (*folder.folders(root), *drafts)]
    if not rows:
        rule = f"{home} has no checkpoint yet"
        raise refusal(rule, f"{program()} checkpoint list RUN", "MT502")
    if as_json:
        say_json({"run": str(home), "checkpoints": rows})
        return 0
    head = ["checkpoint", "step", "size", "state", "layout", "model"]
    texts = [
        [r["name"], str(r["step"] or "-"), bytes_(r["bytes"]), r["state"], r["layout"], r["model"]]
        for r in rows
    ]
    say_page("\n".join(table([head, *texts], left=1, ragged=(3, 4, 5))))
    for row in rows:
        if row["why"]:
            say(f"{row['name']}: {row['why']}")
    return 0


def _row(path: Path) -> dict[str, Any]:
    row = _empty(path.name, sum(f.stat().st_size for f in path.iterdir() if f.is_file()))
    if path.name.startswith("."):
        return row | {"state": "not committed"}
    try:
        row |= _facts(path, folder.parse_manifest(path))
        folder.read_manifest(path, verify=False)
    except (CorruptData, BadEnvironment) as error:
        state = "damaged" if folder.is_checkpoint(path) else "not committed"
        return row | {"state": state, "why": first_line(error)}
    url = address_of(path)
    return row | {"state": "complete" if url is None else f"complete, at {url}"}


def _remote_rows(place: Place) -> Iterator[dict[str, Any]]:
    """Yield a row for each checkpoint at an address."""
    for one in place.checkpoints():
        row = _empty(one.name, one.nbytes) | {"step": one.step}
        if not one.is_committed:
            yield row | {"state": "not committed"}
            continue
        try:
            with TemporaryDirectory(prefix="mtrain-") as scratch:
                manifest = described(place / one.name, Path(scratch))
                yield row | _facts(Path(scratch), manifest) | {"state": "complete"}
        except CorruptData as error:
            yield row | {"state": "damaged", "why": first_line(error)}


def _empty(name: str, nbytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "step": None, "bytes": nbytes, "layout": "-"}
    return row | {"model": "-", "why": ""}


def _facts(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a manifest and of the configuration in its folder."""
    facts = {"step": int(manifest["step"]), "layout": layout_of(manifest["state"])}
    with suppress(ConfigError, BadEnvironment):
        facts["model"] = model_digest(read_run_file(path / RUN_FILE))[:DIGITS]
    return facts


def layout_of(state: dict[str, Any]) -> str:
    """Return the layout that a checkpoint was written in, as `tp2 dp2`."""
    grid = state.get("grid") or {}
    return " ".join(f"{axis}{grid[axis]}" for axis in AXES if grid.get(axis, 1) > 1) or "one rank"


def model_digest(run: RunConfig) -> str:
    """Return hex sha256 of the keys that decide which weights a checkpoint has."""
    keys = {k: v for k, v in run.flat().items() if effect_of(k) is Effect.ARCHITECTURE}
    return hashlib.sha256(strict_json.dumps(keys, sort_keys=True).encode()).hexdigest()


def inspect(words: Sequence[str], *, as_json: bool) -> int:
    """Print the manifest of a checkpoint: model, layout, tensors.

    Raises:
        CorruptData: it is no committed checkpoint, or was altered.
    """
    usage = "inspect CHECKPOINT"
    name = one_word(words, usage)
    if is_remote(name):
        place = one_address(name, usage)
        with TemporaryDirectory(prefix="mtrain-") as scratch:
            root = Path(scratch)
            manifest = filled(root, described(place, root))
            run = read_run_file(root / RUN_FILE)
        _print_contents(str(place), manifest, run, foreign(manifest, place.sizes()), as_json)
        return 0
    path = one_checkpoint(words, usage)
    manifest = filled(path, folder.read_manifest(path, verify=False))
    run = read_run_file(path / RUN_FILE)
    _print_contents(str(path), manifest, run, strangers(path, manifest), as_json)
    return 0


def _print_contents(
    path: str, manifest: dict[str, Any], run: RunConfig, extra: Sequence[str], as_json: bool
) -> None:
    """Print what `inspect` says of a checkpoint; `extra`: files that do not belong to it."""
    tensors = [_tensor(name, entry) for name, entry in sorted(manifest["tensors"].items())]
    total = sum(one["bytes"] for one in tensors)
    state = manifest["state"]
    if as_json:
        facts = {"checkpoint": path, "format": manifest["format"], "step": manifest["step"]}
        facts |= {"model": run.model.name, "model_digest": model_digest(run)}
        facts |= {"run_digest": state.get("digest"), "layout": state.get("grid")}
        facts |= {"state": state, "files": manifest["files"], "strangers": extra}
        say_json(facts | {"tensors": tensors, "bytes": total})
        return
    for one in tensors:
        shape = "x".join(map(str, one["shape"])) or "scalar"
        pieces = number_of(one["pieces"], "piece")
        say(f"{one['name']}  {one['dtype']}  {shape}  {bytes_(one['bytes'])}  {pieces}")
    digest = model_digest(run)[:DIGITS]
    say(
        f"{path}: step {manifest['step']}, format {manifest['format']}, model {run.model.name}"
        f" ({digest}), {layout_of(state)}, {number_of(len(manifest['files']), 'file')}"
    )
    kinds = ", ".join(f"{n} of {kind}" for kind, n in _kinds(tensors).items())
    say(f"{number_of(len(tensors), 'tensor')} ({kinds}), {bytes_(total)}")
    for name in extra:
        say(f"{name}: does not belong to the checkpoint")


def _tensor(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": entry["dtype"],
        "shape": entry["shape"],
        "numbers": prod(entry["shape"]),
        "bytes": nbytes(entry),
        "pieces": len(entry["pieces"]),
    }


def _kinds(tensors: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return how many tensors are weights, and how many each state of the optimizer has."""
    return Counter(one["name"].split("/")[one["name"].startswith("optim/")] for one in tensors)


def verify(words: Sequence[str], *, as_json: bool) -> int:
    """Read every byte of a checkpoint; return exit code 4 if one is not as it was written.

    Raises:
        CorruptData: it has no manifest that can be read.
        BadEnvironment: a file may not be read.
    """
    usage = "verify CHECKPOINT"
    name = one_word(words, usage)
    path: Path | Place
    if is_remote(name):
        path = one_address(name, usage)
        found = verified_there(path)
        damage = list(found.damage)
    else:
        path = one_checkpoint(words, usage)
        with folder.reading(path):
            manifest = folder.parse_manifest(path)
            found = verified(path, manifest)
        extra = strangers(path, manifest)
        damage = [*found.damage]
        damage += [f"{path / one} does not belong to the checkpoint" for one in extra]
    if as_json:
        say_json(
            {
                "checkpoint": str(path),
                "ok": not damage,
                "damage": damage,
                "files": found.files,
                "bytes": found.nbytes,
                "seconds": found.seconds,
                "bytes_per_s": found.rate,
            }
        )
    else:
        for line in damage:
            say(line)
        result = f"{number_of(len(damage), 'fault')}" if damage else "as it was written"
        say(
            f"{path}: {number_of(found.files, 'file')}, {bytes_(found.nbytes)} read in"
            f" {found.seconds:.2f} s, {bytes_(found.rate)}/s: {result}"
        )
    return CorruptData.exit_code if damage else 0
