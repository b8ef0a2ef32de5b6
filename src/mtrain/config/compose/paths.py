"""The folders of choices and recipes, of which a user's take precedence over the shipped ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path

from mtrain.errors import ConfigError, Problem

VARIABLE = "MTRAIN_CONF"
ENTRY_POINTS = "mtrain.conf"
RECIPES = "recipes"
# Files that a run folder and a checkpoint folder have.
RUN_FILE = "run.yaml"
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
# The file of a run folder that records its machine and command.
ENVIRONMENT = "env.json"
# The file of a run folder that names the places of its local checkpoints.
LOCAL_FILE = "local.json"
# The file of a run folder that names the address to which its checkpoints are uploaded.
REMOTE_FILE = "remote.json"
# The file of a run folder with a line for each step and evaluation.
METRICS = "metrics.jsonl"
# The folder of a run folder with the reports of abnormal steps.
ANOMALIES = "anomalies"
# Words that `checkpoint.resume` accepts instead of a folder.
RESUME_WORDS = ("auto", "latest")
# Matches the name of a choice or of a group.
CHOICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*\Z")
# The number of names of a folder that are compared with a missing one.
MAX_NAMES = 2000
# The number of names that a message lists.
MOST_NAMES = 24

_PACKAGE = Path(__file__).resolve().parents[2]


@cache
def _folder(name: str, package: Path) -> Path:
    # An editable install runs from a checkout, whose files a developer edits; a wheel holds copies
    # below `_conf` and `_recipes`.
    checkout = package.parents[1] / name
    return checkout if checkout.is_dir() and package.parent.name == "src" else package / f"_{name}"


@cache
def program() -> str:
    """Return the command that starts this program: `python launch.py` or `mtrain`."""
    checkout = _PACKAGE.parent.name == "src" and (_PACKAGE.parents[1] / "launch.py").is_file()
    return "python launch.py" if checkout else "mtrain"


def listing(names: Sequence[str], verb: str) -> str:
    """Return names as words; of more than MOST_NAMES their number and the listing verb."""
    if len(names) > MOST_NAMES:
        return f"{len(names)}, which `{program()} {verb}` lists"
    return ", ".join(names) or "none"


def conf_dir() -> Path:
    """Return the folder of group files: that of the checkout, else of the installed package."""
    return _folder("conf", _PACKAGE)


def recipes_dir() -> Path:
    """Return the folder of shared recipes: that of the checkout, else of the installed package."""
    return _folder("recipes", _PACKAGE)


def folders() -> list[Path]:
    """Return every folder of choices, highest precedence first.

    They are those of `--config-dir` and of the environment variable `MTRAIN_CONF` (separated as in
    `PATH`), those that installed packages name by the entry point `mtrain.conf`, and the shipped
    one. Of two files for one choice the first counts.
    """
    named = [
        Path(os.path.expanduser(text))
        for text in os.environ.get(VARIABLE, "").split(os.pathsep)
        if text
    ]
    return [*named, *_of_packages(), conf_dir()]


@cache
def _of_packages() -> tuple[Path, ...]:
    """Return the folders that installed packages name: the entry point `mine = "my_package.conf"`
    is `conf/` in my_package, which is not imported.
    """
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    found = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        top, *rest = entry.value.split(".")
        spec = find_spec(top)
        found += [
            Path(place, *rest) for place in (spec.submodule_search_locations or () if spec else ())
        ]
    return tuple(found)


@contextmanager
def config_dirs(named: Sequence[str]) -> Iterator[None]:
    """Put folders of choices before all others, also for processes that are started meanwhile.

    Raises:
        ConfigError: one is no folder.
    """
    before = os.environ.get(VARIABLE)
    wanted = [os.path.abspath(os.path.expanduser(text)) for text in named]
    if wanted:
        # A variable rather than an argument: ranks and other child processes must find the same
        # files.
        os.environ[VARIABLE] = os.pathsep.join([*wanted, *([before] if before else [])])
    try:
        check_folders()
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def check_folders() -> None:
    """Check the folders of choices that a user named.

    Raises:
        ConfigError: one is missing, or is no folder.
    """
    missing = [folder for folder in folders() if not folder.is_dir()]
    if missing:
        said = (
            "the folder of choices that --config-dir, MTRAIN_CONF or an entry point mtrain.conf"
            " names"
        )
        fix = "name a folder with a folder for each group, such as DIR/model/mine.yaml"
        what = [(f, "is no folder" if f.exists() else "is not there") for f in missing]
        raise ConfigError(
            [Problem("MT002", "", None, f"{said} {why}", fix, str(f)) for f, why in what]
        )


def find_config(name: str) -> Path | None:
    """Return the file of a choice, such as `model/llama3_8b`, or of `config`; None if missing."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        return None
    files = (folder / f"{name}.yaml" for folder in folders())
    return next(filter(os.path.isfile, files), None)  # false for a name that no file system takes


def is_group(name: str) -> bool:
    """Return whether a folder of choices has this name."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        return False
    return name != RECIPES and any(os.path.isdir(folder / name) for folder in folders())


def group_names() -> list[str]:
    """Return every group that has a folder, including a user's own."""
    named = {place.name for folder in folders() for place in folder.iterdir() if place.is_dir()}
    return sorted(
        name for name in named if name not in (RECIPES, "hydra") and not name.startswith((".", "_"))
    )


def choices_of_group(group: str) -> list[str]:
    """Return the choices of a group that have a file, as `name` or `folder/name`."""
    return _names_below([folder / group for folder in folders()])


def recipe_names() -> list[str]:
    """Return the names of recipes: shared ones, and those below `recipes/` of a user's folders."""
    return _names_below(_recipe_folders())


def find_recipe_file(name: str) -> Path | None:
    """Return the file of a recipe by name; None if it is missing."""
    for folder in _recipe_folders():
        file = folder / f"{name.removesuffix('.yaml')}.yaml"
        # A name such as `../secret` must not leave the folder.
        if os.path.isfile(file) and os.path.realpath(file).startswith(
            os.path.realpath(folder) + os.sep
        ):
            return file
    return None


def _recipe_folders() -> list[Path]:
    return [*(folder / RECIPES for folder in folders()[:-1]), recipes_dir()]


def _names_below(roots: list[Path]) -> list[str]:
    """Return the names of the YAML files below folders, without hidden files and folders.

    A command needs many such lists of some hundred files, and `Path.rglob` builds several objects
    per file.
    """
    names: set[str] = set()
    for root in map(str, roots):
        for folder, inner, files in os.walk(root):
            inner[:] = [name for name in inner if not name.startswith(".")]
            below = folder[len(root) + 1 :].replace(os.sep, "/")
            prefix = f"{below}/" if below else ""
            names.update(
                prefix + name.removesuffix(".yaml")
                for name in files
                if name.endswith(".yaml") and not name.startswith(".")
            )
    return sorted(names)


def display(path: Path) -> str:
    """Return `path` as problems show it: a shipped file from `conf/` or `recipes/` on."""
    for root, name in ((conf_dir(), "conf"), (recipes_dir(), "recipes")):
        if path.is_relative_to(root) and root.name == name:
            return f"{name}/{path.relative_to(root).as_posix()}"
    return str(path)


def is_shipped(source: str) -> bool:
    """Return whether a file, as problems show it, is a shipped one."""
    shipped = ("conf/", "recipes/", f"{conf_dir()}{os.sep}", f"{recipes_dir()}{os.sep}")
    return source.startswith(shipped)


def user_path(text: str) -> Path:
    """Return a path of a configuration with `~` expanded, if that home exists."""
    return Path(os.path.expanduser(text))


def run_folder_of(folder: Path) -> Path:
    """Return the run folder of a checkpoint's folder; any other folder is its own."""
    return folder.parent.parent if folder.parent.name == CHECKPOINTS else folder


def names_near(path: Path, limit: int = 3) -> list[str]:
    """Return existing paths that resemble a missing one, best first.

    Each missing level is repaired by its own, so `corpuz/wiki.txt` is near `corpus/wiki.txt`.
    """
    folder = path.parent
    if not os.path.isdir(folder) and folder != folder.parent:
        folders = [Path(name) for name in names_near(folder, limit) if os.path.isdir(name)]
        found = [name for near in folders for name in _named_like(near, path.name, limit)]
        return found[:limit]
    return _named_like(folder, path.name, limit)


def _named_like(folder: Path, name: str, limit: int) -> list[str]:
    """Return paths in a folder with names like `name`, an equal one first."""
    import difflib

    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMES))
    except (OSError, ValueError):
        return []
    # Their common ending makes all files of a folder similar: the stems must be, too.
    stem = Path(name).stem
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.65)
    near = [
        each for each in near if difflib.SequenceMatcher(None, stem, Path(each).stem).ratio() >= 0.6
    ]
    same_stem = [each for each in names if Path(each).stem == name and each not in near]
    return [str(folder / each) for each in [*same_stem, *near][:limit]]
