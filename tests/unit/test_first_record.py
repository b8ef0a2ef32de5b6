"""Files of chats without data.kind: they are trained on as chats, and never silently as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.api import Loaded, load
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import ConfigError
from mtrain.loading import checkpoints
from tests.support.configs import LAPTOP
from tests.unit.test_start_from_weights import LLAMA, folder

CHAT = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes " * 40}]
}
SHAREGPT = {
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes " * 40}]
}
PAIR = {"prompt": "hi", "chosen": "yes " * 40, "rejected": "no"}
TEXT = {"text": "messages " * 40}


def lines(path: Path, record: object, begin: str = "") -> Path:
    path.write_text(begin + f"{json.dumps(record)}\n" * 64)
    return path


def loaded(words: str) -> Loaded:
    return load(words.split(), LAPTOP, {}, to_run=False)


@pytest.mark.parametrize(
    ("record", "name", "begin", "kind"),
    [
        (CHAT, "a.jsonl", "", "sft"),
        (SHAREGPT, "a.jsonl", "", "sft"),
        (CHAT, "a.jsonl", "\ufeff", "sft"),
        (CHAT, "a.jsonl", "\n\n", "sft"),
        (TEXT, "a.jsonl", "", "text"),
        ([CHAT], "a.jsonl", "", "text"),
        (CHAT, "a.txt", "", "text"),
        (CHAT, "a.jsonl", "{\n", "text"),
    ],
)
def test_first_record_first_line_decides_chats(
    record: object, name: str, begin: str, kind: str, tmp_path: Path
) -> None:
    hf = folder(tmp_path / "hf", LLAMA)
    words = [
        "trainer=sft",
        f"data.path={lines(tmp_path / name, record, begin)}",
        f"checkpoint.init_from={hf}",
    ]
    why: dict[str, str] = {}
    data = resolve(checkpoints.composed(words).run, LAPTOP, why=why).data
    assert data.kind == kind
    if kind == "sft":
        assert why["data.kind"].endswith("the first line of data.path")
        assert data.tokenizer == str(hf / "tokenizer.json")
        assert data.loss_on == "assistant"


@pytest.mark.parametrize(
    ("record", "fix"),
    [(CHAT, "data=sft"), (PAIR, "data=preference objective=dpo"), (TEXT, "data tokenize")],
)
def test_first_record_records_named_text_warn(record: object, fix: str, tmp_path: Path) -> None:
    found = loaded(f"data=text data.path={lines(tmp_path / 'a.jsonl', record)}")
    said = [problem for problem in found.warnings if problem.code == "MT346"]
    assert [problem.fix.startswith(fix) for problem in said] == [True]
    assert said[0].path == "data.path"


@pytest.mark.parametrize(
    ("record", "name"), [(TEXT, "a.txt"), ({"text": 1}, "a.jsonl"), ({"body": "x" * 99}, "a.jsonl")]
)
def test_first_record_other_files_are_text(record: object, name: str, tmp_path: Path) -> None:
    found = loaded(f"data=text data.path={lines(tmp_path / name, record)}")
    assert "MT346" not in {problem.code for problem in found.warnings}


def test_first_record_pairs_are_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MT328"):
        loaded(f"data.path={lines(tmp_path / 'a.jsonl', PAIR)}")


def test_first_record_rewritten_file_is_read_again(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", TEXT)
    assert loaded(f"data.path={file}").run.data.kind == "text"
    assert loaded(f"data.path={lines(file, CHAT)}").run.data.kind == "sft"
