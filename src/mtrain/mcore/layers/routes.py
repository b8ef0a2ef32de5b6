"""Experts that a sampler sent tokens to, recorded and used again in training.

A sampler and a trainer round differently, and a router near a tie then sends a token to another
expert, whose output is another one altogether. `replaced` is the one place where routers, ours and
megatron-core's, get the recorded experts in place of those that they chose. The weights of experts
stay those of the router's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mtrain.mcore.layers.padding import own_positions, routes_known, routes_of

PLACE = "place_of_routes"
"""Attribute of a router whose experts are recorded and replaced: a `Place`."""


class Place(NamedTuple):
    """The place of a router among those of this rank."""

    layer: int
    tally: Tensor
    """fp64 [2]: choices of routers in training that were replaced, and those that differ from the
    recorded ones.
    """


class Layers(NamedTuple):
    """The layers of experts of a model."""

    number: int
    """Their number on all pipeline stages."""
    own: tuple[int, ...]
    """Numbers of this rank's layers among them, in the order of its chunks."""
    tally: Tensor
    """The one tensor of all `Place`s."""

    def counted(self) -> dict[str, Tensor]:
        """Return what was counted since the last call, for `STEP_METRICS`: fp64 [] each."""
        routes, differ = self.tally.clone()
        self.tally.zero_()
        return {"routes": routes, "routes_differ": differ}


def layers_of(chunks: Sequence[Any]) -> Layers:
    """Mark the routers of a model as those whose experts are recorded and replaced; all ranks of
    its pipeline call it.
    """
    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
    known = next((getattr(router, PLACE, None) for router in routers), None)
    device = next(iter(chunks[0].parameters())).device
    tally = torch.zeros(2, dtype=torch.float64, device=device) if known is None else known.tally
    numbers = [int(router.layer_number) for router in routers]
    group = parallel_state.get_pipeline_model_parallel_group()
    everywhere: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, numbers, group=group)
    order = sorted({number for part in everywhere for number in part})
    for layer, router in enumerate(routers):
        setattr(router, PLACE, Place(layer, tally))
    return Layers(len(order), tuple(order.index(number) for number in numbers), tally)


class Record:
    """The experts of the tokens that rows of a sampler have read, on its device."""

    now: Record | None = None
    """The record that routers write to."""

    def __init__(self, rows: int, tokens: int, layers: int, topk: int, device: Any) -> None:
        self.experts = torch.zeros((rows, tokens, layers, topk), dtype=torch.int16, device=device)
        """int16 [rows, tokens, layers, k]; 0 where another tensor-parallel rank has the token."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Write the choices of routers here, inside."""
        Record.now = self
        try:
            yield
        finally:
            Record.now = None

    def expect(self, rows: Tensor, starts: Tensor, width: int, counts: Tensor) -> None:
        """Prepare for a forward of `width` positions from `starts` on in some `rows`, of which the
        first `counts` are tokens; [b] each, on the device.
        """
        steps = torch.arange(width, device=starts.device)
        self._rows = rows[:, None]
        self._places = starts[:, None] + steps
        self._tokens = (steps < counts[:, None])[..., None]
        # Another rank may have read them before, or a request that left.
        self.experts[self._rows, self._places] = 0

    def write(self, layer: int, experts: Tensor, tp_group: Any) -> None:
        """Keep the experts [positions, b, k] of a layer in this forward."""
        at = own_positions(self._places.shape[1], len(experts), tp_group)
        values = experts.transpose(0, 1) * self._tokens[:, at]
        self.experts[self._rows, self._places[:, at], layer] = values.to(torch.int16)

    def copy(self, row: int, to: int, tokens: int) -> None:
        """Copy the first `tokens` of a row to another one."""
        self.experts[to, :tokens] = self.experts[row, :tokens]

    def taken(self, row: int, tokens: int) -> Tensor:
        """Return the experts of the first `tokens` of a row, on the host."""
        # A copy on a CPU too: the row is written over by the next request.
        return self.experts[row, :tokens].to("cpu", copy=True)


def active(router: Any) -> bool:
    """Return whether the experts of a router are recorded now, or replaced by recorded ones."""
    return hasattr(router, PLACE) and (Record.now is not None or routes_known())


def replaced(router: Any, chosen: Tensor, positions: int) -> Tensor | None:
    """Return the experts [t, k] that were recorded for the tokens of a layer, and those in `chosen`
    [t, k] for tokens without a record; None where nothing is replaced.

    Tokens are [positions, b]. While a sampler records, it keeps `chosen`.
    """
    if not active(router):
        return None
    place: Place = getattr(router, PLACE)
    if Record.now is not None:
        own = chosen.view(positions, -1, chosen.shape[1])
        Record.now.write(place.layer, own, router.tp_group)
    given = routes_of(positions, router.tp_group, place.layer)
    if given is None:
        return None
    experts = given.reshape(chosen.shape).to(torch.int64)
    recorded = experts[:, :1] >= 0
    # A checkpoint runs its first forward without gradients: each choice counts once.
    if router.training and torch.is_grad_enabled():
        same = (chosen[:, :, None] == experts[:, None]).any(-1)
        differ = (recorded & ~same).sum()
        place.tally.add_(torch.stack([recorded.sum() * chosen.shape[1], differ]))
    return torch.where(recorded, experts, chosen)
