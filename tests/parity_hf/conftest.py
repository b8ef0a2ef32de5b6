"""Every test here forks one rank from a process that has megatron-core and transformers
imported.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """Import both sides once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tests.parity_hf import hf_reference
    from tests.support.forked import import_engine

    hf_reference.import_models()
    import_engine()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.dist)
