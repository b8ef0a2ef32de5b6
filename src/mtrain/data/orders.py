"""Orders of samples that cannot be computed one by one: made once, in files that every
rank maps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mtrain import strict_json
from mtrain.data import cache
from mtrain.data.cache import META
from mtrain.errors import CorruptData

SMALL = 1 << 20
"""Orders of fewer numbers are made in memory: that is done in a moment."""
Arrays = dict[str, np.ndarray]
Fill = Callable[[Callable[[str, str, int], np.ndarray]], None]
"""Fills arrays that it asks for by name, dtype and length."""


def made_once(folder: Path, size: int, fill: Fill) -> Arrays:
    """Return the arrays that `fill` makes, of about `size` numbers: from `folder` where they were
    made before.

    Where the folder cannot be written they are made in memory.
    """
    if size > SMALL:
        with contextlib.suppress(OSError):
            return cache.made(
                folder, lambda: _known(folder), lambda building: _write(building, fill)
            )
    made: Arrays = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        made[name] = np.zeros(length, dtype)
        return made[name]

    fill(array)
    return made


def _known(folder: Path) -> Arrays | None:
    """Return the arrays of a folder that is complete."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        arrays = {
            name: load(folder / f"{name}.npy")
            for name in meta["arrays"]
            if f"{name}.npy" in cache.ORDERS
        }
        shapes = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    except (OSError, ValueError, KeyError, TypeError, CorruptData):
        return None
    return arrays if shapes == meta.get("shapes") else None


def _write(folder: Path, fill: Fill) -> None:
    made: dict[str, np.memmap] = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        path = folder / f"{name}.npy"
        made[name] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
        with open(
            path, "r+b"
        ) as file:  # a full disk says so here, and not by SIGBUS where the map is written
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return np.asarray(made[name])  # numpy shuffles plain arrays alone at full speed

    fill(array)
    for one in made.values():
        one.flush()
    shapes = [[name, one.dtype.str, len(one)] for name, one in made.items()]
    text = strict_json.dumps({"kind": "order", "arrays": list(made), "shapes": shapes})
    (folder / META).write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> np.ndarray:
    """Return an array of a `.npy` file as a map of it, without unpickling anything.

    Raises CorruptData for a file that is none, or shorter than its header says.
    """
    try:
        # refuses objects, which are what is pickled
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OverflowError, SyntaxError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorruptData(f"{path}: no array of numbers in numpy's format: {reason}") from error
