"""Positions, tables and masks of context parallelism, made once for all layers of a micro-batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from mtrain_kernels.attention.reference import visible
from mtrain_kernels.attention.seen import Seen, table
from torch import Tensor

from mtrain.mcore.layers.context import Context

LENGTHS = 8
"""The number of lengths whose places are kept: unpacked, micro-batches share them."""

_kept: OrderedDict[Any, Places] = OrderedDict()


class Places:
    """The positions [blocks, tokens of a block] of a batch, with values that layers derive from
    them.

    Everything is made when a layer first asks for it. `blocks` are in the order in which ranks hold
    them; with `ordered`, a layer asks for positions that ascend within each block.
    """

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self._made: dict[Any, Any] = {}

    def order(self, block: int) -> Tensor:
        """Return the indices that sort the tokens of a block by position."""
        found: Tensor = self._once(("order", block), lambda: torch.argsort(self.blocks[block]))
        return found

    def back(self, block: int) -> Tensor:
        """Return the inverse of `order`."""
        found: Tensor = self._once(("back", block), lambda: torch.argsort(self.order(block)))
        return found

    def sequence(self) -> Tensor:
        """Return the indices that sort the tokens of all blocks, laid end to end, by position."""
        found: Tensor = self._once("sequence", lambda: torch.argsort(self.blocks.flatten()))
        return found

    def seen(
        self,
        here: int,
        there: int | None,
        causal: bool,
        window: Any,
        cu_seqlens: Tensor | None,
        *,
        ordered: bool,
    ) -> Seen:
        """Describe to kernels the keys of a block, or of all (None), that another's queries see."""

        def make() -> Seen:
            left, right = window or (-1, -1)
            reach = left, 0 if causal else right
            q_at = self._positions(here, ordered)
            k_at = self._positions(there, ordered)
            return Seen(*reach, table=table(q_at, k_at, reach, cu_seqlens))

        # No boundaries in the key: places of packed sequences are kept with their `cu_seqlens`.
        found: Seen = self._once(("seen", here, there, causal, window, ordered), make)
        return found

    def mask(
        self, here: int, there: int | None, causal: bool, window: Any, cu_seqlens: Tensor | None
    ) -> Tensor | None:
        """Return the same as a mask, True for visible keys; None if all keys are visible."""
        return self._once(  # type: ignore[no-any-return]
            ("mask", here, there, causal, window),
            lambda: mask_of(
                self._positions(here), self._positions(there), causal, window, cu_seqlens
            ),
        )

    def _positions(self, block: int | None, ordered: bool = False) -> Tensor:
        if block is None:
            return torch.arange(self.blocks.numel(), device=self.blocks.device)
        return (
            self.blocks[block].index_select(0, self.order(block)) if ordered else self.blocks[block]
        )

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def places_of(
    context: Context, tokens: int, cu_seqlens: Tensor | None, device: torch.device
) -> Places:
    """Return the places of a micro-batch of which a rank holds `tokens` before an exchange.

    Those of packed sequences are kept with `cu_seqlens`, until other edges are written to its
    memory.
    """
    key = (context.kind, context.group.size(), context.inner_size, tokens, device)
    if cu_seqlens is None:
        kept = _kept
    else:
        # Tensors made in inference mode count no versions.
        version = None if cu_seqlens.is_inference() else cu_seqlens._version
        since, kept = cu_seqlens.__dict__.get("places", (None, None))
        if kept is None or since != version:
            kept = OrderedDict()
            cu_seqlens.places = version, kept  # type: ignore[attr-defined]
    if key not in kept:
        kept[key] = Places(context.positions(tokens, cu_seqlens, device))
        # Evaluation and training may differ in length, so several are kept, and few of them.
        if len(kept) > LENGTHS:
            kept.popitem(last=False)
    found: Places = kept[key]
    return found


def mask_of(
    q_at: Tensor, k_at: Tensor, causal: bool, window: Any, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Return the mask [s, t] of keys at positions [t] for queries at [s]; None: all visible."""
    if not causal and cu_seqlens is None and window is None:
        return None
    segments: dict[str, Tensor] = {}
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(q_at.dtype)
        segments = {
            "q_segments": torch.bucketize(q_at, ends, right=True),
            "k_segments": torch.bucketize(k_at, ends, right=True),
        }
    return visible(q_at, k_at, causal=causal, window=window, **segments)
