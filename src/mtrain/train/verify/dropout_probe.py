"""A probe of dropout: records what each rank of a step drops, for `dropout_compare`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mtrain import strict_json
from mtrain.config.schema.run import RunConfig
from mtrain.mcore.layers.linear import RowLinear
from mtrain.mcore.state.local_params import unwrap
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.loop.step import train_step
from mtrain.train.trace.activations import global_names
from mtrain.train.verify.dropout_compare import HEADS, MASKS
from mtrain.world.init import joined

Inside = tuple[str, bool]
"""A module's name, and whether each tensor-parallel rank has other features of its input."""


def observe_masks(run: RunConfig, folder: Path) -> None:
    """Train one step of `run` on this rank, and write the mask of each dropout to `folder`."""
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        inside: list[Inside] = []
        for chunk in context.state.chunks:
            root = unwrap(chunk)
            for path, name in global_names(root).items():
                _follow(root.get_submodule(path), name, inside)
        with _recorded(inside) as masks:
            train_step(context, stop_requested=False)
        facts = {"rank": world.rank, "coords": world.coords, "masks": masks}
        (folder / MASKS.format(world.rank)).write_text(strict_json.dumps(facts))


def _follow(module: Any, name: str, inside: list[Inside]) -> None:
    """Keep the names of the running modules in `inside`, the innermost last."""
    here = name, isinstance(module, RowLinear)
    module.register_forward_pre_hook(lambda *_: inside.append(here))
    module.register_forward_hook(lambda *_: [inside.pop(), None][1])


@contextmanager
def _recorded(inside: list[Inside]) -> Iterator[list[dict[str, Any]]]:
    """Record what torch's dropout draws: the module, whether its input is split by features, the
    axes, and a hash of the mask; for attention, a hash of the generator's state before it.
    """
    masks: list[dict[str, Any]] = []
    real = F.dropout
    attend = F.scaled_dot_product_attention

    def keep(axes: int, drawn: torch.Tensor) -> None:
        digest = hashlib.sha256(drawn.cpu().contiguous().numpy().tobytes()).hexdigest()
        module, split = inside[-1] if inside else ("", False)
        masks.append({"module": module, "split": split, "axes": axes, "drawn": digest})

    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or not p:
            return real(input, p, training, inplace)
        kept = real(torch.ones_like(input), p)  # zeros of the input are not dropped elements
        keep(kept.dim(), kept == 0)
        return input * kept

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **more: Any,
    ) -> torch.Tensor:
        if dropout_p:  # its mask never leaves the kernel
            keep(HEADS, torch.get_rng_state())
        return attend(query, key, value, attn_mask, dropout_p, *args, **more)

    # type: ignore[assignment]
    F.dropout = dropout
    F.scaled_dot_product_attention = attention
    try:
        yield masks
    finally:
        F.dropout = real
        F.scaled_dot_product_attention = attend
