"""`model.moe.aux_loss_coeff` weighs the loss that its docstring defines, and an imported one that
of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.config.schema.model import MoEConfig
from mtrain.config.schema.run import RunConfig
from mtrain.recipes.huggingface.importer import import_config
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

TOKENS = 64
EXPERTS = 8
TOPK = 2
HF: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "router_aux_loss_coef": 0.02,
}


def gradient(run: RunConfig) -> Tensor:
    """Return the gradient of the balancing losses of all layers, whose routers all read the same
    logits, in a mean over tokens.
    """

    def job() -> Tensor:
        from mtrain.assembly.model import build_model
        from mtrain.mcore import api
        from mtrain.world.init import joined

        with joined(run) as world:
            (chunk,) = build_model(run, world, wrap=False)
            shared = logits()
            for router in (m for m in chunk.train().modules() if isinstance(m, api.TopKRouter)):
                weights, _ = router.routing(shared[:, None])
                (
                    0 * weights.sum()
                ).backward()  # what is left is the loss that rides along, times the tokens
            assert shared.grad is not None
            return shared.grad / TOKENS

    found: Tensor = run_ranks(1, job)[0]
    return found


def logits() -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_balancing_loss_equals_definition(kind: str) -> None:
    moe = MoEConfig(
        num_experts=EXPERTS,
        router_topk=TOPK,
        ffn_hidden_size=64,
        aux_loss_coeff=0.5,
        router_load_balancing_type=kind,  # type: ignore[arg-type]
    )
    found = gradient(tiny_run(model={"num_layers": 3, "moe": moe}))
    wanted = logits()
    scores = wanted.softmax(-1)
    shares = torch.bincount(scores.topk(TOPK).indices.flatten(), minlength=EXPERTS) / (
        TOKENS * TOPK
    )
    (3 * 0.5 * EXPERTS * (shares * scores.mean(0)).sum()).backward()
    torch.testing.assert_close(found, wanted.grad)


@pytest.mark.full
@pytest.mark.parametrize("layers", [1, 4])
def test_balancing_loss_imported_coefficient_as_transformers(layers: int, tmp_path: Path) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**HF, "num_hidden_layers": layers}))
    imported = import_config(file)
    moe = imported.run.model.moe
    assert moe is not None
    assert moe.aux_loss_coeff == pytest.approx(0.02 * TOPK / layers, rel=1e-5)
    assert "router_aux_loss_coef" in {u.flag for u in imported.unplaced}
    found = gradient(tiny_run(model={"num_layers": layers, "moe": moe}))
    wanted = logits()
    (0.02 * mixtral.load_balancing_loss_func((wanted,) * layers, EXPERTS, TOPK)).backward()
    torch.testing.assert_close(found, wanted.grad, rtol=1e-4, atol=1e-8)
