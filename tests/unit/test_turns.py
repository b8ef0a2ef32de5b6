"""Answers of several turns: tokens are appended as the template writes them, and only those of the
model are learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.data.answers import Answer, answer_batch
from mtrain.data.chats.loss_mask import encode_chat
from mtrain.data.chats.messages import parse_chat
from mtrain.data.chats.template import ChatFormat
from mtrain.data.records import Keys
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.train.environments.calculator import calculator, value
from mtrain.train.generate.request import END, LENGTH, Sampling
from mtrain.train.rollouts.engine import Prompt, Rollout
from mtrain.train.rollouts.judges import Judges
from mtrain.train.rollouts.turns import Turns
from tests.support.chats import NAMED, folder_of
from tests.support.covering import some

PLUG_IN = """
def broken(messages, columns): raise KeyError("no tool")
def wrong(messages, columns): return [{"role": "assistant", "content": "I am the model"}]
def large(messages, columns): return [{"role": "tool", "content": "x" * (2 << 20)}]
def endless(messages, columns):
    while True: pass
"""
SAID = (
    ("It is <calc>2 * (3 + 4)</calc>", "so <calc>14 / 0</calc>", "14"),
    ("naïvely 7",),
)
ASKED = ("What is 2 * (3 + 4)?", "Say 7.")


class Scripted:
    """An engine that says the turns of a script."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.tokenizer = tokenizer
        self.end = end
        self.seeds: list[Any] = []

    def generate(self, prompts: Any, sampling: Sampling) -> list[Rollout]:
        turn = len(self.seeds)
        self.seeds.append(sampling.seed)
        found = []
        for prompt in prompts:
            ids = [*self.tokenizer.encode(SAID[prompt.number][turn]), self.end]
            ended = END if len(ids) <= sampling.tokens else LENGTH
            ids = ids[: sampling.tokens]
            logs = tuple(-1.0 - np.arange(len(ids)))
            found.append(Rollout(prompt, tuple(ids), logs, ended))
        return found


def turns_of(folder: Path, kind: str) -> tuple[Turns, Any]:
    tokenizer = Tokenizer(folder_of(folder, kind, marked=True))
    form = ChatFormat(folder)
    end = tokenizer.id_of(NAMED[kind]["eos_token"])
    assert end is not None

    def ask(talks: Any) -> Any:
        return [(calculator(messages, columns), "") for messages, columns in talks]

    engine: Any = Scripted(tokenizer, end)
    return Turns(engine, tokenizer, form, Keys(), 8, ask, lambda text: text, 5), engine


def prompts_of(turns: Turns) -> list[Prompt]:
    found = []
    for number, text in enumerate(ASKED):
        record = {"prompt": text}
        written = turns.form.write([{"role": "user", "content": text}], prompt=True).text
        found.append(Prompt(tuple(turns.tokenizer.encode(written)), number, record))
    return found


@pytest.mark.parametrize("kind", some(["chatml", "llama3", "qwen"], ["chatml"]))
def test_turns_tokens_and_mask_are_the_templates(kind: str, tmp_path: Path) -> None:
    turns, engine = turns_of(tmp_path, kind)
    found = turns.generate(prompts_of(turns), Sampling(200, seed=3))
    assert found is not None
    assert engine.seeds[0] == 3
    assert len(set(engine.seeds)) == 3
    assert [one["role"] for one in found[0].messages] == ["assistant", "tool"] * 2 + ["assistant"]
    assert [one["content"] for one in found[0].messages[1::2]] == ["14", "error: division by zero"]
    for asked, answer in zip(ASKED, found, strict=True):
        chat = parse_chat({"messages": [{"role": "user", "content": asked}, *answer.messages]})
        whole = encode_chat(chat, turns.form, turns.tokenizer, "assistant")
        ids = np.array([*answer.prompt.ids, *answer.ids])
        # The template ends the line after the last turn, which no model writes.
        assert ids.tolist() == whole.ids[: len(ids)].tolist()
        begin = len(answer.prompt.ids)
        assert list(answer.own) == whole.learned[begin : len(ids)].tolist()
        batch = answer_batch(
            [
                Answer(
                    np.array(answer.prompt.ids),
                    np.array(answer.ids),
                    np.array(answer.log_probabilities, np.float32),
                    2.0,
                    np.array(answer.own),
                )
            ],
            len(ids) + 3,
            "token",
            200,
        )
        mask = whole.learned[1 : len(ids)].astype(np.float32)
        assert batch["loss_mask"][0, : len(mask)].tolist() == mask.tolist()
        assert batch["loss_mask"].sum() == mask.sum() == answer.sampled
        assert batch["advantages"][0, : len(mask)].tolist() == (2 * mask).tolist()
        assert ((batch["sampled_log_probabilities"][0] < 0) == (batch["loss_mask"][0] > 0)).all()


@pytest.mark.full
def test_turns_of_sentencepiece_begin_with_no_space(tmp_path: Path) -> None:
    """Encode what follows an end as inside of a text: by itself it would begin with a blank."""
    turns, engine = turns_of(tmp_path, "zephyr")
    found = turns.generate(prompts_of(turns), Sampling(200))
    assert found is not None
    answer = found[0]
    messages = [{"role": "user", "content": ASKED[0]}, *answer.messages]
    whole = turns.tokenizer.encode(turns.form.write(messages, prompt=False).text)
    first = answer.own.index(False)
    written = answer.ids[first : answer.own.index(True, first)]
    # Up to the end of the tool's message.
    known = list(written[: written.index(engine.end) + 1])
    assert len(known) > 3
    places = range(len(whole) - len(known) + 1)
    assert any(whole[place : place + len(known)] == known for place in places)


def test_turns_keep_the_budget(tmp_path: Path) -> None:
    turns, engine = turns_of(tmp_path, "chatml")
    for most in range(1, 90, 3):
        engine.seeds.clear()
        found = turns.generate(prompts_of(turns), Sampling(most))
        assert found is not None
        for answer in found:
            assert len(answer.ids) == len(answer.own) == len(answer.log_probabilities) <= most
            assert answer.ids
            # The last token is the model's: nothing stands behind its last turn.
            assert answer.own[-1]
    engine.seeds.clear()
    turns.most = 2
    found = turns.generate(prompts_of(turns), Sampling(200))
    assert found is not None
    assert len(engine.seeds) == 2
    assert [len(answer.messages) for answer in found] == [3, 1]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1 + 2", 3.0),
        ("2*(3+4)/-7", -2.0),
        ("9**9**9", "only numbers"),
        ("a()", "only numbers"),
        ("'a'*3", "only numbers"),
        ("1e14*1e14", "too large"),
        ("1" * 300, "more than 200"),
    ],
)
def test_turns_calculator_knows_numbers_only(text: str, wanted: Any) -> None:
    if isinstance(wanted, float):
        assert value(text) == wanted
        return
    with pytest.raises(ValueError, match=wanted):
        value(text)


@pytest.mark.full
def test_turns_failing_environments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acting.py").write_text(PLUG_IN)
    info = tmp_path / "acting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acting\nVersion: 1.0\n")
    names = ("broken", "wrong", "large", "endless")
    entries = "\n".join(f"{name} = acting:{name}" for name in names)
    (info / "entry_points.txt").write_text(f"[mtrain.environments]\n{entries}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    judges = Judges(2, seconds=2.0, memory_gib=1.0)
    talk = ([{"role": "assistant", "content": "<calc>1+1</calc>"}], {"answer": "2"})
    try:
        assert judges.replies("calculator", [talk]) == [([{"role": "tool", "content": "2"}], "")]
        found = [judges.replies(name, [talk])[0] for name in (*names, "absent")]
    finally:
        judges.close()
    whys = (
        "no tool",
        "no message of tool or user",
        "above 1048576",
        "more than 2 s",
        "no installed",
    )
    for (messages, why), part in zip(found, whys, strict=True):
        assert messages is None
        assert part in why
