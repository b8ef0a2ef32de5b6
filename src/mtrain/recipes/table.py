"""The one table between Megatron-LM's flags and the keys here, read in both directions."""

from __future__ import annotations

from functools import cache

from mtrain.config.keys import choices_of, schema_keys
from mtrain.recipes.arguments import Entry
from mtrain.recipes.flags import default_of, kind_of, on, one
from mtrain.recipes.flags_layout import AXES, CUTS
from mtrain.recipes.flags_model import EXPERTS, LATENT, MODEL
from mtrain.recipes.flags_optim import OPTIM
from mtrain.recipes.flags_other import OTHERS
from mtrain.recipes.flags_precision import PRECISION
from mtrain.recipes.flags_training import DATA, REST, TRAINER

WRITTEN: tuple[Entry, ...] = (*MODEL, *EXPERTS, *LATENT, *AXES, *CUTS, *PRECISION, *DATA, *TRAINER, *OPTIM, *REST)
"""In the order in which flags are read and written; what an entry asks of other keys stands before it."""


@cache
def table() -> tuple[Entry, ...]:
    """Every entry; a key of the schema that is named as a flag which had no key yet is one as well."""
    taken = {key for entry in WRITTEN for key in entry.keys}
    grown = [entry for key in schema_keys() if key not in taken and (entry := _grown(key)) is not None]
    return (*WRITTEN, *grown)


def _grown(key: str) -> Entry | None:
    """The entry of a key whose name is that of a flag in the list of flags without one."""
    parts = key.split(".")
    word = parts[-1].replace("_", "-")
    names = [f"--{word}", *(f"--{part}-{word}" for part in parts[1:-1])]
    flag = next((name for name in names if name in OTHERS), None)
    if flag is None:
        return None
    default = default_of(key)
    if isinstance(default, bool):
        return on(flag, key) if default is False else None
    field = schema_keys()[key]
    simple = choices_of(key) or kind_of(key) is not str or "str" in str(field.annotation)
    return one(flag, key, default) if simple and "tuple" not in str(field.annotation) else None


@cache
def flags_of() -> dict[str, tuple[str, ...]]:
    """Key -> the flags that say it."""
    return {key: entry.flags for entry in table() for key in entry.keys if entry.flags}


@cache
def known_flags() -> frozenset[str]:
    """Every flag that the table, or the list of flags without a key, has."""
    return frozenset(flag for entry in table() for flag in entry.flags) | OTHERS.keys()
