"""The poisoned document of an abnormal step is named in any layout, or the weights, or neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.run import RunConfig
from mtrain.data import open_splits, prepare
from mtrain.data.samples.origin import pieces
from mtrain.data.store.indexed import IndexedWriter
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run, train_steps

VOCAB = 300
LENGTH = 20
"""Tokens of a document; a sample has 32."""
DOCUMENTS = 2000
TRAINED = 24
SMALL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
SMALL |= {"num_attention_heads": 4, "num_query_groups": 2}


def corpus(prefix: Path, poisoned: set[int]) -> None:
    """Write documents that count up from a token, and poisoned ones of other tokens by chance."""
    draw = np.random.default_rng(1)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens = (np.arange(DOCUMENTS)[:, None] * 7 + np.arange(LENGTH)) % 16
    for document in poisoned:
        tokens[document] = draw.integers(200, VOCAB, LENGTH)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(tokens.ravel(), np.full(DOCUMENTS, LENGTH, np.int64))


def run_on(prefix: Path, **parallel: Any) -> RunConfig:
    """Return a run that learns such documents fast."""
    trainer = {"train_iters": 60, "micro_batch_size": 2}
    optim = {"lr": 1e-2, "warmup_iters": 1}
    run = tiny_run(model=SMALL, trainer=trainer, optim=optim, **parallel)
    data = DataConfig(
        kind="indexed",
        path=str(prefix),
        cache_dir=str(prefix.parent / "cache"),
        split=(1.0, 0.0, 0.0),
        seq_length=32,
    )
    checkpoint = run.checkpoint.model_copy(update={"accept_changes": True})
    # The model learns from poisoned documents, too: later ones surprise it less.
    resilience = run.resilience.model_copy(update={"spike_factor": 3.0})
    changes = {"data": data, "checkpoint": checkpoint, "resilience": resilience}
    return run.model_copy(update=changes)


def chosen(run: RunConfig, steps: list[int]) -> dict[int, tuple[int, int]]:
    """Return for each step a sample and a document that is whole inside of it."""
    opened = open_splits(
        run.data, VOCAB, run.trainer.seed, prepare(run.data, lambda _: None), ("train",)
    )
    found = {}
    for step in steps:
        samples = range((step - 1) * 8, step * 8)
        found[step] = next(
            (sample, document)
            for sample in samples
            for begin, end, document in pieces(opened.train, sample)
            if begin > 0 and end - begin == LENGTH and end < 33
        )
    return found


def causes(
    run: RunConfig, checkpoint: Path, steps: list[int], home: Path, spoil: Callable[[], Any]
) -> list[dict[str, Any]]:
    """Return the reports of `bisect` on ranks of their own."""
    from mtrain.train.suspects.bisect import bisect

    files = [home / f"step_{step}" / "bisect.json" for step in steps]

    def job() -> None:
        spoil()
        for step, file in zip(steps, files, strict=True):
            bisect(run, checkpoint, step, [0.5], file)

    run_ranks(run.parallel.ranks or 1, job, timeout_s=300)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a run that has learned the documents that are not poisoned."""
    import_engine()
    home = tmp_path_factory.mktemp("trained")
    corpus(home / "corpus", set())
    run = run_on(home / "corpus")
    losses = run_ranks(1, lambda: train_steps(run, TRAINED, save_to=home))[0]
    print([round(loss, 3) for loss, _ in losses])
    return home / f"step_{TRAINED:08d}"


def poisoned(home: Path, trained: Path, steps: list[int]) -> dict[int, tuple[int, int]]:
    """Write the corpus with a poisoned document in each of the steps; return them."""
    found = chosen(run_on(trained.parent / "corpus"), steps)
    corpus(home / "corpus", {document for _, document in found.values()})
    return found


def test_bisect_poisoned_document_is_named(trained: Path, tmp_path: Path) -> None:
    steps = [TRAINED + 2]
    wanted = poisoned(tmp_path, trained, steps)
    run = run_on(tmp_path / "corpus")
    (report,) = causes(run, trained, steps, tmp_path, lambda: None)
    sample, document = wanted[steps[0]]
    assert report["cause"] == "data", report
    (named,) = report["samples"]
    assert (named["sample"], named["documents"]) == (sample, [document])
    assert named["place"] == f"{tmp_path / 'corpus'}: document {document}"
    assert (tmp_path / f"step_{steps[0]}/samples.html").is_file()


@pytest.mark.full
def test_bisect_10_documents_in_two_layouts(trained: Path, tmp_path: Path) -> None:
    steps = list(range(TRAINED + 2, TRAINED + 22, 2))
    wanted = poisoned(tmp_path, trained, steps)
    for layout in ({}, {"ranks": 4, "tp": 2, "pp": 2}):
        run = run_on(tmp_path / "corpus", **layout)
        reports = causes(run, trained, steps, tmp_path / str(len(layout)), lambda: None)
        found = [
            (one["cause"], [(each["sample"], *each["documents"]) for each in one["samples"]])
            for one in reports
        ]
        print([(one["whole"], one["without"]) for one in reports])
        assert found == [("data", [wanted[step]]) for step in steps]


@pytest.mark.full
def test_bisect_weights_or_nothing_is_named(trained: Path, tmp_path: Path) -> None:
    step = TRAINED + 2
    run = run_on(trained.parent / "corpus")
    (report,) = causes(run, trained, [step], tmp_path, lambda: None)
    assert (report["cause"], report["samples"]) == ("not reproducible", [])
    from mtrain.ckpt import state

    load = state.load

    def spoil() -> None:
        def spoiled(checkpoint: Any, world: Any, train: Any, **more: Any) -> bool:
            done = load(checkpoint, world, train, **more)
            weight = next(iter(train.chunks[0].parameters()))
            weight.data[:16] = float("nan")
            return done

        state.load = spoiled

    (report,) = causes(run, trained, [TRAINED + 1], tmp_path, spoil)
    assert report["cause"] == "weights"
    assert report["found"]["module"] == "embedding.word_embeddings"
    assert report["found"]["weights_not_finite"] == 16 * SMALL["hidden_size"]
