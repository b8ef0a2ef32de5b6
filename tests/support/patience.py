"""Time limits that follow the load of the machine: a test waits ten times as long for a tenth of a
core.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

DEFAULT_S = 300
"""The time limit of a test that names none, on a machine that does nothing else."""


def slowness() -> float:
    """Return how many times longer than on an idle machine a process may take: the load of the last
    minute per core.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patient(seconds: float) -> int:
    """Return the limit in seconds for work that takes `seconds` on an idle machine."""
    return math.ceil(seconds * slowness())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set the time limit of a test when it begins."""
    named = item.get_closest_marker("timeout")
    limit = float(named.args[0]) if named is not None else DEFAULT_S
    item.add_marker(pytest.mark.timeout(patient(limit)), append=False)
    return (yield)


def hypotheses_take_their_time() -> None:
    """Let examples of hypothesis be as slow as the machine makes them."""
    settings.register_profile(
        "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")
