"""Fixtures that several of these files use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provide an empty object store, `memory://`; one file at a time is transferred, so that calls
    can be counted.
    """
    import fsspec

    from mtrain.ckpt.remote import transfer

    monkeypatch.setattr(transfer, "AT_ONCE", 1)
    files = fsspec.filesystem("memory")
    yield files
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)
