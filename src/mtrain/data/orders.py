"""Orders of samples that cannot be computed one by one: made once, in files that every rank maps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mtrain import strict_json
from mtrain.data import cache as corpora
from mtrain.data.cache import META
from mtrain.errors import CorruptData

SMALL = 1 << 20
"""Orders of fewer numbers are made in memory: that is done in a moment."""
Arrays = dict[str, np.ndarray]
Fill = Callable[[Callable[[str, str, int], np.ndarray]], None]
"""Fills arrays that it asks for by name, dtype and length."""


def made_once(folder: Path, size: int, fill: Fill) -> Arrays:
    """The arrays that `fill` makes, of about `size` numbers: from `folder` where they were made before.

    Where the folder cannot be written they are made in memory.
    """
    if size > SMALL:
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            found = _known(folder)
            if found is None:
                with corpora.locked(folder.with_name(f"{folder.name}.lock")):
                    found = _known(folder) or _write(folder, fill)
            return found
    made: Arrays = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        made[name] = np.zeros(length, dtype)
        return made[name]

    fill(array)
    return made


def _known(folder: Path) -> Arrays | None:
    """The arrays of a folder that is complete, in use from now on."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        arrays = {name: load(folder / f"{name}.npy") for name in meta["arrays"] if f"{name}.npy" in corpora.ORDERS}
        if [[name, array.dtype.str, len(array)] for name, array in arrays.items()] != meta["shapes"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, CorruptData):
        return None
    return arrays if corpora.use(folder) else None


def _write(folder: Path, fill: Fill) -> Arrays:
    """Make the arrays in a folder beside `folder`, then rename it. The caller holds the lock."""
    building = folder.with_name(f".building-{folder.name}-{os.getpid()}")
    for stale in folder.parent.glob(f".building-{folder.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    building.mkdir()
    made: dict[str, np.memmap] = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        path = building / f"{name}.npy"
        made[name] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
        return np.asarray(made[name])  # numpy shuffles plain arrays alone at full speed

    try:
        fill(array)
        for one in made.values():
            one.flush()
        shapes = [[name, one.dtype.str, len(one)] for name, one in made.items()]
        text = strict_json.dumps({"kind": "order", "arrays": list(made), "shapes": shapes})
        (building / META).write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    corpora.use(folder)
    return {name: load(folder / f"{name}.npy") for name in made}


def load(path: Path) -> np.ndarray:
    """An array of a `.npy` file as a map of it, without unpickling anything.

    Raises CorruptData for a file that is none, or shorter than its header says.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")  # refuses objects, which are what is pickled
    except (ValueError, EOFError, OverflowError, SyntaxError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorruptData(f"{path}: no array of numbers in numpy's format: {reason}") from error
