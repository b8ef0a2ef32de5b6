"""A `tokenizer.json` that somebody else made: an error that names the file, or text that is encoded
as a whole.
"""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import ConfigError, CorruptData

MODEL: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
GOOD: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "model": MODEL,
}
FLAGS = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def _with(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def _model(**changes: Any) -> str:
    return _with(model={**MODEL, **changes})


def _charsmap(data: bytes) -> str:
    return _with(
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    )


def _steps(letters: int, times: int) -> str:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * letters}
    return _with(normalizer={"type": "Sequence", "normalizers": [step] * times})


TEXTS = {
    "nothing": "",
    "null": "null",
    "a list": "[]",
    "a number": "3",
    "cut": json.dumps(GOOD)[:-30],
    "deep lists": "[" * 100_000,
    "deep objects": '{"model":' * 100_000,
    "more behind": json.dumps(GOOD) + "\0",
    "a mark of the order of bytes": "\ufeff" + json.dumps(GOOD),
    "no model": json.dumps({key: value for key, value in GOOD.items() if key != "model"}),
    "a model of code": _with(model={"type": "os.system", "vocab": {}, "merges": []}),
    "a vocabulary that is a list": _model(vocab=[1, 2]),
    "a negative id": _model(vocab={"a": -1}, merges=[]),
    "an id of gigabytes": _model(vocab={"a": 0, "b": (1 << 32) - 1}, merges=[]),
    "an id of many digits": _model(vocab={"a": 0}).replace('"a": 0', '"a": ' + "9" * 5000),
    "an id that is a fraction": _model(vocab={"a": 1.5}, merges=[]),
    "an added id of gigabytes": _with(
        added_tokens=[{"id": (1 << 32) - 1, "content": "<x>", **FLAGS}]
    ),
    "a negative added id": _with(added_tokens=[{"id": -1, "content": "<x>", **FLAGS}]),
    "a merge of what is not there": _model(merges=[["x", "y"]]),
    "a merge of numbers": _model(merges=[[1, 2]]),
    "a merge of three": _model(merges=["a b c"]),
    "a share of 5": _model(dropout=5.0),
    "an invalid pattern": _with(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
    ),
    "a decoder of code": _with(decoder={"type": "eval"}),
    "letters of three bytes": _charsmap(b"abc"),
    "letters of gigabytes": _charsmap(b"\xff\xff\xff\xff"),
    "letters that are cut": _charsmap(b"\x00\x01\x00\x00abcd"),
    "letters that are no text": _charsmap(b"\x04\x00\x00\x00abcd\xff\xfe"),
    "letters that are a number": _with(
        normalizer={"type": "Precompiled", "precompiled_charsmap": 3}
    ),
    "steps that make 10**18 letters of one": _steps(1000, 6),
    "steps that make 2**40 letters of one": _steps(2, 40),
    "an empty list of pieces": _with(model={"type": "Unigram", "unk_id": 0, "vocab": []}),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", TEXTS)
def test_tokenizer_hostile_file_is_refused_by_name(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TEXTS[name])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData) as caught:
            Tokenizer(path)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    said = str(caught.value)
    assert said.startswith(f"{path}: not a tokenizer.json: ")
    assert len(said) < 1000
    assert "\n" not in said
    assert capfd.readouterr().err == "", "the library did not fail by itself"


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


FILES: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "not there": (ConfigError, lambda path: None),
    "a folder": (ConfigError, lambda path: path.mkdir()),
    "a pipe": (ConfigError, os.mkfifo),
    "a link that leads nowhere": (ConfigError, lambda path: path.symlink_to("nowhere")),
    "a terabyte": (CorruptData, _huge),
    "no text": (CorruptData, lambda path: path.write_bytes(b"\xff\xfe{}")),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_tokenizer_hostile_non_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    kind, make = FILES[name]
    make(tmp_path / "tokenizer.json")
    with pytest.raises(kind, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {
            "padding": {
                "strategy": {"Fixed": 10**12},
                "direction": "Right",
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "a",
            }
        },
        {
            "truncation": {
                "direction": "Right",
                "max_length": 2,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        },
    ],
    ids=["padded to a terabyte", "cut to two tokens"],
)
def test_tokenizer_hostile_text_is_encoded_whole(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_with(**changes))
    assert Tokenizer(tmp_path / "tokenizer.json").encode("abababb") == [2, 2, 2, 1]


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [
        _model(unk_token="zz"),
        _with(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}),
        _with(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(a+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
    ],
    ids=["no unknown token", "no unknown word", "a pattern without end"],
)
def test_tokenizer_hostile_unencodable_text_names_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    for encode in (Tokenizer(path).encode, Tokenizer(path).encode_with_places):
        with pytest.raises(CorruptData, match="a text cannot be encoded"):
            encode("c " + "a" * 40 + "b")
