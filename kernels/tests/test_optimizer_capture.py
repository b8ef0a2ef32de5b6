"""AdamW whose step and learning rate lie on the device, as a CUDA graph needs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtrain_kernels.optimizer import fused_adam, op
from mtrain_kernels.optimizer.fused_adam import FusedAdam
from test_optimizer import HYPER, assert_same, make, step
from torch import Tensor


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_optimizer_capture_step_and_rate_may_lie_on_device(impl):
    lists = make("bf16", (300, 512))
    hyper = HYPER._replace(stochastic=True)
    clock = torch.tensor((hyper.lr, hyper.step), dtype=torch.float64)
    other = hyper._replace(lr=5.0, step=77, bias1=0.5, bias2=0.5)
    assert_same(step(lists, other, impl, clock=clock), step(lists, hyper, "reference"))
    late = other._replace(bias1=1.0)  # 1 - 0.9^356 is 1 in fp64, long before the second moment's is
    assert_same(step(lists, late, impl, clock=clock), step(lists, hyper, "reference"))
    uncorrected = {"bias1": 1.0, "bias2": 1.0}
    found = step(lists, other._replace(**uncorrected), impl, clock=clock)
    assert_same(found, step(lists, hyper._replace(**uncorrected), "reference"))
    with pytest.raises(ValueError, match="lr and step in fp64"):
        op.adamw_(lists, hyper, clock=clock.float(), impl=impl)


def test_optimizer_capture_follows_step_and_rate(monkeypatch):
    """Count nothing on the host while a graph is captured; `advance` does before a replay."""

    def train(capturable: bool) -> tuple[Tensor, Any]:
        p = torch.nn.Parameter(torch.ones(64))
        optimizer = FusedAdam([p], capturable=capturable, impl="reference")
        for i in range(4):
            p.grad = torch.full((64,), 0.1 * i)
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            if capturable and i:
                monkeypatch.setattr(fused_adam, "_capturing", lambda: True)
                optimizer.advance()
            optimizer.step()
        return p.detach(), optimizer.state_dict()["param_groups"][0]["step"]

    plain = train(False)
    captured = train(True)
    assert torch.equal(plain[0], captured[0])
    assert plain[1] == captured[1] == 4
