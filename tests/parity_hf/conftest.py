"""Every test here forks one rank from a process that has megatron-core and transformers
imported.
"""

from __future__ import annotations

import os

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
    for item in items:
        # a comparison of paths takes seconds for all the tests of the repository
        if item.nodeid.startswith("tests/parity_hf/"):
            item.add_marker(pytest.mark.dist)
