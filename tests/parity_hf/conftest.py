"""Every test here forks one rank from a process that has megatron-core and transformers
imported.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """Import both sides once; one thread, for a pool of threads does not survive a fork."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    from mtrain import mcore
    from mtrain.devices import registry

    mcore.install(registry.get("cpu"))
    from tests.parity_hf import hf_reference

    hf_reference.import_models()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.dist)
