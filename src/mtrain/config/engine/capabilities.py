"""Capabilities that only some supported releases of megatron-core have: one row each.

A row is a key, a value, a family or an optimizer. A rule judges the rows, `explain KEY` shows those
of a key, and `engines` lists all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtrain.config.engine import release as engine
from mtrain.config.engine.release import SINCE_0_19, Release, Versions
from mtrain.config.resolve.conditional import condition

Kind = Literal["key", "family", "dispatcher", "optimizer"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One row."""

    kind: Kind
    when: str
    """The condition that needs it, as in `config.resolve.condition`; its first key is the row's."""
    about: str
    """Its description, as a clause."""
    versions: Versions
    """The releases that have it."""
    without: Mapping[str, Any]
    """Keys and values of a configuration that does without it."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the condition, the row's first."""
        return tuple(term.key for term in condition(self.when).terms)


CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "key",
        "optim.skip_above_grad_norm",
        "an update is skipped where the gradient norm is too large",
        SINCE_0_19,
        {"optim.skip_above_grad_norm": None},
    ),
    Capability(
        "key",
        "model.mtp_detach_heads",
        "predictions of further tokens train only their own layers, with a gradient norm of"
        " their own",
        SINCE_0_19,
        {"model.mtp_detach_heads": False},
    ),
    Capability(
        "key",
        "data.packed and model.mtp_num_layers and parallel.recompute.granularity=full "
        "and parallel.recompute.method=uniform",
        "layers of multi-token prediction are computed again for packed samples",
        SINCE_0_19,
        {
            "parallel.recompute.granularity": "none",
            "parallel.recompute.method": None,
            "parallel.recompute.num_layers": None,
        },
    ),
    Capability(
        "key",
        "parallel.activation_offload.fraction",
        "a part of the activations that could wait in host memory does",
        SINCE_0_19,
        {"parallel.activation_offload.fraction": None},
    ),
    Capability(
        "key",
        "parallel.activation_offload.delta_bytes_across_stages",
        "later stages copy fewer activations to host memory",
        SINCE_0_19,
        {"parallel.activation_offload.delta_bytes_across_stages": None},
    ),
    Capability(
        "dispatcher",
        "model.moe.flex_dispatcher_backend=ncclep",
        "tokens travel to experts by NCCL's own kernels, through TransformerEngine",
        SINCE_0_19,
        {"model.moe.flex_dispatcher_backend": None},
    ),
)


def keys() -> tuple[str, ...]:
    """Return every key that some row reads."""
    return tuple(dict.fromkeys(key for row in CAPABILITIES for key in row.keys))


def of_key(key: str) -> Iterator[Capability]:
    """Return the rows whose first key is this one."""
    return (row for row in CAPABILITIES if row.keys[0] == key)


def is_here(row: Capability, release: Release | None) -> bool:
    """Return whether a release has it; an unknown release is refused by a run, not here."""
    return release is None or release in row.versions


def where_it_is(row: Capability) -> str:
    """Describe which releases have it, and which release is installed."""
    found = engine.release()
    here = f"{engine.words(found)} is installed" if found else "none is installed"
    return f"{row.when}: megatron-core {row.versions}; {here}"
