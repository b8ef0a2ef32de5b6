"""The Mamba-2 mixer of megatron-core in plain torch and our kernels: it runs wherever torch does.

Names of parameters, how tensor parallelism splits them and what checkpoints hold of them are those
of `megatron.core.ssm.mamba_mixer`, which needs the CUDA kernels of mamba-ssm. Those of the scan are
taken where `mtrain_kernels.ssd` finds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import divide
from mtrain_kernels.causal_conv1d.op import causal_conv1d
from mtrain_kernels.ssd.op import ssd
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.config.engine import release
from mtrain.mcore.layers.cache import State
from mtrain.mcore.layers.mamba_context import HeadExchange

if release.at_least(0, 19):
    from megatron.core.ssm.utils import _split_tensor_factory
else:
    from megatron.core.ssm.mamba_mixer import _split_tensor_factory

DECAYS = (1.0, 16.0)
"""Range of -A at the start, of which each head draws its own."""
STEPS = (1e-3, 1e-1)
"""Range of a head's time step at the start, drawn evenly in its logarithm."""
LEAST_STEP = 1e-4


@dataclass(frozen=True)
class Scan:
    """Settings of the mixer that megatron-core's config lacks."""

    conv_kernel: int
    """Times that the convolution sees, the present one included."""
    chunk: int
    """Times that are computed by one product of matrices."""
    least_step: float = 0.0
    """Lower bound of a time step."""


class GatedNorm(MegatronModule):
    """RMSNorm of `x * silu(gate)` [..., d], over each of `groups` equal parts of the channels
    apart.

    Each tensor-parallel rank has whole groups, so none sends anything. Source: Dao and Gu 2024,
    arXiv:2405.21060, section 7.2.
    """

    def __init__(self, config: Any, channels: int, groups: int, tp_group: Any) -> None:
        super().__init__(config)
        self.eps = config.layernorm_epsilon
        self.groups = groups
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.ones(channels, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm, computed in fp32, in the shape and dtype of `gate`."""
        gated = x.float() * F.silu(gate.float())
        parts = gated.unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return (parts.flatten(-2) * self.weight.float()).to(gate.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Split by channels."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


@dataclass
class Mamba2MixerSubmodules:
    """The linear layers in front and behind."""

    in_proj: Any
    out_proj: Any


class Mamba2Mixer(MegatronModule):
    """[s, b, h] to [s, b, h], or this rank's [s / tp, b, h] of both under sequence parallelism.

    One linear layer makes of each token a gate z, channels x, input B and output C of each group's
    state, and a time step of each head. x, B and C go through a causal convolution of each channel,
    then the state of each head is scanned (`mtrain_kernels.ssd`). Each tensor-parallel rank has
    whole groups with their heads; under context parallelism, inputs of convolution and scan are
    exchanged so that each rank has some heads of all tokens. `impl` is that of the convolution and
    of the scan: `reference`, or `auto` for the fastest that takes a call.
    """

    impl = "reference"

    def __init__(
        self,
        config: Any,
        submodules: Mamba2MixerSubmodules,
        d_model: int,
        *,
        scan: Scan,
        pg_collection: Any,
        layer_number: int = 1,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.scan = scan
        self.tp_group = pg_collection.tp
        self.head_dim = config.mamba_head_dim
        ranks = pg_collection.tp.size()
        self.heads, self.groups = (
            divide(n, ranks) for n in (config.mamba_num_heads, config.mamba_num_groups)
        )
        self.channels = self.heads * self.head_dim
        self.states = self.groups * config.mamba_state_dim
        sizes = {name: getattr(self, name) for name in ("heads", "channels", "groups", "states")}
        self._exchange = (
            HeadExchange(pg_collection.cp, **sizes) if pg_collection.cp.size() > 1 else None
        )
        dtype = config.params_dtype
        mixed = self.channels + 2 * self.states
        self.dt_bias = nn.Parameter(_blank(self.heads, dtype))
        # fp32 in any run, as mamba-ssm keeps both: the exponential would magnify rounding.
        self.A_log = nn.Parameter(_blank(self.heads, torch.float32))
        self.D = nn.Parameter(_blank(self.heads, torch.float32).fill_(1.0))
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            ranks * sum(self.parts),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **options,
        )
        self.conv1d = nn.Conv1d(mixed, mixed, scan.conv_kernel, groups=mixed, dtype=dtype)
        self.norm = GatedNorm(config, self.channels, self.groups, self.tp_group)
        self.out_proj = build_module(
            submodules.out_proj,
            ranks * self.channels,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **options,
        )
        self._mark_initial_values()

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Return rows of the first linear layer on this rank: of z, x, B, C and the time steps."""
        return self.channels, self.channels, self.states, self.states, self.heads

    def _mark_initial_values(self) -> None:
        """Say how the weights begin that are no linear layer's; drawn alike in every layout."""
        # The bound of torch's own initialization of a depthwise convolution.
        bound = 1 / math.sqrt(self.scan.conv_kernel)
        for weight in (self.conv1d.weight, self.conv1d.bias):
            weight.mtrain_init_bound = bound  # type: ignore[union-attr]
        self.A_log.mtrain_init_of_share = _decay_at_the_start  # type: ignore[attr-defined]
        self.dt_bias.mtrain_init_of_share = _step_at_the_start  # type: ignore[attr-defined]
        for weight in (self.dt_bias, self.A_log, self.D, self.conv1d.weight, self.conv1d.bias):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix tokens; each packed document begins with an empty state and an empty convolution.

        With a context, the scan continues from the state after the tokens that it has read, and
        stores the new state there.
        """
        mixed, _bias = self.in_proj(hidden_states)
        z, xbc, dt = mixed.split(
            [self.channels, self.channels + 2 * self.states, self.heads], dim=-1
        )
        if self._exchange is None:
            y = self._scanned(xbc, dt, _segments(packed_seq_params, mixed), inference_context)
        else:
            xbc, dt, places = self._exchange.to_heads(xbc, dt, _ends(packed_seq_params))
            y = self._exchange.to_tokens(
                self._scanned(xbc, dt, _segments(packed_seq_params, xbc), None), places
            )
        out: tuple[Tensor, Tensor | None] = self.out_proj(self.norm(y, z))
        return out

    def _scanned(self, xbc: Tensor, dt: Tensor, marks: Tensor | None, context: Any) -> Tensor:
        """Convolve and scan [s, b, channels] with time steps [s, b, heads], of all heads of this
        rank or of its part of them; return [s, b, channels of heads].
        """
        # After an exchange a rank has a share of its heads, channels and groups.
        own = self._exchange or self
        weight, bias, dt_bias, a_log, d = self._weights()
        before = State.of(context, self.layer_number)
        x = xbc.permute(1, 2, 0)
        times = xbc.shape[0]
        if before is not None:
            x = torch.cat([before.tail, x], -1)
        mixed = causal_conv1d(x, weight, bias, segments=marks, impl=self.impl)[
            ..., -times:
        ].transpose(1, 2)
        channels, b, c = mixed.split([own.channels, own.states, own.states], dim=-1)
        y, state = ssd(
            channels.unflatten(-1, (own.heads, -1)),
            self._steps(dt, dt_bias).transpose(0, 1),
            -a_log.float().exp(),
            b.unflatten(-1, (own.groups, -1)),
            c.unflatten(-1, (own.groups, -1)),
            d=d.float(),
            state=None if before is None else before.state,
            segments=marks,
            chunk=self.scan.chunk,
            impl=self.impl,
        )
        if context is not None:
            tail = F.pad(x, (weight.shape[-1] - 1, 0))[..., x.shape[-1] :]
            State(tail, state).keep(context, self.layer_number, times)
        return y.flatten(2).transpose(0, 1)

    def _weights(self) -> tuple[Tensor, ...]:
        """Return the weights of convolution, time steps, decays and skips: all rows, or a part."""
        assert self.conv1d.bias is not None
        channels: tuple[Tensor, ...] = self.conv1d.weight.squeeze(1), self.conv1d.bias
        heads: tuple[Tensor, ...] = self.dt_bias, self.A_log, self.D
        if self._exchange is None:
            return *channels, *heads
        return *map(self._exchange.own_channels, channels), *map(self._exchange.own_heads, heads)

    def _steps(self, dt: Tensor, bias: Tensor) -> Tensor:
        """Return time steps, in fp32."""
        steps = F.softplus(dt.float() + bias.float())
        return steps.clamp(min=self.scan.least_step) if self.scan.least_step else steps

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return megatron-core's form: a fused weight as separate tensors, split over ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own: dict[str, Any] = {}
        # Only the mixer's own parameters: its modules follow one by one.
        self._save_to_state_dict(own, "", keep_vars=True)
        out = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups
        )
        for name, module in self.named_children():
            # torch's convolution does not know how it is sharded, so its axis is given here.
            if module is self.conv1d:
                state = module.state_dict(prefix="", keep_vars=True)
                axes = dict.fromkeys(state, 0)
                out |= make_sharded_tensors_for_checkpoint(
                    state, f"{prefix}{name}.", axes, sharded_offsets, **groups
                )
            else:
                out |= sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
        fused: dict[str, tuple[tuple[int, ...], list[str]]] = {
            "in_proj.weight": (self.parts, ["z", "x", "B", "C", "dt"])
        }
        own_adapter = [
            name for name in ("in_proj.lora_b", "in_proj.magnitude") if f"{prefix}{name}" in out
        ]
        # The rows of an adapter's B belong to the same parts as those of the weight.
        fused |= dict.fromkeys(own_adapter, fused["in_proj.weight"])
        fused |= {
            f"conv1d.{kind}": (self.parts[1:4], ["x", "B", "C"]) for kind in ("weight", "bias")
        }
        for name, (sizes, names) in fused.items():
            key = f"{prefix}{name}"
            out[key] = _split_tensor_factory(out[key], list(sizes), names, 0)
        return out


def _blank(numbers: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numbers, dtype=dtype)


def _decay_at_the_start(share: Tensor) -> Tensor:
    """Return log(-A) of heads that drew a share in [0, 1)."""
    low, high = DECAYS
    return (low + share * (high - low)).log()


def _step_at_the_start(share: Tensor) -> Tensor:
    """Return the bias whose softplus is the time step of heads that drew a share in [0, 1)."""
    low, high = map(math.log, STEPS)
    step = (low + share * (high - low)).exp().clamp(min=LEAST_STEP)
    # The inverse of softplus, exact for small steps.
    return step + (-torch.expm1(-step)).log()


def _ends(packed: Any) -> Tensor | None:
    """Return the offsets of packed samples, padding included; None where they are not packed."""
    if packed is None:
        return None
    ends: Tensor = (
        packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    )
    return ends


def _segments(packed: Any, mixed: Tensor) -> Tensor | None:
    """Return the document [1, t] of each token of packed samples; trailing tokens form another."""
    ends = _ends(packed)
    if ends is None:
        return None
    tokens = torch.arange(mixed.shape[0], device=mixed.device, dtype=ends.dtype)
    return torch.searchsorted(ends, tokens, right=True).to(torch.int32)[None]
