"""Teachers that were computed once: the same steps as with the teacher, and files of other runs."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data.teacher_rows import file_of
from mtrain.errors import ConfigError, CorruptData
from mtrain.plan.count import frozen_copy_bytes
from mtrain.plan.teacher_file import facts_problems, files_problems, read_facts
from tests.distributed.test_distil import run_of
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import two_steps
from tests.support.runs import whole_tensors

KEYS = {"distil_top_k": 5, "divergence": "jsd", "temperature": 2.0, "ce_weight": 0.3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tp2sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"ranks": 2, "pp": 2},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "packed cp2": {"ranks": 2, "cp": 2, "packed": True},
    "dp2": {"ranks": 2, "distributed_optimizer": True},
    "ep2": {"ranks": 2, "ep": 2},
}


def changed(run: RunConfig, section: str, **keys: Any) -> RunConfig:
    part = getattr(run, section).model_copy(update=keys)
    return run.model_copy(update={section: part})


def made(run: RunConfig) -> Path:
    """Return a new folder with the rows of a run's teacher, written in the layout of the run."""
    from mtrain.train.teacher_file import write

    import_engine()
    folder = Path(mkdtemp()) / "top"
    run_ranks(run.parallel.ranks, write, run, folder)
    return folder


def reading(run: RunConfig, folder: Path, **keys: Any) -> RunConfig:
    own = {"teacher_file": str(folder), "teacher": None} | keys
    return run.model_copy(update={"objective": run.objective.model_copy(update=own)})


@cache
def alone() -> tuple[RunConfig, Path]:
    run = run_of(KEYS)
    return run, made(run)


@pytest.mark.parametrize("layout", some([*LAYOUTS], ["cp2"]))
def test_teacher_file_gives_the_same_steps(layout: str, tmp_path: Path) -> None:
    """Compute the rows in the layout of the run: loss and gradient are the same, bit by bit."""
    keys = dict(LAYOUTS[layout])
    packed = keys.pop("packed", False)
    run = changed(
        run_of(KEYS, **keys), "data", packed=packed, packed_multiple=4 if packed else None
    )
    folder = made(run)
    from_file = reading(run, folder)
    assert frozen_copy_bytes(run) > 0 == frozen_copy_bytes(from_file)
    live, read = (
        run_ranks(run.parallel.ranks, two_steps, one, tmp_path / name)
        for name, one in (("live", run), ("file", from_file))
    )
    assert live == read
    for step in ("0", "1"):
        inside = Path(step) / "step_00000000"
        here = whole_tensors(tmp_path / "file" / inside)
        for name, value in whole_tensors(tmp_path / "live" / inside).items():
            assert torch.equal(here[name], value), name


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2sp", "pp2vpp2", "ep2"])
def test_teacher_file_is_read_in_another_layout(layout: str, tmp_path: Path) -> None:
    """Write on one rank what another layout reads: its steps are those of one rank to 1e-6."""
    keys = LAYOUTS[layout]
    run = run_of(KEYS, moe=bool(keys.get("ep")))
    folder = made(run)
    (wanted,) = run_ranks(1, two_steps, run, tmp_path / "live")
    other = reading(run_of(KEYS, **keys), folder)
    for found in run_ranks(other.parallel.ranks, two_steps, other, tmp_path / "file"):
        for step, same in zip(found, wanted, strict=True):
            assert step["loss"] == pytest.approx(same["loss"], rel=1e-6)
            assert step["divergence"] == pytest.approx(same["divergence"], rel=1e-6)


def test_teacher_file_of_another_run_is_refused() -> None:
    run, folder = alone()
    facts = read_facts(folder)
    own = reading(run, folder)
    assert facts_problems(own, facts) == []
    others = {
        "data.seq_length": changed(own, "data", seq_length=8),
        "trainer.seed": changed(own, "trainer", seed=2),
        "objective.distil_top_k": reading(run, folder, distil_top_k=6),
        "objective.temperature": reading(run, folder, temperature=1.0),
        "objective.teacher": reading(run, folder, teacher="drawn:llama3_8b"),
        "samples of train": changed(own, "trainer", train_iters=10_000),
    }
    for name, other in others.items():
        (problem,) = facts_problems(other, facts)
        assert problem.code == "MT493"
        assert name in problem.rule
    files = [problem.rule for problem in files_problems(own, facts, "a", "b", "c")]
    for what, text in zip(("corpus", "tokenizer", "teacher"), files, strict=True):
        assert f"another {what}" in text
    with pytest.raises(ConfigError, match=r"has no teacher\.json"):
        read_facts(folder.parent)


def first_batch(run: RunConfig) -> str:
    """Return the error that reading the first micro-batch of a run raises; empty without one."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.world.init import joined

    with joined(run) as world:
        try:
            context = assemble(run, world, splits_of(run))
            context.train_data.microbatches(0)
        except (ConfigError, CorruptData) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.full
def test_teacher_file_that_changed_is_refused(tmp_path: Path) -> None:
    """Name other tokens, a changed row and a short file; a whole one passes."""
    run = run_of(KEYS)
    folder = made(run)
    own = reading(run, folder)
    ask = partial(run_ranks, 1, first_batch)
    assert ask(own) == [""]
    ends = changed(own, "data", packed=True)
    assert "MT493" in ask(ends)[0]
    file = file_of(folder, "train")
    whole = file.read_bytes()
    file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    assert "CorruptData" in ask(own)[0]
    file.write_bytes(whole[:100])
    assert "CorruptData" in ask(own)[0]


def losses(run: RunConfig, home: Path, first: bool) -> tuple[list[float], str]:
    """Return the losses of four steps, or of the last two from a checkpoint, and its teacher."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.teacher import same_teacher
    from mtrain.world.init import joined

    found = []
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        state = context.state
        if not first:
            path = ckpt_state.opened(home / "step_00000002", run, world)
            same_teacher(path.state, state)
            ckpt_state.load(path, world, state, seed=run.trainer.seed)
        while state.step < 4:
            found.append(train_step(context, stop_requested=False).loss)
            if first and state.step == 2:
                ckpt_state.save(home, run, world, state, {})
        context.close()
    return found, state.teacher_digest


@pytest.mark.full
def test_teacher_file_continues_after_its_teacher(tmp_path: Path) -> None:
    """Resume bit by bit from a file, in the place of the run of which it is."""
    import_engine()
    live = run_of(KEYS, ranks=2, pp=2)
    own = reading(live, made(live))
    ((whole, _), _) = run_ranks(2, losses, live, tmp_path, True)
    for run in (live, own):
        ((rest, _), _) = run_ranks(2, losses, run, tmp_path, False)
        assert rest == whole[2:]
