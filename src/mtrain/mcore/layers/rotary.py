"""Rotary positions: fp32 frequencies for longer sequences, as in transformers, and two bases."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import attention
from torch import Tensor, nn

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.rope_scaling import RopeScalingConfig

Frequencies = Callable[[int], Tensor]
"""Radians per token [rotary_dim / 2] of sequences of a length, on the CPU."""


def frequencies(model: ModelConfig) -> Frequencies | None:
    """Return the frequencies of `model.rope_scaling`, complete in a resolved run, or unscaled."""
    if model.rope_scaling is None:
        return None
    return functools.partial(_KINDS[model.rope_scaling.rope_type], model, model.rope_scaling)


def _periods(model: ModelConfig, base: float | Tensor) -> Tensor:
    """Return tokens per radian without scaling."""
    return base ** (torch.arange(0, model.rotary_dim, 2, dtype=torch.float32) / model.rotary_dim)


def _dynamic(model: ModelConfig, scaling: RopeScalingConfig, length: int) -> Tensor:
    """Return a larger base beyond the length of the model (bloc97 and emozilla 2023)."""
    whole = model.max_position_embeddings
    factor = scaling.factor
    width = model.rotary_dim
    # A tensor, so that the base is computed in fp32, as transformers does, and not in Python's
    # fp64.
    longer = torch.tensor(max(length, whole))
    return 1.0 / _periods(
        model, model.rotary_base * (factor * longer / whole - (factor - 1)) ** (width / (width - 2))
    )


def _llama3(model: ModelConfig, scaling: RopeScalingConfig, length: int) -> Tensor:
    """Divide slow frequencies, keep fast ones, and interpolate between both (Llama 3.1)."""
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    before = scaling.original_max_position_embeddings
    assert low is not None
    assert high is not None
    assert before is not None
    usual = 1.0 / _periods(model, model.rotary_base)
    turns = before / (2 * math.pi / usual)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * usual / scaling.factor + kept * usual


def _yarn(model: ModelConfig, scaling: RopeScalingConfig, length: int) -> Tensor:
    """Return a ramp over channels between kept and divided frequencies (Peng et al. 2023)."""
    fast = scaling.beta_fast
    slow = scaling.beta_slow
    before = scaling.original_max_position_embeddings
    assert fast is not None
    assert slow is not None
    assert before is not None
    width = model.rotary_dim
    scale = 2 * math.log(model.rotary_base)
    first, last = (
        width * math.log(before / (turns * 2 * math.pi)) / scale for turns in (fast, slow)
    )
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    if first == last:
        # A ramp of no width would divide by zero.
        last += 0.001
    divided = ((torch.arange(width // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    periods = _periods(model, model.rotary_base)
    return divided / (scaling.factor * periods) + (1 - divided) / periods


def _longrope(model: ModelConfig, scaling: RopeScalingConfig, length: int) -> Tensor:
    """Return a factor of each frequency, others in long sequences than in short ones (Ding et al.
    2024).
    """
    assert scaling.original_max_position_embeddings is not None
    if length > scaling.original_max_position_embeddings:
        factors = scaling.long_factor
    else:
        factors = scaling.short_factor
    return 1.0 / (torch.tensor(factors) * _periods(model, model.rotary_base))


_KINDS: dict[str, Callable[[ModelConfig, RopeScalingConfig, int], Tensor]] = {
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


class ScaledRotary(RotaryEmbedding):
    """megatron-core's rotary embedding with mtrain's frequencies, which lengths may change."""

    frequencies: Frequencies

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles [tokens, rotary_dim / 2] of the tokens from `offset` on."""
        device = self.inv_freq.device
        turns = self.frequencies(max_seq_len + offset).to(device)
        return torch.outer(
            torch.arange(offset, offset + max_seq_len, device=device, dtype=torch.float32), turns
        )


def _attention_factor(config: Any) -> float:
    return getattr(config, "rotary_attention_factor", 1.0)


def multiply_turns(config: Any, factor: float) -> None:
    """Let attention of this configuration multiply cosines and sines with `factor`.

    megatron-core asks a function for it that knows only the fields of its own yarn; it is
    replaced.
    """
    config.rotary_attention_factor = factor
    attention._yarn_get_concentration_factor_from_config = _attention_factor


class TwoBases(nn.Module):
    """Angles of layers with a window, by `base` and unscaled, and of others: [2, s, 1, 1, r]."""

    def __init__(self, others: RotaryEmbedding, base: float) -> None:
        super().__init__()
        self.others = others
        self.windows = RotaryEmbedding(
            # The width that is rotated: `rotary_percent` has been applied to it already.
            2 * len(others.inv_freq),
            rotary_percent=1.0,
            rotary_interleaved=others.rotary_interleaved,
            rotary_base=base,
            use_cpu_initialization=others.inv_freq.is_cpu,
            cp_group=others.cp_group,
        )
        self.get_rotary_seq_len = others.get_rotary_seq_len

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the angles for the arguments of megatron-core's method."""
        return torch.stack([self.windows(*args, **kwargs), self.others(*args, **kwargs)])
