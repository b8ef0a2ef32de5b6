"""The rank that saves each piece, where several data-parallel ranks hold the same.

Otherwise the first of them would save all weights, and every save would take as long as one disk
needs for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from mtrain.ckpt.meeting import Meeting
from mtrain.mcore.state.sharding import TensorShard

FACTS = 3
"""Numbers of a piece to exchange: identity, bytes, and whether this rank is its first holder."""


@dataclass
class Replicas:
    """The pieces that this rank saves; ranks agree on them once, and remember the result."""

    _facts: np.ndarray | None = None
    """The pieces of the last save."""
    _own: np.ndarray | None = None
    """True for each of them that this rank saves."""

    def shared_out(
        self, shards: Sequence[TensorShard], group: dist.ProcessGroup, device: torch.device
    ) -> list[TensorShard]:
        """Return the shards, of which this rank saves its share as primary ones.

        `group` has the ranks that may hold the same pieces; all of them call this together. Each
        piece that its first holder is in the group for is saved by one of them: so that all save
        about as many bytes.
        """
        if group.size() == 1:
            return list(shards)
        facts = _facts(shards)
        changed = torch.tensor([int(not self._is_known(facts))], device=device)
        # A rank whose pieces are the same has to take part where those of another have changed.
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=group)
        if self._own is None or changed.item():
            self._facts = facts
            self._own = _assigned(_exchanged(facts, group, device), group.rank())
        return [
            replace(shard, primary=bool(mine))
            for shard, mine in zip(shards, self._own, strict=True)
        ]

    def _is_known(self, facts: np.ndarray) -> bool:
        return self._facts is not None and np.array_equal(facts, self._facts)


def of_machine(shards: Sequence[TensorShard], ranks: Meeting) -> list[TensorShard]:
    """Return the shards, of which this rank saves its share of all that the ranks of its machine
    hold.

    `ranks` are those of the machine; all of them call this together.
    """
    facts = [
        np.frombuffer(data, dtype=np.int64).reshape(-1, FACTS).copy()
        for data in ranks.gather(_facts(shards).tobytes())
    ]
    # A piece whose first holder is elsewhere is saved here as well.
    seen: set[int] = set()
    for one in facts:
        numbers = one[:, 0].tolist()
        one[:, 2] = [number == -1 or number not in seen for number in numbers]
        seen.update(numbers)
    own = _assigned(facts, ranks.rank)
    return [replace(shard, primary=bool(mine)) for shard, mine in zip(shards, own, strict=True)]


def _facts(shards: Sequence[TensorShard]) -> np.ndarray:
    """Return int64 [shards, FACTS]."""
    rows = []
    for shard in shards:
        place = repr((shard.key, shard.offset, shard.shape, shard.flat)).encode()
        number = int.from_bytes(
            hashlib.blake2b(place, digest_size=8).digest(), "little", signed=True
        )
        # A buffer may differ between the ranks that hold it: the first of them saves it.
        if shard.param is None and shard.key.startswith("model/"):
            number = -1
        nbytes = shard.tensor.numel() * shard.tensor.element_size()
        rows.append((number, nbytes, shard.primary))
    return np.array(rows, dtype=np.int64).reshape(-1, FACTS)


def _exchanged(
    facts: np.ndarray, group: dist.ProcessGroup, device: torch.device
) -> list[np.ndarray]:
    """Return the facts of every rank of a group."""
    count = torch.tensor([len(facts)], device=device)
    counts = [torch.zeros_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    numbers = [int(one) for one in counts]
    # ranks hold different numbers of pieces, and a collective takes one shape
    padded = torch.zeros((max(numbers), FACTS), dtype=torch.int64, device=device)
    padded[: len(facts)] = torch.from_numpy(facts)
    gathered = [torch.zeros_like(padded) for _ in numbers]
    dist.all_gather(gathered, padded, group=group)
    return [one[:n].cpu().numpy() for one, n in zip(gathered, numbers, strict=True)]


def _assigned(ranks: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """Return whether `rank` saves each of its pieces; every rank finds the same for all of them."""
    everything = np.concatenate(ranks)
    holders = np.repeat(np.arange(len(ranks)), [len(one) for one in ranks])
    pieces, places = np.unique(everything[:, 0], return_inverse=True)
    copies = np.bincount(places)
    wanted = np.zeros(len(pieces), dtype=bool)
    np.logical_or.at(wanted, places, everything[:, 2] == 1)
    shared = (copies[places] > 1) & (everything[:, 0] != -1) & wanted[places]
    saved = (everything[:, 2] == 1) & ~shared
    load = np.bincount(holders[saved], everything[saved, 1], minlength=len(ranks))
    rows: dict[int, list[int]] = {}
    for row in np.flatnonzero(shared):
        rows.setdefault(int(places[row]), []).append(int(row))
    # the largest first: small ones even out the remaining differences
    for _, held in sorted(rows.items(), key=lambda item: (-everything[item[1][0], 1], item[0])):
        lightest = min(held, key=lambda row: (load[holders[row]], holders[row]))
        saved[lightest] = True
        load[holders[lightest]] += everything[lightest, 1]
    return np.asarray(saved[holders == rank])
