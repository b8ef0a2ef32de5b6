"""Features of megatron-core since 0.19 that have a key: `make engines` runs this with 0.19."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtrain.config.engine import release
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply, check
from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from tests.support.configs import LAPTOP
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

pytestmark = pytest.mark.skipif(not release.at_least(0, 19), reason="megatron-core can since 0.19")
STEPS = 3


def test_later_releases_large_gradient_norm_skips_update() -> None:
    """Expect the losses of constant weights; below the threshold nothing changes."""
    still = {"lr": 1e-30, "min_lr": 0.0}
    all_skipped = {"skip_above_grad_norm": 1e-6}
    none_skipped: dict[str, float] = {"skip_above_grad_norm": 1e6}

    def losses(optim: dict[str, float]) -> list[float]:
        run = tiny_run(ranks=2, distributed_optimizer=True, model={"num_layers": 2}, optim=optim)
        found = run_ranks(2, lambda: train_steps(run, STEPS))
        assert found[0] == found[1]
        return [loss for loss, _ in found[0]]

    assert losses(all_skipped) == losses(still)
    assert losses(none_skipped) == losses({}) != losses(still)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", ["reference", "megatron"])
def test_later_releases_detached_predictions_keep_gradients(
    loss: str, tied: bool, tmp_path: Path
) -> None:
    def gradients(name: str, **mtp: object) -> dict[str, torch.Tensor]:
        run = apply(tiny_run(model={"tie_word_embeddings": tied, **mtp}), {"kernels.loss": loss})
        run_ranks(1, lambda: train_steps(run, 1, gradients_to=tmp_path / name))
        found = whole_tensors(tmp_path / name / "step_00000000")
        return {key: grad for key, grad in found.items() if "mtp." not in key}

    plain = gradients("plain")
    detached = gradients("detached", mtp_num_layers=1, mtp_detach_heads=True)
    together = gradients("together", mtp_num_layers=1)
    assert plain.keys() == detached.keys() == together.keys()
    assert all(
        torch.allclose(plain[key], grad, rtol=1e-5, atol=1e-8) for key, grad in detached.items()
    )
    assert all(
        not torch.allclose(plain[key], grad, rtol=1e-3)
        for key, grad in together.items()
        if "layers" in key
    )
    read = "model/embedding.word_embeddings.weight" if tied else "model/output_layer.weight"
    assert not torch.allclose(plain[read], together[read], rtol=1e-3)


def test_later_releases_packed_mtp_is_recomputed(tmp_path: Path) -> None:
    """Expect two calls of each layer, and the gradients of activations that were kept."""
    found = {}
    for granularity in ("none", "full"):
        again = RecomputeConfig(granularity=granularity)  # type: ignore[arg-type]
        run = tiny_run(model={"num_layers": 2, "mtp_num_layers": 1}, recompute=again)
        data = run.data.model_copy(update={"packed": True, "packed_multiple": 1})
        run = resolve(run.model_copy(update={"data": data}), LAPTOP)
        assert "MT045" not in {p.code for p in check(run)}
        found[granularity] = run_ranks(
            1, lambda run=run: _counted(run, tmp_path / run.parallel.recompute.granularity)
        )[0]
    kept, once = found["none"]
    computed, twice = found["full"]
    assert twice == 2 * once
    assert kept == pytest.approx(computed, rel=1e-6)
    left, right = (whole_tensors(tmp_path / name / "step_00000000") for name in found)
    for key, gradient in left.items():
        torch.testing.assert_close(right[key], gradient, rtol=1e-5, atol=1e-7)


def _counted(run: RunConfig, folder: Path) -> tuple[list[float], int]:
    """Return a step's loss and norm, its gradients, and the number of calls of a layer that
    predicts.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as Layer

    calls = [0]
    real = Layer._proj_and_transformer_layer

    def counting(self: object, *args: object, **kwargs: object) -> object:
        calls[0] += 1
        assert kwargs["packed_seq_params"] is not None
        return real(self, *args, **kwargs)

    Layer._proj_and_transformer_layer = counting
    ((loss, norm),) = train_steps(run, 1, gradients_to=folder)
    return [loss, norm], calls[0]
