"""Every test here forks ranks from a process that has megatron-core imported."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _install_adapter() -> None:
    """Import everything once per test process."""
    from tests.support.forked import import_engine

    import_engine()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # a comparison of paths takes seconds for all the tests of the repository
        if item.nodeid.startswith("tests/museum/"):
            item.add_marker(pytest.mark.dist)
