"""Bounded logits: transformers' formula in every implementation of the loss, and the same numbers
in every layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

# logits of this model go beyond, and its vocabulary has padding
CAP = 2.0
VOCAB = 257
LOSSES = ("reference", "megatron")
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "init_method_std": 0.2,
    "final_logit_softcapping": CAP,
}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}


def _of_transformers(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits, and the weight that they are made with, of Gemma 2's model in
    transformers.

    Its decoder is given: it returns `hidden` as it is.
    """
    from transformers import Gemma2Config, Gemma2ForCausalLM
    from transformers.modeling_outputs import BaseModelOutputWithPast

    sizes = {
        "hidden_size": weight.shape[1],
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "head_dim": 4,
    }
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
    theirs = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=len(weight), final_logit_softcapping=CAP, **sizes, **heads)
    ).eval()
    theirs.lm_head.weight = nn.Parameter(weight)
    theirs.model.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden)
    logits: Tensor = theirs(input_ids=torch.zeros(hidden.shape[:2], dtype=torch.int64)).logits
    return logits, theirs.lm_head.weight


@pytest.mark.sampled(9)
@pytest.mark.parametrize("loss", LOSSES)
def test_softcapping_equals_transformers(loss: str) -> None:
    run = apply(tiny_run(model=MODEL), {"kernels.loss": loss})

    def job() -> tuple[float, ...]:
        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        with joined(run) as world:
            chunk = build_model(run, world, wrap=False)[0]
            hidden: list[Tensor] = []
            chunk.output_layer.register_forward_pre_hook(lambda _, given: hidden.append(given[0]))
            tokens = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))
            given = tokens, torch.arange(32).expand(2, 32), None
            labels = tokens.roll(-1, 1)
            found = chunk(*given, labels=labels, loss_mask=torch.ones(2, 32))
            weight = chunk.output_layer.weight
            (mine,) = torch.autograd.grad(found, weight)
            logits = chunk(*given)
            right, theirs = _of_transformers(hidden[-1].detach().transpose(0, 1), weight[:VOCAB])
            wanted = F.cross_entropy(right.flatten(0, 1), labels.flatten(), reduction="sum")
            (gradient,) = torch.autograd.grad(wanted, theirs)
            free = (hidden[-1] @ weight.T).abs().max()
            apart = (
                (logits[..., :VOCAB] - right).abs().max(),
                (mine[:VOCAB] - gradient).norm() / gradient.norm(),
            )
            return (
                float(found),
                float(wanted),
                *map(float, apart),
                float(right.abs().max()),
                float(free),
            )

    found, wanted, logits, gradient, largest, free = run_ranks(1, job)[0]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert logits < 1e-6
    assert gradient < 1e-5
    assert largest <= CAP < free, "the bound has to bind, or the test proves nothing"


def _trained(run: RunConfig, folder: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    ranks = run.parallel.ranks or 1
    return run_ranks(ranks, lambda: train_steps(run, 2, gradients_to=folder))[0], whole_tensors(
        folder / "step_00000000"
    )


@pytest.mark.full
@pytest.mark.parametrize("loss", some(LOSSES, ["reference"]))
def test_softcapping_ranks_train_as_one_rank(loss: str, tmp_path: Path) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "one": {},
        "tp2": {"ranks": 2, "tp": 2, "sequence_parallel": True},
        "pp2": {"ranks": 2, "pp": 2},
    }
    ends = {
        name: _trained(
            apply(tiny_run(model=MODEL | MTP, **layout), {"kernels.loss": loss}), tmp_path / name
        )
        for name, layout in layouts.items()
    }
    values, gradients = ends.pop("one")
    for name, (found, sharded) in ends.items():
        for value, wanted in zip(found, values, strict=True):
            assert value == pytest.approx(wanted, rel=1e-5), name
        assert sharded.keys() == gradients.keys()
        assert all((sharded[k] - g).norm() <= 1e-5 * g.norm() for k, g in gradients.items()), name


def test_softcapping_generation_uses_cap() -> None:
    run = tiny_run(model=MODEL)

    def job() -> float:
        from mtrain.assembly.model import build_model
        from mtrain.train.generate.sampler import Sampler
        from mtrain.world.init import joined

        with joined(run) as world, torch.no_grad():
            sampler = Sampler(run, world, build_model(run, world, wrap=False))
            for chunk in sampler.chunks:
                chunk.output_layer.weight.mul_(100)
            logits = sampler._next_logits([[1, 2, 3]])
            assert logits is not None
            return float(logits.abs().max())

    assert run_ranks(1, job)[0] == pytest.approx(CAP, rel=1e-3)
