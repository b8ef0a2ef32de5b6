"""Which ranks drop alike: parts of a tensor that is sharded must not, copies of a whole one must."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mtrain import strict_json
from mtrain.config.run import RunConfig
from mtrain.mcore.local_params import unwrap
from mtrain.train.activations import global_names
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.step import train_step
from mtrain.world.init import joined

MASKS = "masks_{:05d}.json"
HEADS = 4
"""Axes of attention's probabilities, of which tensor-parallel ranks have other heads."""


def observe_masks(run: RunConfig, folder: Path) -> None:
    """Train one step of `run` on this rank, and leave in `folder` what each dropout of it left of its input."""
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        inside: list[str] = []
        for chunk in parts.state.chunks:
            root = unwrap(chunk)
            for path, name in global_names(root).items():
                _follow(root.get_submodule(path), name, inside)
        with _recorded(inside) as masks:
            train_step(parts, stop_requested=False)
        facts = {"rank": world.rank, "coords": world.coords, "masks": masks}
        (folder / MASKS.format(world.rank)).write_text(strict_json.dumps(facts))


def _follow(module: Any, name: str, inside: list[str]) -> None:
    """Keep the names of the modules that run in `inside`, the innermost last."""
    module.register_forward_pre_hook(lambda *_: inside.append(name))
    module.register_forward_hook(lambda *_: [inside.pop(), None][1])


@contextmanager
def _recorded(inside: list[str]) -> Iterator[list[dict[str, Any]]]:
    """What torch's dropout draws: the module, the axes, and a hash of where it is zero; of attention's, a hash of the
    generator's state before it.
    """
    found: list[dict[str, Any]] = []
    real, attend = F.dropout, F.scaled_dot_product_attention

    def keep(axes: int, drawn: torch.Tensor) -> None:
        digest = hashlib.sha256(drawn.cpu().contiguous().numpy().tobytes()).hexdigest()
        found.append({"module": inside[-1] if inside else "", "axes": axes, "drawn": digest})

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        out = real(input, p, training, inplace)
        if training and p:
            keep(out.dim(), out == 0)
        return out

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **more: Any,
    ) -> torch.Tensor:
        if dropout_p:  # its mask is not to be seen
            keep(HEADS, torch.get_rng_state())
        return attend(query, key, value, attn_mask, dropout_p, *args, **more)

    F.dropout, F.scaled_dot_product_attention = dropout, attention  # type: ignore[assignment]
    try:
        yield found
    finally:
        F.dropout, F.scaled_dot_product_attention = real, attend


def wrong_masks(folder: Path, *, sequence_parallel: bool) -> list[tuple[str, str]]:
    """Modules whose dropout is alike on ranks where it must not be, or not where it must, each with what is wrong."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("masks_*.json"))]
    return [
        problem
        for a, b in itertools.combinations(ranks, 2)
        if a["coords"]["pp"] == b["coords"]["pp"]
        for problem in _of_two(a, b, sequence_parallel)
    ]


def _of_two(a: dict[str, Any], b: dict[str, Any], sequence_parallel: bool) -> Iterator[tuple[str, str]]:
    others = [axis for axis in ("dp", "cp", "tp") if a["coords"][axis] != b["coords"][axis]]
    who = f"ranks {a['rank']} and {b['rank']} ({', '.join(others)})"
    for x, y in zip(_masks(a), _masks(b), strict=False):
        copies = others == ["tp"] and x["axes"] < HEADS and not sequence_parallel
        alike = x["drawn"] == y["drawn"]
        if alike and not copies:
            yield x["module"], f"{who} drop the same of different tokens or heads"
        elif copies and not alike:
            yield x["module"], f"{who} hold the same tensor and drop different elements of it"


def _masks(rank: dict[str, Any]) -> Sequence[dict[str, Any]]:
    masks: list[dict[str, Any]] = rank["masks"]
    return masks
