"""Training on whole documents of `.bin/.idx`: any split of a global batch computes the same as its
documents one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.run import RunConfig
from mtrain.data import open_splits, prepare
from mtrain.data.store.indexed import IndexedWriter
from tests.distributed.test_chats import apart, computed
from tests.support.covering import some
from tests.support.runs import tiny_run

S = 64
VOCAB = 300
LENGTHS = [30, 34, 0, 64, 65, 1, 40, 20, 7, 150, 2, 3, 28]
"""Some as long as a sample, some longer, and some of which nothing is learned."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("documents")
    with IndexedWriter(home / "corpus", np.dtype("<u2")) as writer:
        writer.add(
            np.random.default_rng(1).integers(0, VOCAB, sum(LENGTHS)), np.array(LENGTHS, np.int64)
        )
    return home / "corpus"


def run_with(prefix: Path, window: int, average: str = "token", **more: Any) -> RunConfig:
    """Return a run of one step over all documents; with `window` 1 each has a sample of its own.

    The others are keys of `parallel`.
    """
    data = DataConfig(
        kind="indexed",
        path=str(prefix),
        cache_dir=str(prefix.parent / "cache"),
        split=(1.0, 0.0, 0.0),
        seq_length=S,
        packed=True,
        packed_by="first_fit",
        packed_window=window,
        packed_multiple=4,
    )
    samples = len(open_splits(data, VOCAB, 1, prepare(data, lambda note: None), ("train",)).train)
    trainer = {
        "global_batch_size": samples,
        "micro_batch_size": more.pop("micro", 1),
        "loss_average": average,
    }
    return tiny_run(trainer=trainer, **more).model_copy(update={"data": data})


SPLITS: dict[str, dict[str, Any]] = {
    "8 in a micro-batch": {"micro": 8},
    "dp2": {"ranks": 2},
    "dp4, 2 each": {"ranks": 4, "micro": 2},
    "dp2, sharded optimizer": {"ranks": 2, "distributed_optimizer": True},
    "cp2": {"ranks": 2, "cp": 2, "cp_comm_type": "all_gather"},
    "cp2 ring": {"ranks": 2, "cp": 2, "cp_comm_type": "p2p"},
    "tp2 sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "pp2cp2, 2 each": {"ranks": 4, "pp": 2, "cp": 2, "micro": 2, "cp_comm_type": "all_gather"},
    "dynamic": {
        **{"ranks": 2, "hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 32},
        "cp_comm_type": "all_gather",
    },
}


@pytest.fixture(scope="module")
def alone(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains on one rank, one document at a time, for each way to
    average.
    """
    known: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}

    def of(average: str) -> tuple[float, dict[str, torch.Tensor]]:
        if average not in known:
            known[average] = computed(
                run_with(prefix, 1, average), tmp_path_factory.mktemp("alone")
            )
        return known[average]

    return of


@pytest.mark.parametrize("name", some(SPLITS, ["cp2 ring"]))
@pytest.mark.parametrize("average", ["token", pytest.param("sample", marks=pytest.mark.full)])
def test_whole_documents_any_split_has_one_loss_and_gradient(
    name: str, average: str, prefix: Path, alone: Any, tmp_path: Path
) -> None:
    packed = run_with(prefix, 2048, average, **SPLITS[name])
    assert packed.trainer.global_batch_size == 8
    assert apart(alone(average), computed(packed, tmp_path)) < 1e-6


def test_whole_documents_leaking_document_is_found(
    prefix: Path, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.data import batch as batches

    real = batches.collate

    def merged(*args: Any, **more: Any) -> Any:
        batch = real(*args, **more)
        bounds = batch["cu_seqlens"]
        return {
            **batch,
            "cu_seqlens": torch.cat([bounds[:1], bounds[2:]]) if len(bounds) > 2 else bounds,
        }

    monkeypatch.setattr(batches, "collate", merged)
    assert apart(alone("token"), computed(run_with(prefix, 2048), tmp_path)) > 1e-4
