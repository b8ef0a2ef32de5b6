"""A step of the pipeline over time: each stage's work, waits, and kept bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.plan.order import turns
from mtrain.plan.rank import StageMemory

# A backward multiplies with inputs and with weights, a forward only with weights.
BACKWARD = 2.0
# A schedule repeats itself after so many micro-batches per stage: a picture shows no more.
MOST_GROUPS = 3


@dataclass(frozen=True)
class Block:
    """One forward or backward of a chunk; times relative to the model's forward."""

    stage: int
    chunk: int
    micro: int
    forward: bool
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The schedule of all stages in a step, or at its ends; communication is free here."""

    blocks: tuple[tuple[Block, ...], ...]
    """Blocks of each stage, in order."""
    micro: int
    """Micro-batches that are drawn."""
    of: int
    """Micro-batches of a step."""

    @property
    def end(self) -> float:
        """Return the time at which the last block ends."""
        return max(stage[-1].end for stage in self.blocks)

    @property
    def cut(self) -> float | None:
        """Return the middle of the drawn micro-batches, if some are left out: before it stands the
        beginning of the step, after it the end, and between them the same repeats. None: all are
        drawn.
        """
        return self.end / 2 if self.micro < self.of else None

    def number(self, block: Block) -> int:
        """Return the micro-batch of a block in the whole step."""
        return block.micro + (
            self.of - self.micro if self.cut is not None and block.begin >= self.cut else 0
        )

    @property
    def bubble(self) -> float:
        """Return the share of the whole step that the busiest stage waits; more micro-batches add
        work to it, and no waiting.
        """
        busy = max(sum(block.end - block.begin for block in stage) for stage in self.blocks)
        waits = self.end - busy
        return waits / (waits + busy * self.of / self.micro)


def timeline(stages: Sequence[StageMemory], *, whole: bool = False) -> Timeline:
    """Return the timeline of the stages of a run, in the order of megatron-core's schedules;
    `whole`: all micro-batches of a step.

    Raises:
        ValueError: the family does not say what a stage computes.
    """
    run = stages[0].run
    p = run.parallel
    every = run.micro_batches
    if not all(stage.chunks for stage in stages):
        raise ValueError(f"the family {run.model.family} does not say what its layers compute")
    group = (p.microbatch_group_size_per_vp_stage or p.pp) if p.vpp > 1 else 1
    drawn = every if whole else min(every, -(-MOST_GROUPS * p.pp // group) * group)
    costs = [[_cost(stage, chunk) for chunk in range(p.vpp)] for stage in stages]
    unit = sum(forward for stage in costs for forward, _ in stage) or 1.0
    return Timeline(_blocks(stages, costs, drawn, unit), drawn, every)


def _cost(stage: StageMemory, chunk: int) -> tuple[float, float]:
    """Return the FLOPs of a forward, and of a backward with its recomputation."""
    graphs = stage.chunks[chunk]
    forward = sum(graph.flops() for graph in graphs)
    again = sum(
        product.flops for graph in graphs for op in graph.ops if op.again for product in op.products
    )
    return float(forward), BACKWARD * forward + again


def _blocks(
    stages: Sequence[StageMemory],
    costs: Sequence[Sequence[tuple[float, float]]],
    micro: int,
    unit: float,
) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks of each stage: it takes its turns in order, and each turn waits for the
    chunk before it in the model.
    """
    run = stages[0].run
    todo = [list(turns(run, stage.stage, micro)) for stage in stages]
    made: list[list[Block]] = [[] for _ in stages]
    ends: dict[tuple[bool, int, int, int], float] = {}
    seen: dict[tuple[int, bool, int], int] = {}
    last = len(stages) * run.parallel.vpp - 1
    left = sum(map(len, todo))
    while left:
        before = left
        for stage, order in enumerate(todo):
            while len(made[stage]) < len(order):
                forward, chunk = order[len(made[stage])]
                number = seen.get((stage, forward, chunk), 0)
                place = chunk * len(stages) + stage
                needs = _needed(forward, place, number, last, len(stages))
                if needs is not None and needs not in ends:
                    break
                free = made[stage][-1].end if made[stage] else 0.0
                begin = max(free, ends[needs] if needs is not None else 0.0)
                end = begin + costs[stage][chunk][not forward] / unit
                made[stage].append(Block(stage, chunk, number, forward, begin, end))
                ends[forward, number, chunk, stage] = end
                seen[stage, forward, chunk] = number + 1
                left -= 1
        if left == before:
            raise ValueError("the stages of this schedule wait for each other")
    return tuple(map(tuple, made))


def _needed(
    forward: bool, place: int, micro: int, last: int, stages: int
) -> tuple[bool, int, int, int] | None:
    """Return the block that must end before the chunk at `place` begins, or None."""
    before = place - 1 if forward else place + 1
    if forward and place == 0:
        return None
    if not forward and place == last:
        return True, micro, last // stages, last % stages
    return forward, micro, before // stages, before % stages


def kept_over_time(stage: StageMemory, blocks: Sequence[Block]) -> list[tuple[float, int]]:
    """Return the times at which the saved bytes of a rank change, and their new value."""
    held = 0
    out = [(0.0, 0)]
    for block in blocks:
        held += stage.kept[block.chunk] if block.forward else -stage.kept[block.chunk]
        out.append((block.end, held))
    return out
