"""Numbers as people write them: counts, bytes, seconds."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def count(n: float) -> str:
    """A count with a decimal suffix: 8030261248 -> '8.03B'."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.2f}{suffix}"
    return f"{n:.0f}"


def bytes_(n: float) -> str:
    """Bytes with a binary suffix: 1536 -> '1.5 KiB'."""
    for size, suffix in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(n) >= size:
            return f"{n / size:.1f} {suffix}"
    return f"{n:.0f} B"


def seconds(t: float) -> str:
    """A duration: 4000 -> '1h06m', 75 -> '1m15s', 1.234 -> '1.2s'."""
    if t >= 3600:
        return f"{int(t // 3600)}h{int(t % 3600 // 60):02d}m"
    if t >= 60:
        return f"{int(t // 60)}m{int(t % 60):02d}s"
    return f"{t:.1f}s"


def in_unit(size: int, unit: int) -> str:
    """A number of bytes in GiB or MiB."""
    number = size / unit
    return "-" if not size else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def duration(t: float) -> str:
    """A duration to three digits: 1.234 -> '1.23 s', 0.0123 -> '12.3 ms'."""
    return f"{t:.3g} s" if t >= 1 else f"{t * 1e3:.3g} ms"
