"""Faults that a test seeds into ranks, for `prove` to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtrain.launching import local


def seed(fault: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every rank that `prove` starts call `fault` before it trains; this process stays as it is."""
    real = local._observe

    def faulty(*args: Any) -> None:
        fault()
        real(*args)

    monkeypatch.setattr(local, "_observe", faulty)
