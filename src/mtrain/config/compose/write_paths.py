"""Places that a run writes to, which files may only set below the working folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mtrain.config.compose.dump import override
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import (
    ENVIRONMENT,
    LOCAL_FILE,
    REMOTE_FILE,
    RESUME_WORDS,
    run_folder_of,
    user_path,
)
from mtrain.config.messages.keys import field_of
from mtrain.config.messages.suggestions import at_default
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import Problem
from mtrain.object_store import is_remote

RUNS = "log.runs_dir"
CACHE = "data.cache_dir"
LOCAL = "checkpoint.local_dir"
REMOTE = "checkpoint.remote"
RESUME = "checkpoint.resume"
HOOKS = "log.hooks"
REWARD_URL = "rollout.reward_url"
# Keys that decide where something is written, and the contents.
KEYS = {
    RUNS: "run folders",
    CACHE: "tokenized text",
    LOCAL: "local checkpoints",
    RESUME: "the run that goes on",
}
# The mark of a cache folder for backup programs (bford.info/cachedir) and for mtrain.
TAG_FILE = "CACHEDIR.TAG"
TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Made by mtrain; what is in here can be made"
    " again.\n"
)


def strays(run: UnresolvedRun, said: Mapping[str, str], base: Path | None) -> list[Problem]:
    """Return a problem for each place outside of the working folder that only a recipe or run file
    names.

    Args:
        run: the configuration.
        said: key -> origin, for the keys that a recipe or run file set.
        base: the run file; one in its run folder may keep the place of its run folders.
    """
    values = run.flat()
    out = []
    for key in KEYS:
        value = values[key]
        field = field_of(key)
        if (
            key not in said
            or value is None
            or field is None
            or value in (field.default, *RESUME_WORDS)
        ):
            continue
        place = "" if is_remote(value) else real_path(value)
        # A recipe is data from somebody else: it must not write into a home folder or a system
        # folder.
        if _beneath(place, real_path(".")) or (key == CACHE and _is_ours(place)):
            continue
        # A run file in its own run folder may name that place, wherever it is.
        if key == RUNS and base is not None and _beneath(real_path(str(base)), place):
            continue
        if key == LOCAL and base is not None and place in _places_of(user_path(str(base)).parent):
            continue
        rule = f"is outside the working folder; only the command line may place {KEYS[key]} there"
        fix = f"{at_default(key)} or {override(key, value)}"
        out.append(Problem("MT019", key, value, rule, fix, said[key]))
    return out


def foreign_launcher(
    run: UnresolvedRun,
    origin_of: Callable[[str], str],
    is_own: Callable[[str], bool],
    choosers: Mapping[str, str],
) -> list[Problem]:
    """Return a problem for each key of `launch` that a recipe or run file sets, and for a recipe's
    choice of it: both decide which commands run where.

    Args:
        run: the configuration.
        origin_of: returns the origin of a key.
        is_own: returns whether a file may set keys of `launch`.
        choosers: group -> the origin of its choice, if it is not the default one.
    """
    out = []
    chooser = choosers.get("launch", COMMAND_LINE)
    if chooser != COMMAND_LINE:
        out.append(Problem("MT021", "launch", run.launch.kind, "", "launch=local", chooser))
    for key, value in run.flat().items():
        if not key.startswith("launch."):
            continue
        source = origin_of(key).rpartition(":")[0]
        if not source or is_own(source):
            continue
        # run.yaml has every key, at its default; an entry of a mapping is no key, and has none.
        field = field_of(key)
        if field is None or value not in (field.default, _plain(field.default)):
            mapping = ".".join(key.split(".")[:2])
            fix = override(key, value) if field is not None else f"{mapping}={{KEY:VALUE}}"
            out.append(Problem("MT021", key, value, "", fix, origin_of(key)))
    return out


def foreign_remote(
    run: UnresolvedRun,
    origin_of: Callable[[str], str],
    is_own: Callable[[str], bool],
    base: Path | None,
) -> list[Problem]:
    """Return a problem if a recipe or run file sets the address to which checkpoints are uploaded:
    it would receive the weights, and could be anybody's.

    Args:
        run: the configuration.
        origin_of: returns the origin of a key.
        is_own: returns whether a file may set it.
        base: the run file; one in its own run folder may keep the address of its run.
    """
    address = run.checkpoint.remote
    source = origin_of(REMOTE).rpartition(":")[0]
    if address is None or not source or is_own(source):
        return []
    if base is not None and address == _noted(_home_of(base) / REMOTE_FILE).get("url"):
        return []
    return [Problem("MT458", REMOTE, address, "", override(REMOTE, address), origin_of(REMOTE))]


def foreign_hooks(
    run: UnresolvedRun,
    origin_of: Callable[[str], str],
    is_own: Callable[[str], bool],
    base: Path | None,
) -> list[Problem]:
    """Return a problem if a recipe or run file enables hooks, which are code: somebody else may
    have written it.

    Args:
        run: the configuration.
        origin_of: returns the origin of a key.
        is_own: returns whether a file may set it.
        base: the run file; one in its own run folder may keep the hooks of its run.
    """
    return _foreign("MT523", HOOKS, list(run.log.hooks), origin_of, is_own, base)


def foreign_reward_url(
    run: UnresolvedRun,
    origin_of: Callable[[str], str],
    is_own: Callable[[str], bool],
    base: Path | None,
) -> list[Problem]:
    """Return a problem if a recipe or run file sets the server that judges answers: it would
    receive prompts and answers, and could be anybody's.

    The arguments are those of `foreign_hooks`.
    """
    return _foreign("MT480", REWARD_URL, run.rollout.reward_url, origin_of, is_own, base)


def _foreign(
    code: str,
    key: str,
    value: object,
    origin_of: Callable[[str], str],
    is_own: Callable[[str], bool],
    base: Path | None,
) -> list[Problem]:
    source = origin_of(key).rpartition(":")[0]
    if not value or not source or is_own(source):
        return []
    name = key.rpartition(".")[2]
    if base is not None and value == _noted(_home_of(base) / ENVIRONMENT).get(name):
        return []
    return [Problem(code, key, value, "", override(key, value), origin_of(key))]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def real_path(text: str) -> str:
    """Return the absolute path of a user's text, without links; "" if it can be none."""
    try:
        return os.path.realpath(user_path(text))
    except (OSError, ValueError):
        return ""


def _beneath(place: str, folder: str) -> bool:
    """Return whether a place is in a folder other than the root, which holds everything."""
    return folder not in ("", "/") and f"{place}/".startswith(f"{folder}/")


def _places_of(home: Path) -> list[str]:
    """Return the folders in which a run has had local checkpoints."""
    places = _noted(home / LOCAL_FILE).get("places")
    return list(map(str, places)) if isinstance(places, list) else []


def _home_of(base: Path) -> Path:
    """Return the run folder of a run file, which may be that of one of its checkpoints."""
    return run_folder_of(user_path(str(base)).parent)


def _noted(file: Path) -> dict[str, object]:
    """Return the content of a file that names its run folder; empty for a folder that is not where
    it was made, which may be somebody else's.
    """
    try:
        body = json.loads(file.read_text())
        ours = body["home"] == os.path.realpath(file.parent)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return body if ours else {}


def _is_ours(place: str) -> bool:
    """Return whether a folder is a cache of mtrain."""
    try:
        return (
            os.path.isfile(f"{place}/{TAG_FILE}")
            and (Path(place) / TAG_FILE).read_bytes()[:200] == TAG.encode()
        )
    except (OSError, ValueError):
        return False
