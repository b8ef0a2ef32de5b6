"""Every test here forks ranks from a process that has megatron-core imported."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _install_adapter() -> None:
    """Install the adapter once per test process, which computes with one thread: a pool does not survive a fork."""
    import torch

    torch.set_num_threads(1)
    from mtrain import mcore
    from mtrain.devices import registry

    mcore.install(registry.get("cpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.dist)
