"""A run says once which part of it is not what was planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_plan_compare import PLAN, RUN, lines


@pytest.mark.parametrize(("share", "memory", "said"), [(1.0, 1.0, 0), (1.3, 1.0, 1), (1.0, 1.5, 1)])
def test_a_run_says_once_what_is_off(share: float, memory: float, said: int) -> None:
    from mtrain.train.planned import AFTER, Planned

    notes: list[str] = []
    peak = round(PLAN["peak_bytes_by_stage"][0] * memory)
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes": peak})
    parts: Any = SimpleNamespace(run=RUN, world=SimpleNamespace(is_rank0=True, device=device))
    progress: Any = SimpleNamespace(note=notes.append)
    hook = Planned(progress)
    hook.start(parts)
    for line in lines(share) + lines(share):
        seconds = {key.removesuffix("_s"): value for key, value in line.items() if key != "step"}
        result: Any = SimpleNamespace(step=line["step"], seconds=seconds)
        hook.after_step(parts, result)
    assert len(notes) == said
    assert all("planned" in note for note in notes)
    assert all(("memory of stage 0" in note) == (memory > 1) for note in notes)
    assert AFTER < 12
