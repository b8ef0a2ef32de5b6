"""Trains a tokenizer on documents, by Hugging Face's tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mtrain.data.preprocess import tables
from mtrain.data.preprocess.readers import documents
from mtrain.data.preprocess.record import Reading, Rejected
from mtrain.data.preprocess.sources import Source
from mtrain.data.preprocess.units import plan
from mtrain.errors import ConfigError, CorruptInput, Problem

KINDS = ("bpe", "wordpiece", "unigram")
OF_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass
class Texts:
    """The texts of sources, one after the other, up to a limit of bytes."""

    sources: Sequence[Source]
    reading: Reading
    limit: int
    max_rejects: int
    read: int = 0
    rejected: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        for unit in plan(self.sources, self.reading, tables.cut):
            for part in unit:
                source = self.sources[part.source]
                for number, found in documents(part, source, self.reading):
                    if isinstance(found, Rejected):
                        self._reject(f"{source.name}: record {number} of a part: {found.why}")
                        continue
                    for text in [found] if isinstance(found, str) else found:
                        if not text.isascii() and not _is_utf8(text):
                            self._reject(f"{source.name}: record {number} of a part: half of a letter")
                            continue
                        self.read += len(text)
                        yield text
                    if self.read >= self.limit:
                        return

    def _reject(self, why: str) -> None:
        self.rejected.append(why)
        if len(self.rejected) > self.max_rejects:
            rule = f"more records are left out; the last: {why}"
            fix = "correct them, or a larger max_rejects"
            raise CorruptInput([Problem("MT621", "max_rejects", self.max_rejects, rule, fix, "command line")])


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def train(texts: Texts, kind: str, vocab_size: int, special: Sequence[str], lower_case: bool) -> tokenizers.Tokenizer:
    """A tokenizer of at most so many tokens, special tokens first.

    Raises:
        ConfigError: there was no text.
        CorruptInput: too many records had none.
    """
    made, trainer = _untrained(kind, vocab_size, special, lower_case)
    made.train_from_iterator(iter(texts), trainer)
    if not texts.read:
        first = f", as {texts.rejected[0]}" if texts.rejected else ""
        rule = f"the inputs hold no text; {len(texts.rejected)} records are left out{first}"
        raise ConfigError(
            [Problem("MT601", "input", None, rule, "name files with documents, or key=NAME", "command line")]
        )
    return made


def _untrained(
    kind: str, vocab_size: int, special: Sequence[str], lower_case: bool
) -> tuple[tokenizers.Tokenizer, Any]:
    common: dict[str, Any] = {"vocab_size": vocab_size, "show_progress": False}
    if kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token=OF_BERT[1]))
        made.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        names = [*OF_BERT, *(name for name in special if name not in OF_BERT)]
        return made, trainers.WordPieceTrainer(special_tokens=names, **common)
    letters = pre_tokenizers.ByteLevel.alphabet()
    if kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(special_tokens=list(special), initial_alphabet=letters, **common)
    else:
        made = tokenizers.Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(special_tokens=list(special), initial_alphabet=letters, **common)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made, trainer


def save(made: tokenizers.Tokenizer, out: Path) -> None:
    """Write a tokenizer.json, there when it is whole."""
    beside = out.with_name(f".{out.name}.new")
    beside.write_text(made.to_str(pretty=True), encoding="utf-8")
    beside.replace(out)
