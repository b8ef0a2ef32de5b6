"""Retention in runs: the best checkpoint is known after the next save, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mtrain.ckpt import folder
from tests.distributed.test_endings import train
from tests.support.forked import import_engine, run_ranks
from tests.support.many_ranks import meetings
from tests.support.runs import tiny_run


def test_retention_resumed_run_keeps_best_and_permanent(tmp_path: Path) -> None:
    import_engine()

    def job() -> None:
        for steps, start in ((4, None), (7, "step_00000004")):
            # its loss grows from the first steps on
            run = tiny_run(
                optim={"lr": 3.0, "warmup_iters": 3},
                trainer={"train_iters": steps, "eval_iters": 1, "eval_interval": 1},
            )
            saving = {"save_interval": 1, "keep": 1, "keep_every": 3, "keep_best": "valid_loss"}
            checkpoint = run.checkpoint.model_copy(update=saving)
            where = None if start is None else tmp_path / "checkpoints" / start
            end = train(run.model_copy(update={"checkpoint": checkpoint}), tmp_path, where)
            assert end.error == "", end.said

    run_ranks(1, job)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6, 7]
    best = min(losses, key=losses.__getitem__)
    assert best % 3, losses
    assert best < 4, losses
    steps = [folder.step_of(path) for path in folder.committed(tmp_path / "checkpoints")]
    assert steps == sorted({best, 3, 6, 7})


def test_retention_linked_frozen_file_outlives_its_checkpoint(tmp_path: Path) -> None:
    from mtrain.ckpt import retention, store
    from mtrain.mcore.state.sharding import TensorShard

    (place,) = meetings(1)
    whole = torch.arange(64.0)
    shard = TensorShard("model/frozen", (64,), (0,), (64,), whole)
    frozen = store.Frozen([shard])
    for step in (1, 2, 3):
        store.save(
            tmp_path,
            step,
            [],
            {"rng/torch": torch.arange(4)},
            {},
            "a: 1\n",
            place,
            frozen,
            lambda: retention.prune(tmp_path, retention.Policy(1)),
        )
    (path,) = folder.committed(tmp_path)
    assert path.name == folder.folder_name(3)
    assert (path / folder.frozen_name(0)).stat().st_nlink == 1
    assert torch.equal(store.Checkpoint.open(path).whole("model/frozen"), whole)
