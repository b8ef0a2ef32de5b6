"""An argument of a checkpoint of Megatron-LM that says another model than a run's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
