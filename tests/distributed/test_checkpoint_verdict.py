"""The verdict on a resume in another layout is what the ranks of that layout do.

A checkpoint is saved in each layout. Then one world of each layout loads all of them in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.ckpt import folder
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.schema.model import MoEConfig
from mtrain.config.schema.run import RunConfig
from mtrain.launching.verdict.figures import WIDTHS, reading
from mtrain.launching.verdict.judge import judge, rng_resets
from mtrain.launching.verdict.regions import Layout
from tests.faults.promises import Record, measured
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, whole_tensors

FIRST = 2
MOE = {"moe": MoEConfig(num_experts=4, ffn_hidden_size=64)}
ZERO: dict[str, Any] = {"distributed_optimizer": True}
OVERLAPPED = {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}

DENSE: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "tp4": {"ranks": 4, "tp": 4, "sequence_parallel": True},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "dp2 zero": {"ranks": 2, **ZERO},
    "tp2dp2 zero": {"ranks": 4, "tp": 2, **OVERLAPPED},
    "pp2dp2 zero": {"ranks": 4, "pp": 2, **ZERO},
    "cp2 zero": {"ranks": 2, "cp": 2, **ZERO},
    "dp2 fsdp2": {"ranks": 2, "fsdp": "fsdp2"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one": {"model": MOE},
    "dp2 zero": {"ranks": 2, "model": MOE, **ZERO},
    "ep2": {"ranks": 2, "ep": 2, "model": MOE},
    "ep2pp2 zero": {"ranks": 4, "ep": 2, "pp": 2, "model": MOE, **ZERO},
    "tp2ep2": {"ranks": 4, "tp": 2, "ep": 2, "sequence_parallel": True, "model": MOE},
    "tp2ep4": {"ranks": 4, "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "model": MOE},
}
Place = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, int] | None]
"""Name of a tensor, offset and shape of a box of it, and the flat range of that."""
LAYOUTS = {"dense": DENSE, "experts": EXPERTS}
STEPS = 20
"""Steps after each resume, whose losses are compared."""


@dataclass(frozen=True)
class Resumed:
    """The facts of one rank that resumed."""

    nbytes: int
    """Bytes of the tensors that it read, as they are in the checkpoint."""
    resharded: frozenset[str]
    """Tensors of which it read another part than one rank wrote."""
    regions: frozenset[Place]
    """The parts of tensors that it read."""
    restored: bool
    """Its generators were restored."""
    losses: tuple[float, ...]


class Saved:
    """Runs of several layouts that saved a checkpoint and trained on, each once for all tests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._losses: dict[Path, list[float]] = {}

    def path(self, kind: str, name: str) -> Path:
        """Return the checkpoint of a layout."""
        return self.home / kind / name / folder.folder_name(FIRST)

    def losses(self, kind: str, name: str, steps: int) -> list[float]:
        """Return the losses after the checkpoint of a layout, which is saved if it is not there."""
        path = self.path(kind, name)
        if path not in self._losses:
            run = tiny_run(**LAYOUTS[kind][name])
            self._losses[path] = run_ranks(run.parallel.ranks, _save, run, path.parent, steps)[0]
        return self._losses[path]


def _save(run: RunConfig, root: Path, steps: int) -> list[float]:
    from mtrain.ckpt import state as ckpt_state
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        for _ in range(FIRST):
            train_step(parts, stop_requested=False)
        ckpt_state.save(root, run, world, parts.state, {})
        return [train_step(parts, stop_requested=False).loss for _ in range(steps)]


def _resume(run: RunConfig, paths: dict[str, Path], home: Path, steps: int) -> dict[str, Resumed]:
    from mtrain.ckpt import state as ckpt_state
    from mtrain.ckpt import store
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    read: list[Any] = []
    fill = store._Reader.fill

    def noted(self: Any, shard: Any) -> None:
        read.append(shard)
        fill(self, shard)

    store._Reader.fill = noted  # type: ignore[method-assign]
    found = {}
    with joined(run) as world:
        for name, path in paths.items():
            parts = assemble(run, world, splits_of(run))
            read.clear()
            opened = store.Checkpoint.open(path)
            restored = ckpt_state.load(opened, world, parts.state, seed=run.trainer.seed)
            ckpt_state.save(home / name, run, world, parts.state, {})
            facts = _facts(opened.manifest["tensors"], read, restored)
            losses = [train_step(parts, stop_requested=False).loss for _ in range(steps)]
            found[name] = replace(facts, losses=tuple(losses))
    return found


def _facts(tensors: dict[str, Any], read: Sequence[Any], restored: bool) -> Resumed:
    anew = set()
    nbytes = 0
    for shard in read:
        entry = tensors[shard.key]
        nbytes += shard.tensor.numel() * WIDTHS[entry["dtype"]]
        place = [list(shard.offset), list(shard.shape), list(shard.flat) if shard.flat else None]
        if place not in [[p["offset"], p["shape"], p["flat"]] for p in entry["pieces"]]:
            anew.add(shard.key)
    regions = frozenset((shard.key, shard.offset, shard.shape, shard.flat) for shard in read)
    return Resumed(nbytes, frozenset(anew), regions, restored, ())


def check(
    saved: Saved, kind: str, old: Sequence[str], new: str, steps: int, record: Record
) -> None:
    """Resume from checkpoints of old layouts in a new one, and compare that with the verdict."""
    apart = 0.0
    run = tiny_run(**LAYOUTS[kind][new])
    expected = {name: saved.losses(kind, name, steps) for name in old}
    paths = {name: saved.path(kind, name) for name in old}
    home = saved.home / f"{kind} to {new}"
    ranks = run_ranks(run.parallel.ranks, _resume, run, paths, home, steps, timeout_s=250)
    for name, path in paths.items():
        pair = f"{name} -> {new}"
        facts = [found[name] for found in ranks]
        manifest = folder.parse_manifest(path)
        other = read_run_file(path / "run.yaml")
        judged = judge(run, other, manifest, source=path / "run.yaml")
        said = reading(run, manifest)
        assert judged.possible, pair
        assert dict(enumerate(one.nbytes for one in facts)) == said.by_rank, pair
        assert set(said.resharded) == set().union(*(one.resharded for one in facts)), pair
        assert said.tensors == len({key for one in facts for key, *_ in one.regions}), pair
        assert [one.regions for one in facts] == _regions(run), pair
        restores = not rng_resets(run, other, manifest["state"])
        assert [one.restored for one in facts] == [restores] * len(facts), pair
        assert (name == new) == (restores and not judged.numbers), pair
        _same_bits(path, home / name / path.name, pair)
        assert facts[0].losses == pytest.approx(expected[name], rel=1e-5), pair
        assert (facts[0].losses == tuple(expected[name])) or name != new, pair
        pairs = zip(facts[0].losses, expected[name], strict=True)
        apart = max(apart, *(abs(one - other) / abs(other) for one, other in pairs))
    measured(record, reshards=len(paths), loss_apart=apart)


def _regions(run: RunConfig) -> list[frozenset[Place]]:
    """Return the parts that each rank reads by the verdict."""
    layout = Layout(run)
    return [
        frozenset(
            (read.name, read.region.offset, read.region.shape, read.region.flat)
            for read in layout.reads(rank)
        )
        for rank in range(run.parallel.ranks)
    ]


def _same_bits(left: Path, right: Path, pair: str) -> None:
    """Require the same gathered weights and moments in two checkpoints."""
    before = whole_tensors(left)
    after = whole_tensors(right)
    assert before.keys() == after.keys(), pair
    assert all(torch.equal(before[key], after[key]) for key in before), pair


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return checkpoints of layouts."""
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("new", ["tp2", "dp2 zero"])
def test_verdict_sample_of_layouts_is_what_happens(
    new: str, tmp_path: Path, record_property: Record
) -> None:
    check(Saved(tmp_path), "dense", ("tp2",), new, 1, record_property)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "new"), [(kind, name) for kind, layouts in LAYOUTS.items() for name in layouts]
)
def test_verdict_every_layout_is_what_happens(
    kind: str, new: str, saved: Saved, record_property: Record
) -> None:
    check(saved, kind, tuple(LAYOUTS[kind]), new, STEPS, record_property)
