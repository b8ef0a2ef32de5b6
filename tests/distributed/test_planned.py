"""A run says what is planned of it, and once of each part that it is not what was planned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP
from tests.unit.test_plan_compare import PLAN, RUN, lines

FIRST, SECOND = PLAN["memory_by_stage"]["peak_bytes"]


def followed(
    folder: Path, share: float, memory: float, steps: int = 24, *, first: bool = True
) -> tuple[Any, ...]:
    """Return the notes of a run whose steps take so much of the planned time and memory, and the
    fields that it adds to a line of metrics.
    """
    from mtrain.train.hooks.planned import Planned

    notes: list[str] = []
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes": round(FIRST * memory)})
    parts: Any = SimpleNamespace(
        run=RUN, world=SimpleNamespace(is_rank0=first, device=device), measures=[], profiled=()
    )
    progress: Any = SimpleNamespace(note=notes.append)
    hook = Planned(folder, progress)
    hook.start(parts)
    beside: list[dict[str, float]] = []
    for number, line in enumerate((lines(share) + lines(share))[:steps], 1):
        seconds = {key.removesuffix("_s"): value for key, value in line.items() if key != "step"}
        result: Any = SimpleNamespace(step=number, seconds=seconds, batch_size=RUN.trainer.batch)
        beside.append(hook.measure(parts, result))
        hook.after_step(parts, result)
    hook.finish(parts)
    return notes, beside


@pytest.mark.parametrize(
    ("share", "memory", "steps", "said"),
    [
        (1.0, 1.0, 24, ""),
        (1.3, 1.0, 24, "steps 4 to 10 are not what was planned: step "),
        (1.3, 1.0, 6, "steps 4 to 6 are not what was planned: step "),
        (1.3, 1.0, 3, ""),
        (1.0, 1.5, 24, "this run is not what was planned: memory of stage 0 "),
    ],
)
def test_planned_deviation_is_reported_once(
    tmp_path: Path, share: float, memory: float, steps: int, said: str
) -> None:
    (tmp_path / "memory.json").write_text(
        json.dumps({"peak_bytes_by_rank": [round(FIRST * memory)] * 4 + [SECOND] * 4})
    )
    (ahead, *off), _ = followed(tmp_path, share, memory, steps)
    assert ahead.startswith("planned: a step of ")
    assert "GiB on a device of pipeline stage 0" in ahead
    assert len(off) == bool(said)
    for note in off:
        assert note.startswith(said)
        assert f"plan --compare {tmp_path}" in note
        assert ("plan --calibrate" in note) == (share > 1)
        assert "+30%" in note or "+50%" in note
    assert followed(tmp_path, share, memory, steps, first=False) == ([], [{}] * steps)


def test_planned_other_stages_and_checkpoint_are_compared(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step_00000024"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    (tmp_path / "memory.json").write_text(
        json.dumps({"peak_bytes_by_rank": [FIRST] * 7 + [round(SECOND * 1.2)]})
    )
    (_, off), _ = followed(tmp_path, 1.0, 1.0)
    assert "memory of stage 1 " in off
    assert "checkpoint 2 B, planned " in off
    assert "memory of stage 0" not in off


def test_planned_stands_next_to_measured_from_step_one(tmp_path: Path) -> None:
    _, beside = followed(tmp_path, 1.3, 1.5)
    assert len(beside) == 24
    assert all(line == beside[0] for line in beside)
    keys = ("step_s", "forward_backward_s", "optimizer_s")
    assert {key: beside[0][f"planned_{key}"] for key in keys} == pytest.approx(
        {key: PLAN[key] for key in keys}, rel=1e-4
    )
    assert beside[0]["planned_peak_bytes"] == FIRST
    assert beside[0]["peak_bytes"] == round(FIRST * 1.5)


def test_planned_fp8_step_states_both_mfu() -> None:
    from mtrain.train.loop.result import step_record

    for precision, of in (("bf16", 989), ("fp8_tensorwise", 1979)):
        words = [
            "model=llama3_8b",
            "parallel=pp2",
            "cluster=h100x8",
            "data=mock",
            f"precision={precision}",
        ]
        run = resolve(compose(words).run, LAPTOP)
        seen = dict.fromkeys(
            ("step", "loss", "grad_norm", "lr", "tokens", "batch_size", "consumed_samples"), 1
        )
        more = {
            "flops": 1e15,
            "full_flops": 2e15,
            "read": 10**6,
            "seconds": {"step": 8.0},
            "data_wait_share": 0.0,
            "loss_scale": None,
            "updated": True,
            "extra": (),
        }
        result: Any = SimpleNamespace(**seen, **more)
        record = step_record(run, 8, result)
        assert record["mfu"] == pytest.approx(record["tflops_per_rank"] / of)
        assert record.get("mfu_bf16") == (
            None if of == 989 else pytest.approx(record["tflops_per_rank"] / 989)
        )
