"""Where the choices and the shared recipes lie."""

from __future__ import annotations

import os
from functools import cache
from itertools import islice
from pathlib import Path

RUN_FILE, MANIFEST = "run.yaml", "manifest.json"
"""What a run folder and a checkpoint folder have."""
MAX_NAMES = 2000
"""Names of a folder that are compared with one that is missing."""

_PACKAGE = Path(__file__).resolve().parents[1]


def _folder(name: str) -> Path:
    checkout = _PACKAGE.parents[1] / name
    return checkout if checkout.is_dir() and _PACKAGE.parent.name == "src" else _PACKAGE / f"_{name}"


@cache
def program() -> str:
    """How this program is called here: `python launch.py` in a checkout, `mtrain` where it is installed."""
    checkout = _PACKAGE.parent.name == "src" and (_PACKAGE.parents[1] / "launch.py").is_file()
    return "python launch.py" if checkout else "mtrain"


def conf_dir() -> Path:
    """The folder of group files: `conf/` of the checkout, else the copy inside the installed package."""
    return _folder("conf")


def recipes_dir() -> Path:
    """The folder of shared recipes: `recipes/` of the checkout, else the copy inside the installed package."""
    return _folder("recipes")


def choices_of_group(group: str) -> list[str]:
    """The choices of a group that have a file."""
    return sorted(path.name.removesuffix(".yaml") for path in (conf_dir() / group).glob("*.yaml"))


def display(path: Path) -> str:
    """`path` as problems name it: from `conf/` or `recipes/` on for shipped files, else as it was given."""
    for root, name in ((conf_dir(), "conf"), (recipes_dir(), "recipes")):
        if path.is_relative_to(root):
            return f"{name}/{path.relative_to(root).as_posix()}"
    return str(path)


def user_path(text: str) -> Path:
    """The path that a configuration names, `~` expanded where there is such a home."""
    return Path(os.path.expanduser(text))


def names_near(path: Path, limit: int = 3) -> list[str]:
    """Names beside a missing `path` that look like it, best first."""
    import difflib

    folder = path.parent
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMES))
    except (OSError, ValueError):
        return []
    near = difflib.get_close_matches(path.name, names, n=limit, cutoff=0.65)
    same_stem = [name for name in names if Path(name).stem == path.name and name not in near]
    return [str(folder / name) for name in [*same_stem, *near][:limit]]
