"""Training on chats: one global batch in many splits, and what only the assistant's tokens can
teach.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.run import RunConfig
from tests.support.chats import chats_file, drawn_chats, turns
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

CHATS = 16
LENGTH = 64
VOCAB = 320
AVERAGES = ("token", "sample", "sequence")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sixteen chats of unlike lengths, and a tokenizer."""
    return drawn_chats(tmp_path_factory.mktemp("chats"), CHATS)


def run_with(home: Path, average: str, windows: int | None = None, **more: Any) -> RunConfig:
    """Return a run of one step over all chats of the file; keyword arguments are keys of
    `parallel`, or `micro`.
    """
    batch = windows or CHATS
    micro = more.pop("micro", 1)
    trainer = {"global_batch_size": batch, "micro_batch_size": micro, "loss_average": average}
    run = tiny_run(model={"vocab_size": VOCAB, **more.pop("model", {})}, trainer=trainer, **more)
    data = DataConfig(
        kind="sft",
        path=str(home / "chats.jsonl"),
        tokenizer=str(home / "tokenizer.json"),
        cache_dir=str(home / "cache"),
        seq_length=LENGTH,
        split=(1.0, 0.0, 0.0),
        packed=windows is not None,
        packed_multiple=4 if windows is not None else None,
    )
    return run.model_copy(update={"data": data})


def windows_of(home: Path) -> int:
    """Return the number of windows that all chats fill."""
    from mtrain.data import open_splits, prepare

    data = run_with(home, "token", 1).data
    return len(open_splits(data, VOCAB, 1, prepare(data, lambda note: None), ("train",)).train)


def computed(run: RunConfig, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of the first step, and its whole gradient."""

    def job() -> list[tuple[float, float]]:
        return train_steps(run, 1, gradients_to=folder)

    rows = run_ranks(run.parallel.ranks or 1, job)
    assert all(row == rows[0] for row in rows)
    (saved,) = folder.glob("step_*")
    return rows[0][0][0], whole_tensors(saved)


def apart(
    one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]
) -> float:
    """Return the largest relative difference: of the losses, and of each gradient relative to the
    largest one.
    """
    assert one[1].keys() == other[1].keys()
    largest = max(float(g.abs().max()) for g in one[1].values())
    off = max(float((one[1][key] - other[1][key]).abs().max()) for key in one[1]) / largest
    return max(abs(one[0] - other[0]) / abs(one[0]), off)


SPLITS: dict[str, dict[str, Any]] = {
    "accumulated by 4": {"micro": 4},
    "accumulated by 16": {"micro": 16},
    "dp2": {"ranks": 2, "micro": 2},
    "packed": {"packed": True},
    "packed, dp2": {"packed": True, "ranks": 2},
    "packed, cp2": {"packed": True, "ranks": 2, "cp": 2, "cp_comm_type": "all_gather"},
    "packed, dynamic": {
        **{
            "packed": True,
            "ranks": 2,
            "hybrid_context_parallel": True,
            "max_seqlen_per_dp_cp_rank": 32,
        },
        "cp_comm_type": "all_gather",
    },
    "cp2": {"ranks": 2, "cp": 2, "cp_comm_type": "all_gather"},
    "packed, tp2pp2": {"packed": True, "ranks": 4, "tp": 2, "pp": 2},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2, "micro": 2},
    "dp4, sharded optimizer": {"ranks": 4, "distributed_optimizer": True},
}
PLAIN = ("accumulated by 16", "packed, cp2")


@pytest.fixture(scope="module")
def alone(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains on one rank, chat by chat, for each way to average."""
    known: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}

    def of(average: str) -> tuple[float, dict[str, torch.Tensor]]:
        if average not in known:
            known[average] = computed(run_with(home, average), tmp_path_factory.mktemp("alone"))
        return known[average]

    return of


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(SPLITS, PLAIN))
@pytest.mark.parametrize("average", ["token", "sample"])
def test_chats_any_split_has_one_loss_and_gradient(
    name: str, average: str, home: Path, alone: Any, tmp_path: Path
) -> None:
    more = dict(SPLITS[name])
    windows = windows_of(home) if more.pop("packed", False) else None
    found = computed(run_with(home, average, windows, **more), tmp_path)
    assert apart(alone(average), found) < 1e-6


def test_chats_averages_differ_as_defined(home: Path, alone: Any, tmp_path: Path) -> None:
    token = alone("token")[0]
    sample = alone("sample")[0]
    sequence = computed(run_with(home, "sequence", windows_of(home)), tmp_path)[0]
    assert len({round(value, 5) for value in (token, sample, sequence)}) == 3


def test_chats_average_per_micro_batch_is_found(
    home: Path, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed a fault: losses are normalised before they are added up."""
    from mtrain.data import batch

    def by_itself(made: Any, average: str, rows: int) -> Any:
        mask = made["loss_mask"]
        counts = torch.zeros_like(mask)
        counts[0, 0] = 1.0
        return {**made, "loss_mask": mask / mask.sum(), "loss_counts": counts}

    monkeypatch.setattr(batch, "averaged", by_itself)
    assert apart(alone("token"), computed(run_with(home, "token", micro=4), tmp_path)) > 1e-3


@pytest.mark.full
def test_chats_router_losses_weigh_as_configured(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Require their part of a gradient to depend on the tokens that are read, and not on those that
    are learned.
    """
    from mtrain.train.loop import step

    def added(average: str, loss_on: str, name: str, **parallel: Any) -> torch.Tensor:
        found = []
        for coefficient in (0.0, 0.5):
            moe: dict[str, Any] = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}
            moe |= {
                "router_load_balancing_type": "aux_loss",
                "aux_loss_coeff": coefficient,
                "z_loss_coeff": 1e-2 if coefficient else None,
            }
            run = run_with(home, average, micro=4, model={"moe": moe}, **parallel)
            run = run.model_copy(update={"data": run.data.model_copy(update={"loss_on": loss_on})})
            gradients = computed(run, tmp_path / f"{name}-{coefficient}")[1]
            found.append(
                torch.cat([g.flatten() for key, g in sorted(gradients.items()) if "router" in key])
            )
        return found[1] - found[0]

    expected = added("token", "all", "all")
    scale = float(expected.abs().max())
    assert scale > 0
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("token", "assistant", {}),
        ("sample", "assistant", {}),
    ]
    cases.append(("sequence", "last", {"ranks": 2, "ep": 2}))
    for number, (average, loss_on, parallel) in enumerate(cases):
        off = float((added(average, loss_on, str(number), **parallel) - expected).abs().max())
        assert off / scale < 1e-4, (average, loss_on)
    monkeypatch.setattr(step, "_share_out", lambda *given: None)
    assert float((added("sample", "assistant", "fault") - expected).abs().max()) / scale > 1.0


@pytest.mark.full
def test_chats_indexer_loss_weighs_as_configured(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.train.loop import step

    mla = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    }
    dsa = {"indexer_n_heads": 2, "indexer_head_dim": 16, "indexer_topk": 8}

    def taught(average: str, loss_on: str, name: str) -> torch.Tensor:
        run = run_with(home, average, micro=4, model={"mla": mla, "dsa": dsa})
        run = run.model_copy(update={"data": run.data.model_copy(update={"loss_on": loss_on})})
        gradients = computed(run, tmp_path / name)[1]
        return torch.cat(
            [g.flatten() for key, g in sorted(gradients.items()) if ".indexer." in key]
        )

    expected = taught("token", "all", "all")
    scale = float(expected.abs().max())
    assert scale > 0
    for average, loss_on in (("token", "assistant"), ("sample", "assistant"), ("sequence", "last")):
        off = float((taught(average, loss_on, average) - expected).abs().max())
        assert off / scale < 1e-4, (average, loss_on)
    monkeypatch.setattr(step, "_share_out", lambda *given: None)
    assert float((taught("sample", "assistant", "fault") - expected).abs().max()) / scale > 1.0


LETTERS = "abcdef"


def letters(count: int, seed: int) -> list[Any]:
    """Return chats in which the user names two letters, and two wrong answers; the assistant
    answers with the letter after the first one.
    """
    dice = random.Random(seed)
    out = []
    for _ in range(count):
        first = dice.choice(LETTERS)
        other = dice.choice(LETTERS)
        wrong = dice.choice(LETTERS)
        right = LETTERS[(LETTERS.index(first) + 1) % len(LETTERS)]
        out.append(turns(f"{first}{other} is {wrong}", right))
    return out


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_chats_answer_only_task_is_learned(packed: bool, home: Path, tmp_path: Path) -> None:
    chats_file(tmp_path / "chats.jsonl", letters(600, 0))
    run = run_with(home, "token", 8 if packed else None, micro=8 if packed else 16)
    steps = 200 if packed else 100  # with some initial weights, packed samples need more than 100
    asked = {
        "path": str(tmp_path / "chats.jsonl"),
        "split": (0.9, 0.1, 0.0),
        "seq_length": 64 if packed else 24,
    }
    update = {
        "trainer": run.trainer.model_copy(update={"train_iters": steps, "eval_iters": 1}),
        "data": run.data.model_copy(update=asked),
        "model": run.model.model_copy(update={"num_layers": 2}),
        "optim": run.optim.model_copy(update={"lr": 5e-3, "min_lr": 2e-3}),
    }
    run = run.model_copy(update=update)

    def job() -> tuple[float, float]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import evaluate, train_step
        from mtrain.world.init import joined

        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            first = train_step(parts, stop_requested=False).loss
            for _ in range(steps - 1):
                train_step(parts, stop_requested=False)
            assert parts.valid_data is not None
            return first, evaluate(parts, parts.valid_data, 1) or 0.0

    before, after = run_ranks(1, job)[0]
    assert before > 5.0
    # an answer by chance has 0.9 nats a token: 1.8 for its letter, none for its end
    assert 0.0 < after < 0.2
