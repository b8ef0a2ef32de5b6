"""Bugs of packed documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.museum.exhibit import Exhibit, wrap
from tests.museum.sums import CORE, ranks

LEARNED = "model.position_embedding_type=learned_absolute"


def merged(bounds: torch.Tensor) -> torch.Tensor:
    """Merge the first two documents."""
    return bounds if len(bounds) < 3 else torch.cat([bounds[:1], bounds[2:]])


def _boundaries(
    change: Callable[[torch.Tensor], torch.Tensor | None], wrong: Callable[[], bool]
) -> None:
    wrap(
        "mtrain.train.loop.step",
        "packed_params",
        lambda real, bounds: real(change(bounds) if bounds is not None and wrong() else bounds),
    )
    # The host knows the longest document from the bounds of the data: here it is that of the
    # changed ones.
    wrap(
        "mtrain.train.loop.step",
        "documents_of",
        lambda real, batch: real({"cu_seqlens": change(batch["cu_seqlens"])} if wrong() else batch),
    )


def middle_stage_without_boundaries() -> None:
    """Hide the boundaries of documents from a middle stage."""
    _boundaries(lambda bounds: None, lambda: ranks().get_pipeline_model_parallel_rank() == 1)


def leaked_attention() -> None:
    """Let one rank's attention read the document before."""
    _boundaries(merged, lambda: torch.distributed.get_rank() == 1)


def _packed_otherwise(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    def pack(real: Any, *args: Any, **more: Any) -> Any:
        packed = real(*args, **more)
        change(packed)
        return packed

    wrap("mtrain.data.batch", "pack", pack)
    wrap("mtrain.data.batch", "collate", pack)


def positions_begin_at_1() -> None:
    """Begin the positions of the data at 1."""
    _packed_otherwise(lambda packed: packed.update(position_ids=packed["position_ids"] + 1))


def end_counted() -> None:
    """Count a loss for the token after the end of a document."""
    _packed_otherwise(lambda packed: packed.update(loss_mask=torch.ones_like(packed["loss_mask"])))


def one_boundary_less() -> None:
    """Merge two documents of the data."""
    _packed_otherwise(lambda packed: packed.update(cu_seqlens=merged(packed["cu_seqlens"])))


def rotary_positions_go_on() -> None:
    """Continue rotary positions from document to document."""
    wrap(
        f"{CORE}transformer.attention",
        "apply_rotary_pos_emb",
        lambda real, t, freqs, config, cu_seqlens=None, **more: real(t, freqs, config, **more),
    )


def token_counted_twice() -> None:
    """Count a token twice on the second rank of the context."""

    def part(real: Any, batch: Any, world: Any) -> Any:
        found = dict(real(batch, world))
        if world.coords["cp"] == 1 and "loss_mask" in found:
            counted = found["loss_mask"][0].nonzero()
            found["loss_mask"] = found["loss_mask"].clone()
            found["loss_mask"][0, counted[:1]] = 2.0
        return found

    wrap("mtrain.train.loop.prefetch", "_part_of_context", part)


LOSS = r"output_layer"
INSIDE = r"decoder\.layers\.\d\.self_attention(\.core_attention)?"
EXHIBITS = (
    Exhibit(
        "middle stage without cu_seqlens",
        "Megatron-Bridge 2952",
        "parallel=pp4 data.packed=true",
        "documents see each other",
        middle_stage_without_boundaries,
        INSIDE,
    ),
    Exhibit(
        "attention leaks on one rank",
        "packed fine-tuning",
        "parallel=dp2 data.packed=true",
        "documents see each other",
        leaked_attention,
        INSIDE,
    ),
    Exhibit(
        "learned positions begin at 1",
        "packed data",
        f"parallel=dp2 {LEARNED} data.packed=true",
        "other embeddings",
        positions_begin_at_1,
        r"embedding.*",
    ),
    Exhibit(
        "a loss beyond the end of a document",
        "packed data",
        "parallel=dp2 data.packed=true",
        "predicts another's beginning",
        end_counted,
        LOSS,
    ),
    Exhibit(
        "two documents of the data merged",
        "packed data",
        "data.packed=true",
        "documents see each other",
        one_boundary_less,
        INSIDE,
    ),
    Exhibit(
        "rotary positions go on over documents",
        "Megatron-LM 5243",
        "data.packed=true",
        "relative positions are right, bases are not",
        rotary_positions_go_on,
        INSIDE,
    ),
    Exhibit(
        "a token counts twice under cp",
        "loss mask under cp",
        "parallel=cp2 data.packed=true",
        "its loss is doubled",
        token_counted_twice,
        LOSS,
    ),
)
