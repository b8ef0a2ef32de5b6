"""Statistics of attention: entropy and largest logit of sampled rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mtrain.mcore.layers.attention import CoreAttention
from mtrain.mcore.state.local_params import unwrap
from mtrain.models.selection import selects
from mtrain.train.loop.context import TrainContext
from mtrain.train.statistics.part import Handles, Part, recomputes
from mtrain.train.statistics.weights import of_all_stages
from mtrain.train.trace.activations import global_names

ATTENTION = "attention"
COLUMNS = ("entropy", "max")
"""Mean entropy of the weights of a row over its keys, in nats, and the largest logit."""
ROWS = 16
"""Queries of each sample that are described, evenly spaced; each with all of its keys."""
_CORE = ".core_attention"


class AttentionStatistics(Part):
    """Hooks on our core attention inside the selected modules, by the name of the layer.

    Tensor-parallel ranks have other heads, context-parallel ranks other rows.
    """

    def __init__(self, context: TrainContext, patterns: Sequence[str]) -> None:
        self._watched = {}
        for chunk in context.state.chunks:
            root = unwrap(chunk)
            names = global_names(root)
            for path, module in root.named_modules():
                name = names[path].removesuffix(_CORE)
                # Sparse attention and attention with biases have other logits.
                ours = isinstance(module, CoreAttention)
                plain = ours and type(module).forward is CoreAttention.forward
                if plain and selects(patterns, name):
                    self._watched[name] = module
        self.names = of_all_stages(set(self._watched))
        device = context.world.torch_device
        # of each layer: entropies and their number
        self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        self.maxima = self.sums.new_full((len(self.names),), -torch.inf)
        self._handles = Handles()

    def watch(self) -> None:
        """Add the rows of all forwards until `leave`."""
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)
        for name, module in self._watched.items():
            place = self.names.index(name)
            hook = self._hook(self.sums[place], self.maxima[place])
            self._handles.add(module.register_forward_pre_hook(hook, with_kwargs=True))

    def leave(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    def _hook(self, sums: torch.Tensor, largest: torch.Tensor) -> Any:
        @torch.no_grad()
        def enter(module: Any, args: Any, kwargs: Any) -> None:
            if recomputes():
                return
            query, key, _, *mask = args
            named = ("attention_mask", "attn_mask_type", "packed_seq_params")
            given = {word: kwargs[word] for word in named if word in kwargs}
            logits, here = module.sampled_logits(ROWS, query, key, *mask[:1], **given)
            size = torch.logsumexp(logits, -1, keepdim=True)
            logs = torch.where(logits > -torch.inf, logits - size, 0.0)
            entropy = -(torch.where(logits > -torch.inf, logs.exp(), 0.0) * logs).sum(-1)
            rows = here.sum(dtype=torch.float64) * entropy[..., 0].numel()
            sums.add_(torch.stack([(entropy * here).sum(dtype=torch.float64), rows]))
            most = torch.where(here[:, None], logits, -torch.inf).amax().double()
            largest.copy_(torch.maximum(largest, most))

        return enter

    def events(self, sums: Sequence[float], maxima: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yield `COLUMNS` by layer."""
        found = zip(self.names, sums[::2], sums[1::2], maxima, strict=True)
        rows = {name: [total / rows, largest] for name, total, rows, largest in found if rows}
        if rows:
            yield {"of": ATTENTION, "columns": COLUMNS, "rows": rows}
