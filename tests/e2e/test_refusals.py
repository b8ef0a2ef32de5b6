"""Bad configurations as a shell gives them: refused within two seconds, before anything starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.promises import Record, measured
from tests.support.commands import mtrain
from tests.support.patience import slowness

pytestmark = pytest.mark.e2e

CASES = {
    "model.hiden_size=64": "model.hidden_size",
    "parallel=tp3": "parallel.tp",
    "precision.dtype=fp8": "precision.dtype",
    "trainer.train_iters=-1": "trainer.train_iters",
    "recipe=no_such_recipe": "no_such_recipe",
}


@pytest.mark.full
@pytest.mark.parametrize("word", CASES)
def test_refusal_takes_two_seconds_and_starts_nothing(
    word: str, tmp_path: Path, record_property: Record
) -> None:
    begun = time.monotonic()
    done = mtrain("data=mock", word, cwd=tmp_path)
    took_s = time.monotonic() - begun
    measured(record_property, refusal_s=took_s)
    assert done.returncode == 2
    assert CASES[word] in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    assert took_s < 2 * slowness()
