"""Copies of megatron-core in host memory: they outlive their source, even if the CPU is the
device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import tiny
from tests.support.forked import run_ranks

pytestmark = pytest.mark.dist


def _buffers() -> list[Any]:
    tiny.start_world()
    return list(tiny.model(tiny.config(), distributed_optimizer=True).buffers)


def test_host_copies_restore_weights() -> None:
    def there_and_back() -> tuple[bool, bool, bool]:
        buffer = _buffers()[0]
        for change in (0.0, 1.0):  # the second time into memory that exists already
            buffer.param_data.add_(change)
            before = buffer.param_data.clone()
            at = buffer.param_data.data_ptr()
            buffer.offload_to_cpu()
            empty = buffer.param_data.storage().size() == 0
            apart = buffer.param_data_cpu.data_ptr() != at
            buffer.reload_from_cpu()
        return empty, apart, torch.equal(buffer.param_data, before)

    assert run_ranks(1, there_and_back)[0] == (True, True, True)


def test_host_copies_absent_copies_lose_weights() -> None:
    def lost() -> bool:
        from mtrain.mcore.adapter import hook

        hook._Adapter.to_host = lambda self, value, *args, **kwargs: value  # type: ignore[method-assign,assignment]
        buffer = _buffers()[0]
        buffer.offload_to_cpu()
        return bool(buffer.param_data_cpu.storage().size() == 0)

    assert run_ranks(1, lost)[0]


def test_host_copies_optimizer_leaves_device_and_returns() -> None:
    def moved() -> tuple[bool, bool]:
        from mtrain.mcore import api

        tiny.start_world()
        cfg = tiny.config()
        model = tiny.model(cfg)
        config = api.OptimizerConfig(optimizer="adam", lr=1e-2)
        optimizer = api.get_megatron_optimizer(config, [model]).chained_optimizers[0]
        tiny.accumulate_gradients(model, cfg)
        optimizer.step()
        state = next(iter(optimizer.optimizer.state.values()))
        before = state["exp_avg"]
        held = state["exp_avg"].clone()
        optimizer.offload_to_cpu()
        before.zero_()  # what a device does with memory that nobody holds
        optimizer.restore_from_cpu()
        return state["exp_avg"] is not before, torch.equal(state["exp_avg"], held)

    assert run_ranks(1, moved)[0] == (True, True)
