"""Statistics of routers: tokens of each expert, entropy, dropped tokens, losses, bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mtrain.mcore.layers.balance import PER_SAMPLE, imbalance
from mtrain.mcore.layers.router import tokens_of
from mtrain.mcore.state.local_params import unwrap
from mtrain.models.selection import selects
from mtrain.train.loop.context import TrainContext
from mtrain.train.statistics.part import Handles, Part, recomputes
from mtrain.train.statistics.weights import of_all_stages
from mtrain.train.trace.activations import global_names

EXPERTS = "experts"
COLUMNS = ("max_over_mean", "rank_max_over_mean", "entropy", "dropped", "aux_loss", "z_loss")
"""Load of the most loaded expert over the mean; the same of expert-parallel ranks; mean entropy of
the distribution over experts, in nats; share of the choices of tokens that no expert took; mean
balancing loss and z-loss over tokens, before their coefficients.
"""
_SUMS = 4
"""Sums over tokens of entropies, balancing losses and z-losses, and the tokens."""


class ExpertStatistics(Part):
    """Hooks on the selected routers, which are there only in the steps that are described."""

    def __init__(self, context: TrainContext, patterns: Sequence[str]) -> None:
        moe = context.run.model.moe
        assert moe is not None
        self.context = context
        self.number = moe.num_experts
        self.topk = moe.router_topk
        own: dict[str, Any] = {}
        for chunk in context.state.chunks:
            root = unwrap(chunk)
            names = global_names(root)
            routers = ((names[path], m) for path, m in root.named_modules() if _routes(m))
            own |= {name: module for name, module in routers if selects(patterns, name)}
        self.names = of_all_stages(set(own))
        self._watched = own
        self.per_sample = moe.router_load_balancing_type == PER_SAMPLE
        # of each router: loads, biases, sums
        width = 2 * self.number + _SUMS
        device = context.world.torch_device
        self.sums = torch.zeros(len(self.names), width, dtype=torch.float64, device=device)
        self.maxima = self.sums.new_zeros(0)
        self._handles = Handles()

    @torch.no_grad()
    def watch(self) -> None:
        """Add the biases, which one of the ranks describes, and the choices of all forwards until
        `leave`.
        """
        self.sums.zero_()
        coords = self.context.world.coords
        first = not any(coords[axis] for axis in ("tp", "cp", "dp"))
        for name, module in self._watched.items():
            row = self.sums[self.names.index(name)]
            self._handles.add(module.register_forward_hook(self._hook(row)))
            bias = getattr(module, "expert_bias", None)
            if first and bias is not None:
                row[self.number : 2 * self.number] += bias

    def leave(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    def _hook(self, row: torch.Tensor) -> Any:
        run = self.context.run
        describes = run.parallel.sequence_parallel or self.context.world.coords["tp"] == 0

        @torch.no_grad()
        def leave(router: Any, args: Any, output: Any) -> None:
            if recomputes():
                return
            logits = router.gating(args[0])
            tokens = tokens_of(router, logits)
            scores = logits.flatten(0, 1).float()
            if tokens is None:
                tokens = scores.new_ones(len(scores), dtype=torch.bool)
            # Ranks with other tokens of the micro-batch add up its choices.
            balance = imbalance(router, scores, tokens, logits.shape[1] if self.per_sample else 1)
            if not describes:
                return
            row[: self.number] += _loads(output[1], tokens, self.number)
            size = torch.logsumexp(scores, dim=-1)
            logs = scores - size[:, None]
            entropy = ((logs.exp() * logs).sum(-1) * tokens).sum().neg()
            z_loss = (size.square() * tokens).sum()
            row[-_SUMS:] += torch.stack([entropy, balance, z_loss, tokens.sum().to(entropy)])

        return leave

    def events(self, sums: Sequence[float], maxima: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yield `COLUMNS` by router, and further lists by what they are: loads of experts, of
        expert-parallel ranks, and biases that are not all 0.
        """
        width = self.sums.shape[1]
        rows: dict[str, list[float]] = {}
        lists: dict[str, dict[str, list[float]]] = {"loads": {}, "rank_loads": {}, "biases": {}}
        each = self.number // self.context.run.parallel.ep
        for place, name in enumerate(self.names):
            found = sums[width * place : width * (place + 1)]
            loads = list(found[: self.number])
            biases = list(found[self.number : -_SUMS])
            entropy, balance, z_loss, tokens = found[-_SUMS:]
            ranks = [sum(loads[i : i + each]) for i in range(0, self.number, each)]
            taken = sum(loads)
            if not taken:
                continue
            over = [max(values) * len(values) / taken for values in (loads, ranks)]
            dropped = 1 - taken / (tokens * self.topk)
            rows[name] = [*over, entropy / tokens, dropped, balance / tokens, z_loss / tokens]
            lists["loads"][name] = loads
            lists["rank_loads"][name] = ranks
            if any(biases):
                lists["biases"][name] = biases
        yield {"of": EXPERTS, "columns": COLUMNS, "rows": rows} | {
            kind: found for kind, found in lists.items() if found
        }


def _routes(module: Any) -> bool:
    return hasattr(module, "gating") and hasattr(module, "routing")


def _loads(chosen: torch.Tensor, tokens: torch.Tensor, number: int) -> torch.Tensor:
    """Return the tokens of each expert, of a map [t, e] or of lists [t, k] with -1 for none."""
    if chosen.dtype == torch.bool:
        return (chosen & tokens[:, None]).sum(0)
    there = ((chosen >= 0) & tokens[:, None]).flatten()
    loads = torch.zeros(number, dtype=torch.int64, device=chosen.device)
    return loads.scatter_add_(0, chosen.clamp(min=0).flatten(), there.long())
