"""Losses by position, source and kind of token, and of routers: those that a step trains by, in
every layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data.store.indexed import IndexedWriter
from mtrain.events.read import events
from tests.distributed.test_statistics import STEPS, described, differences, train
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.token_corpora import bpe

VOCAB = 300
LENGTH = 32
PACKED = {"packed": True, "eod_mask_loss": True, "packed_multiple": 4}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "blend": ("dense", {"eod_mask_loss": True}, {"loss": "reference"}),
    "packed": ("dense", PACKED, {"loss": "reference"}),
    "further": ("further", {}, {"loss": "reference"}),
    "samples": ("dense", {"eod_mask_loss": True}, {"loss_average": "sample"}),
    "z-loss": ("dense", {}, {"loss": "reference", "z_loss_coeff": 1e-3}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "tp2sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"ranks": 2, "pp": 2},
}
CASES = {f"{run} {layout}": (run, layout) for run in RUNS for layout in LAYOUTS}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return two corpora of documents of 5 to 20 tokens, which end with id 0, and a tokenizer."""
    draw = np.random.default_rng(1)
    made = []
    for name in ("books", "web"):
        prefix = tmp_path_factory.mktemp("corpora") / name
        with IndexedWriter(prefix, np.dtype("<u2")) as writer:
            for size in draw.integers(5, 20, 400):
                writer.add(np.append(draw.integers(1, VOCAB, size), 0))
        made.append(str(prefix))
    return [*made, str(bpe(tmp_path_factory.mktemp("tokenizer"), VOCAB))]


def blended(name: str, corpora: list[str], **layout: Any) -> RunConfig:
    """Return a run over both corpora, one of which gives three of four samples."""
    model, keys, more = RUNS[name]
    options = dict(more)
    run = described(model, **layout)
    kernels = run.kernels.model_copy(update={"loss": options.pop("loss", "megatron")})
    *blend, tokenizer = corpora
    data: dict[str, Any] = {"kind": "indexed", "blend": tuple(blend), "tokenizer": tokenizer}
    data |= {"blend_weights": (3.0, 1.0), "split": (1.0, 0.0, 0.0)}
    data = run.data.model_copy(update=data | keys)
    trainer = run.trainer.model_copy(update=options)
    return run.model_copy(update={"kernels": kernels, "data": data, "trainer": trainer})


def losses(home: Path) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the rows of losses, and the numbers of the step, of the last step."""
    last = [event for event in events(home) if event["step"] == STEPS]
    (rows,) = [event["rows"] for event in last if event.get("of") == "losses"]
    (step,) = [event["values"] for event in last if event["kind"] == "step"]
    return rows, step


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpora: list[str]) -> Any:
    import_engine()
    known: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in known:
            home = tmp_path_factory.mktemp(name)
            train(blended(name, corpora), home)
            known[name] = losses(home)
        return known[name]

    return of


def mean(rows: dict[str, list[float]], word: str) -> tuple[float, float]:
    """Return the mean loss and the tokens of all rows that begin with a word."""
    some = [row for name, row in rows.items() if name.startswith(word)]
    tokens = sum(row[1] for row in some)
    return sum(row[0] * row[1] for row in some) / tokens, tokens


@pytest.mark.parametrize("name", some(RUNS, ["packed"]))
def test_token_statistics_add_up_to_loss_of_step(name: str, alone: Any) -> None:
    rows, step = alone(name)
    learned, tokens = rows["tokens learned"]
    assert mean(rows, "position") == pytest.approx((learned, tokens))
    assert mean(rows, "source") == pytest.approx((learned, tokens))
    if name != "samples":
        assert learned == pytest.approx(step["loss"], rel=1e-6)
    assert sum(name.startswith("source ") for name in rows) == 2
    unlearned = rows.get("tokens unlearned", [0, 0])[1]
    assert tokens + unlearned <= 4 * LENGTH
    if name == "blend":
        # the prediction after an end of a document does not count, that of the end does
        assert tokens + unlearned == 4 * LENGTH
        assert 0 < rows["tokens special"][1] < tokens
    if name == "packed":
        assert rows["position 0"][1] > 4, "each document begins at position 0"
    if name == "further":
        assert rows["token 2 ahead"][1] == 4 * (LENGTH - 1)
        assert rows["token 3 ahead"][1] == 4 * (LENGTH - 2)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_token_statistics_equal_those_of_one_rank(
    case: str, alone: Any, corpora: list[str], tmp_path: Path
) -> None:
    name, layout = CASES[case]
    train(blended(name, corpora, **LAYOUTS[layout]), tmp_path)
    one = alone(name)[0]
    many = losses(tmp_path)[0]
    assert differences({"losses": one}, {"losses": many}) == []


@pytest.mark.full
def test_token_statistics_of_a_repeated_step_count_once(tmp_path: Path) -> None:
    import_engine()
    found = []
    for mode in ("off", "every_n"):
        run = described("moe")
        resilience = run.resilience.model_copy(update={"rerun": mode, "rerun_interval": 1})
        train(run.model_copy(update={"resilience": resilience}), tmp_path / mode)
        lines = [e for e in events(tmp_path / mode) if e["kind"] == "statistics"]
        found.append([{k: e.get(k) for k in ("step", "of", "rows", "loads")} for e in lines])
    assert len(found[0]) == 9 * STEPS
    assert found[1] == found[0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_token_statistics_of_routers_are_trained_losses(kind: str, tmp_path: Path) -> None:
    import_engine()
    run = described("moe")
    assert run.model.moe is not None
    update = {"router_load_balancing_type": kind, "aux_loss_coeff": 0.01, "z_loss_coeff": 0.001}
    moe = run.model.moe.model_copy(update=update)
    trainer = run.trainer.model_copy(update={"micro_batch_size": 2})
    model = run.model.model_copy(update={"moe": moe})
    run = run.model_copy(update={"model": model, "trainer": trainer})

    def job() -> list[float]:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        attach = MoEAuxLossAutoScaler.apply
        seen = []

        def noted(onto: torch.Tensor, loss: torch.Tensor) -> Any:
            seen.append(float(loss))
            return attach(onto, loss)

        MoEAuxLossAutoScaler.apply = noted
        _train(run, tmp_path)
        return seen

    (seen,) = run_ranks(1, job)
    # of the last step: 2 micro-batches of 3 routers, the z-loss of each before its balancing loss
    last = torch.tensor(seen[-12:], dtype=torch.float64).view(2, 3, 2).sum(0) / (4 * LENGTH)
    (event,) = [e for e in events(tmp_path) if e["step"] == STEPS and e.get("of") == "experts"]
    for place, row in enumerate(event["rows"].values()):
        z_loss, balance = (last[place] / torch.tensor([0.001, 0.01])).tolist()
        assert row[4:] == pytest.approx([balance, z_loss], rel=1e-5)


def _train(run: RunConfig, home: Path) -> None:
    from mtrain.train.run import Paths
    from mtrain.train.run import train as train_rank

    train_rank(run, lambda _: Paths(home), lambda *_: None)
