"""DPO through whole models: the loss of TRL on transformers' models next to ours, every gradient,
and two steps of AdamW.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.models.gpt.hf import TABLES
from mtrain.models.hybrid.hf import LAYERS
from mtrain.models.table import to_ours, to_theirs
from tests.parity_hf import hf_reference
from tests.parity_hf.compare import Case, Windows, _own_tensors, imported, largest_difference, load
from tests.parity_hf.test_chats import HF
from tests.parity_hf.test_hybrid import KINDS
from tests.support.forked import import_engine, run_ranks
from tests.unit.test_pair_losses import Outputs, inputs_of, sides, trainer_of

BETA = 0.3
ROWS = 4
STEPS = 2
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,
    "head_dim": 16,
}
CASES = {
    "llama": ("llama", HF),
    "qwen3 moe": ("qwen3_moe", HF | EXPERTS),
    "hybrid": KINDS["nemotron h"],
}
LIMITS = {"losses": 1e-5, "gradients": 1e-5, "weights": 1e-4}
WORDS = (
    "data=mock",
    "objective=dpo",
    f"objective.beta={BETA}",
    "objective.loss_type=[sigmoid,ipo]",
    "objective.loss_weights=[0.8,0.2]",
    "kernels=reference",
)


def compared(kind: str, values: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Return the largest relative difference of each quantity, and its place; a job of one rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from mtrain.train.loop.step import gradients, reduce_report, train_step
    from mtrain.world.init import joined

    config = hf_reference.configuration(kind, values)
    made, reference = (hf_reference.model(config, seed) for seed in (1, 2))
    run, refused = imported(Case(kind, values, extra=WORDS), config.to_dict())
    assert not refused
    trainer = run.trainer.model_copy(update={"global_batch_size": ROWS})
    # Adam must not make a step of the rounding in the gradient of a key.
    optim = run.optim.model_copy(update={"eps": 1e-3})
    run = run.model_copy(update={"trainer": trainer, "optim": optim})
    run = resolve(run, Machine.here(), 1)
    table = {**LAYERS, **TABLES}[kind]
    with joined(run) as world:
        parts = parts_of(run, world, config.vocab_size)
        chunk = parts.state.chunks[0]
        for model, ours in ((made, chunk), (reference, parts.state.reference[0])):
            pieces = to_ours(table, run.model, hf_reference.tensors(model))
            own = _own_tensors(ours)
            load(whole_of(pieces, own), own, run)
        parts.state.optimizer.reload_model_params()
        reports = gradients(parts, parts.prefetcher.take(0, ROWS))
        loss = reduce_report(world, parts.table, reports, False)["loss"]
        every = {name: getattr(p, "main_grad", None) for name, p in _own_tensors(chunk).items()}
        own = {name: gradient.clone() for name, gradient in every.items() if gradient is not None}
        before = {name: t.detach().clone() for name, t in made.named_parameters()}
        update = hf_reference.optimizer(made, run.optim)
        errors = {}
        apart = []
        for step in range(STEPS):
            found = train_step(parts, stop_requested=False)
            batches = parts.train_data.microbatches(step * ROWS, ROWS)
            whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
            wanted = trl_loss(made, reference, whole)
            wanted.backward()
            apart.append(abs(found.loss / float(wanted.detach()) - 1))
            if step == 0:
                assert loss == found.loss
                theirs = {name: p.grad.clone() for name, p in made.named_parameters()}
                given = to_theirs(table, run.model, parts_like(own, pieces))
                errors["gradients"] = largest_difference(given, theirs, theirs, 1e-2)
            update(found.lr)
        errors["losses"] = max(apart), ""
        every = {name: t.detach() for name, t in made.named_parameters()}
        own = {name: t.detach() for name, t in _own_tensors(chunk).items() if learns(t)}
        moved = {name: t - before[name] for name, t in every.items()}
        given = to_theirs(table, run.model, parts_like(own, pieces))
        errors["weights"] = largest_difference(given, every, moved, 1.0)
    return errors


MIXED = ("z", "x", "B", "C", "dt")
"""The parts of a Mamba mixer's matrices, in their order; the table names each by itself."""


def whole_of(pieces: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names of the chunk, put together from the parts of mixers."""
    out = dict(pieces)
    for name in own.keys() - pieces.keys():
        found = [out.pop(f"{name}.{part}", None) for part in MIXED]
        out[name] = torch.cat([part for part in found if part is not None])
    return out


def parts_like(own: dict[str, Tensor], pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the chunk by the names of `pieces`."""
    out = dict(own)
    for name in own.keys() - pieces.keys():
        names = [f"{name}.{part}" for part in MIXED if f"{name}.{part}" in pieces]
        sizes = [len(pieces[part]) for part in names]
        out |= dict(zip(names, out.pop(name).split(sizes), strict=True))
    return out


def learns(tensor: Tensor) -> bool:
    return hasattr(tensor, "main_grad")


def parts_of(run: Any, world: Any, vocab: int) -> Any:
    """Return a training context on drawn pairs whose answers differ in length."""
    from mtrain.assembly.model import build_model, build_reference
    from mtrain.assembly.optim import build_optimizer, build_schedule
    from mtrain.ckpt.state import TrainState
    from mtrain.data.batch import GlobalBatches
    from mtrain.data.pairs import MockPairs, pair_collator
    from mtrain.train.assemble import configure_schedule_hooks
    from mtrain.train.loop.context import TrainContext

    chunks = build_model(run, world)
    optimizer = build_optimizer(run, chunks)
    configure_schedule_hooks(run, chunks, optimizer)
    state = TrainState(chunks, optimizer, build_schedule(run, optimizer))
    state.reference = build_reference(run, world)
    windows = Windows(vocab, run.data.length, 0)
    drawn = np.random.default_rng(3)
    windows.windows = drawn.integers(0, vocab, (ROWS * STEPS, run.data.length + 1))
    collator = pair_collator(MockPairs(windows), mismatched=False)
    data = GlobalBatches(windows, ROWS, run.trainer.micro, 0, 1, collator, average="pair")
    return TrainContext(run, world, state, data, None)


def trl_loss(policy: Any, reference: Any, batch: dict[str, Tensor]) -> Tensor:
    from trl import DPOTrainer

    mask = batch["loss_mask"] > 0

    def log_probabilities(model: Any) -> Tensor:
        logits = model(input_ids=batch["tokens"]).logits.log_softmax(-1)
        return logits.gather(-1, batch["labels"][..., None]).squeeze(-1) * mask

    with torch.no_grad():
        known = log_probabilities(reference).sum(-1)
    trainer = trainer_of(
        loss_types=["sigmoid", "ipo"],
        loss_weights=[0.8, 0.2],
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
    )
    inputs = inputs_of(sides(mask))
    inputs |= {"ref_chosen_logps": known[::2], "ref_rejected_logps": known[1::2]}
    outputs = Outputs(sides(log_probabilities(policy)))
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_preferences_dpo_steps_equal_trl(name: str) -> None:
    pytest.importorskip("trl", reason="pip install 'mtrain[dev]'")
    import_engine()
    errors = run_ranks(1, compared, *CASES[name])[0]
    assert {what: found for what, found in errors.items() if found[0] > LIMITS[what]} == {}
    assert errors.keys() == LIMITS.keys()
