"""Measures the variants of kernels on this device and notes the fastest: `python -m
mtrain_kernels.tune`.

The grouped products of a layer of experts, forward and backward, are measured with rows shared out
evenly, fused attention with and without a window, and logits with their statistics kept and not.
What is found goes into the file that `mtrain_kernels.tuning` reads; runs that begin later take it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from mtrain_kernels import tuning
from mtrain_kernels.attention import tiles as attention_tiles
from mtrain_kernels.attention.seen import Seen
from mtrain_kernels.cross_entropy.reference import Terms
from mtrain_kernels.grouped_gemm import tiles
from mtrain_kernels.linear_cross_entropy import tiles as loss_tiles
from mtrain_kernels.registry import MODELS
from mtrain_kernels.runtime import triton_obstacle

log = logging.getLogger(__name__)

Seconds = Callable[[Callable[[], object]], float]
"""Timer: a function that returns the seconds of a call."""


class Variant(Protocol):
    """One of a table."""

    @property
    def name(self) -> str: ...


def products(rows: int, groups: int, hidden: int, ffn: int) -> list[tuple[str, int, int]]:
    """Return the products of a layer of gated experts, both ways, and the gradients of weights:
    kind, n and k of each.
    """
    up = 2 * ffn
    found = [("gated", ffn, hidden), ("rows", up, hidden), ("rows", hidden, ffn)]
    found += [("turned", hidden, up), ("turned", ffn, hidden)]
    return [*found, ("weights", up, hidden), ("weights", hidden, ffn)]


def measure(
    path: Path,
    device: torch.device,
    rows: int,
    groups: int,
    hidden: int,
    ffn: int,
    dtype: torch.dtype,
    seconds: Seconds,
) -> dict[str, str]:
    """Measure all products of a layer and notes the fastest tiles in the file at `path`: product
    -> tile.

    A tile that the device cannot launch is left out.
    """
    # Measuring switches variants; the earlier record is restored at the end.
    before = tuning.read(path)
    chosen = {}
    ends = (torch.arange(1, groups + 1, device=device) * (rows // groups)).int()
    try:
        for kind, n, k in products(rows, groups, hidden, ffn):
            x = torch.randn(rows, k, device=device, dtype=dtype)
            kernel = f"grouped_gemm.{kind}"
            shapes = tiles.shape_class(x, rows, n, k, groups)
            taken = _times(
                kernel,
                shapes,
                tiles.candidates(kind, x, descriptors=True),
                _call(kind, x, n, ends),
                seconds,
            )
            fastest = tuning.fastest(taken)
            tuning.add(path, kernel, shapes, fastest)
            chosen[f"{kernel} {shapes}"] = fastest
    finally:
        tuning.use(before)
    return chosen


def measure_attention(
    path: Path,
    device: torch.device,
    heads: int,
    kv_heads: int,
    widths: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    seconds: Seconds,
) -> dict[str, str]:
    """Measure causal attention, `widths` of a head and its values, without a window and with one
    of an eighth.

    The two passes of the backward are measured together, while the tiles of one of them change.
    Notes the fastest in the file at `path`: pass -> tile.
    """
    before = tuning.read(path)
    chosen = {}
    size, value = widths
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value))
    q, k, v = (torch.randn(1, n, tokens, width, device=device, dtype=dtype) for n, width in shapes)
    try:
        for seen in (Seen(right=0), Seen(tokens // 8, 0)):
            calls = _attention_calls(q, k, v, seen)
            shape = attention_tiles.shape_class(q, v, seen.masks_left)
            for pass_, call in calls.items():
                kernel = f"attention.{pass_}"
                taken = _times(
                    kernel, shape, attention_tiles.candidates(pass_, q, v), call, seconds
                )
                chosen[f"{kernel} {shape}"] = tuning.fastest(taken)
                tuning.add(path, kernel, shape, chosen[f"{kernel} {shape}"])
    finally:
        tuning.use(before)
    return chosen


def measure_loss(
    path: Path,
    device: torch.device,
    tokens: int,
    hidden: int,
    columns: int,
    dtype: torch.dtype,
    seconds: Seconds,
) -> dict[str, str]:
    """Measure who makes the logits of a chunk of `tokens` and their statistics, kept for gradients
    or not.

    See `linear_cross_entropy.tiles`. Notes the faster in the file at `path`: kernel -> way.
    """
    from mtrain_kernels.linear_cross_entropy.chunks import TritonChunks, chunk_rows

    before = tuning.read(path)
    chosen = {}
    rows = chunk_rows(0, tokens, columns, device)
    x, weight = (torch.randn(n, hidden, device=device, dtype=dtype) for n in (rows, columns))
    labels = torch.randint(0, columns, (rows,), device=device)
    logits = torch.empty(rows, columns, device=device, dtype=dtype)
    given = x, weight, labels, 0, Terms(columns), lambda tokens: logits
    try:
        for kept in (True, False):
            kernel = loss_tiles.kernel_of(kept)
            shape = loss_tiles.shape_class(x, columns)
            call = partial(TritonChunks().open, *given, kept=kept, class_weights=None, ranked=False)
            taken = _times(kernel, shape, loss_tiles.candidates(x, kept), call, seconds)
            chosen[f"{kernel} {shape}"] = tuning.fastest(taken)
            tuning.add(path, kernel, shape, chosen[f"{kernel} {shape}"])
    finally:
        tuning.use(before)
    return chosen


def _attention_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen
) -> dict[str, Callable[[], object]]:
    """Return the forward, and the backward under the name of each of its passes."""
    from mtrain_kernels.attention import backward_triton, triton

    scale = q.shape[-1] ** -0.5
    out, lse = triton.forward(q, k, v, None, seen, scale, 0.0, False)

    def backward() -> object:
        return backward_triton.backward(out, None, q, k, v, out, lse, seen, scale, 0.0)

    def forward() -> object:
        return triton.forward(q, k, v, None, seen, scale, 0.0, False)

    return {"forward": forward, "queries": backward, "keys": backward}


def _call(kind: str, x: torch.Tensor, n: int, ends: torch.Tensor) -> Callable[[], object]:
    """Return a product of a kind with random tensors."""
    from mtrain_kernels.grouped_gemm import triton

    rows, k = x.shape
    groups = len(ends)
    if kind == "weights":
        other = torch.randn(rows, n, device=x.device, dtype=x.dtype)
        return lambda: triton.weights_product(other, x, ends)
    shape = {"gated": (groups, 2 * n, k), "turned": (groups, k, n)}.get(kind, (groups, n, k))
    weight = torch.randn(shape, device=x.device, dtype=x.dtype)
    if kind == "gated":
        share = torch.rand(rows, device=x.device)
        return lambda: triton.gated_product(x, [weight], ends, share, "swiglu")
    return lambda: triton.rows_product(x, [weight], ends, transposed=kind == "turned")


def _times(
    kernel: str,
    shapes: str,
    candidates: Sequence[Variant],
    call: Callable[[], object],
    seconds: Seconds,
) -> dict[str, float]:
    """Time a call with each tile that the device can launch.

    Raises what the last one did if none can.
    """
    taken: dict[str, float] = {}
    why: Exception | None = None
    for tile in candidates:
        tuning.use({kernel: {shapes: tile.name}})
        try:
            taken[tile.name] = seconds(call)
        # a tile that wants more than the device has, which Triton reports in many ways
        except Exception as error:
            why = error
            log.warning("%s, tile %s: %s", kernel, tile.name, error)
    if why is not None and not taken:
        raise why
    return taken


def main(arguments: list[str] | None = None) -> int:
    """Measure on the first GPU; the exit code is 1 where Triton serves no GPU."""
    parser = argparse.ArgumentParser(prog="python -m mtrain_kernels.tune", description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), help="sizes of a layer")
    parser.add_argument("--rows", type=int, help="copies of tokens that the experts of a rank get")
    parser.add_argument("--experts", type=int, help="experts of a rank")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--ffn", type=int, help="width of an expert on a rank")
    said = parser.parse_args(arguments)
    model = MODELS[said.model or "qwen3_30b_a3b"]
    device = torch.device("cuda")
    why = triton_obstacle(device) if torch.cuda.is_available() else "there is no GPU here"
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    from triton.testing import do_bench

    path = tuning.file_of(device)

    def seconds(call: Callable[[], object]) -> float:
        return float(do_bench(call)) / 1e3

    found = measure_loss(
        path, device, model.tokens, model.hidden, model.vocab, torch.bfloat16, seconds
    )
    # of MLA values are narrower
    widths = (
        model.head_dim,
        128 if model.head_dim == 192 else model.head_dim,
    )
    heads = (model.heads, model.kv_heads)
    found |= measure_attention(path, device, *heads, widths, model.tokens, torch.bfloat16, seconds)
    if experts := said.experts or model.experts:
        rows = said.rows or model.tokens * model.top_k
        hidden = said.hidden or model.hidden
        ffn = said.ffn or model.expert_ffn
        found |= measure(path, device, rows, experts, hidden, ffn, torch.bfloat16, seconds)
    print(*(f"{what}: {tile}" for what, tile in found.items()), f"noted in {path}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
