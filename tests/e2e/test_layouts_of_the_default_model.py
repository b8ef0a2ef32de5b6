"""The five layouts of the default model, as a user starts them: twenty losses equal one rank's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import metrics
from tests.support.launched import mtrain

pytestmark = pytest.mark.e2e
WORDS = ("trainer.train_iters=20", "trainer.global_batch_size=4", "data.seq_length=64", "checkpoint=off", "data=mock")
QUIET = ("trainer.eval_iters=0", "trainer.sample_tokens=0", "log.name=run", "optim.warmup_iters=2")


def _values(home: Path, layout: str) -> list[tuple[float, float]]:
    done = mtrain(f"parallel={layout}", *WORDS, *QUIET, cwd=home / layout)
    assert done.returncode == 0, done.stderr
    return [(line["loss"], line["grad_norm"]) for line in metrics(home / layout / "runs/run")]


def test_five_layouts_print_the_same_losses(tmp_path: Path) -> None:
    layouts = ("single", "dp2", "tp2", "pp2", "tp2pp2")
    for layout in layouts:
        (tmp_path / layout).mkdir()
    one, *others = (_values(tmp_path, layout) for layout in layouts)
    assert len(one) == 20
    assert one[-1][0] < one[0][0]
    for layout, values in zip(layouts[1:], others, strict=True):
        for step, ((loss, norm), (one_loss, one_norm)) in enumerate(zip(values, one, strict=True), 1):
            assert loss == pytest.approx(one_loss, rel=1e-5), (layout, step)
            # Later norms are of gradients at weights that rounding has moved: Adam turns a gradient that is next to
            # nothing into a whole step whose sign the order of a sum decides.
            assert norm == pytest.approx(one_norm, rel=1e-5 if step == 1 else 2e-4), (layout, step)
