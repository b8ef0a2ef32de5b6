"""The order in which a rank of the pipeline runs the forwards and backwards of a step."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.schema.run import RunConfig

# Whether it is a forward, and the chunk of the rank.
Turn = tuple[bool, int]


def turns(run: RunConfig, stage: int, microbatches: int) -> Iterator[Turn]:
    """Yield the forwards and backwards of pipeline rank `stage` in a step, in order.

    First only forwards, then one forward and one backward in turn, then only backwards; with
    virtual stages a chunk takes a group of micro-batches before the next chunk does, and backwards
    go through the chunks from the last to the first (Narayanan et al. 2021, arXiv:2104.04473).
    """
    p = run.parallel
    group = p.microbatch_group_size_per_vp_stage or p.pp
    order = list(_forwards(microbatches, p.vpp, group))
    ahead = 0 if p.pp == 1 else p.pp - stage - 1
    if p.vpp > 1:
        ahead = 2 * ahead + (p.vpp - 1) * group
    ahead = min(ahead, len(order))
    yield from ((True, chunk) for chunk in order[:ahead])
    backwards = [p.vpp - 1 - chunk for chunk in order]
    for forward, backward in zip(order[ahead:], backwards, strict=False):
        yield True, forward
        yield False, backward
    yield from ((False, chunk) for chunk in backwards[len(order) - ahead :])


def _forwards(microbatches: int, chunks: int, group: int) -> Iterator[int]:
    for first in range(0, microbatches, group):
        for chunk in range(chunks):
            yield from [chunk] * (min(first + group, microbatches) - first)


def most_in_flight(
    run: RunConfig, stage: int, kept: list[int], microbatches: int
) -> tuple[int, list[int]]:
    """Return the peak bytes that pipeline rank `stage` saves, and the micro-batches of each chunk
    at that moment.
    """
    p = run.parallel
    if p.vpp == 1:
        number = min(p.pp - stage, microbatches)
        return number * kept[0], [number]
    group = p.microbatch_group_size_per_vp_stage or p.pp
    # Later micro-batches repeat what these do.
    enough = 4 * max(group, p.pp)
    held = [0] * p.vpp
    now = 0
    most = 0
    best = [0] * p.vpp
    for forward, chunk in turns(run, stage, min(microbatches, enough)):
        held[chunk] += 1 if forward else -1
        now += kept[chunk] if forward else -kept[chunk]
        if now > most:
            most = now
            best = list(held)
    return most, best
