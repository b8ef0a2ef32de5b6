"""Statistics of routers: tokens of each expert, entropy, tokens that were dropped, bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtrain.mcore.layers.router import tokens_of
from mtrain.mcore.state.local_params import unwrap
from mtrain.models.selection import selects
from mtrain.train.loop.context import TrainContext
from mtrain.train.statistics.table import Rows
from mtrain.train.statistics.weights import of_all_stages
from mtrain.train.trace.activations import global_names

EXPERTS = "experts"
COLUMNS = ("max_over_mean", "rank_max_over_mean", "entropy", "dropped")
"""Load of the most loaded expert over the mean; the same of expert-parallel ranks; mean entropy of
the distribution over experts, in nats; share of the choices of tokens that no expert took.
"""


class ExpertStatistics:
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
        # of each router: loads, biases, entropy, tokens
        width = 2 * self.number + 2
        device = context.world.torch_device
        self.values = torch.zeros(len(self.names), width, dtype=torch.float64, device=device)
        self._handles: list[Any] = []

    @torch.no_grad()
    def watch(self) -> None:
        """Add the biases, which one of the ranks describes, and the choices of all forwards until
        `leave`.
        """
        self.values.zero_()
        coords = self.context.world.coords
        first = not any(coords[axis] for axis in ("tp", "cp", "dp"))
        for name, module in self._watched.items():
            row = self.values[self.names.index(name)]
            self._handles.append(module.register_forward_hook(self._hook(row)))
            bias = getattr(module, "expert_bias", None)
            if first and bias is not None:
                row[self.number : 2 * self.number] += bias

    def leave(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, row: torch.Tensor) -> Any:
        run = self.context.run
        describes = run.parallel.sequence_parallel or self.context.world.coords["tp"] == 0

        @torch.no_grad()
        def leave(router: Any, args: Any, output: Any) -> None:
            # A forward within the backward is one that recomputation makes again.
            if not describes or torch._C._current_graph_task_id() != -1:
                return
            logits = router.gating(args[0])
            tokens = tokens_of(router, logits)
            scores = logits.flatten(0, 1).float()
            if tokens is None:
                tokens = scores.new_ones(len(scores), dtype=torch.bool)
            row[: self.number] += _loads(output[1], tokens, self.number)
            logs = torch.log_softmax(scores, dim=-1)
            row[-2] += ((logs.exp() * logs).sum(-1) * tokens).sum().neg()
            row[-1] += tokens.sum()

        return leave

    def read(self, numbers: Sequence[float]) -> tuple[Rows, dict[str, dict[str, list[float]]]]:
        """Return `COLUMNS` by router, and further lists by what they are: loads of experts, of
        expert-parallel ranks, and biases that are not all 0.
        """
        width = self.values.shape[1]
        rows: dict[str, list[float]] = {}
        lists: dict[str, dict[str, list[float]]] = {"loads": {}, "rank_loads": {}, "biases": {}}
        each = self.number // self.context.run.parallel.ep
        for place, name in enumerate(self.names):
            found = numbers[width * place : width * (place + 1)]
            loads = list(found[: self.number])
            biases = list(found[self.number : -2])
            entropy, tokens = found[-2:]
            ranks = [sum(loads[i : i + each]) for i in range(0, self.number, each)]
            taken = sum(loads)
            if not taken:
                continue
            over = [max(values) * len(values) / taken for values in (loads, ranks)]
            rows[name] = [*over, entropy / tokens, 1 - taken / (tokens * self.topk)]
            lists["loads"][name] = loads
            lists["rank_loads"][name] = ranks
            if any(biases):
                lists["biases"][name] = biases
        return {EXPERTS: rows}, {kind: found for kind, found in lists.items() if found}


def _routes(module: Any) -> bool:
    return hasattr(module, "gating") and hasattr(module, "routing")


def _loads(chosen: torch.Tensor, tokens: torch.Tensor, number: int) -> torch.Tensor:
    """Return the tokens of each expert, of a map [t, e] or of lists [t, k] with -1 for none."""
    if chosen.dtype == torch.bool:
        return (chosen & tokens[:, None]).sum(0)
    there = ((chosen >= 0) & tokens[:, None]).flatten()
    loads = torch.zeros(number, dtype=torch.int64, device=chosen.device)
    return loads.scatter_add_(0, chosen.clamp(min=0).flatten(), there.long())
