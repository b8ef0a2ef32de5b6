"""Two steps from the same weights by mtrain, in any layout, and by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.cli.main import main
from tests.parity_hf.compare import adam_of
from tests.support.forked import run_alone

SAMPLES = 4
STEPS = 2
WORDS = (
    f"data=mock trainer.global_batch_size={SAMPLES} optim.lr=1e-2"
    " optim.warmup_iters=0 optim.schedule=constant optim.clip_grad=0.5"
    " optim.weight_decay=0.1 trainer.eval_iters=0 cluster=cpu kernels=reference"
)
Batch = dict[str, Tensor]
Sides = Callable[[str], tuple[Path, dict[str, Any]]]


def convert(*words: object) -> int:
    """Run `convert WORDS` in a process of its own."""
    return int(run_alone(lambda: main(["convert", *map(str, words)])))


def ours(
    run: Any,
    weights: Path,
    out: Path,
    given: Callable[[Any, Batch], Tensor],
    before: Callable[[Any], None] = lambda state: None,
) -> list[tuple[float, float]]:
    """Return the losses and norms of two steps from the weights of a run folder; a job for ranks.

    Write to `out` the weights before and after them, the first gradient and, on one rank, the
    logits, which `given` computes with a chunk. `before` may change the state first.
    """
    from mtrain.ckpt import state
    from mtrain.ckpt.store import Checkpoint
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        state.load_weights(Checkpoint.open(weights / "checkpoints/step_00000000"), parts.state)
        before(parts.state)
        if world.size == 1:
            (batch,) = parts.train_data.microbatches(0)
            with torch.no_grad():
                logits = given(parts.state.chunks[0], batch)
            torch.save(logits[..., : run.model.vocab_size], out / "logits.pt")
        state.save(out, run, world, parts.state, {})
        record_gradients(parts, out / "gradients")
        results = [train_step(parts, stop_requested=False) for _ in range(STEPS)]
        state.save(out, run, world, parts.state, {})
    return [(r.loss, r.grad_norm) for r in results]


def batches(run: Any, collator: Callable[..., Any]) -> list[Batch]:
    """Return the whole batch of each step."""
    from mtrain.data.batch import GlobalBatches
    from mtrain.train.assemble import splits_of

    splits = splits_of(run)
    data = GlobalBatches(splits.train, SAMPLES, SAMPLES, 0, 1, collator(run, splits, "train"))
    return [dict(data.microbatches(step * SAMPLES)[0]) for step in range(STEPS)]  # type: ignore[arg-type]


def theirs(
    made: Any,
    run: Any,
    data: list[Batch],
    forward: Callable[[Batch], tuple[Tensor, Tensor]],
    tensors: Callable[[Any], dict[str, Tensor]],
    after: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the logits, losses, norms, the first gradient, and the weights before and after the
    steps, by transformers.

    Args:
        made: its model.
        run: the run, whose optimizer it has.
        data: the whole batch of each step.
        forward: the loss and the logits of a batch.
        tensors: the weights of the model by name.
        after: called after each update.
    """
    named = dict(made.named_parameters())
    adam = adam_of(named.values(), run.optim)
    out: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "before": {name: tensor.detach().clone() for name, tensor in tensors(made).items()},
    }
    for batch in data:
        loss, logits = forward(batch)
        out.setdefault("logits", logits.detach())
        loss.backward()
        out.setdefault("gradients", {name: p.grad.clone() for name, p in named.items()})
        out["losses"].append(float(loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(made.parameters(), run.optim.clip_grad)
        out["norms"].append(float(norm))
        adam.step()
        after()
        adam.zero_grad()
    return {**out, "weights": {name: tensor.detach() for name, tensor in tensors(made).items()}}


def sides_of(
    factory: pytest.TempPathFactory,
    saved: Callable[[str, Path], Path],
    computed: Callable[[str, Path], dict[str, Any]],
) -> Sides:
    """Return a function that returns our run folder with the weights that transformers `saved`, and
    the results that it `computed`; both are made once for each name.
    """
    known: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in known:
            home = factory.mktemp(name.replace(" ", "-"))
            assert convert("import", saved(name, home / "theirs"), home / "run") == 0
            known[name] = home / "run", run_alone(lambda: computed(name, home / "run"))
        return known[name]

    return of
