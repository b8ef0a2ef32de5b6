"""Definition of the depthwise causal convolution, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = ("none", "silu")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    segments: Tensor | None = None,
) -> Tensor:
    """Compute `act(bias + sum_j weight[:, w-1-j] x[..., t-j])`: each channel over its own last w
    times.

    `x` [b, d, t], `weight` [d, w], `bias` [d], `activation` "silu" or "none". Before the first time
    there are zeros. `segments` [b, t] are integers: a time sees only times of its own segment, so
    that sequences packed into one row know nothing of each other. The result has x's shape and
    dtype; half input is computed in fp32. Raises `ValueError` where shapes or names do not fit.
    Source: Gu and Dao 2023, arXiv:2312.00752, figure 3.
    """
    require_conv(x, weight, bias, activation, segments)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    times = x.shape[-1]
    width = weight.shape[-1]
    padded = F.pad(x.to(wide), (width - 1, 0))
    z = torch.zeros_like(x, dtype=wide) if bias is None else bias.to(wide)[:, None].expand(x.shape)
    for j in range(width):
        earlier = padded[..., width - 1 - j : width - 1 - j + times]
        if segments is not None:
            same = torch.zeros_like(segments, dtype=torch.bool)
            # Where the filter is longer than the sequence, the bound must not turn negative and
            # count from the end.
            same[:, j:] = segments[:, j:] == segments[:, : max(times - j, 0)]
            earlier = torch.where(same[:, None], earlier, 0.0)
        z = z + weight.to(wide)[:, width - 1 - j, None] * earlier
    return (F.silu(z) if activation == "silu" else z).to(x.dtype)


def require_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, segments: Tensor | None
) -> None:
    """Raise `ValueError` unless the arguments of `causal_conv1d` belong together."""
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(
            f"x must be floating [batch, channels, times], not {x.dtype} {tuple(x.shape)}"
        )
    if weight.ndim != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be [{x.shape[1]}, width], one row for each channel"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be ({x.shape[1]},), one for each channel")
    if any(other is not None and other.device != x.device for other in (weight, bias, segments)):
        raise ValueError(f"weight, bias and segments must be on {x.device}, as x")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if segments is not None and (
        segments.shape != (x.shape[0], x.shape[2]) or segments.is_floating_point()
    ):
        raise ValueError(
            f"segments must be integers [{x.shape[0]}, {x.shape[2]}], not {tuple(segments.shape)}"
        )
