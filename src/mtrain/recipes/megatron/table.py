"""The table between Megatron-LM's flags and mtrain's keys, read in both directions."""

from __future__ import annotations

from functools import cache

from mtrain.config.messages.keys import flag_of, keys
from mtrain.recipes.megatron.arguments import Entry, of_schema
from mtrain.recipes.megatron.flags_layout import AXES, CUTS
from mtrain.recipes.megatron.flags_model import EXPERTS, LATENT, MODEL
from mtrain.recipes.megatron.flags_optim import OPTIM
from mtrain.recipes.megatron.flags_precision import PRECISION
from mtrain.recipes.megatron.flags_running import GRAPHS, RUNNING
from mtrain.recipes.megatron.flags_training import DATA, TRAINER
from mtrain.recipes.megatron.flags_unmapped import OTHERS, VALUED

WRITTEN: tuple[Entry, ...] = (
    *MODEL,
    *EXPERTS,
    *LATENT,
    *AXES,
    *CUTS,
    *PRECISION,
    *DATA,
    *TRAINER,
    *GRAPHS,
    *OPTIM,
    *RUNNING,
)
"""Entries that need more than one flag with one value."""


@cache
def table() -> tuple[Entry, ...]:
    """Return every entry in the order of the schema: WRITTEN, and those of keys with a flag."""
    taken = {key for entry in WRITTEN for key in entry.keys}
    declared = [
        of_schema(key, flag)
        for key in keys()
        if key not in taken and (flag := flag_of(key)) is not None
    ]
    # the order of the schema is the order of an exported command
    place = {key: index for index, key in enumerate(keys())}
    return tuple(
        sorted(
            (*WRITTEN, *declared),
            key=lambda entry: min(map(place.__getitem__, entry.keys), default=len(place)),
        )
    )


@cache
def flags_of() -> dict[str, tuple[str, ...]]:
    """Return key -> the flags that set it."""
    return {key: entry.flags for entry in table() for key in entry.keys if entry.flags}


@cache
def known_flags() -> frozenset[str]:
    """Return every flag of the table and of the list of flags without a key."""
    return frozenset(flag for entry in table() for flag in entry.flags) | OTHERS.keys()


@cache
def switches() -> frozenset[str]:
    """Return every known flag that takes no value."""
    return frozenset(flag for entry in table() for flag in entry.switches) | (
        OTHERS.keys() - VALUED
    )
