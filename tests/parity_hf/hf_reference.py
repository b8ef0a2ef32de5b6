"""Hugging Face's side of a comparison: its model with drawn weights, losses, optimizer steps and
text.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain.models.gpt.hf import TABLES

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
# keys of a cache keep the rotary frequencies of the length that they were made for, in dynamic
# scaling and longrope
GREEDY["use_cache"] = False


def import_models() -> None:
    """Import the families' modules, which transformers otherwise leaves until they are
    asked for.
    """
    for kind in TABLES:
        module = kind.removesuffix("_text")  # Gemma 3's has the model of images too
        importlib.import_module(f"transformers.models.{module}.modeling_{module}")


def configuration(kind: str, values: dict[str, Any]) -> Any:
    """Return the configuration object of a `model_type`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **deepcopy(values))  # which writes into what it is given


def model(config: Any, seed: int, auto: str = "AutoModelForCausalLM") -> Any:
    """Return the model of a configuration with weights such that every part has an effect."""
    import transformers

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = getattr(transformers, auto).from_config(config, **plain).float().train()
    made.get_input_embeddings().padding_idx = (
        None  # that id has a gradient too: nothing here is padding
    )
    # a norm's weight is its distance from 1
    from_1 = (
        config.model_type.startswith(("gemma", "qwen3_next")) or config.model_type == "nemotron"
    )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in tensors(made).items():
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.ndim > 1:  # products keep the size of what they take
                transposed = config.model_type == "gpt2" or (
                    config.model_type == "gpt_oss" and tensor.ndim > 2
                )
                tensor.copy_(noise / tensor.shape[-2 if transposed else -1] ** 0.5)
            else:
                kept_from_1 = from_1 and "linear_attn." not in name
                scale = ("norm" in name or "ln_" in name) and "bias" not in name and not kept_from_1
                tensor.copy_(0.2 * noise + float(scale))
    return made


def tensors(made: Any) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that a checkpoint holds, by name."""
    saved = made.state_dict().keys()
    return dict(made.named_parameters()) | {k: v for k, v in made.named_buffers() if k in saved}


@dataclass
class Loss:
    """Outputs and losses of the model for a batch."""

    logits: Tensor
    cross_entropy: Tensor
    balance: Tensor
    """The router's balancing loss with its coefficient; 0 where there is none."""


def loss(made: Any, tokens: Tensor, labels: Tensor) -> Loss:
    """Return logits [b, s, vocabulary], their mean loss in nats, and the router's.

    transformers multiplies the load of an expert in all layers by its probability in all layers;
    megatron-core does so in each layer, as the papers do. So their function is called once for each
    layer here, and their own sum is the same wherever one layer has experts.
    """
    config = made.config
    kind = made.config.model_type
    routed = kind in BALANCED and any("experts" in name for name, _ in made.named_modules())
    out = made(input_ids=tokens, output_router_logits=True) if routed else made(input_ids=tokens)
    each = made.loss_function(
        logits=out.logits, labels=labels, shift_labels=labels, vocab_size=config.vocab_size
    )
    balance = torch.zeros(())
    if routed:
        function = importlib.import_module(type(made).__module__).load_balancing_loss_func
        layers = [
            function((one,), config.num_experts, config.num_experts_per_tok)
            for one in out.router_logits
        ]
        balance = config.router_aux_loss_coef * torch.stack(layers).mean()
        if len(layers) == 1:
            whole = made(
                input_ids=tokens, labels=labels, shift_labels=labels, output_router_logits=True
            ).loss
            torch.testing.assert_close(whole, each + balance, rtol=1e-6, atol=0.0)
    return Loss(out.logits, each, balance)


BALANCED = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "gpt_oss")
"""Families whose own loss has a term for the balance of experts."""


def optimizer(made: Any, o: Any) -> Callable[[float], float]:
    """Return a function that makes a step of AdamW with clipping at a rate and returns the norm;
    `o` is the `optim` section.
    """
    named = dict(made.named_parameters())
    parameters = list(named.values())
    # gpt_oss stacks its experts' biases
    kept = [p for name, p in named.items() if p.ndim == 1 or "bias" in name]
    decayed = [p for name, p in named.items() if p.ndim > 1 and "bias" not in name]
    groups = [
        {"params": decayed, "weight_decay": o.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)

    def step(rate: float) -> float:
        for group in adam.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(parameters, o.clip_grad)
        adam.step()
        adam.zero_grad()
        return float(norm)

    return step


class Biases:
    """The biases that balance the routers of DeepSeek-V3 and MiniMax-M2: transformers holds them,
    and moves none.

    After each step that of an expert with less than the mean load goes up by `rate`, that of one
    with more goes down.
    """

    def __init__(self, made: Any, rate: float) -> None:
        self.rate = rate
        self.routers = [m for m in made.modules() if hasattr(m, "e_score_correction_bias")]
        self.loads: dict[Any, Tensor] = {}
        for router in self.routers:  # MiniMax-M2's are next to the part that chooses
            getattr(router, "gate", router).register_forward_hook(
                functools.partial(self._count, router)
            )

    def _count(self, router: Any, _: Any, __: Any, output: tuple[Tensor, ...]) -> None:
        experts = router.e_score_correction_bias.numel()
        self.loads[router] = torch.bincount(output[2].flatten(), minlength=experts).float()

    def move(self) -> None:
        """Move them by the loads of the last forward pass."""
        for router in self.routers:
            load = self.loads[router]
            router.e_score_correction_bias += self.rate * torch.sign(load.mean() - load)


def text(made: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return the prompt and the most likely tokens after it."""
    made.eval()
    for name, value in GREEDY.items():
        setattr(made.generation_config, name, value)
    out = made.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)).long(),
        max_new_tokens=tokens,
    )
    made.train()
    return [int(token) for token in out[0]]
