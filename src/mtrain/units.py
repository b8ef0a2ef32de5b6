"""Numbers in human-readable form: counts, bytes, seconds, devices."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
DAY = 24 * 3600
FEW_DAYS = 2
MANY_DAYS = 10
"""Durations are in days with one decimal from FEW_DAYS on, without from MANY_DAYS on."""


def count(n: float) -> str:
    """Return a count with a decimal suffix: 8030261248 -> '8.03B'."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.2f}{suffix}"
    return f"{n:.0f}"


def short(n: float) -> str:
    """Return a number to three digits with a decimal suffix: 99660 -> '99.7k', 12.34 -> '12.3'."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if abs(n) >= 0.9995 * size:
            return _three_digits(n / size) + suffix
    return f"{n:.2f}" if n else "0"


def _three_digits(n: float) -> str:
    """Return a number of at least 1 to three digits; larger integers keep all their digits."""
    if abs(n) < 9.995:
        return f"{n:.2f}"
    if abs(n) < 99.95:
        return f"{n:.1f}"
    return f"{n:.0f}"


def number_of(number: int, noun: str) -> str:
    """Return a number of things: '1 layer', '2 layers', '2 batches'."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number} {noun}{ending}"


def bytes_(n: float) -> str:
    """Return bytes with a binary suffix: 1536 -> '1.5 KiB'."""
    for size, suffix in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(n) >= size:
            return f"{n / size:.1f} {suffix}"
    return f"{n:.0f} B"


def seconds(t: float) -> str:
    """Return a duration: 5e6 -> '58 days', 4000 -> '1h06m', 75 -> '1m15s', 1.234 -> '1.2s'."""
    if t >= MANY_DAYS * DAY:
        return f"{t / DAY:.0f} days"
    if t >= FEW_DAYS * DAY:
        return f"{t / DAY:.1f} days"
    if t >= 3600:
        return f"{int(t // 3600)}h{int(t % 3600 // 60):02d}m"
    if t >= 60:
        return f"{int(t // 60)}m{int(t % 60):02d}s"
    return f"{t:.1f}s"


def in_unit(size: int, unit: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    number = size / unit
    if not size:
        return "-"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def duration(t: float) -> str:
    """Return a duration to three digits: 1.234 -> '1.23 s', 0.0123 -> '12.3 ms'."""
    return f"{t:.3g} s" if t >= 1 else f"{t * 1e3:.3g} ms"


def devices(number: int | None, cluster: str) -> str:
    """Return a number of devices of a cluster: 64 of 'h100' -> '64 x h100'.

    A size at the end of the cluster's name, such as `x8`, is left out.
    """
    kind = re.sub(r"(?<=.[a-z0-9])x\d+$", "", cluster)
    return f"{number} x {kind}"
