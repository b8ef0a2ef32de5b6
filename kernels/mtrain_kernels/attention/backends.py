"""Backends of attention: the rules of each, and how it is called."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtrain_kernels.admitted import missing
from mtrain_kernels.attention import cpu, reference
from mtrain_kernels.attention.tiles import WIDEST
from mtrain_kernels.runtime import HAS_TRITON, cuda_capability, kind_of, triton_obstacle

HALF = (torch.float16, torch.bfloat16)
HAS_FLASH3 = importlib.util.find_spec("flash_attn_interface") is not None


def _has_windows() -> bool:
    """Return whether this torch has attention over packed sequences that knows windows and grouped
    queries.
    """
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    # The module is older than these arguments, so its presence does not tell.
    return {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


HAS_VARLEN = _has_windows()


class Call(NamedTuple):
    """The description of a call of attention, without its data; rules read nothing else.

    `capability` is that of the GPU, (0, 0) elsewhere. `window` is (left, right), negative for no
    limit, with causality written into it. `packed` says that sequences lie one behind the other in
    one row of the batch.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    window: tuple[int, int]
    masked: bool
    sink: bool
    softcap: float
    dropout_p: float
    packed: bool

    @property
    def dense(self) -> bool:
        """Return whether every query sees all keys, or all up to its own, so that no kernel needs a
        mask.
        """
        return not self.masked and not self.packed and self.window in ((-1, -1), (-1, 0))

    @property
    def plain(self) -> bool:
        """Return whether all fused kernels have it: only later keys are hidden, and scores are not
        changed.
        """
        return self.dense and not self.sink and not self.softcap


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: tuple[int, int],
    masked: bool,
    sink: bool,
    softcap: float,
    dropout_p: float,
    packed: bool,
) -> Call:
    """Return the call that these tensors and settings make."""
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    return Call(
        *device_of_call(q.device), q.dtype, *sizes, window, masked, sink, softcap, dropout_p, packed
    )


def device_of_call(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Return the kind of a device, and its compute capability if it is CUDA's."""
    kind = kind_of(device)
    return kind, cuda_capability(device) if kind == "cuda" else (0, 0)


def _common(call: Call, oldest: tuple[int, int], largest: int) -> Iterator[str]:
    """Yield the features of a call that no fused kernel of a GPU has."""
    if call.device != "cuda":
        yield f"runs on CUDA only, the tensors are on {call.device}"
    elif call.capability < oldest:
        yield (
            f"needs sm_{oldest[0]}{oldest[1]} or newer, this is"
            f" sm_{call.capability[0]}{call.capability[1]}"
        )
    if call.dtype not in HALF:
        yield f"takes fp16 and bf16, not {call.dtype}"
    if call.size > largest or call.size % 8 or call.value_size > call.size:
        yield (
            f"takes heads of 8 to {largest} by 8, with values no wider, not {call.size} and"
            f" {call.value_size}"
        )
    if call.masked:
        yield "takes no mask"
    if call.sink:
        yield "takes no sink"


def _flash3(call: Call) -> Iterator[str]:
    if not HAS_FLASH3:
        yield "FlashAttention-3 (flash_attn_interface) is not installed"
    yield from _common(call, (9, 0), 256)
    if call.device == "cuda" and call.capability[0] != 9:
        yield f"is written for sm_90, this is sm_{call.capability[0]}{call.capability[1]}"
    if call.dropout_p:
        yield "knows no dropout"


def _cudnn(call: Call) -> Iterator[str]:
    yield from _common(call, (9, 0), 128)
    if call.packed or (not call.dense and not call.masked):
        yield "knows neither windows nor packed sequences here"
    if call.softcap:
        yield "knows no cap of scores"


def _flash(call: Call) -> Iterator[str]:
    if call.device == "cpu":
        # torch has another flash kernel for CPUs, with limits of its own.
        if call.dropout_p:
            yield "knows no dropout on the CPU"
        if call.sink:
            yield "takes no sink"
        if call.value_size > call.size:
            yield f"takes values no wider than keys: not {call.value_size} for {call.size}"
    else:
        yield from _common(call, (8, 0), 256)
        if not call.dense and not HAS_VARLEN:
            yield (
                "this torch knows neither windows nor packed sequences (torch.nn.attention.varlen)"
            )
        if not call.dense and call.dropout_p:
            yield "knows no dropout with windows or packed sequences"
    if call.softcap:
        yield "knows no cap of scores"


def _triton(call: Call) -> Iterator[str]:
    if call.device != "cuda":
        yield from filter(None, [triton_obstacle(torch.device(call.device))])
    elif not HAS_TRITON:
        yield "triton is not installed"
    elif call.capability < (8, 0):
        yield f"needs sm_80 or newer, this is sm_{call.capability[0]}{call.capability[1]}"
    if call.dtype not in (*HALF, torch.float32):
        yield f"takes fp32, fp16 and bf16, not {call.dtype}"
    if max(call.size, call.value_size) > WIDEST:
        yield f"takes heads of up to {WIDEST}, not {call.size} and {call.value_size}"
    if call.masked:
        yield "takes no mask"
    if call.dropout_p:
        yield "knows no dropout"


def _efficient(call: Call) -> Iterator[str]:
    if call.device != "cuda":
        yield f"runs on CUDA only, the tensors are on {call.device}"
    if call.dtype not in (*HALF, torch.float32):
        yield f"takes fp32, fp16 and bf16, not {call.dtype}"
    alignment = 4 if call.dtype == torch.float32 else 8
    if call.size % alignment or call.value_size % alignment:
        yield f"takes heads of a multiple of {alignment}, not {call.size} and {call.value_size}"
    if call.softcap:
        yield "knows no cap of scores"


def _math(call: Call) -> Iterator[str]:
    if call.softcap:
        yield "knows no cap of scores"


def _cpu(call: Call) -> Iterator[str]:
    if call.device != "cpu":
        yield f"is for a CPU, the tensors are on {call.device}"
    if call.dtype not in HALF:
        yield f"takes fp16 and bf16, not {call.dtype}"
    if not call.plain or call.window != (-1, 0) or call.queries != call.keys:
        yield "knows causal attention of whole sequences, without mask, window, sink and cap"
    if call.dropout_p:
        yield "knows no dropout"
    scores = call.batch * call.heads * call.queries * call.keys
    if not 0 < scores <= cpu.MOST_SCORES:
        yield f"holds up to {cpu.MOST_SCORES} scores, not {scores}"


RULES = {  # in the order in which `auto` tries them: the faster first, see the README
    "flash3": _flash3,
    "cudnn": _cudnn,
    "cpu": _cpu,
    "flash": _flash,
    "triton": _triton,
    "efficient": _efficient,
    "math": _math,
    "reference": lambda call: iter(()),
}


def order(call: Call) -> list[str]:
    """Return the backends as `auto` tries them: ours before the one of torch that needs a number
    for each pair it hides.
    """
    names = list(RULES)
    if call.plain:
        names.remove("triton")
        names.insert(names.index("efficient") + 1, "triton")
    return names


def unwanted(name: str, call: Call) -> str | None:
    """Return why `auto` passes a backend over that can run, or None."""
    if name == "triton" and call.device == "cpu":
        return "Triton's interpreter is for tests"
    generation = 10 * call.capability[0] + call.capability[1]
    if name == "triton" and call.device == "cuda" and missing(generation, ["attention"]):
        return f"has not been run on sm_{generation} yet"
    return None


SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def seen(
    call: Call, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return the boolean mask [s, t] (or `mask`) of a call for those who know no other way; None if
    all is seen.
    """
    if mask is not None or (call.window == (-1, -1) and not call.packed):
        return mask
    q_at, k_at = (torch.arange(n, device=device) for n in (call.queries, call.keys))
    q_owner = k_owner = None
    if cu_seqlens is not None:
        # The number of edges at or before a position identifies its sequence.
        q_owner, k_owner = (
            torch.searchsorted(cu_seqlens.to(at.dtype), at, right=True) for at in (q_at, k_at)
        )
    return reference.visible(q_at, k_at, window=call.window, q_segments=q_owner, k_segments=k_owner)


def by_torch(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Compute attention by one backend of torch's scaled_dot_product_attention; `mask` is the mask
    of `seen`.
    """
    causal = call.window == (-1, 0) and call.dense
    # Fused kernels want a unit stride within rows; views that move heads keep it and stay views.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    # it wants as many key heads as query heads
    if name == "efficient" and call.heads != call.kv_heads:
        k, v = (x.repeat_interleave(call.heads // call.kv_heads, 1) for x in (k, v))
    with sdpa_kernel(SDPA[name]):
        return reference.attention(
            q,
            k,
            v,
            causal=causal,
            mask=None if causal else mask,
            sink=sink,
            scale=scale,
            dropout_p=call.dropout_p,
        )


def by_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    cu_seqlens: Tensor | None,
    longest: int | None,
    scale: float | None,
) -> Tensor:
    """Compute attention with windows or packed sequences by the flash attention in torch."""
    from torch.nn.attention.varlen import varlen_attn

    width = v.shape[-1]
    # The kernel knows one head size: zero columns of values give zero columns of the output, which
    # are cut off below.
    v = F.pad(v, (0, q.shape[-1] - width))
    (q_rows, q_edges, q_longest), (k_rows, k_edges, k_longest) = (
        _flat(x, cu_seqlens, longest) for x in (q, k)
    )
    options: dict[str, Any] = {
        "scale": scale,
        "window_size": call.window,
        "enable_gqa": call.heads != call.kv_heads,
    }
    out = varlen_attn(
        q_rows,
        k_rows,
        _flat(v, cu_seqlens, longest)[0],
        q_edges,
        k_edges,
        q_longest,
        k_longest,
        **options,
    )
    return _unflat(out, q.shape[0])[..., :width]  # type: ignore[arg-type]


def by_flash3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    cu_seqlens: Tensor | None,
    longest: int | None,
    scale: float | None,
) -> Tensor:
    """Attend by FlashAttention-3, whose versions return the output, or it and the logarithms
    of the sums.
    """
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width))
    options = {
        "softmax_scale": scale,
        "causal": call.window[1] == 0,
        "window_size": call.window,
        "softcap": call.softcap,
    }
    if cu_seqlens is None:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)[..., :width]
    rows, edges, most = zip(*(_flat(x, cu_seqlens, longest) for x in (q, k, v)), strict=True)
    out = flash_attn_varlen_func(
        *rows, edges[0], edges[1], max_seqlen_q=most[0], max_seqlen_k=most[1], **options
    )
    out = out[0] if isinstance(out, tuple) else out
    return _unflat(out, q.shape[0])[..., :width]  # type: ignore[arg-type]


def _flat(x: Tensor, cu_seqlens: Tensor | None, longest: int | None) -> tuple[Tensor, Tensor, int]:
    """Return [b, n, s, d] as rows [b s, n, d], where each sequence begins and ends, and the longest
    one's length.
    """
    b, n, s, d = x.shape
    # Kernels for packed sequences index tokens before heads.
    rows = x.transpose(1, 2).reshape(b * s, n, d)
    if cu_seqlens is None:
        return rows, torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=x.device), s
    return rows, cu_seqlens.to(torch.int32), s if longest is None else longest


def _unflat(rows: Tensor, batch: int) -> Tensor:
    return rows.unflatten(0, (batch, -1)).transpose(1, 2)
