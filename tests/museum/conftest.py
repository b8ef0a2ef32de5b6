"""Every test here forks ranks from a process that has megatron-core imported."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _install_adapter() -> None:
    """Import everything once per test process."""
    from tests.support.forked import import_engine

    import_engine()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.dist)
