"""A gated delta net small enough for a test, and what shows that its norm has the gradient of all
heads.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support import tiny

FINE = "fine"
SIZES: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def output_norm() -> str:
    """Return whether the norm behind the states of all heads has the gradient of all heads."""
    from mtrain.mcore import api

    tiny.start_world(tp=2)
    cfg = tiny.config(tensor_model_parallel_size=2, **SIZES)
    model = tiny.model(cfg)
    before = {}

    def remember_and_finalize(chunks: Any, *args: Any, **kwargs: Any) -> None:
        before.update(tiny.gradients(model))
        api.finalize_model_grads(chunks, *args, **kwargs)

    tiny.accumulate_gradients(model, cfg, remember_and_finalize)
    name = "decoder.layers.0.self_attention.out_norm.weight"
    torch.distributed.all_reduce(before[name])
    same = torch.allclose(tiny.gradients(model)[name], before[name])
    return FINE if same else "the gradient of one rank's heads"
