"""The verdict on a resume in another layout is what the ranks of that layout do.

`matrix` saves a checkpoint in each layout, and loads each in each: in one world of each layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Resumed:
    """The facts of one rank that resumed."""

    nbytes: int
    """Bytes of the tensors that it read, as they are in the checkpoint."""
    resharded: frozenset[str]
    """Tensors of which it read another part than one rank wrote."""
    tensors: frozenset[str]
    restored: bool
    """Its generators were restored."""
    losses: tuple[float, ...]


def matrix(layouts: dict[str, RunConfig], home: Path, steps: int) -> dict[tuple[str, str], Any]:
    """Resume from the checkpoint of each layout in each layout, with so many steps; return the
    facts of every rank by the names of both.
    """
    paths = {name: home / name / folder.folder_name(FIRST) for name in layouts}
    for name, run in layouts.items():
        run_ranks(run.parallel.ranks, _save, run, paths[name].parent)
    found = {}
    for name, run in layouts.items():
        by_rank = run_ranks(run.parallel.ranks, _resume, run, paths, home / f"to {name}", steps)
        for old in layouts:
            found[old, name] = [facts[old] for facts in by_rank]
    return found


def _save(run: RunConfig, root: Path) -> None:
    from mtrain.ckpt import state as ckpt_state
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        for _ in range(FIRST):
            train_step(parts, stop_requested=False)
        ckpt_state.save(root, run, world, parts.state, {})


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
            found[name] = _facts(opened.manifest["tensors"], read, restored)
            ckpt_state.save(home / name, run, world, parts.state, {})
            losses = [train_step(parts, stop_requested=False).loss for _ in range(steps)]
            found[name] = Resumed(**{**vars(found[name]), "losses": tuple(losses)})
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
    keys = frozenset(shard.key for shard in read)
    return Resumed(nbytes, frozenset(anew), keys, restored, ())


def check(layouts: dict[str, dict[str, Any]], home: Path, steps: int = 0) -> int:
    """Compare the verdict on every pair with what happens; return the number of pairs."""
    runs = {name: tiny_run(**case) for name, case in layouts.items()}
    happened = matrix(runs, home, steps)
    for (old, new), ranks in happened.items():
        path = home / old / folder.folder_name(FIRST)
        manifest = folder.parse_manifest(path)
        saved = read_run_file(path / "run.yaml")
        judged = judge(runs[new], saved, manifest, source=path / "run.yaml")
        said = reading(runs[new], manifest)
        pair = f"{old} -> {new}"
        assert judged.possible, pair
        assert dict(enumerate(r.nbytes for r in ranks)) == said.by_rank, pair
        assert {*said.resharded} == frozenset().union(*(r.resharded for r in ranks)), pair
        assert said.tensors == len(frozenset().union(*(r.tensors for r in ranks))), pair
        restores = not rng_resets(runs[new], saved, manifest["state"])
        assert [r.restored for r in ranks] == [restores] * len(ranks), pair
        assert (old == new) == (restores and not judged.numbers), pair
        _same_bits(path, home / f"to {new}" / old / path.name, pair)
        losses = happened[old, old][0].losses
        assert ranks[0].losses == pytest.approx(losses, rel=1e-5), pair
    return len(happened)


def _same_bits(left: Path, right: Path, pair: str) -> None:
    """Require the same gathered weights and moments in two checkpoints."""
    before = whole_tensors(left)
    after = whole_tensors(right)
    assert before.keys() == after.keys(), pair
    assert all(torch.equal(before[key], after[key]) for key in before), pair


def test_verdict_sample_of_layouts_is_what_happens(tmp_path: Path) -> None:
    names = ("tp2", "dp2 zero")
    assert check({name: DENSE[name] for name in names}, tmp_path, steps=1) == 4


@pytest.mark.full
def test_verdict_dense_layouts_are_what_happens(tmp_path: Path) -> None:
    assert check(DENSE, tmp_path, steps=20) == 144


@pytest.mark.full
def test_verdict_expert_layouts_are_what_happens(tmp_path: Path) -> None:
    assert check(EXPERTS, tmp_path, steps=20) == 36
