"""The release of megatron-core that this process loads, read from its files without an import, and
facts about its fields.

The module that Python finds counts, not pip's metadata: a folder at the front of the path has its
own.

Facts about fields are data, in `fields.json`. Its section `unmapped` groups fields without a key
by owner and reason; `since` marks fields that megatron-core has had since 0.19. `fixed_in_tables`
are fields that the tables of `core_fields` set for every run. `versions` names the releases of
single fields.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

Release = tuple[int, int, int]
# The releases that adaptations and patches were checked against, each for later ones of its series
# too.
SUPPORTED: tuple[Release, ...] = ((0, 16, 1), (0, 19, 2))
_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d{1,6})\s*$", re.MULTILINE)
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Versions:
    """The releases from `first` up to, but not including, `before`, if there is one."""

    first: Release = SUPPORTED[0]
    before: Release | None = None

    def __contains__(self, release: Release) -> bool:
        return self.first <= release and (self.before is None or release < self.before)

    def __str__(self) -> str:
        first = f">={words(self.first)}"
        return first if self.before is None else f"{first},<{words(self.before)}"


EVERY = Versions()
UNTIL_0_16 = Versions(before=(0, 17, 0))
SINCE_0_19 = Versions(first=(0, 19, 0))


def words(release: Release) -> str:
    """Return a release as it is written."""
    return ".".join(map(str, release))


def supported_words() -> str:
    """Return the supported releases as it is written."""
    return " and ".join(map(words, SUPPORTED))


def is_supported(release: Release) -> bool:
    """Return whether a release was checked, or is a later one of a checked series."""
    return any(release[:2] == known[:2] and release >= known for known in SUPPORTED)


def folder() -> Path | None:
    """Return the folder of the module `megatron.core` that Python finds; None if it is missing."""
    try:
        if "megatron.core" in sys.modules:
            spec = sys.modules["megatron.core"].__spec__
        else:  # what stands above it is found and not imported
            above = importlib.util.find_spec("megatron")
            places = above.submodule_search_locations if above is not None else None
            spec = (
                PathFinder.find_spec("megatron.core", list(places)) if places is not None else None
            )
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def release() -> Release | None:
    """Return the release of that module; None if it is missing or states no release."""
    found = folder()
    return None if found is None else release_in(found)


def version() -> str | None:
    """Return that release as text; None if it is unknown."""
    found = release()
    return None if found is None else words(found)


def at_least(*first: int) -> bool:
    """Return whether that module's release is this one or a later one."""
    found = release()
    return found is not None and found >= first


def release_in(found: Path) -> Release | None:
    """Return the release in the text of a folder `megatron/core`, as numbers."""
    try:
        with (found / "package_info.py").open("rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    # The version is assembled from three constants in the file, which is read and not run.
    numbers = {name: int(value) for name, value in _NUMBER.findall(text)}
    return (numbers["MAJOR"], numbers["MINOR"], numbers["PATCH"]) if len(numbers) == 3 else None


Why = Literal["derived", "fixed", "not offered"]
TRANSFORMER = "TransformerConfig"
LATENT = "MLATransformerConfig"
GPT = "GPTModel"
DDP = "DistributedDataParallelConfig"
FSDP2 = "TorchFullyShardedDataParallelConfig"
OPTIMIZER = "OptimizerConfig"
SCHEDULER = "OptimizerParamScheduler"
DATA = "GPTDatasetConfig"
# Configurations whose every field is accounted for; a subclass only for its additions.
OWNERS = (TRANSFORMER, LATENT, GPT, DDP, FSDP2, OPTIMIZER, SCHEDULER, DATA)

_VERSIONS = {"since 0.19": SINCE_0_19, "until 0.16": UNTIL_0_16}
_FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("fields.json").read_text("utf-8"))

# `Owner.field` -> why the tables set it, whatever the keys are.
FIXED_IN_TABLES: dict[str, str] = _FACTS["fixed_in_tables"]


def _unmapped() -> dict[str, tuple[Why, str]]:
    return {
        f"{owner}.{name}": (group["why"], group["reason"])
        for owner, groups in _FACTS["unmapped"].items()
        for group in groups
        for name in group["fields"]
    }


def _field_versions() -> dict[str, Versions]:
    versions = {field: _VERSIONS[text] for field, text in _FACTS["versions"].items()}
    for owner, groups in _FACTS["unmapped"].items():
        for group in groups:
            if "since" in group:
                versions |= {f"{owner}.{name}": SINCE_0_19 for name in group["fields"]}
    return versions


# `Owner.field` -> why no key feeds it, and a sentence.
UNMAPPED = _unmapped()
# `Owner.field` -> the releases that have it; every other field is in all of them.
FIELD_VERSIONS = _field_versions()
_BY_NAME = {field.partition(".")[2]: versions for field, versions in FIELD_VERSIONS.items()}


def is_there(name: str) -> bool:
    """Return whether the release that this process loads has a field of this name."""
    return name not in _BY_NAME or (release() or SUPPORTED[0]) in _BY_NAME[name]
