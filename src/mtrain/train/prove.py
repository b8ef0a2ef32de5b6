"""What a layout computes, written down so that another layout can be compared with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrain import strict_json
from mtrain.ckpt import state as ckpt_state
from mtrain.ckpt import store
from mtrain.ckpt.folder import MODEL, folder_name
from mtrain.config.run import RunConfig
from mtrain.mcore import sharding
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.step import Parts, train_step
from mtrain.world.init import joined


def observe(run: RunConfig, folder: Path) -> None:
    """Train `run` to its end on this rank, and leave in `folder`: losses and norms of each step, the whole gradient
    that the first update was made from, and the weights after the last.
    """
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        record_gradients(parts, folder / "gradients")
        results = [train_step(parts, stop_requested=False) for _ in range(run.trainer.train_iters)]
        ckpt_state.save(folder, run, world, parts.state, {})
        if world.is_rank0:
            rows = [{"loss": r.loss, "grad_norm": r.grad_norm} for r in results]
            (folder / "steps.json").write_text(strict_json.dumps(rows))


def record_gradients(parts: Parts, folder: Path) -> None:
    """Save the gradients that the optimizer's next step finds, as a checkpoint of step 0."""
    optimizer = parts.state.optimizer
    step = optimizer.step

    def recording() -> Any:
        optimizer.step = step
        ranks = store.Ranks(parts.world.rank, parts.world.size, dist.barrier)
        shards = sharding.gradient_shards(parts.state.chunks, optimizer)
        store.save(folder, 0, shards, {}, {}, "", ranks)
        return step()

    optimizer.step = recording


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint put together from its pieces, by name."""
    opened = store.Checkpoint.open(checkpoint)
    return {key: opened.whole(key) for key in opened.manifest["tensors"]}


@dataclass(frozen=True)
class Row:
    """The largest relative difference of one kind of number, and where it was found."""

    what: str
    error: float
    where: str
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether it is within its tolerance."""
        return self.error <= self.tolerance


def compare(
    one: Path, many: Path, steps: int, tolerances: dict[str, float], *, zero_centered: bool = False
) -> list[Row]:
    """What `observe` left of two layouts: losses, norm and gradients of the first step, weights after the last.

    With `zero_centered` norms, what they multiply with is compared, 1 more than what is kept: that has no size of its
    own after a few steps.
    """
    a, b = (json.loads((folder / "steps.json").read_text()) for folder in (one, many))
    losses = {f"step {i}": _relative(x["loss"], y["loss"]) for i, (x, y) in enumerate(zip(a, b, strict=True), 1)}
    norm = {"step 1": _relative(a[0]["grad_norm"], b[0]["grad_norm"])}
    rows = [
        _worst("loss", losses, tolerances["loss"]),
        _worst("gradient norm", norm, tolerances["gradient norm"]),
    ]
    for what, inside in (("gradient", f"gradients/{folder_name(0)}"), ("weight", folder_name(steps))):
        left, right = (whole_tensors(folder / inside) for folder in (one, many))
        left, right = ({k: v for k, v in tensors.items() if _is_weight(k)} for tensors in (left, right))
        if left.keys() != right.keys():
            odd = sorted(left.keys() ^ right.keys())
            return [*rows, Row(what, float("inf"), f"only on one side: {', '.join(odd[:3])}", 0.0)]
        factors = {key for key in left if what == "weight" and zero_centered and "norm" in key and "bias" not in key}
        errors = {key: _distance(value, right[key], 1.0 if key in factors else 0.0) for key, value in left.items()}
        rows.append(_worst(what, errors, tolerances[what]))
    return rows


def _is_weight(key: str) -> bool:
    """Whether a key is of a weight or its gradient: not of the optimizer or of a router's counters."""
    return key.startswith(MODEL) and "tokens_per_expert" not in key


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None:  # not a number
        return float("inf")
    return abs(a - b) / max(abs(a), 1e-12)


def _distance(a: torch.Tensor, b: torch.Tensor, offset: float) -> float:
    return float((a.double() - b.double()).norm() / (a.double() + offset).norm().clamp_min(1e-12))


def _worst(what: str, errors: dict[str, float], tolerance: float) -> Row:
    where = max(errors, key=lambda key: errors[key])
    return Row(what, errors[where], where, tolerance)
