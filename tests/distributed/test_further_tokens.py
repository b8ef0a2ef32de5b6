"""The loss of each further token is a mean over its own predictions, of which short documents have
none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.run import RunConfig
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, whole_tensors

LENGTH = 32
LONG = 2


class Documents:
    """Two samples of one long document each, and behind them samples of documents of two tokens."""

    def __init__(self, end: int) -> None:
        self.seq_length = LENGTH
        self._end = end

    def __len__(self) -> int:
        return 1 << 20

    def batch(self, numbers: Any) -> np.ndarray:
        rows = np.stack(
            [np.random.RandomState(int(number)).randint(20, 200, LENGTH + 1) for number in numbers]
        )
        rows[np.asarray(numbers) >= LONG, 1::2] = self._end
        return rows.astype(np.int64)


def gradient(run: RunConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradient of the layers that predict further tokens, after one step; a job for a
    rank.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    with joined(run) as world:
        splits = splits_of(run)
        splits.train = Documents(splits.document_ends[0])  # type: ignore[assignment]
        parts = assemble(run, world, splits)
        record_gradients(parts, folder)
        train_step(parts, stop_requested=False)
    (saved,) = folder.glob("step_*")
    return {key: value for key, value in whole_tensors(saved).items() if "mtp." in key}


@pytest.mark.parametrize("average", ["token", "sample"])
def test_further_tokens_two_token_documents_change_nothing(average: str, tmp_path: Path) -> None:
    def of(samples: int) -> RunConfig:
        trainer = {"global_batch_size": samples, "micro_batch_size": 1, "loss_average": average}
        run = tiny_run(model={"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, trainer=trainer)
        return run.model_copy(
            update={"data": DataConfig(kind="mock", seq_length=LENGTH, packed=True)}
        )

    def job() -> Any:
        return [gradient(of(samples), tmp_path / str(samples)) for samples in (LONG, LONG + 2)]

    alone, beside = run_ranks(1, job)[0]
    assert len(alone) > 10
    for key, wanted in alone.items():
        torch.testing.assert_close(beside[key], wanted, rtol=1e-4, atol=1e-7)
