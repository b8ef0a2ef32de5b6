"""Layouts of the default model, as a user starts them: ten losses equal one rank's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import metrics
from tests.support.covering import some
from tests.support.launched import mtrain

pytestmark = [pytest.mark.e2e, pytest.mark.full]
WORDS = (
    "trainer.train_iters=10",
    "trainer.global_batch_size=4",
    "data.seq_length=64",
    "checkpoint=off",
    "data=mock",
)
QUIET = ("trainer.eval_iters=0", "trainer.sample_tokens=0", "log.name=run", "optim.warmup_iters=2")


def _values(home: Path, layout: str) -> list[tuple[float, float]]:
    done = mtrain(f"parallel={layout}", *WORDS, *QUIET, cwd=home)
    assert done.returncode == 0, done.stderr
    return [(line["loss"], line["grad_norm"]) for line in metrics(home / "runs/run")]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step on one rank."""
    return _values(tmp_path_factory.mktemp("single"), "single")


@pytest.mark.parametrize("layout", some(["dp2", "tp2", "pp2", "tp2pp2"], ["tp2"]))
def test_default_layout_prints_losses_of_one_rank(
    layout: str, one_rank: list[tuple[float, float]], tmp_path: Path
) -> None:
    values = _values(tmp_path, layout)
    assert len(one_rank) == 10
    assert one_rank[-1][0] < one_rank[0][0]
    for step, ((loss, norm), (one_loss, one_norm)) in enumerate(
        zip(values, one_rank, strict=True), 1
    ):
        assert loss == pytest.approx(one_loss, rel=1e-5), step
        # Later norms are of gradients at weights that rounding has moved: Adam turns a gradient
        # that is next to nothing into a whole step whose sign the order of a sum decides.
        assert norm == pytest.approx(one_norm, rel=1e-5 if step == 1 else 2e-4), step
