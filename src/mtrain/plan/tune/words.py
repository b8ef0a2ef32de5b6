"""The reasons for a layout in the list, and its drawbacks against the first, in words."""

from __future__ import annotations

from mtrain.plan.tune.search import Layout
from mtrain.units import GIB

PARTS = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "host": "waits for the host",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "sends between stages",
    "bubble": "the pipeline bubble",
    "dp": "data-parallel communication",
    "optimizer": "the optimizer",
    "offload": "the optimizer in host memory",
}
# A part that differs by less, as a share of a step, is not named: the model is not that exact.
ALIKE = 0.003


def _times(word: str, parts: list[str]) -> list[str]:
    """Return the parts that take more or less time, as one gain or loss; empty if there are
    none.
    """
    if parts:
        return [f"{word} time for {' and '.join(PARTS.get(name, name) for name in parts)}"]
    return []


def part_words(layout: Layout) -> str:
    """Return the parts that take its time."""
    most = sorted(layout.time.parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{value / layout.seconds:.0%} {PARTS.get(name, name)}"
        for name, value in most[:4]
        if value > 0
    )


def reason(layout: Layout, first: Layout) -> str:
    """Return the gains and losses of a layout against the first one."""
    if layout is first:
        return f"the fastest that fits: {part_words(layout)}"
    slower = layout.seconds / first.seconds - 1
    own = layout.time.parts
    other = first.time.parts
    change = {name: own.get(name, 0.0) - other.get(name, 0.0) for name in {**other, **own}}
    more = sorted(
        (name for name in change if change[name] > ALIKE * first.seconds), key=lambda n: -change[n]
    )
    less = sorted(
        (name for name in change if change[name] < -ALIKE * first.seconds), key=lambda n: change[n]
    )
    takes = _times("more", more[:2])
    gives = _times("less", less[:2])
    spare = first.memory.peak - layout.memory.peak
    if abs(spare) > 0.01 * first.memory.peak:
        (gives if spare > 0 else takes).append(
            f"{abs(spare) / GIB:.1f} GiB {'less' if spare > 0 else 'more'} memory"
        )
    for key, gain in (
        ("pp", "fewer stages"),
        ("tp", "a smaller tp"),
        ("ep", "a smaller ep"),
        ("cp", "a smaller cp"),
    ):
        if not gives and getattr(layout.run.parallel, key) < getattr(first.run.parallel, key):
            gives.append(gain)
    gained = f"{', '.join(gives)}; " if gives else ""
    if takes:
        lost = f": {', '.join(takes)}"
    else:
        lost = ", in small parts" if slower >= 0.001 else ""
    return f"{gained}{_pace(slower)}{lost}"


def _pace(slower: float) -> str:
    """Return how much longer a step takes, as a share."""
    if abs(slower) < 0.0005:
        return "as fast"
    return f"{slower:.1%} slower" if slower > 0 else f"{-slower:.1%} faster"
