"""Pieces of texts that are encoded apart have the ids of the whole, for every tokenizer that is
cut.
"""

from __future__ import annotations

import base64
import unicodedata
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from mtrain.data.preprocess.encoder import find_tokenizer
from mtrain.data.preprocess.pieces import GPT2, LATER, BulkPieces, Pieces, pieces_of
from mtrain.data.preprocess.tokenizers import TiktokenEncoder
from tests.support.token_corpora import TEXTS, documents

LETTERS = (
    *"aZ9'sStTdDlLmMrRvVeE \n\r\t.,;/!?(){}_-\"<|>@#",
    "  ",
    "\n\n",
    "\r\n",
    " \n",
    "'s",
    "'LL",
    "'ve",
    "<|x|>",
    "12345",
    "don't",
    "\x0b",
    "\x1c",
    "\x85",
    "\xa0",
    "é",
    "É",
    "́",
    "東",
    "Ж",
    "ǅ",
    "ª",
    "²",
    "Ⅷ",
    "٣",
    "\u2003",
    "\u200b",
    "\u2028",
    "\U0001f600",
    "ſ",
    "K",
    "\u180e",
)


def trained(pattern: str | None, kind: str = "bpe", normalizer: Any = None) -> tokenizers.Tokenizer:
    if kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "<|x|>"], show_progress=False
        )
    else:
        made = tokenizers.Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
        split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
        if kind == "digits":
            split = [pre_tokenizers.Digits(individual_digits=True)]
        made.pre_tokenizer = pre_tokenizers.Sequence([*split, level]) if split else level
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=alphabet, show_progress=False
        )
        made.decoder = decoders.ByteLevel()
        if normalizer is not None:
            made.normalizer = normalizer
    made.train_from_iterator([*TEXTS, *documents(300, 5), *random_texts(300, 6)], trainer)
    made.add_special_tokens([AddedToken("<|x|>", normalized=False)])
    return made


def random_texts(many: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), rng.integers(0, 40)))
        for _ in range(many)
    ]


CUT = {
    "gpt2": lambda: trained(None),
    "gpt2 by split": lambda: trained(GPT2),
    "llama3": lambda: trained(LATER[0]),
    "qwen2": lambda: trained(LATER[1], normalizer=normalizers.NFC()),
    "gpt4o": lambda: trained(LATER[2]),
    "digits": lambda: trained(None, "digits"),
    "bert": lambda: trained(None, "wordpiece"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("many", [1500, pytest.param(20_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [Pieces, BulkPieces])
def test_pieces_have_ids_of_the_whole_text(
    name: str, many: int, plain: bool, kind: type[Pieces]
) -> None:
    made = CUT[name]()
    made.encode_special_tokens = plain
    pieces = pieces_of(made, "H", plain, kind)
    assert pieces is not None
    texts = [
        *TEXTS,
        *documents(200, 7),
        *random_texts(many // 2, 8),
        *(t for t in random_texts(many, 9) if t.isascii()),
    ]
    whole = [
        array("H", made.encode(text, add_special_tokens=False).ids).tobytes() for text in texts
    ]
    for start in range(0, len(texts), 100):
        found = pieces.pack(texts[start : start + 100])
        for text, one, other in zip(texts[start:], found, whole[start:], strict=False):
            assert one == other, repr(text)


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
@pytest.mark.parametrize("kind", [Pieces, BulkPieces])
def test_pieces_cut_letters_as_the_library(name: str, kind: type[Pieces]) -> None:
    made = CUT[name]()
    pieces = pieces_of(made, "H", False, kind)
    assert pieces is not None
    odd = [
        c
        for c in map(chr, range(0x3100))
        if c.isspace() or not c.isprintable() or unicodedata.category(c) in ("Nl", "No", "Lm")
    ]
    texts = [f"a{c} b{c}\n c {c}{c} d' s{c}" for c in odd if not "\ud800" <= c <= "\udfff"]
    for text, packed in zip(texts, pieces.pack(texts), strict=True):
        assert packed == array("H", made.encode(text, add_special_tokens=False).ids).tobytes(), (
            repr(text)
        )


def test_pieces_wrong_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain.data.preprocess import pieces as module

    made = trained(LATER[0])
    monkeypatch.setattr(module, "NOT_BEHIND_SIGNS", module.AT_SPACES)
    monkeypatch.setitem(module.FINER, LATER[0], module.FINER[GPT2])
    pieces = pieces_of(made, "H", False)
    assert pieces is not None
    texts = [";\nx", "é;\nx", *random_texts(500, 10)]
    whole = [
        array("H", made.encode(text, add_special_tokens=False).ids).tobytes() for text in texts
    ]
    assert pieces.pack(texts) != whole


@pytest.mark.parametrize(
    "step",
    [
        pre_tokenizers.Metaspace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\w+"), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        ),
    ],
)
def test_pieces_unknown_tokenizer_is_not_cut(step: Any) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = step
    assert pieces_of(made, "H", False) is None
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert pieces_of(made, "H", False) is not None
    made.normalizer = normalizers.Lowercase()
    assert pieces_of(made, "H", False) is None


def test_pieces_names_behind_a_normalizer_are_not_cut() -> None:
    made = trained(None, "wordpiece")
    assert pieces_of(made, "H", False) is not None
    made.add_tokens([AddedToken("Two Words", normalized=True)])
    assert made.encode("two words", add_special_tokens=False).ids == [made.token_to_id("Two Words")]
    assert pieces_of(made, "H", False) is None


def test_pieces_llama3_ends_documents_with_own_token(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_text(
        "".join(f"{base64.b64encode(b'%06x' % i).decode()} {i}\n" for i in range(128_000))
    )
    spec = find_tokenizer(file, pattern="cl100k")
    assert spec.kind == "tiktoken"
    made = TiktokenEncoder(spec)
    assert (made.eod, made.id_of("<|begin_of_text|>"), made.id_of("<|eot_id|>")) == (
        128_001,
        128_000,
        128_009,
    )
