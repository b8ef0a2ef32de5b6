"""Generation of text: sampled tokens, the end of a text, and refusals before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.cli.generate import WORDS, read_prompts
from mtrain.cli.named_values import read_words
from mtrain.data.text.tokenizer import EOD, Tokenizer, train_bpe
from mtrain.errors import ConfigError
from mtrain.train.generate.request import END, LENGTH, STOP, Continuation, Request, Sampling
from mtrain.train.generate.sampling import draw, limited
from mtrain.train.generate.texts import continued, endings


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_generated_text_limits_keep_tokens_as_transformers(limits: dict[str, Any]) -> None:
    from transformers.generation import logits_process as theirs

    logits = 3 * torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    expected = logits
    for name, warper in (
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
        ("min_p", theirs.MinPLogitsWarper),
    ):
        if name in limits:
            expected = warper(limits[name])(None, expected)
    assert torch.equal(torch.stack([limited(row, Sampling(**limits)) for row in logits]), expected)


def test_generated_text_temperature_zero_is_greedy() -> None:
    logits = torch.tensor([0.0, 1.0, 3.0, 2.0])
    for temperature in (0.5, 5.0):
        generator = torch.Generator().manual_seed(0)
        sampling = Sampling(temperature=temperature)
        share = sum(draw(logits, sampling, generator)[0] == 2 for _ in range(500)) / 500
        expected = float(torch.softmax(logits / temperature, -1)[2])
        assert share == pytest.approx(expected, abs=0.06)
    assert draw(logits, Sampling(temperature=0), torch.Generator()) == (2, 0.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = "the cat sat on the mat. über den Dächern\n" * 20
    path.write_text(train_bpe([text], 300).to_str())
    return Tokenizer(path)


class Scripted:
    """Stands for a sampler: what it adds to each prompt is written here."""

    independent = True

    def __init__(self, tokenizer: Tokenizer, script: dict[str, list[int]]) -> None:
        self.script = {tuple(tokenizer.encode(prompt)): ids for prompt, ids in script.items()}
        self.rows: list[int] = []

    def continued(
        self, prompts: list[list[int]], sampling: Sampling, *, ending: Any
    ) -> list[Continuation]:
        self.rows.append(len(prompts))
        out = []
        for prompt in prompts:
            text = Continuation()
            for token in self.script[tuple(prompt)]:
                text.ids.append(token)
                text.ended = ending(text.ids)
                if text.ended != LENGTH:
                    break
            out.append(text)
        return out


def test_generated_text_ends_before_stop_or_end_of_document(
    tokenizer: Tokenizer,
) -> None:
    script = {
        "the ": tokenizer.encode("cat sat on the mat"),
        "the mat. ": [*tokenizer.encode("über"), EOD, *tokenizer.encode("never")],
        "t": tokenizer.encode("he Dächern"),
        "x": tokenizer.encode("on the mat"),
    }
    sampler = Scripted(tokenizer, script)
    request = Request(tuple(script), stop=("sat on", "ächern"), rows=3)
    found = continued(sampler, tokenizer, request)  # type: ignore[arg-type]
    assert [(one.text, one.ended) for one in found] == [
        ("cat ", STOP),
        ("über", END),
        ("he D", STOP),
        ("on the mat", LENGTH),
    ]
    assert sampler.rows == [3, 1]


def test_generated_text_stop_is_found_across_tokens(tokenizer: Tokenizer) -> None:
    text = "über den Dächern sat the cat"
    ids = tokenizer.encode(text)
    for end in ("Dächern", "n D", "ü", "cat"):
        ending = endings(tokenizer, [end])
        said = [ending(ids[:n]) for n in range(1, len(ids) + 1)]
        first = next(n for n in range(1, len(ids) + 1) if end in tokenizer.decode(ids[:n]))
        assert said.index(STOP) == first - 1, end


WRONG = {
    "temperature=warm": ("MT003", "temperature=0.8"),
    "temperature=-1": ("MT003", "temperature=0.8"),
    "tokens=nan": ("MT003", "tokens=64"),
    "top_p=0": ("MT003", "top_p=0.9"),
    "min_p=1.5": ("MT003", "min_p=0.05"),
    "top_k=2.5": ("MT003", "top_k=2"),
    "seed=-1": ("MT003", "seed=1"),
    "chat=maybe": ("MT003", "chat=true"),
    "batch=0": ("MT003", "batch=8"),
    "temprature=1": ("MT003", "temperature=1"),
}


@pytest.mark.parametrize("word", WRONG)
def test_generated_text_wrong_word_has_a_fix(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_words([word], WORDS)
    (problem,) = refused.value.problems
    assert (problem.code, problem.fix, problem.source) == (*WRONG[word], "command line")
    read_words([problem.fix], WORDS)


def test_generated_text_number_in_words_is_offered_as_number() -> None:
    for word, meant in (
        ("tokens=10k", "tokens=10000"),
        ("tokens=1,000", "tokens=1000"),
        ("top_p=0,5", "top_p=0.5"),
    ):
        with pytest.raises(ConfigError) as refused:
            read_words([word], WORDS)
        assert [problem.fix for problem in refused.value.problems] == [meant]


def test_generated_text_reports_all_wrong_words_but_settings() -> None:
    with pytest.raises(ConfigError) as refused:
        read_words([*WRONG, "tokens=1", "tokens=2"], WORDS)
    # a second problem for temperature, and two for tokens
    assert len(refused.value.problems) == len(WRONG) + 3
    values, others = read_words(
        ["stop=a", 'stop=["b", "c"]', "data=mock", "parallel=tp2", "model.top=1"], WORDS
    )
    assert values["stop"] == ["a", "b", "c"]
    assert values["tokens"] == 64
    assert others == ["data=mock", "parallel=tp2", "model.top=1"]


def test_generated_text_prompts_are_text_or_json_lines(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    plain = tmp_path / "p.txt"
    lines = tmp_path / "p.jsonl"
    plain.write_text('one\n\n  {"two": 2}\n')
    lines.write_text(
        "\n".join(json.dumps(x) for x in ("a\nb", {"prompt": "c"}, {"messages": chat}, chat))
    )
    assert read_prompts(plain) == ["one", '  {"two": 2}']
    assert read_prompts(lines) == ["a\nb", "c", chat, chat]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("p.jsonl", b'"a"\n{"text": 1}\n', "MT003"),
        ("p.jsonl", b"plain\n", "MT003"),
        ("p.txt", b"\n \n", "MT002"),
        ("p.txt", b"\xff\xfe", "MT002"),
        ("gone.txt", None, "MT002"),
    ],
)
def test_generated_text_unreadable_prompts_state_reason(
    name: str, content: bytes | None, code: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_prompts(tmp_path / name)
    assert [problem.code for problem in refused.value.problems] == [code]
