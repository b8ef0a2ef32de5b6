"""Prompts of a file: groups, columns, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.data import PromptSamples, open_splits, prepare
from mtrain.data.chats.messages import parse_prompt
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import ConfigError, CorruptData
from tests.support.chats import chats_file, folder_of
from tests.unit.test_chats import data_of

VOCAB = 400


def opened(home: Path, rows: list[dict[str, Any]], length: int = 48) -> PromptSamples:
    if not (home / "tokenizer.json").exists():
        folder_of(home, "chatml", marked=True)
    path = chats_file(home / "prompts.jsonl", rows)
    data = data_of(home, kind="prompts", path=str(path), seq_length=length, split=(1, 0, 0))
    found = open_splits(data, VOCAB, 1, prepare(data, lambda note: None), ("train",)).train
    assert isinstance(found, PromptSamples)
    return found


def test_prompts_are_answered_in_groups_with_their_columns(tmp_path: Path) -> None:
    rows = [{"prompt": f"count {i}", "answer": i, "level": [i]} for i in range(7)]
    samples = opened(tmp_path, rows)
    samples.group = 3
    assert len(samples) == 21
    text = Tokenizer(tmp_path / "tokenizer.json")
    answers = []
    for number in range(42):
        record = samples.record(number)
        assert record == samples.record(number // 3 * 3)
        assert f"count {record['answer']}" in text.decode(samples.ids(number))
        answers.append(record["answer"])
    # Each epoch has every prompt once, in another order.
    first = answers[:21:3]
    second = answers[21::3]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    sample = samples.sample(0)
    assert not sample.learned.any()
    assert np.array_equal(sample.tokens[: len(samples.ids(0))], samples.ids(0))


def test_prompts_end_where_the_model_answers(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    samples = opened(tmp_path, rows)
    form = Tokenizer(tmp_path / "tokenizer.json")
    wanted = form.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert samples.ids(0).tolist() == wanted


def test_prompts_without_room_are_refused(tmp_path: Path) -> None:
    samples = opened(tmp_path, [{"prompt": "a"}, {"prompt": "b c d e f g h i j k l m n"}])
    most = max(len(samples.ids(number)) for number in range(2))
    samples.require_room(49 - most)
    with pytest.raises(ConfigError, match=f"prompts.jsonl:2 has {most} tokens") as error:
        samples.require_room(50 - most)
    (problem,) = error.value.problems
    assert problem.code == "MT348"
    assert problem.fix == f"data.seq_length=49 or rollout.max_tokens={49 - most}"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"answer": "7"}, "a prompt is one key"),
        ({"prompt": "a", "messages": []}, "a prompt is one key"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "the last message is of assistant"),
        ({"prompt": []}, "prompt is not a list of messages"),
    ],
)
def test_prompts_wrong_line_is_refused(line: dict[str, Any], why: str) -> None:
    with pytest.raises(CorruptData, match=why):
        parse_prompt(line)
