"""Every check, in the order of the report, and the exit code of their findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtrain.doctor import communication, gpus, host, rates, software, storage
from mtrain.doctor.facts import Facts
from mtrain.doctor.rows import Row
from mtrain.errors import BadEnvironment

AREAS = {
    "software": software.check,
    "gpus": gpus.check,
    "communication": communication.check,
    "rates": rates.check,
    "storage": storage.check,
    "host": host.check,
}
"""Area -> the check that yields its rows."""


def examined(facts: Facts) -> Iterator[tuple[str, Row]]:
    """Yield the area of each row, and the row."""
    for area, check in AREAS.items():
        for row in check(facts):
            yield area, row


def exit_code(rows: Sequence[Row]) -> int:
    """Return 3 if a run would fail here, else 0."""
    return BadEnvironment.exit_code if any(row.verdict == "wrong" for row in rows) else 0
