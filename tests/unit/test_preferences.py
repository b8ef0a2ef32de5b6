"""Preferences in a file: pairs, answers with labels, and several scored answers of a prompt."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.api import load
from mtrain.config.schema.data import DataConfig
from mtrain.data import Splits, open_splits, prepare
from mtrain.data.batch import averaged
from mtrain.data.chats.messages import Chat, parse_labelled, parse_pair, parse_ranking
from mtrain.data.chats.samples import ChatSamples, PairSamples
from mtrain.data.pairs import packed_pair_collator, pair_collator
from mtrain.errors import ConfigError, CorruptData
from mtrain.models.gpt.data import collator
from mtrain.train.pairs import packed_answers, pairs_of, sums_of
from tests.support.chats import chats_file, folder_of, turns
from tests.support.configs import LAPTOP

LABELLED = [
    {"prompt": "a", "completion": "yes", "label": True},
    {"prompt": turns("a"), "completion": turns("a", "no")[1:], "label": False},
    {"prompt": "a", "completion": {"role": "assistant", "content": "yes"}, "label": 1},
    {"prompt": "a", "completion": "no", "label": 0, "system": "be kind"},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("preferences")
    folder_of(home, "chatml", marked=True)
    return home


def opened(
    home: Path, file: Path, split: tuple[float, float, float] = (1.0, 0.0, 0.0), **more: Any
) -> Splits:
    keys: dict[str, Any] = {
        "kind": "preference",
        "path": str(file),
        "tokenizer": str(home / "tokenizer.json"),
        "cache_dir": str(home / "cache"),
        "seq_length": 48,
        "split": split,
    }
    data = DataConfig(**(keys | more))
    corpus = prepare(data, lambda line: None)
    return open_splits(data, 400, 1234, corpus, ("train",))


def said(chat: Chat) -> str:
    return str(chat.messages[-1]["content"])


def texts(home: Path, samples: Any) -> list[tuple[str, bool]]:
    from mtrain.data.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(home / "tokenizer.json")
    every = [samples.sample(number) for number in range(len(samples))]
    return [(tokenizer.decode(s.tokens[s.learned].tolist()), s.chosen) for s in every]


def test_preferences_labels_are_single_answers(home: Path, tmp_path: Path) -> None:
    samples = opened(home, chats_file(tmp_path / "a.jsonl", LABELLED)).train
    assert isinstance(samples, ChatSamples)
    assert sorted(texts(home, samples)) == [("no", False)] * 2 + [("yes", True)] * 2
    batch = pair_collator(samples, mismatched=True)(torch.zeros(0), [0, 1, 2])  # type: ignore[arg-type]
    kinds = [samples.sample(number).chosen for number in range(3)]
    assert (batch["desirable"] * batch["loss_mask"]).sum(1).tolist() == kinds
    assert averaged(batch, "answer", 3)["loss_counts"].sum() == 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"label": "good"}, "its label is 'good', and not true or false"),
        ({"label": None}, "not true or false"),
        ({"completion": " "}, "completion is empty"),
        ({"prompt": None}, "follows a prompt, which is missing"),
        ({"chosen": "a"}, "unknown key: chosen"),
    ],
)
def test_preferences_wrong_label_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(CorruptData, match=why):
        parse_labelled(LABELLED[0] | change)


def test_preferences_scores_rank_answers_into_pairs() -> None:
    line = {"prompt": "q", "answers": ["a", "b", "c", "d"], "scores": [2, 5.5, 2, -1]}
    pairs = [(said(chosen), said(rejected)) for chosen, rejected in parse_ranking(line)]
    assert pairs == [("b", "a"), ("b", "c"), ("b", "d"), ("a", "d"), ("c", "d")]
    assert parse_ranking({**line, "scores": [1, 1, 1, 1]}) == []
    wrong = {
        "two lists of one length": {"scores": [1, 2]},
        "score 2 is .True": {"scores": [1, True, 2, 3]},
        "answer 2 as chosen, 1 as rejected: chosen and rejected are the same": {
            "answers": ["a", "a", "c", "d"]
        },
        "either answers or completions": {"completions": ["a"]},
    }
    for why, change in wrong.items():
        with pytest.raises(CorruptData, match=why):
            parse_ranking({**line, **change})


def test_preferences_pairs_of_a_prompt_share_a_split(home: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"{n}", "completions": ["a", "b", "c"], "scores": [1, 2, 3]} for n in range(4)
    ]
    rows.insert(0, {"prompt": "5", "completions": ["a", "b"], "scores": [1, 1]})
    splits = opened(home, chats_file(tmp_path / "a.jsonl", rows), (0.5, 0.5, 0.0))
    assert isinstance(splits.train, PairSamples)
    assert isinstance(splits.validation, PairSamples)
    assert (len(splits.train), len(splits.validation)) == (12, 12)
    ones = [
        {s.place(number).rsplit(":")[-1] for number in range(len(s) // 2)}
        for s in (splits.train, splits.validation)
    ]
    assert ones == [{"2", "3"}, {"4", "5"}]
    (remark,) = splits.remarks()[-1:]
    assert "12 pairs of 5 lines with scored answers; equal scores leave 1 lines" in remark


def test_preferences_margins_reach_their_pairs(home: Path, tmp_path: Path) -> None:
    """Read a column, and differences of scores on request; refuse them where nothing reads them."""
    rows = [{"prompt": "q", "chosen": "1" * n, "rejected": "2"} for n in range(1, 5)]
    for row, margin in zip(rows, (0.5, -2, 0, 3), strict=True):
        row["margin"] = margin
    scored = [{"prompt": "q", "answers": ["a", "b", "c"], "scores": [1, 4.5, 2]}]
    columns = opened(home, chats_file(tmp_path / "a.jsonl", rows))
    scores = opened(home, chats_file(tmp_path / "b.jsonl", scored))
    plain = opened(home, chats_file(tmp_path / "c.jsonl", [{**rows[0], "margin": 0}]))

    def margins(splits: Splits, words: str = "objective=reward") -> list[float] | None:
        run = load(["data=mock", "model=llama_tiny", *words.split()], LAPTOP).run
        run = run.model_copy(update={"data": run.data.model_copy(update={"kind": "preference"})})
        size = len(splits.train)
        batch: Any = collator(run, splits, "train")(torch.zeros(0), np.arange(size))
        if "margins" not in batch:
            return None
        sums, _, _ = sums_of(batch["margins"], batch["loss_mask"], None)
        assert not sums[1::2].any()
        return sorted(sums[::2].tolist())

    assert margins(columns) == [-2, 0, 0.5, 3]
    assert margins(scores) is None
    assert margins(scores, "objective=reward objective.score_margins=true") == [1, 2.5, 3.5]
    with pytest.raises(ConfigError, match=r"MT496.*dpo reads no margins"):
        margins(columns, "objective=dpo")
    assert margins(plain, "objective=dpo") is None
    with pytest.raises(ConfigError, match="has no scored answers"):
        margins(columns, "objective=reward objective.score_margins=true")
    with pytest.raises(CorruptData, match="margin is 'wide', and not a number"):
        parse_pair(rows[0] | {"margin": "wide"})


def test_preferences_packed_pairs_stay_whole(home: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "1" * n, "rejected": "2" * (n + 1)} for n in range(1, 8)]
    rows[3]["chosen"] = "3" * 200
    file = chats_file(tmp_path / "a.jsonl", rows)
    splits = opened(home, file, seq_length=144, packed=True, packed_multiple=4)
    samples = splits.train
    assert isinstance(samples, ChatSamples)
    windows = [samples.sample(number) for number in range(len(samples))]
    held = [window.documents for window in windows]
    assert sorted(one for documents in held for one in documents) == [*range(6), *range(8, 14)]
    assert all(d[i] % 2 == 0 and d[i + 1] == d[i] + 1 for d in held for i in range(0, len(d), 2))
    assert any(len(documents) > 2 for documents in held)
    assert "1 pairs of train are left out: their two answers do not fit" in splits.remarks()[-1]
    numbers = np.arange(len(samples))
    batch = packed_pair_collator(samples)(torch.zeros(0), numbers)
    bounds = batch["cu_seqlens"].tolist()
    answers = batch["answers"][0]
    learned = batch["loss_mask"][0] > 0
    assert sorted(set(answers[learned].tolist())) == list(range(12))
    for start, end in pairwise(bounds):
        assert len(set(answers[start:end][learned[start:end]].tolist())) <= 1
        assert batch["position_ids"][0, start] == 0
        assert start % 4 == 0
    counts = averaged(batch, "pair", len(windows))["loss_counts"]
    assert counts.sum() == 6
    assert set(answers[counts[0] > 0].tolist()) == {0, 2, 4, 6, 8, 10}
    lp = -torch.rand(answers.shape)[None]
    packed = pairs_of(lp, batch["loss_mask"], None, None, packed_answers(batch))
    sums = [float(lp[0][learned & (answers == answer)].double().sum()) for answer in range(12)]
    assert packed.chosen[:6].tolist() == pytest.approx(sums[::2])
    assert packed.rejected[:6].tolist() == pytest.approx(sums[1::2])
    assert packed.chosen_tokens[6:].tolist() == [0.0] * (len(packed.chosen) - 6)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("objective.loss_type=ipo", None),
        ("objective.loss_type=[sigmoid,ipo]", None),
        ("objective.loss_type=[sigmoid,ipo] objective.loss_weights=[0.8,0.2]", None),
        ("objective.loss_type=[sigmoid,ipo] objective.label_smoothing=0.1", None),
        ("objective.loss_type=[hinge,ipo] objective.label_smoothing=0.1", "label_smoothing"),
        ("objective.loss_type=[sigmoid,ipo] objective.loss_weights=[1]", "MT396"),
        ("objective.loss_weights=[1,2]", "MT396"),
        ("data.packed=true", None),
        ("data.packed=true trainer.micro_batch_size=1", None),
        ("trainer.micro_batch_size=1", "MT331"),
        ("objective.name=kto data.packed=true", "MT329"),
        ("data.packed=true parallel.ranks=2 parallel.hybrid_context_parallel=true", "MT329"),
        ("objective.loss_type=[sigmoid,nope]", "loss_type"),
    ],
)
def test_preferences_objective_is_checked(words: str, wrong: str | None) -> None:
    given = ["objective=dpo", "data=mock", "data.seq_length=32", *words.split()]
    if wrong is not None:
        with pytest.raises(ConfigError, match=wrong):
            load(given, LAPTOP, {}, to_run=False)
        return
    kinds = load(given, LAPTOP, {}, to_run=False).run.objective.weighted_losses
    assert sum(weight for _, weight in kinds) == (2 if "[" in words and "0.8" not in words else 1)


@pytest.mark.parametrize(
    ("record", "objective", "code"),
    [
        (LABELLED[0], "dpo", "MT395"),
        (LABELLED[0], "next_token", "MT328"),
        (LABELLED[0], "kto", None),
        ({"prompt": "q", "answers": ["a", "b"], "scores": [1, 2]}, "dpo", None),
    ],
)
def test_preferences_file_decides_objective(
    record: dict[str, Any], objective: str, code: str | None, home: Path, tmp_path: Path
) -> None:
    file = chats_file(tmp_path / "a.jsonl", [record] * 8)
    words = [f"objective.name={objective}", f"data.path={file}"]
    words.append(f"data.tokenizer={home / 'tokenizer.json'}")
    if code is not None:
        with pytest.raises(ConfigError, match=code):
            load(words, LAPTOP, {}, to_run=False)
        return
    assert load(words, LAPTOP, {}, to_run=False).run.data.kind == "preference"
