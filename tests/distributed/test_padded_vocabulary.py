"""Ids that only pad the embedding: outside of every loss, or inside as in Megatron-LM, in every
layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

LOSSES = ("reference", "megatron")
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}


def _built(run: RunConfig, job: Any) -> Any:
    """Run `job(world, chunk)` on one rank, with padding that is far more probable than any id."""

    def inside() -> Any:
        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        with joined(run) as world:
            chunk = build_model(run, world, wrap=False)[0]
            with torch.no_grad():
                chunk.output_layer.weight[run.model.vocab_size :] += 1.0
                chunk.decoder.final_layernorm.weight.fill_(1.0).div_(8)
            return job(world, chunk)

    return run_ranks(1, inside)[0]


@pytest.mark.parametrize(("vocab", "masked"), [(257, True), (257, False), (384, True)])
def test_padded_vocabulary_loss_equals_torch_over_real_ids(vocab: int, masked: bool) -> None:
    run = tiny_run(model={"vocab_size": vocab, "mask_padded_vocab": masked})

    def losses(world: Any, chunk: Any) -> tuple[float, ...]:
        tokens = torch.randint(0, vocab, (2, 32), generator=torch.Generator().manual_seed(1))
        given = tokens, torch.arange(32).expand(2, 32), None
        labels = tokens.roll(-1, 1)
        found = []
        for loss in LOSSES:
            chunk._loss = loss
            with torch.no_grad():
                found.append(float(chunk(*given, labels=labels, loss_mask=torch.ones(2, 32))) / 64)
        logits = chunk(*given)[..., : vocab if masked else None]
        return *found, float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    parts, whole, right = _built(run, losses)
    assert (parts, whole) == pytest.approx((right, right), rel=1e-6)


@pytest.mark.parametrize(("masked", "temperature"), [(True, 1.0), (False, 0.0)])
def test_padded_vocabulary_padding_is_never_sampled(masked: bool, temperature: float) -> None:
    run = tiny_run(model={"vocab_size": 257, "mask_padded_vocab": masked})

    def sampled(world: Any, chunk: Any) -> list[int]:
        from mtrain.train.generate.sampler import Sampler

        return Sampler(run, world, [chunk]).generate([1], 6, temperature=temperature)

    assert max(_built(run, sampled)) < 257


@pytest.mark.full
@pytest.mark.parametrize("loss", some(LOSSES, LOSSES[:1]))
def test_padded_vocabulary_padding_only_ranks_train_as_one_rank(loss: str, tmp_path: Path) -> None:
    model = {"vocab_size": 130, **MTP}  # 256 rows: two ids on rank 2, none on rank 3
    ends = []
    for layout in ({}, {"ranks": 4, "tp": 4, "sequence_parallel": True}):
        run = apply(tiny_run(model=model, **layout), {"kernels.loss": loss})
        folder = tmp_path / str(run.parallel.tp)
        values = run_ranks(
            run.parallel.ranks or 1, lambda run=run, to=folder: train_steps(run, 2, gradients_to=to)
        )[0]
        ends.append((values, whole_tensors(folder / "step_00000000")))
    (right, one), (found, four) = ends
    for value, wanted in zip(found, right, strict=True):
        assert value == pytest.approx(wanted, rel=1e-5)
    key = "model/output_layer.weight"
    assert (four[key] - one[key]).norm() <= 1e-5 * one[key].norm()
    assert bool((four[key][130:] == 0).all()), "padding has a gradient"
    assert bool((four[key][:130].abs().sum(1) > 0).all())
