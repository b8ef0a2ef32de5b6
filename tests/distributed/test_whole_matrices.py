"""Updates under the distributed optimizer: those of whole matrices on every rank, so that no
layer-wise optimizer is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_on_given, whole_tensors

STEPS = 2


def _made(name: str, folder: Path, *, spoil: Any = None, **keys: Any) -> dict[str, torch.Tensor]:
    optim = {"name": name, "clip_grad": None, "warmup_iters": 0}
    run = tiny_run(model={"num_layers": 3}, optim=optim, **keys)
    run_ranks(run.parallel.ranks or 1, lambda: train_on_given(run, folder, STEPS, spoil=spoil))
    return whole_tensors(folder / f"step_{STEPS:08d}")


def _turned(optimizer: Any) -> None:
    """Seed a fault: a rank does not orthogonalise the matrices that it owns."""
    for leaf in optimizer.chained_optimizers:
        leaf.optimizer.computed = lambda group, params, given: given


@pytest.mark.full
@pytest.mark.parametrize("name", ["muon", "lion"])
def test_whole_matrices_sharded_updates_equal_whole(name: str, tmp_path: Path) -> None:
    whole, sharded = (
        _made(name, tmp_path / str(on), ranks=2, distributed_optimizer=on) for on in (False, True)
    )
    assert whole.keys() == sharded.keys()
    for key, tensor in whole.items():
        # matrices of one shape are multiplied together, and a rank that owns some of them has fewer
        exact = {"rtol": 1e-5, "atol": 1e-7} if name == "muon" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(sharded[key], tensor, **exact)
    if name == "muon":
        wrong = _made(name, tmp_path / "wrong", ranks=2, distributed_optimizer=True, spoil=_turned)
        assert any(
            not torch.allclose(wrong[key], tensor, rtol=1e-3) for key, tensor in whole.items()
        )
