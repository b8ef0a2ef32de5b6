"""gigatoken encodes for tokenizers of which it does all that their file says, and for no others."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.support.launched import light

Body = dict[str, Any]
PIECES = [
    "tool",
    "tools",
    "toolbox",
    "retool",
    "the",
    " ",
    "  ",
    "\n",
    "\t",
    "\u00e9",
    "e\u0301",
    "\u65e5\u672c",
    "12",
]
PIECES += [
    "3",
    "!",
    "'s",
    "<|a|>",
    "<|a|>b",
    "|>x",
    "ab",
    "abc",
    "cd",
    "\ufb01",
    "\uff21",
    "x" * 30,
    "\u200b",
    "\u2581",
]
PIECES += ["\u00a0", "<0x41>", "<s>", "##", "\r\n", "\U0001f600", "\u0130", "\x00"]
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
)
CL100K += r"\s+(?!\S)|\s+"
LAST = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
FRONT = {"type": "Prepend", "prepend": "\u2581"}


def texts(seed: int, count: int) -> list[str]:
    drawn = random.Random(seed)
    return [
        "".join(drawn.choice(PIECES) for _ in range(drawn.randint(0, 14))) for _ in range(count)
    ]


@cache
def trained(kind: str) -> str:
    """Return a small tokenizer.json: BPE on bytes, or that of sentencepiece with tokens of
    bytes.
    """
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        special = ["<|endoftext|>"]
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        alphabet = []
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        made.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581+[^\u2581]*"), "isolated")
        special = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    plain = [text.replace("<0x41>", "") for text in texts(1, 200)]
    made.train_from_iterator(plain, trainer)
    body = json.loads(made.to_str())
    if kind != "bytes":
        body["pre_tokenizer"] = None
        body["added_tokens"] = body["added_tokens"][:1]
    return json.dumps(body)


def body_of(kind: str) -> Body:
    found: Body = json.loads(trained(kind))
    return found


def added(body: Body, content: str, **flags: bool) -> Body:
    ids = [*body["model"]["vocab"].values(), *(token["id"] for token in body["added_tokens"])]
    token = {
        "id": body["model"]["vocab"].get(content, max(ids) + 1),
        "content": content,
        "special": True,
    }
    flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), **flags}
    body["added_tokens"].append({**token, **flags})
    return body


def split(behavior: str, *, invert: bool, last: Body = LAST) -> Body:
    cut = {"type": "Split", "pattern": {"Regex": CL100K}, "behavior": behavior, "invert": invert}
    return {"type": "Sequence", "pretokenizers": [cut, last]}


CHANGES: dict[str, tuple[str, Callable[[Body], Any]]] = {
    "has single_word": ("bytes", lambda b: added(b, "tool", single_word=True)),
    "has lstrip": ("bytes", lambda b: added(b, "tool", lstrip=True)),
    "has rstrip": ("llama", lambda b: added(b, "tool", rstrip=True)),
    "are of different kinds": ("bytes", lambda b: (added(b, "ab"), added(b, "bc", special=False))),
    "'abc' and 'b' may share letters": (
        "bytes",
        lambda b: (added(b, "abc"), added(b, "b", normalized=True)),
    ),
    "found in text that is normalized": ("llama", lambda b: added(b, "tool", normalized=True)),
    "an added token without characters": ("bytes", lambda b: added(b, "")),
    "a key regex, which is not known": ("bytes", lambda b: b["added_tokens"][0].update(regex=True)),
    "left out by chance": ("bytes", lambda b: b["model"].update(dropout=0.1)),
    "has end_of_word_suffix": ("bytes", lambda b: b["model"].update(end_of_word_suffix="</w>")),
    "a key scores, which is not known": ("bytes", lambda b: b["model"].update(scores=[1])),
    "lacks a letter for some byte": ("bytes", lambda b: b["model"]["vocab"].pop("\u0100")),
    "not written in the letters of bytes": (
        "bytes",
        lambda b: b["model"]["vocab"].update({"\u65e5": 900}),
    ),
    "its model is Unigram": ("bytes", lambda b: b["model"].update(type="Unigram")),
    "its normalizer is Lowercase": ("bytes", lambda b: b.update(normalizer={"type": "Lowercase"})),
    "does not end with ByteLevel": ("bytes", lambda b: b.update(pre_tokenizer=None)),
    "puts a space in front": ("bytes", lambda b: b["pre_tokenizer"].update(add_prefix_space=True)),
    "or not at all": ("bytes", lambda b: b["pre_tokenizer"].update(use_regex=False)),
    "cuts words twice": (
        "bytes",
        lambda b: b.update(
            pre_tokenizer=split("Isolated", invert=False, last={**LAST, "use_regex": True})
        ),
    ),
    "its pre-tokenizer has Split": (
        "bytes",
        lambda b: b.update(pre_tokenizer=split("Removed", invert=False)),
    ),
    "has Digits": (
        "bytes",
        lambda b: b.update(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, LAST],
            }
        ),
    ),
    "which stands for a byte": (
        "llama",
        lambda b: (
            b["model"]["vocab"].update({"<0x": 900}),
            b["model"]["merges"].append(["<0x", "41>"]),
        ),
    ),
    "lacks a token for some byte": ("llama", lambda b: b["model"]["vocab"].pop("<0x00>")),
    "and has tokens of bytes": ("llama", lambda b: b["model"].update(ignore_merges=True)),
    "its normalizer has Strip": (
        "llama",
        lambda b: b["normalizer"]["normalizers"].insert(
            0, {"type": "Strip", "strip_left": True, "strip_right": True}
        ),
    ),
    "has Whitespace": ("llama", lambda b: b.update(pre_tokenizer={"type": "Whitespace"})),
    "it has no pre-tokenizer, and it has no normalizer": (
        "llama",
        lambda b: b.update(normalizer=None),
    ),
}


@pytest.mark.parametrize("said", CHANGES)
def test_fast_features_names_what_gigatoken_may_differ_in(said: str) -> None:
    from mtrain.data.preprocess.gigatoken import unsupported

    kind, change = CHANGES[said]
    body = body_of(kind)
    assert unsupported(body) == ""
    change(body)
    assert said in unsupported(body)


def test_fast_features_whole_word_token_falls_back_with_note(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(added(body_of("bytes"), "tool", single_word=True, special=False)))
    (tmp_path / "docs.jsonl").write_text(
        '{"text": "a tool"}\n{"text": "tools of a toolbox retool"}\n'
    )
    words = ["data", "tokenize", "docs.jsonl", "--tokenizer", str(file), "eod=false", "workers=1"]
    fast = light(*words, "--out", "fast", cwd=tmp_path)
    assert fast.returncode == 0, fast.stderr
    assert "gigatoken is not used" in fast.stderr
    assert "its token 'tool' has single_word" in fast.stderr
    assert "by tokenizers" in fast.stdout
    ids = [
        i
        for text in ("a tool", "tools of a toolbox retool")
        for i in Tokenizer.from_file(str(file)).encode(text).ids
    ]
    assert (tmp_path / "fast.bin").read_bytes() == b"".join(i.to_bytes(2, "little") for i in ids)
    named = light(*words, "--out", "named", "engine=gigatoken", cwd=tmp_path)
    assert (named.returncode, "has single_word" in named.stderr) == (2, True)


def drawn(count: int, first: int) -> Iterator[tuple[int, Body]]:
    """Yield tokenizers with features at random, of which many are not allowed."""
    for seed in range(first, first + count):
        draw = random.Random(seed)
        kind = draw.choice(["bytes", "llama"])
        body = copy.deepcopy(body_of(kind))
        for content in draw.sample(PIECES, draw.randint(0, 4)):
            if all(token["content"] != content for token in body["added_tokens"]):
                rare = {
                    name: draw.random() < 0.05
                    for name in ("single_word", "lstrip", "rstrip", "normalized")
                }
                added(body, content, special=draw.random() < 0.5, **rare)
        body["model"]["ignore_merges"] = draw.random() < 0.2
        if kind == "bytes":
            nfc = {"type": "NFC"}
            body["normalizer"] = draw.choice(
                [None, nfc, {"type": "Sequence", "normalizers": [nfc]}]
            )
            whole = {**LAST, "use_regex": True}
            cuts = [split("Isolated", invert=False), split("Removed", invert=True)]
            body["pre_tokenizer"] = draw.choice([whole, *cuts])
        else:
            both = {"type": "Sequence", "normalizers": [FRONT, SPACES]}
            body["normalizer"] = draw.choice([None, SPACES, both])
            scheme = draw.choice(["always", "first", "never"])
            space = {
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": scheme,
                "split": draw.random() < 0.5,
            }
            body["pre_tokenizer"] = None if body["normalizer"] else space
        yield seed, body


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.full)])
def test_fast_features_gigatoken_equals_tokenizers_where_used(first: int) -> None:
    gigatoken = pytest.importorskip("gigatoken")
    from mtrain.data.preprocess.gigatoken import unsupported

    taken = 0
    for seed, body in drawn(400 if first else 40, first):
        text = json.dumps(body)
        if unsupported(body):
            continue
        some = texts(seed, 60)
        ours = [
            one.ids for one in Tokenizer.from_str(text).encode_batch(some, add_special_tokens=False)
        ]
        theirs = gigatoken.Tokenizer.from_json(text).encode_batch(some, parallel=False).to_list()
        assert theirs == ours, f"seed {seed}"
        taken += 1
    assert taken >= 15
