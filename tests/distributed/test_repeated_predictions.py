"""One MTP layer in the place of several: the same numbers in every layout, and the gradients of all
its uses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrain.config.schema.model import MoEConfig
from mtrain.plan.count import parameters
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, trained

STEPS = 2
TWICE = {"num_layers": 2, "mtp_num_layers": 2, "mtp_use_repeated_layer": True}
EXPERTS = MoEConfig(num_experts=4, ffn_hidden_size=64)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "dp2 sharded, tied": {
        "ranks": 2,
        "distributed_optimizer": True,
        "model": {"tie_word_embeddings": True},
    },
    "ep2": {"ranks": 2, "ep": 2, "model": {"moe": EXPERTS}},
    "fsdp2": {"ranks": 2, "fsdp": "fsdp2"},
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(LAYOUTS, ("tp2", "pp2")))
def test_repeated_predictions_layout_equals_one_rank(name: str) -> None:
    layout = dict(LAYOUTS[name])
    model = {**TWICE, **layout.pop("model", {})}
    found = trained(tiny_run(model=model, **layout), STEPS)
    expected = trained(tiny_run(model=model), STEPS)
    for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


def _gradients(**mtp: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the number of parameters, and the gradients of the first step from MTP layers that
    start alike.
    """
    run = tiny_run(model={**TWICE, **mtp})

    def job() -> tuple[int, dict[str, torch.Tensor]]:
        from mtrain.mcore.state.local_params import unwrap
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import gradients
        from mtrain.world.init import joined

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            named = dict(unwrap(parts.state.chunks[0]).named_parameters())
            for name, weight in named.items():
                if "mtp.layers.1." in name:
                    weight.data.copy_(named[name.replace("layers.1.", "layers.0.")].data)
            gradients(parts, parts.prefetcher.take(0, run.trainer.batch))
            count = sum(weight.numel() for weight in named.values())
            return count, {name: weight.main_grad.clone() for name, weight in named.items()}

    return run_ranks(1, job)[0]


def test_repeated_predictions_layer_learns_from_each_use() -> None:
    count, once = _gradients()
    _, apart = _gradients(mtp_use_repeated_layer=False)
    assert count == parameters(tiny_run(model=TWICE).model)
    assert not any("mtp.layers.1." in name for name in once)
    for name, gradient in once.items():
        if "mtp." in name:
            both = apart[name] + apart[name.replace("layers.0.", "layers.1.")]
        else:
            both = apart[name]
        torch.testing.assert_close(gradient, both, rtol=1e-4, atol=1e-6)
    first = next(name for name in once if "mtp.layers.0.eh_proj" in name)
    assert not torch.allclose(once[first], apart[first], rtol=1e-3), "the second use is not in it"
