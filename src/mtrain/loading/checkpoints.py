"""The checkpoint of a run folder, the settings under which another verb may use it, and the
weights that a new run starts from.

This module reads configurations and headers of weights, without torch.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt.remote.place import TOKENIZER, Place
from mtrain.ckpt.remote.transfer import referred
from mtrain.config.compose.composer import Composed, compose
from mtrain.config.compose.dump import override
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, MANIFEST, RUN_FILE, display, program, user_path
from mtrain.config.compose.yaml_reader import Document, load
from mtrain.config.messages.keys import schema_keys
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.launching.from_store import nothing_at
from mtrain.launching.local import Source
from mtrain.launching.uploads import note, reached
from mtrain.models.registry import family_of
from mtrain.object_store import is_remote
from mtrain.plan.recompute import KEYS

# Keys that do not describe a corpus.
_OF_SAMPLES = frozenset(
    f"data.{key}"
    for key in (
        "kind",
        "seq_length",
        "split",
        "packed",
        "packed_multiple",
        "eod_mask_loss",
        "prefetch",
        "cache_dir",
        "suffixes",
        "tokenizer_vocab_size",
        "remote_cache_gib",
    )
)
_OF_A_CORPUS = {
    key: field.get_default(call_default_factory=True)
    for key, field in schema_keys().items()
    if key.startswith("data.") and key not in _OF_SAMPLES
}
# Drops the adapters that a run started from: the checkpoint contains them.
WITHOUT_START = "peft.init_from=null"
# The corpus of the run may be gone: its tokenizer is in the run folder.
WITHOUT_DATA = (
    "data.kind=mock",
    *(override(key, default) for key, default in _OF_A_CORPUS.items()),
    "trainer.sample_tokens=0",
    WITHOUT_START,
)


def relaid(target: Path, overrides: Sequence[str]) -> list[str]:
    """Return overrides of the configuration in a run or checkpoint folder that derive the
    micro-batch again if the layout changes, and how many layers of a stage are recomputed.
    """
    if not any(word.startswith("parallel") for word in overrides):
        return []
    path = target / ckpt_folder.RUN_FILE
    again = read_run_file(path).parallel.recompute if path.is_file() else None
    # Other stages may have fewer layers; every other choice suits all layouts.
    keys = KEYS if again is not None and again.method == "block" else ()
    return ["trainer.micro_batch_size=null", *(f"parallel.recompute.{key}=null" for key in keys)]


def beneath(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return our own `words`, except keys that the user overrides, and then the overrides."""
    said = {word.partition("=")[0] for word in overrides}
    return [*(word for word in words if word.partition("=")[0] not in said), *overrides]


def target_of(argv: list[str], verb: str, usage: str) -> tuple[Path, list[str]]:
    """Return the run or checkpoint folder that is a verb's first argument, and the other arguments.

    A folder of this process stands for an address.

    Raises:
        ConfigError: the folder is missing, or is neither a run nor a checkpoint.
        CorruptData: an object at the address is damaged.
        BadEnvironment: the store does not answer, or refuses.
    """
    if argv and is_remote(argv[0]):
        return standing_for(argv[0]), argv[1:]
    if not argv or "=" in argv[0]:
        # The last word is the verb: `convert export` exports.
        rule = f"cannot {verb.split()[-1]} because a run folder or checkpoint folder is missing"
        raise ConfigError.of("MT002", "", None, rule, usage)
    target = Path(argv[0]).expanduser()
    if not (target / ckpt_folder.RUN_FILE).is_file():
        what = "does not exist" if not target.exists() else f"has no {ckpt_folder.RUN_FILE}"
        raise ConfigError.of("MT502", "", None, f"{target} {what}", usage)
    return target, argv[1:]


@cache
def standing_for(url: str) -> Path:
    """Return a run folder that stands for an address until this process ends, or its checkpoint if
    the address names one.

    Raises:
        ConfigError: there is no committed checkpoint.
        CorruptData: an object is damaged.
        BadEnvironment: the store does not answer, or refuses.
    """
    place = Place(url)
    newest = place.newest()
    if newest is None:
        rule = f"{place} has no committed checkpoint"
        fix = f"{program()} checkpoint list ADDRESS, which shows what is there"
        raise ConfigError.of("MT502", "", None, rule, fix)
    home = Path(mkdtemp(prefix="mtrain-"))
    atexit.register(_removed, home, os.getpid())
    target = home / CHECKPOINTS / newest.name
    target.mkdir(parents=True)
    referred(newest, target)
    shutil.copyfile(target / RUN_FILE, home / RUN_FILE)
    of_run = Place(place.url.rpartition("/")[0]) if place.is_checkpoint else place
    # Its configuration names the address that it was read from.
    note(home, of_run.url, "")
    if of_run.size_of(TOKENIZER) is not None:
        of_run.fetch(TOKENIZER, home / TOKENIZER)
    return target if place.is_checkpoint else home


def _removed(home: Path, owner: int) -> None:
    """Remove a folder at the end of the process that made it, and not of those it forked."""
    if os.getpid() == owner:
        shutil.rmtree(home, ignore_errors=True)


def run_file(target: Path) -> str:
    """Return the configuration of a run or checkpoint folder, as an override's value."""
    return quoted(target / ckpt_folder.RUN_FILE)


def quoted(path: Path | str) -> str:
    """Return a path as a value in override grammar."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def require_writing(run: RunConfig) -> None:
    """Require a model that continues text, and whole sequences on every rank.

    Raises:
        ConfigError: the family continues no text, the model has a value head, or context
            parallelism splits a sequence.
    """
    if run.model.head:
        fix = "evaluate, for its accuracy on pairs"
        raise ConfigError.of("MT377", "model.head", run.model.head, "", fix)
    if not family_of(run.model).writes:
        fix = "evaluate, for its loss"
        raise ConfigError.of("MT247", "model.family", run.model.family, "", fix)
    if run.parallel.cp > 1:
        raise ConfigError.of("MT313", "parallel.cp", run.parallel.cp, "", "parallel.cp=1")


def source_of(target: Path, usage: str) -> Source:
    """Return the checkpoint of a run or checkpoint folder, and the tokenizer that the run kept.

    Raises:
        ConfigError: there is no checkpoint, or no tokenizer.
    """
    home, checkpoint = checkpoint_of(target, usage)
    tokenizer = home / TOKENIZER
    if not tokenizer.is_file():
        fix = "a run on data=stdlib, data=text or data.tokenizer=FILE"
        raise ConfigError.of("MT506", "", None, f"{home} has no tokenizer.json", fix)
    return Source(checkpoint, tokenizer)


def checkpoint_of(target: Path, usage: str) -> tuple[Path, Path]:
    """Return the run folder and the checkpoint of a run or checkpoint folder.

    Raises:
        ConfigError: the run has no checkpoint.
    """
    if target.parent.name == CHECKPOINTS:
        return target.parent.parent, target
    saved = ckpt_folder.committed(target / CHECKPOINTS)
    if not saved:
        raise ConfigError.of("MT502", "", None, f"{target} has no checkpoint yet", usage)
    return target, saved[-1]


def newest(target: Path, usage: str) -> Path:
    """Return the newest checkpoint of a run folder, or the checkpoint folder itself.

    Raises:
        ConfigError: the run has none yet.
    """
    if target.parent.name == CHECKPOINTS or (target / ckpt_folder.MANIFEST).is_file():
        return target
    saved = ckpt_folder.committed(target / CHECKPOINTS)
    if not saved:
        raise ConfigError.of("MT502", "", None, f"{target} has no checkpoint yet", usage)
    return saved[-1]


HF_CONFIG = "config.json"
# Section of a model -> its keys that follow from the data of a run, and do not describe weights.
FROM_DATA = {"t5": ("encoder_length", "decoder_length")}


def composed(argv: Sequence[str]) -> Composed:
    """Compose a command line; if it chooses no model, take that of `checkpoint.init_from`.

    Raises:
        Rejected: with every problem that the schema found.
        ConfigError: files do not compose, or the weights are of a model that is not known here.
    """
    return compose(argv, model_of)


def model_of(start: str) -> Document | None:
    """Return the model in the folder of `checkpoint.init_from`, as a file of the group `model`;
    None if the folder has none.

    Raises:
        ConfigError: its configuration cannot be read, or is of a model that is not known here.
    """
    if is_remote(start):
        return _of_address(start)
    path = user_path(start)
    file = run_file_of(path)
    if file is not None:
        return _of_run(file)
    if not (path / HF_CONFIG).is_file():
        return None
    from mtrain.convert.huggingface.model import configuration

    _, found = configuration(path / HF_CONFIG)
    return Document(_said(found.run.model), {}, display(path / HF_CONFIG))


def brought(composed: Composed) -> ModelConfig | None:
    """Return the model of the weights if the run's model was taken from them, else None.

    Raises:
        ConfigError: the configuration of the weights cannot be read.
    """
    start = composed.run.checkpoint.init_from
    document = model_of(start) if start is not None else None
    if document is None or composed.choices.get("model") != document.source:
        return None
    return ModelConfig.model_validate(document.values)


def run_file_of(path: Path) -> Path | None:
    """Return the run.yaml of a run folder or of a checkpoint, or None."""
    home = path.parent.parent if path.parent.name == CHECKPOINTS else path
    return next((file for file in (path / RUN_FILE, home / RUN_FILE) if file.is_file()), None)


@cache
def _of_address(url: str) -> Document:
    """Return the model of an address's newest checkpoint, for a comparison before download."""
    key = "checkpoint.init_from"
    with reached(key, url), TemporaryDirectory() as scratch:
        newest = Place(url).newest()
        if newest is None:
            raise nothing_at(key, url)
        newest.fetch(RUN_FILE, Path(scratch) / RUN_FILE)
        return replace(_of_run(Path(scratch) / RUN_FILE), source=f"{newest}/{RUN_FILE}")


def _of_run(file: Path) -> Document:
    document = load(file)
    values = dict(document.values.get("model") or {})
    for section, keys in FROM_DATA.items():
        if isinstance(values.get(section), dict):
            values[section] = {
                key: value for key, value in values[section].items() if key not in keys
            }
    # The document stands for conf/model/NAME.yaml, whose keys begin below `model`.
    lines = {
        key.partition(".")[2]: line
        for key, line in document.lines.items()
        if key.startswith("model.")
    }
    return Document(values, lines, document.source, document.text)


def _said(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a model that are not at their defaults."""
    found: dict[str, Any] = model.model_dump(mode="json", exclude_defaults=True)
    return found


def problems(run: RunConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each key in which a run's model differs from that of its first weights.

    Raises:
        CorruptData: the weights are incomplete.
    """
    start = run.checkpoint.init_from
    # A resumed run has weights of its own.
    if start is None or is_remote(start) or run.checkpoint.resume not in (None, "auto"):
        return []
    path = user_path(start)
    try:
        if any((path / name).is_file() for name in (RUN_FILE, MANIFEST)):
            from mtrain.launching.resume import weights_of

            weights_of(run)
        elif (path / HF_CONFIG).is_file():
            from mtrain.convert.huggingface.model import open_matching

            open_matching(run, path)
    except ConfigError as error:
        return [replace(p, source=p.source or origins.get(p.path, "")) for p in error.problems]
    return []
