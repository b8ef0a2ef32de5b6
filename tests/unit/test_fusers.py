"""Functions that megatron-core compiles, which are compiled when they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrain.mcore.adapter.fusers import compiled_when_called


@pytest.mark.parametrize("ever", [False, True])
def test_fusers_compile_at_the_first_call(ever: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []

    def compile_(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return lambda x: function(x) + 100

    monkeypatch.setattr(torch, "compile", compile_)
    with compiled_when_called(ever=ever):

        @torch.compile
        def plain(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def dynamic(x: int) -> int:
            return x + 2

    assert vars(torch)["compile"] is compile_
    assert not compiled
    assert [plain(1), plain(1), dynamic(1)] == ([102, 102, 103] if ever else [2, 2, 3])
    assert compiled == ([{}, {"dynamic": True}] if ever else [])
