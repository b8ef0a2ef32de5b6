"""Low-rank adapters of a frozen model's linear layers (LoRA, DoRA), in any layout.

A layer with an adapter computes W x + s B A x. Where it is several of Hugging Face's layers in one
(queries, keys and values; gate and up projection), each of them has an A of its own in `lora_a`
[parts * r, in], and `lora_b` [out, r] has the rows of the weight, each of which is multiplied with
the A of its part, as `peft` trains separate layers. `lora_b` is sharded as the rows of the
weight are, `lora_a` as its columns.

What crosses tensor-parallel ranks is A x, of rank r: it is gathered or reduced before it is
multiplied with B.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from mtrain_kernels.grouped_gemm.op import PLAIN, grouped_gemm
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.config.schema.model import VALUE_HEAD
from mtrain.mcore.layers.grouped_linear import ColumnGroupedLinear, RowGroupedLinear
from mtrain.mcore.layers.linear import ColumnLinear, RowLinear
from mtrain.mcore.layers.merging import (
    LATENT,
    MAGNITUDE,
    A,
    B,
    parts_of_halves,
    parts_of_qkv,
    spread,
)
from mtrain.mcore.layers.portable import DuplicatedLinear

OF_MIXERS = (".mixer.in_proj", ".mixer.out_proj")
"""Ends of the names of linear layers of Mamba-2 mixers."""
NORM_ELEMENTS = 1 << 24
"""Elements of a weight that are in memory in fp32 at once while norms of its rows are computed."""


@dataclass(frozen=True)
class Adapter:
    """The hyperparameters of all adapters of a model."""

    rank: int
    scale: float
    dropout: float
    has_magnitude: bool
    """True if each row of an adapted weight has a trained norm (DoRA)."""


@dataclass(frozen=True)
class Parts:
    """The Hugging Face layers in one fused layer: their number, and the layer of each row."""

    count: int
    of_row: Tensor


def adapt(model: Any, adapter: Adapter, target: tuple[str, ...]) -> None:
    """Freeze an unwrapped chunk of a model but for its value head, and give its layers of the kinds
    in `target` adapters, those of MTP not.

    `lora_a` is marked with its distribution and has to be drawn, `lora_b` is 0, and magnitudes are
    what `start_magnitudes` makes of the weights.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(VALUE_HEAD))
    for name, layer in list(model.named_modules()):
        parts = None if name.startswith("mtp.") else _parts_of(name, layer, model.config, target)
        if parts is not None:
            _make_adapted(layer, adapter, parts)
    if hasattr(model, "embedding"):
        model.embedding.register_forward_hook(_begin_gradient)


def _make_adapted(layer: Any, adapter: Adapter, parts: Parts) -> None:
    kind: type = type(layer)
    layer.__class__ = _with_adapter(kind)
    layer.make_adapter(adapter, parts)


@torch.no_grad()
def start_magnitudes(chunks: list[Any]) -> None:
    """Make magnitudes the norms of the present weights' rows, on every tensor-parallel rank."""
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, _LowRank) and layer.magnitude is not None:
                layer.magnitude.copy_(layer.row_norms())


def _begin_gradient(module: Any, given: Any, output: Tensor) -> None:
    """Request the gradient of embeddings: recomputed layers have one only if their input has."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _parts_of(name: str, layer: Any, config: Any, target: tuple[str, ...]) -> Parts | None:
    """Return the parts of a layer that gets an adapter, else None."""
    own: str = name.rpartition(".")[2]
    kind = own.removeprefix("linear_")
    if isinstance(layer, ColumnGroupedLinear | RowGroupedLinear):
        # transformers fuses the gate and up projections of an expert, so they share one A.
        return Parts(1, torch.zeros(0)) if "experts" in target else None
    known = kind != own or name.endswith(OF_MIXERS)
    if not isinstance(layer, ColumnLinear | RowLinear | DuplicatedLinear) or not known:
        return None
    if ("qkv" if kind in LATENT else kind) not in target:
        return None
    rows: int = layer.weight.shape[0]
    if kind == "qkv":
        first = layer.tp_group.rank() * rows
        each = config.num_attention_heads // config.num_query_groups
        return Parts(3, parts_of_qkv(first, rows, each, config.kv_channels))
    if kind == "fc1" and config.gated_linear_unit:
        return Parts(2, parts_of_halves(rows))
    return Parts(1, torch.zeros(rows, dtype=torch.long))


def _parameter(like: Tensor, rows: int, columns: int | None = None) -> nn.Parameter:
    shape = (rows,) if columns is None else (rows, columns)
    return nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))


def _drawn(a: nn.Parameter, inputs: int) -> nn.Parameter:
    """Mark `lora_a` with `peft`'s distribution: uniform, as in torch's linear layers."""
    a.mtrain_init_bound = inputs**-0.5  # type: ignore[attr-defined]
    return a


class _Switch:
    """The switch of all adapters of a process."""

    on = True


@contextmanager
def adapters_off() -> Iterator[None]:
    """Compute as the bare layers do inside: as the model before it had adapters."""
    _Switch.on = False
    try:
        yield
    finally:
        _Switch.on = True


class _LowRank:
    """A linear layer with an adapter, over the class of the layer."""

    adapter: Adapter
    lora_a: Tensor
    lora_b: Tensor
    magnitude: Tensor | None
    one_hot: Tensor | None
    sharded: dict[str, int]
    """Tensor split over tensor-parallel ranks -> the axis along which it is split."""

    def make_adapter(self: Any, adapter: Adapter, parts: Parts) -> None:
        """Add the parameters."""
        self.adapter = adapter
        weight = self.weight
        self.lora_a = _drawn(
            _parameter(weight, parts.count * adapter.rank, weight.shape[1]), self.input_size
        )
        self.lora_b = _parameter(weight, weight.shape[0], adapter.rank)
        self.magnitude = _parameter(weight, weight.shape[0]) if adapter.has_magnitude else None
        for name, parameter in self._own().items():
            if name in self.sharded:
                set_tensor_model_parallel_attributes(parameter, True, self.sharded[name], 1)
            else:  # under sequence parallelism, each rank has seen part of the tokens
                parameter.sequence_parallel = self.sequence_parallel
        if parts.count > 1:
            one_hot = F.one_hot(parts.of_row, parts.count).bool().to(weight.device)
        else:
            one_hot = None
        self.register_buffer("one_hot", one_hot, persistent=False)
        self._halves = self.config.gated_linear_unit and parts.count == 2

    def row_norms(self: Any) -> Tensor:
        """Return the norms [rows] of the rows of W + s B A, in fp32."""
        own = spread(self.lora_b, self.one_hot)
        rows = max(1, NORM_ELEMENTS // self.weight.shape[1])
        squares = torch.cat(
            [
                torch.addmm(w.float(), b.float(), self.lora_a.float(), alpha=self.adapter.scale)
                .square()
                .sum(1)
                for w, b in zip(self.weight.split(rows), own.split(rows), strict=True)
            ]
        )
        if A in self.sharded and self.tp_group.size() > 1:
            dist.all_reduce(squares, group=self.tp_group)
        return squares.sqrt()

    def sharded_state_dict(
        self: Any,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the shards of the layer and of its adapter."""
        metadata = metadata or {}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        if self.sharded:
            of_layer = super().sharded_state_dict  # type: ignore[misc]
            held: dict[str, Any] = of_layer(prefix, sharded_offsets, metadata)
        else:  # a layer that ranks hold whole leaves it to megatron-core
            held = make_sharded_tensors_for_checkpoint(
                {"weight": self.weight}, prefix, {}, sharded_offsets, **groups
            )
        held |= make_sharded_tensors_for_checkpoint(
            self._own(), prefix, self.sharded, sharded_offsets, **groups
        )
        for key in (f"{prefix}{name}" for name in (B, MAGNITUDE) if self._halves):
            if key in held:
                held[key] = apply_swiglu_sharded_factory(held[key], sharded_offsets)
        return held

    def _own(self) -> dict[str, Any]:
        found = {A: self.lora_a, B: self.lora_b, MAGNITUDE: self.magnitude}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _compressed(self: Any, x: Tensor) -> Tensor:
        """Return s A x of all parts, [..., parts * r]; each part has dropout of its own on `x`."""
        rate = self.adapter.dropout
        if not rate or not self.training:
            return F.linear(x, self.lora_a) * self.adapter.scale
        with get_cuda_rng_tracker().fork() if self._inputs_differ() else nullcontext():
            parts = [F.linear(F.dropout(x, rate), a) for a in self.lora_a.split(self.adapter.rank)]
        return torch.cat(parts, -1) * self.adapter.scale

    def _adapted(self: Any, y: Tensor, compressed: Tensor) -> Tensor:
        """Return the output for that of the bare layer and s A x."""
        change = F.linear(compressed, spread(self.lora_b, self.one_hot))
        if self.magnitude is None:
            return y + change
        bias = None if self.skip_bias_add else self.bias
        with torch.no_grad():
            # A constant in the backward, as in the paper (arXiv:2402.09353, section 4.3) and in
            # `peft`.
            norms = self.row_norms()
        product = (y if bias is None else y - bias) + change
        product = product * (self.magnitude.float() / norms).to(y.dtype)
        return product if bias is None else product + bias


class _LowRankColumn(_LowRank):
    """A layer that is split by output features."""

    sharded = {B: 0, MAGNITUDE: 0}

    def _inputs_differ(self: Any) -> bool:
        return bool(self.sequence_parallel)  # then each tensor-parallel rank has other tokens

    def forward(self: Any, input_: Tensor, *args: Any, **more: Any) -> Any:
        """Return as the layer, [s, b, in] to [s, b, out / tp]."""
        y, bias = super().forward(input_, *args, **more)  # type: ignore[misc]
        if not _Switch.on:
            return y, bias
        compressed = self._compressed(input_)
        if self.sequence_parallel:
            compressed = gather_from_sequence_parallel_region(compressed, group=self.tp_group)
        else:
            # All ranks have the same A x, and each multiplies it with its rows of B: the gradients
            # are summed.
            compressed = copy_to_tensor_model_parallel_region(compressed, group=self.tp_group)
        return self._adapted(y, compressed), bias


class _LowRankRow(_LowRank):
    """A layer that is split by input features."""

    sharded = {A: 1}

    def _inputs_differ(self: Any) -> bool:
        return bool(self.tp_group.size() > 1)  # other features

    def forward(self: Any, input_: Tensor) -> Any:
        """Return as the layer, [s, b, in / tp] to [s, b, out], or a part of the tokens under
        sequence parallelism.
        """
        y, bias = super().forward(input_)  # type: ignore[misc]
        if not _Switch.on:
            return y, bias
        compressed = self._compressed(input_)
        if self.sequence_parallel:
            compressed = reduce_scatter_to_sequence_parallel_region(compressed, group=self.tp_group)
        else:
            compressed = reduce_from_tensor_model_parallel_region(compressed, group=self.tp_group)
        return self._adapted(y, compressed), bias


class _LowRankWhole(_LowRank):
    """A layer that every tensor-parallel rank has whole."""

    sharded: dict[str, int] = {}
    skip_bias_add = True

    def _inputs_differ(self: Any) -> bool:
        return bool(self.sequence_parallel)

    def _product(self: Any, x: Tensor) -> Tensor:
        y = super()._product(x)  # type: ignore[misc]
        return self._adapted(y, self._compressed(x)) if _Switch.on else y  # type: ignore[no-any-return]


class _LowRankExperts:
    """This rank's experts' layers of one kind, with an adapter of each.

    No expert-tensor rank has all of an adapter: a part that is not split with the weight is split
    along the hidden size, and gathered when it is needed, so that the sum over ranks of its
    gradient is that of a gather.
    """

    adapter: Adapter

    def make_adapter(self: Any, adapter: Adapter, parts: Parts) -> None:
        """Add the parameters of each expert."""
        self.adapter = adapter
        ranks = self._tp.size()
        rows, columns = self.weight0.shape
        # The layer holds the other side whole; that one is split here, so that no rank keeps a
        # whole factor.
        if self.partition_dim == 0:
            columns = columns // ranks
        else:
            rows = rows // ranks
        for i in range(self.num_gemms):
            a = _drawn(_parameter(self.weight0, adapter.rank, columns), self._whole[1])
            for name, axis, parameter in (
                (A, 1, a),
                (B, 0, _parameter(self.weight0, rows, adapter.rank)),
            ):
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
                parameter.allreduce = self.weight0.allreduce  # type: ignore[attr-defined]
                self.register_parameter(f"{name}{i}", parameter)

    def forward(self: Any, x: Tensor, rows: Any) -> Any:
        """Return as the layer, [sum(rows), in] to [sum(rows), out]."""
        y, biases = super().forward(x, rows)  # type: ignore[misc]
        if not _Switch.on:
            return y, biases
        a = self._each(A)
        b = self._each(B)
        # Stacked, so that one collective serves all experts of the rank.
        if self._tp.size() > 1 and self.partition_dim == 0:
            a = self._gathered(torch.stack(a)).unbind()
        elif self._tp.size() > 1:
            b = self._gathered(torch.stack(b).mT.contiguous()).mT.unbind()
        compressed = self._product(x, a, rows) * self.adapter.scale
        return y + self._product(compressed, b, rows), biases

    may_gate = False

    def _product(self: Any, x: Tensor, weights: Any, rows: Any) -> Tensor:
        if self.impl in PLAIN and not isinstance(rows, Tensor):
            return PLAIN[self.impl].grouped_linear(x, weights, rows)
        return grouped_gemm(x, weights, torch.as_tensor(rows, device=x.device), impl=self.impl)

    def sharded_state_dict(
        self: Any,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the shards of the layer and of its adapters among those of all experts."""
        of_layer = super().sharded_state_dict  # type: ignore[misc]
        held: dict[str, Any] = of_layer(prefix, sharded_offsets, metadata)
        held |= self.sharded_by_expert(
            (A, B), {A: 1, B: 0}, prefix, sharded_offsets, metadata or {}
        )
        if self.partition_dim == 0 and self._config.gated_linear_unit:
            for i in range(self.num_gemms):
                key = f"{prefix}{B}{i}"
                offsets = self.offsets_of_expert(i, sharded_offsets)
                held[key] = apply_swiglu_sharded_factory(held[key], offsets)
        return held

    def _gathered(self: Any, x: Tensor) -> Tensor:
        out: Tensor = all_gather_last_dim_from_tensor_parallel_region(x, group=self._tp)
        return out


@functools.cache
def _with_adapter(layer: type) -> type:
    """Return the class of a layer with an adapter."""
    if issubclass(layer, ColumnGroupedLinear | RowGroupedLinear):
        kind: type = _LowRankExperts
    elif issubclass(layer, DuplicatedLinear):
        kind = _LowRankWhole
    else:
        kind = _LowRankColumn if issubclass(layer, ColumnLinear) else _LowRankRow
    return type(
        layer.__name__, (kind, layer), {"__doc__": layer.__doc__, "__module__": layer.__module__}
    )
