"""Group-limited routing chooses the groups that the report on a model chooses, in the model that
was built.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.config.schema.model import MoEConfig
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

GROUPS = 4
CHOSEN = 2
TOPK = 4
EXPERTS = 16
ROUTING: dict[str, Any] = {
    "num_experts": EXPERTS,
    "ffn_hidden_size": 32,
    "router_topk": TOPK,
    "router_pre_softmax": True,
    "router_num_groups": GROUPS,
    "router_group_topk": CHOSEN,
}


def published(logits: Tensor, best: int) -> list[set[int]]:
    """Return the experts chosen for each token: by hand, as in the reports on DeepSeek-V2 (best 1)
    and V3 (best 2).
    """
    size = EXPERTS // GROUPS
    out = []
    for scores in logits.softmax(-1).tolist():
        worth = [
            sum(sorted(scores[g * size : (g + 1) * size], reverse=True)[:best])
            for g in range(GROUPS)
        ]
        groups = sorted(range(GROUPS), key=lambda g: -worth[g])[:CHOSEN]
        members = [e for e in range(EXPERTS) if e // size in groups]
        out.append(set(sorted(members, key=lambda e: -scores[e])[:TOPK]))
    return out


@pytest.mark.parametrize(("key", "best"), [(1, 1), (2, 2), (3, 3), (None, 2)])
def test_group_scores_sum_as_many_as_configured(key: int | None, best: int) -> None:
    run = tiny_run(model={"moe": MoEConfig(**ROUTING, router_group_score_topk=key)})

    def routes() -> list[set[int]]:
        from mtrain.assembly.model import build_model
        from mtrain.mcore import api
        from mtrain.world.init import joined

        with joined(run) as world:
            router = next(
                m for m in build_model(run, world)[0].modules() if isinstance(m, api.TopKRouter)
            )
            _, goes = router.routing(logits[:, None])
        return [set(row.nonzero().flatten().tolist()) for row in goes]

    logits = torch.randn(200, EXPERTS, generator=torch.Generator().manual_seed(1))
    assert run_ranks(1, routes)[0] == published(logits, best)
    assert all(
        published(logits, best) != published(logits, other) for other in (1, 2, 3) if other != best
    )
