"""The random generators of a rank: which ranks draw the same numbers, and which do not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy as np
import torch

from mtrain.config.schema.run import RunConfig

# The stream of megatron-core's tracker that tensor-parallel ranks share
DATA_STREAM = "data-parallel-rng"


def tracker_of(run: RunConfig) -> dict[str, bool]:
    """Return the options of megatron-core's tracker, which CUDA graphs restrict."""
    graphs = run.trainer.cuda_graph_impl
    by_engine = graphs == "transformer_engine" or run.kernels.linear == "te"
    return {
        "use_cudagraphable_rng": graphs != "none",
        "te_rng_tracker": graphs != "none" and by_engine,
    }


def seed_generators(
    seed: int, coords: Mapping[str, int], step: int = 0, tracker: Mapping[str, bool] | None = None
) -> None:
    """Seed every generator of the rank at `coords` (`RankGrid.coords`) for the steps after `step`.

    Ranks that hold different layers or read different tokens draw different numbers from every
    generator: pipeline stages, data- and context-parallel ranks, and therefore expert-parallel
    ranks. Tensor-parallel ranks draw the same numbers from the generators of Python, NumPy and
    torch, which serve tensors that each of them holds whole. They draw different numbers from the
    streams that megatron-core's tracker forks for sharded tensors (`model-parallel-rng`: heads, and
    with sequence parallelism rows).

    Weights and the order of samples depend on none of these. Megatron-LM adds 100 to the seed per
    stage and, with --data-parallel-random-init, 10 per data-parallel rank, so that rank 10 of stage
    0 draws what rank 0 of stage 1 draws; hashes do not collide. `tracker` makes a new tracker of
    that kind; None seeds the existing one.
    """
    from mtrain.mcore import api as mcore

    shared = stream_seed(seed, step, "default", coords, ("pp", "dp", "cp"))
    random.seed(shared)
    # NumPy's global generator takes seeds of 32 bits.
    np.random.seed(shared % 2**32)
    torch.manual_seed(shared)
    kind = {"force_reset_rng": tracker is not None, **(tracker or {})}
    mcore.model_parallel_cuda_manual_seed(shared, tp_rank=0, ep_rank=0, etp_rank=0, **kind)
    tracked = mcore.get_cuda_rng_tracker()
    streams = tuple(tracked.get_states())
    # megatron-core adds offsets to one seed for its streams, which can collide between ranks. The
    # streams keep their names and get seeds of their own.
    tracked.reset()
    for name in streams:
        axes = ("pp", "dp", "cp") if name == DATA_STREAM else ("pp", "dp", "cp", "tp")
        tracked.add(name, stream_seed(seed, step, name, coords, axes))


def stream_seed(
    seed: int, step: int, name: str, coords: Mapping[str, int], axes: tuple[str, ...]
) -> int:
    """Return the 62-bit seed of a rank's stream; ranks that differ on no axis of `axes` share it.

    2^62 of a stream of a rank; the same for ranks that differ on no axis of `axes`.
    """
    at = " ".join(f"{axis}{coords[axis]}" for axis in axes)
    digest = hashlib.sha256(f"{seed}/{step}/{name}/{at}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
