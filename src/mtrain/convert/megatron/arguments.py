"""The arguments that Megatron-LM stores in a checkpoint, read from `common.pt` as data.

No class that the pickle names is imported.

Megatron-LM knows one scaling, yarn: a type of position embedding with arguments, some of which MLA
shares and all of which forks prefix with `yarn_`. An export stores other scalings under mtrain's
keys.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.rope_scaling import RopeScalingConfig
from mtrain.config.schema.run import RunConfig
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
    """Reason against importing the argument; or, with a key, for `becomes`."""


def is_whole(kept: Mapping[str, Any]) -> bool:
    """Return whether Megatron-LM saved the arguments, which stores all of them."""
    return len(kept) > _WHOLE


COMMON = "common.pt"
MAX_COMMON_BYTES = 64 << 20
MOST_ITEMS = 1 << 14
"""The longest list among the arguments, with an item for each layer."""


class _Every:
    """A set of all names: the reader runs none of them, and returns plain values only."""

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
    """Return the file with a checkpoint's arguments: `common.pt` if it exists."""
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


POSITIONS = "position_embedding_type"
YARN = "yarn"
_KEY = "model.rope_scaling"
_OURS = "rope_scaling."
_NUMBERS: dict[str, tuple[str, Any]] = {
    "factor": ("rotary_scaling_factor", 1.0),
    "original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
    "truncate": ("yarn_correction_range_round_to_int", True),
}
"""Key -> the argument of Megatron-LM, and its default."""
_WEIGHTS: dict[str, tuple[str, Any]] = {
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""The same for the two keys of the factor of cosines and sines."""
_PREFIXED = {"rotary_scaling_factor": "yarn_rotary_scaling_factor"} | {
    name: f"yarn_{name}" for name in _WEIGHTS
}

_MOST = 1e12
"""Every number of yarn is below it."""


def as_rope(kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with yarn as mtrain has it: rotary positions with a scaling."""
    return {**kept, POSITIONS: "rope"} if kept.get(POSITIONS) == YARN else kept


def scaling_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments for the scaling of a model's rotary frequencies."""
    scaling = model.rope_scaling
    if scaling is None:
        return {f"{_OURS}rope_type": None}
    if scaling.rope_type != YARN:
        return {f"{_OURS}{key}": _plain(value) for key, value in scaling if value is not None}
    numbers = _numbers(scaling, model)
    out = {name: numbers[key] for key, (name, _) in _NUMBERS.items()}
    return {f"{_OURS}rope_type": None, POSITIONS: YARN, **out, **_weights(scaling, model)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _numbers(scaling: RopeScalingConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the numbers of a run's yarn, null included."""
    usual = {key: value for key, (_, value) in _NUMBERS.items()}
    usual["original_max_position_embeddings"] = model.max_position_embeddings
    given = {key: getattr(scaling, key) for key in usual}
    return {key: usual[key] if value is None else value for key, value in given.items()}


def _weights(scaling: RopeScalingConfig, model: ModelConfig) -> dict[str, float]:
    """Return the two weights that make the factor of cosines and sines of a model."""
    if scaling.mscale and scaling.mscale_all_dim:
        return {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    if scaling.attention_factor is None or scaling.factor <= 1:
        return dict(_WEIGHTS.values())
    wanted = (scaling.attention(model.max_position_embeddings) - 1) / (
        0.1 * math.log(scaling.factor)
    )
    return {"mscale": wanted, "mscale_all_dim": 0.0}


def scaling_differences(kept: Mapping[str, Any], run: RunConfig) -> Iterator[Difference]:
    """Yield the differences of a checkpoint's scaling of rotary frequencies from a run's.

    MLA has its own scaling.
    """
    ours = run.model.rope_scaling
    if run.model.mla is not None or kept.get("multi_latent_attention"):
        return
    if kept.get(POSITIONS) == YARN:
        yield from _of_yarn(kept, run.model)
    elif ours is not None and ours.rope_type == YARN and POSITIONS in kept:
        yield Difference(POSITIONS, kept[POSITIONS], _KEY, YARN, None)
    else:
        yield from _of_others(kept, ours)


def _of_yarn(kept: Mapping[str, Any], model: ModelConfig) -> Iterator[Difference]:
    given = {
        key: _kept(kept, *argument) for key, argument in (*_NUMBERS.items(), *_WEIGHTS.items())
    }
    theirs = {key: value for key, (_, value) in given.items() if value is not None}
    strange = [key for key, value in theirs.items() if not _is_number(value)]
    for key in strange:
        yield Difference(given[key][0], theirs[key], "", None, None, "is no number")
    if strange:
        return
    ours = model.rope_scaling
    if ours is None or ours.rope_type != YARN:
        here = None if ours is None else ours.rope_type
        if "factor" not in theirs:
            why = "Megatron-LM scales by a factor that no argument says"
            yield Difference(POSITIONS, YARN, "", here, None, why)
            return
        whole = {"rope_type": YARN, **{key: theirs[key] for key in _NUMBERS if key in theirs}}
        weights = _as_keys(theirs, theirs["factor"])
        whole |= {key: value for key, value in weights.items() if value is not None}
        yield Difference(POSITIONS, YARN, _KEY, here, whole)
        return
    for key, value in _numbers(ours, model).items():
        if key in theirs and theirs[key] != value:
            yield Difference(given[key][0], theirs[key], f"{_KEY}.{key}", value, theirs[key])
    if theirs.keys() & _WEIGHTS.keys():
        yield from _of_weights(kept, {key: given[key][0] for key in _WEIGHTS}, theirs, model)


def _of_weights(
    kept: Mapping[str, Any], names: Mapping[str, str], theirs: Mapping[str, Any], model: ModelConfig
) -> Iterator[Difference]:
    """Yield the differences of the factor of cosines and sines, which has several spellings."""
    ours = model.rope_scaling
    assert ours is not None
    factor = theirs.get("factor", ours.factor)
    scaled = ours.model_copy(update={"factor": factor})
    if math.isclose(
        _attention(theirs, factor), scaled.attention(model.max_position_embeddings), rel_tol=1e-6
    ):
        return
    for key, value in _as_keys(theirs, factor).items():
        if value != getattr(ours, key):
            name = names.get(key, names["mscale"])
            yield Difference(name, kept.get(name), f"{_KEY}.{key}", getattr(ours, key), value)


def _kept(kept: Mapping[str, Any], name: str, usual: Any) -> tuple[str, Any]:
    """Return the argument that sets a number of yarn, and its value, if a checkpoint has one."""
    # the longer name is only yarn's, so that it counts first
    for given in (_PREFIXED.get(name, name), name):
        if kept.get(given) is not None:
            return given, kept[given]
    return name, usual if is_whole(kept) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST


def _weight(theirs: Mapping[str, Any], key: str) -> float:
    return float(theirs.get(key, _WEIGHTS[key][1]))


def _attention(theirs: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cosines and sines in megatron-core."""
    # nothing is stretched
    if factor <= 1:
        return 1.0
    above, below = (0.1 * _weight(theirs, key) * math.log(factor) + 1.0 for key in _WEIGHTS)
    return above / below if below else math.inf


def _as_keys(theirs: Mapping[str, Any], factor: float) -> dict[str, float | None]:
    """Return the keys that determine the factor of cosines and sines."""
    attention = _attention(theirs, factor)
    usual = _attention({}, factor)
    above, below = (_weight(theirs, key) for key in _WEIGHTS)
    if above > 0 and below > 0:
        return {"mscale": above, "mscale_all_dim": below, "attention_factor": None}
    same = math.isclose(attention, usual, rel_tol=1e-9)
    return {"mscale": None, "mscale_all_dim": None, "attention_factor": None if same else attention}


def _of_others(kept: Mapping[str, Any], ours: RopeScalingConfig | None) -> Iterator[Difference]:
    """Yield the differences of scalings that only our exports have."""
    name = f"{_OURS}rope_type"
    if name not in kept and not is_whole(kept):
        return
    here = None if ours is None else ours.rope_type
    there = kept.get(name)
    if there is None:
        if here is not None:
            yield Difference(name, None, _KEY, here, None, "" if name in kept else NO_ARGUMENT)
        return
    theirs = {
        key: kept[f"{_OURS}{key}"]
        for key in RopeScalingConfig.model_fields
        if f"{_OURS}{key}" in kept
    }
    if ours is None or here != there:
        yield Difference(name, there, _KEY, here, theirs)
        return
    for key, value in ours:
        if _plain(value) != _plain(theirs.get(key)):
            yield Difference(
                f"{_OURS}{key}", theirs.get(key), f"{_KEY}.{key}", value, theirs.get(key)
            )
