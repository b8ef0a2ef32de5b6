"""The arguments that Megatron-LM stores in a checkpoint, read from `common.pt` as data.

No class that the pickle names is imported.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.convert.megatron import pickled
from mtrain.convert.megatron.pickled import Mapped, Record
from mtrain.convert.megatron.torch_dist import Chunk
from mtrain.convert.plain_file import open_plain, read_plain

_WHOLE = 200
"""A checkpoint of Megatron-LM has more arguments than this: one that it lacks did not exist yet."""
NO_ARGUMENT = "has no argument for it"


class Difference(NamedTuple):
    """An argument of another model than the run's."""

    name: str
    there: Any
    key: str
    """Our key, or empty without one."""
    here: Any
    becomes: Any
    """The value of the key that the argument means."""
    why: str = ""
    """Reason why the argument cannot be imported; or, with a key, why `becomes` is what Megatron-LM
    computes.
    """


def is_whole(kept: Mapping[str, Any]) -> bool:
    """Return whether Megatron-LM saved the arguments, which stores all of them."""
    return len(kept) > _WHOLE


COMMON = "common.pt"
MAX_COMMON_BYTES = 64 << 20
MOST_ITEMS = 1 << 14
"""The longest list among the arguments, with an item for each layer."""


class _Every:
    """A container of all names: none of them is run, and only plain values are read."""

    def __contains__(self, name: object) -> bool:
        return True


def read_arguments(folder: Path, common: Chunk | None = None) -> dict[str, Any]:
    """Return the plain values among the arguments of a checkpoint, or {} if they cannot be read.

    They are in `common.pt`, or since megatron-core 0.19 in the object `common` of the checkpoint.
    """
    try:
        data = _saved(folder, common)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (info,) = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
            # torch compresses nothing, and a compressed entry could unfold without end
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                return {}
            top = pickled.read(archive.read(info), _Every(), str(kept_in(folder, common)))
    except Exception:  # zipfile raises errors of many types for a damaged file
        return {}
    # an object of a checkpoint is stored in a list
    kept = _texts(top[0] if isinstance(top, list) and top else top).get("args")
    found = (
        _texts(kept.state) if isinstance(kept, Record) and kept.name == "argparse.Namespace" else {}
    )
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_ITEMS and all(map(_is_plain, value))
    # enumerations and dtypes, which a pickle names, are left out
    return value is None or isinstance(value, bool | int | float | str)


def kept_in(folder: Path, common: Chunk | None = None) -> Path:
    """Return the file that has a checkpoint's arguments: `common.pt` where there is one, as
    megatron-core reads it.
    """
    return folder / COMMON if common is None or (folder / COMMON).exists() else common.path


def _saved(folder: Path, common: Chunk | None) -> bytes:
    file = kept_in(folder, common)
    if common is None or file.name == COMMON:
        return read_plain(file, MAX_COMMON_BYTES)
    with open_plain(file) as opened:
        opened.seek(common.start)
        return opened.read(min(common.length, MAX_COMMON_BYTES))


def _texts(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapped):
        return {key: of for key, of in value.pairs if isinstance(key, str)}
    return {}
