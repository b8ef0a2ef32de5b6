"""Parameters of the low-rank adapters of a hybrid, from its configuration only."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.models.gpt.adapters import Size, adapters_of, attention_layers, mlp_layers
from mtrain.models.hybrid.config import ATTENTION, EXPERTS, LATENT, MAMBA, MLP
from mtrain.models.hybrid.count import channels, own, states


def adapter_parameters(model: ModelConfig, peft: PeftConfig) -> tuple[int, int]:
    """Return the parameters of adapters: of layers that every token visits, and of routed experts.

    `peft` is resolved.
    """
    target = peft.target or ()
    moe = model.moe
    pattern = own(model).pattern
    shared = moe.shared_expert_intermediate_size if moe is not None else None
    layers: dict[str, list[Size]] = {
        MAMBA: [size for name, size in _mixer(model) if name in target],
        **dict.fromkeys((ATTENTION, LATENT), attention_layers(model, target)),
        MLP: mlp_layers(model, model.ffn_hidden_size, target),
        EXPERTS: mlp_layers(model, shared, target) if shared else [],
    }
    total = sum(pattern.count(kind) * adapters_of(sizes, peft) for kind, sizes in layers.items())
    if moe is None or "experts" not in target:
        return total, 0
    # gate and up projection of an expert are one weight
    each = [
        (inputs, outputs, 1)
        for inputs, outputs, _ in mlp_layers(model, moe.ffn_hidden_size, ("fc1", "fc2"))
    ]
    return total, pattern.count(EXPERTS) * moe.num_experts * adapters_of(each, peft)


def _mixer(model: ModelConfig) -> list[tuple[str, Size]]:
    h = own(model)
    rows = 2 * channels(h) + 2 * states(h) + h.num_heads
    return [
        ("in_proj", (model.hidden_size, rows, 1)),
        ("out_proj", (channels(h), model.hidden_size, 1)),
    ]
