"""Hybrids in layouts: losses, norms and weights are one rank's; they resume bitwise and learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import HybridConfig
from mtrain.plan.count import parameters
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, trained, whole_tensors

STEPS = 3
MIXER: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "state_dim": 16,
    "num_groups": 4,
    "chunk_size": 8,
}
HYBRID: dict[str, Any] = {
    "family": "hybrid",
    "num_layers": 6,
    "position_embedding_type": "none",
    "activation": "squared_relu",
    "hybrid": HybridConfig(pattern="M-M*-M", **MIXER),
}
ZERO = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2pp2, sequence parallel": {"ranks": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
    "dp2 distributed optimizer": {"ranks": 2, **ZERO},
    "tp2": {"ranks": 2, "tp": 2},
    "tp4": {"ranks": 4, "tp": 4},
    "pp2": {"ranks": 2, "pp": 2},
    "pp2 unlike stages": {"ranks": 2, "pp": 2, "layers_per_stage": (4, 2)},
    "pp2vpp3": {"ranks": 2, "pp": 2, "vpp": 3},
    "cp2": {"ranks": 2, "cp": 2},
    "tp2cp2, sequence parallel, a group of two ranks": {
        "ranks": 4,
        "tp": 2,
        "cp": 2,
        "sequence_parallel": True,
    },
    "cp2 ring": {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"},
    "cp4, a group of four ranks": {"ranks": 4, "cp": 4},
    "dp2 fsdp2": {"ranks": 2, "fsdp": "fsdp2"},
    "dp2 megatron fsdp": {"ranks": 2, "fsdp": "megatron", "fsdp_sharding": "optim_grads_params"},
}


ALWAYS = ["tp2", "pp2 unlike stages", "cp2"]


def hybrid_run(**more: Any) -> RunConfig:
    return tiny_run(model={**HYBRID, **more.pop("model", {})}, **more)


def _train(run: RunConfig, folder: Path) -> list[tuple[float, float]]:
    return train_steps(run, STEPS, save_to=folder)


@pytest.fixture(scope="module")
def one_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Return the losses and norms of one rank, and the weights after them."""
    home = tmp_path_factory.mktemp("one")
    return run_ranks(1, _train, hybrid_run(), home)[0], whole_tensors(home / f"step_{STEPS:08d}")


@pytest.mark.sampled
@pytest.mark.parametrize("name", some(LAYOUTS, ALWAYS))
def test_hybrid_layout_equals_one_rank(name: str, one_rank: Any, tmp_path: Path) -> None:
    run = hybrid_run(**LAYOUTS[name])
    values = run_ranks(run.parallel.ranks or 1, _train, run, tmp_path)[0]
    for found, expected in zip(values, one_rank[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    many = whole_tensors(tmp_path / f"step_{STEPS:08d}")
    assert many.keys() == one_rank[1].keys()
    for key, weight in one_rank[1].items():
        error = (many[key] - weight).norm() / weight.norm().clamp_min(1e-12)
        # Adam divides by the root of a gradient's square: where a bias has next to none, rounding
        # decides its sign.
        assert error < (1e-3 if "bias" in key else 2e-5), (key, float(error))


@pytest.mark.full
def test_hybrid_wrong_chunk_order_is_found(one_rank: Any) -> None:
    run = hybrid_run(**LAYOUTS["cp2"])

    def job() -> list[tuple[float, float]]:
        from mtrain.mcore.layers import mamba_context

        mamba_context.context_positions = lambda tokens, ranks, ends, device: torch.arange(tokens)  # type: ignore
        return train_steps(run, STEPS)

    pairs = zip(run_ranks(2, job)[0], one_rank[0], strict=True)
    assert max(abs(found[0] / expected[0] - 1) for found, expected in pairs) > 1e-4


@pytest.mark.full
def test_hybrid_twenty_steps_learn() -> None:
    losses = [loss for loss, _ in trained(hybrid_run(), 20)]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3


def test_hybrid_plan_counts_built_parameters() -> None:
    run = hybrid_run(ranks=4, tp=2, pp=2)

    def job() -> int:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.state.sharding import model_shards
        from mtrain.world.init import joined

        with joined(run) as world:
            shards = model_shards(build_model(run, world), trainable=True)
            return sum(shard.tensor.numel() for shard in shards if shard.primary)

    assert sum(run_ranks(4, job)) == parameters(run.model)


@pytest.mark.full
def test_hybrid_resume_is_bitwise(tmp_path: Path) -> None:
    run = hybrid_run(model={"hidden_dropout": 0.1}, ranks=2, tp=2, sequence_parallel=True)

    def whole() -> list[tuple[float, float]]:
        return train_steps(run, 3, save_to=tmp_path / "whole", save_after=1)

    def rest() -> list[tuple[float, float]]:
        return train_steps(
            run, 2, save_to=tmp_path / "rest", load_from=tmp_path / "whole/step_00000001"
        )

    expected = run_ranks(2, whole)[0]
    assert run_ranks(2, rest)[0] == expected[1:]
    left, right = (whole_tensors(tmp_path / name / "step_00000003") for name in ("whole", "rest"))
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


def _mixed(run: RunConfig, chunk: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a mixer's output for drawn input, and all gradients, by chunks of so many tokens (0:
    by the recurrence, one token after the other); a job for one rank.
    """
    from mtrain_kernels.ssd import reference

    from mtrain.assembly.model import build_model
    from mtrain.mcore.layers import mamba_mixer
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.world.init import joined

    def one_by_one(*args: Any, chunk: int, impl: str, **more: Any) -> Any:
        return reference.ssd_sequential(*args, **more)

    with joined(run) as world:
        mixer = unwrap(build_model(run, world)[0]).decoder.layers[0].mixer
        if chunk:
            mixer.scan = mamba_mixer.Scan(mixer.scan.conv_kernel, chunk)
        else:
            mamba_mixer.ssd = one_by_one
        drawn = torch.randn(
            30, 2, run.model.hidden_size, generator=torch.Generator().manual_seed(1)
        )
        out, _ = mixer(drawn.requires_grad_())
        gradients = torch.autograd.grad(
            out.square().sum(), [drawn, mixer.dt_bias, mixer.A_log, mixer.D]
        )
        return out.detach(), list(gradients)


@pytest.mark.parametrize("chunk", [8, 30, 64])
def test_hybrid_chunk_size_keeps_recurrence(chunk: int) -> None:
    found, expected = (run_ranks(1, _mixed, hybrid_run(), size)[0] for size in (chunk, 0))
    for ours, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert float((ours - other).abs().max()) <= 2e-5 * float(other.abs().max())
