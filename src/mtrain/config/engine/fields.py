"""Facts about fields of megatron-core: those that no key feeds, and the releases of the others.

They are data, in `fields.json`. Its section `unmapped` groups fields by owner and reason; `since`
marks fields that megatron-core has had since 0.19. `fixed_in_tables` are fields that the tables of
`core_fields` set for every run. `versions` names the releases of single fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from mtrain.config.engine import release
from mtrain.config.engine.release import SINCE_0_19, UNTIL_0_16, Versions

Why = Literal["derived", "fixed", "not offered"]
TRANSFORMER = "TransformerConfig"
LATENT = "MLATransformerConfig"
GPT = "GPTModel"
DDP = "DistributedDataParallelConfig"
FSDP2 = "TorchFullyShardedDataParallelConfig"
OPTIMIZER = "OptimizerConfig"
SCHEDULER = "OptimizerParamScheduler"
DATA = "GPTDatasetConfig"
# Configurations whose every field is accounted for; a subclass only for what it adds.
OWNERS = (TRANSFORMER, LATENT, GPT, DDP, FSDP2, OPTIMIZER, SCHEDULER, DATA)

_VERSIONS = {"since 0.19": SINCE_0_19, "until 0.16": UNTIL_0_16}
_FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("fields.json").read_text("utf-8"))

# `Owner.field` -> why the tables set it, whatever the keys say.
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
    return name not in _BY_NAME or (release.release() or release.SUPPORTED[0]) in _BY_NAME[name]
