"""Gradients of many rows that meet in one are added up in fp32, whatever the format of
the weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

TOKENS = 4096
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"ranks": 2, "tp": 2},
    "tp2 sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_embedding_gradient_of_one_id_sums_in_fp32(dtype: str, name: str) -> None:
    model = {"position_embedding_type": "learned_absolute"} if name == "tp2" else {}

    def gradients() -> list[torch.Tensor]:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.state.local_params import unwrap
        from mtrain.world.init import joined

        with joined(run) as world:
            embedding = unwrap(build_model(run, world, wrap=False)[0]).embedding
            found = []
            for ids in (torch.full((2, TOKENS // 2), 7), torch.full((2, TOKENS // 2), 299)):
                rows = embedding.word_embeddings(ids)
                part = embedding.word_embeddings.weight
                found.append(
                    torch.autograd.grad(rows, part, torch.ones_like(rows))[0].float().sum(1) / 64
                )
            if model:
                rows = embedding.position_embeddings(torch.full((TOKENS,), 3))
                part = embedding.position_embeddings.weight
                found.append(torch.autograd.grad(rows, part, torch.ones_like(rows))[0].float()[3])
            return found

    for run in (
        tiny_run(model=model, dtype=dtype, **LAYOUTS[name]),
        tiny_run(model=model, dtype=dtype, trainer={"deterministic": True}, **LAYOUTS[name]),
    ):
        ranks = run_ranks(run.parallel.ranks or 1, gradients)
        for which, token in enumerate((7, 299)):
            whole = torch.cat([found[which] for found in ranks])
            wanted = torch.zeros_like(whole)
            wanted[token] = TOKENS
            assert torch.equal(whole, wanted)
        if model:
            assert ranks[0][2].tolist() == [TOKENS] * 64
