"""Experts whose row counts stay on the device: megatron-core's grouped MLP without copies."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import TEGroupedMLP
from mtrain_kernels.activation.op import activation
from mtrain_kernels.device_tables import DeviceTables
from mtrain_kernels.grouped_gemm.op import FUSED, rows_of
from torch import Tensor

from mtrain.mcore.layers.grouped_linear import Gate
from mtrain.mcore.layers.portable import Activation

_CAPACITIES = DeviceTables(64)


class GroupedExperts(TEGroupedMLP):  # type: ignore[misc]
    """All experts of this rank on rows that are sorted by expert."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Map `permuted_local_hidden_states` [r, h] with `permuted_probs` [r] to [r, h]; the names
        are megatron-core's.

        `tokens_per_expert` [e] may be on the device, where it stays, or on the host; rows behind
        the last expert's give zeros.
        """
        x = permuted_local_hidden_states
        share: Tensor | None = permuted_probs
        counts = self._counts(tokens_per_expert, x.device)
        if self.config.moe_apply_probs_on_input:
            # megatron-core allows this with one expert a token only, so no weight is left for the
            # output.
            x = (permuted_probs[:, None] * x).to(x.dtype)
            share = None
        if self._quantises:
            h, _none = self.linear_fc1(x, counts)
            # The second layer reads gate and up, and quantises the activation without writing it in
            # full.
            gate = Gate(self.activation_func.impl, share, self.activation_recompute)
            return self._biased(self.linear_fc2(h, counts, before=gate), counts, share)
        if self.activation_recompute:
            h, _none = self.linear_fc1(x, counts)
            self.activation_checkpoint = tensor_parallel.CheckpointWithoutOutput()
            y = self.activation_checkpoint.checkpoint(self._activate, h, share)
        elif self._kind in FUSED and getattr(self.linear_fc1, "may_gate", False):
            y, _none = self.linear_fc1(x, counts, behind=Gate(self._kind, share))
        else:
            h, _none = self.linear_fc1(x, counts)
            y = self._activate(h, share)
        found = self.linear_fc2(y, counts)
        if self.activation_recompute:
            # The activation is freed once the second layer has read it; the hook makes it again
            # before that layer's backward.
            self.activation_checkpoint.discard_output_and_register_recompute(found[0])
        return self._biased(found, counts, share)

    def _counts(self, given: Tensor, device: torch.device) -> Tensor:
        """Return the rows of each expert [e] on a device."""
        if self.config.moe_pad_expert_input_to_capacity and given.is_cpu:
            # The same in every step, so there is one copy: a CUDA graph cannot wait for the host.
            return _CAPACITIES.of(tuple(given.tolist()), device, lambda: given)
        return given.to(device, non_blocking=True)

    def _biased(
        self, found: tuple[Tensor, list[Tensor] | None], counts: Tensor, share: Tensor | None
    ) -> tuple[Tensor, None]:
        """Add the biases that the second layer left out to its output, weighed as its rows are."""
        out, biases = found
        if biases is not None:
            of_rows = rows_of(torch.stack(biases), counts, out.shape[0], impl=self.linear_fc2.impl)
            out = (out + (of_rows if share is None else of_rows * share[:, None])).to(out.dtype)
        return out, None

    @property
    def _quantises(self) -> bool:
        """Return whether the second layer makes the activation on its way into FP8."""
        triton = self._kind == "swiglu" and self.activation_func.impl == "triton"
        return triton and getattr(self.linear_fc2, "fp8", None) is not None

    @property
    def _kind(self) -> str | None:
        """Return the activation by its name among the kernels, where a kernel makes it."""
        return self.activation_func.kind if isinstance(self.activation_func, Activation) else None

    def _activate(self, h: Tensor, share: Tensor | None) -> Tensor:
        """Return the activation of `h` [r, n], each row times its share."""
        if self._kind is not None:
            return activation(h, self._kind, weight=share, impl=self.activation_func.impl)
        config = self.config
        if config.gated_linear_unit:
            gate, up = torch.chunk(h, 2, dim=-1)
            if (most := config.activation_func_clamp_value) is not None:
                gate = gate.clamp(max=most)
                up = up.clamp(-most, most)
            y = config.activation_func(gate) * (up + config.glu_linear_offset)
        else:
            y = config.activation_func(h)
        return y if share is None else (y * share[:, None]).to(y.dtype)
