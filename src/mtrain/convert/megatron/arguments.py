"""What Megatron-LM calls the parts of a model in the arguments that it keeps in a checkpoint.

Needs no torch: the arguments in `common.pt` are read as data, and no class that it names is more
than its name.
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
"""Arguments of which a checkpoint has more when Megatron-LM saved it: what is not among them was
not there yet.
"""
NO_ARGUMENT = "has no argument for it"


class Apart(NamedTuple):
    """An argument that says another model."""

    name: str
    there: Any
    key: str
    """Ours; empty: there is none."""
    here: Any
    becomes: Any
    """The value of the key that the argument says."""
    why: str = ""
    """A clause about what cannot be taken over, or, beside a key, about Megatron-LM, which computes
    as `becomes`.
    """


def is_whole(kept: Mapping[str, Any]) -> bool:
    """Tell if Megatron-LM saved the arguments: it keeps all that it has."""
    return len(kept) > _WHOLE


COMMON = "common.pt"
MAX_COMMON_BYTES = 64 << 20
MOST_ITEMS = 1 << 14
"""Of a list among the arguments: one item for each layer."""


class _Every:
    """Whatever a pickle names: none of it is run, and only plain values are looked at."""

    def __contains__(self, name: object) -> bool:
        return True


def read_arguments(folder: Path, common: Chunk | None = None) -> dict[str, Any]:
    """Return the plain values among the arguments that a checkpoint keeps; empty where it keeps
    none that can be read.

    They are in `common.pt`, or since megatron-core 0.19 among the objects of the checkpoint:
    `common` says where.
    """
    try:
        data = _saved(folder, common)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (info,) = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                return {}
            top = pickled.read(archive.read(info), _Every(), str(kept_in(folder, common)))
    except Exception:  # of whatever zipfile makes of what it is given
        return {}
    kept = _texts(top[0] if isinstance(top, list) and top else top).get("args")
    found = (
        _texts(kept.state) if isinstance(kept, Record) and kept.name == "argparse.Namespace" else {}
    )
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_ITEMS and all(map(_is_plain, value))
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
