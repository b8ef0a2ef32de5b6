"""Training of a tokenizer on documents, by Hugging Face's tokenizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mtrain import durable
from mtrain.data.preprocess.journal import disk
from mtrain.data.preprocess.readers import cut, documents, surrogate_fault
from mtrain.data.preprocess.record import Reading, Rejected, refuse_misread
from mtrain.data.preprocess.sources import Part, Source, plan
from mtrain.errors import ConfigError, CorruptInput

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
    """Bytes so far."""
    rejected: list[str] = field(default_factory=list)
    by: Counter[str] = field(default_factory=Counter)
    """Learning flag -> number of records that it excludes."""
    _records: Counter[int] = field(default_factory=Counter)
    """Source -> records of the parts that were read."""

    def __iter__(self) -> Iterator[str]:
        for unit in plan(self.sources, self.reading, cut):
            for part in unit:
                yield from self._of_part(part)
                if self.read >= self.limit:
                    return

    def _of_part(self, part: Part) -> Iterator[str]:
        source = self.sources[part.source]
        before = self._records[part.source]
        number = 0
        for number, found in documents(part, source, self.reading):
            place = f"{source.name}:{before + number}" if number else source.name
            if isinstance(found, Rejected):
                refuse_misread(found, source.name, before + number)
                self.by.update(found.by)
                self._reject(f"{place}: {found.why}")
                continue
            for text in [found] if isinstance(found, str) else found or ():
                try:
                    self.read += len(text.encode())
                except UnicodeEncodeError as error:
                    self._reject(f"{place}: {surrogate_fault(error)}")
                    continue
                yield text
            if self.read >= self.limit:
                return
        self._records[part.source] += number

    def _reject(self, why: str) -> None:
        self.rejected.append(why)
        if (many := len(self.rejected)) > self.max_rejects:
            rule = f"{many} records are left out so far; the last: {why}"
            fix = f"correct them, or max_rejects={2 * many}"
            raise CorruptInput.of(
                "MT621", "max_rejects", self.max_rejects, rule, fix, "command line"
            )


def train(
    texts: Texts, kind: str, vocab_size: int, special: Sequence[str], lower_case: bool
) -> tokenizers.Tokenizer:
    """Return a tokenizer of at most `vocab_size` tokens, special tokens first.

    Raises:
        ConfigError: there is no text, its letters and the special tokens already exceed the size,
            or a learning flag of a record is neither yes nor no.
        CorruptInput: too many records have no text.
    """
    # the trainers would take this number of tokens without a word; WordPiece has no fixed alphabet
    if kind != "wordpiece":
        _refuse_small(vocab_size, len({*pre_tokenizers.ByteLevel.alphabet(), *special}))
    made, trainer = _untrained(kind, vocab_size, special, lower_case)
    made.train_from_iterator(iter(texts), trainer)
    if not texts.read:
        first = f", as {texts.rejected[0]}" if texts.rejected else ""
        rule = f"the inputs have no text; {len(texts.rejected)} records are left out{first}"
        raise ConfigError.of(
            "MT601", "input", None, rule, "name files with documents, or key=NAME", "command line"
        )
    _refuse_small(vocab_size, made.get_vocab_size())
    return made


def _refuse_small(vocab_size: int, least: int) -> None:
    if vocab_size < least:
        rule = f"cannot be kept because letters and special tokens already are {least} tokens"
        raise ConfigError.of(
            "MT003", "vocab_size", vocab_size, rule, f"vocab_size={least}", "command line"
        )


def _untrained(
    kind: str, vocab_size: int, special: Sequence[str], lower_case: bool
) -> tuple[tokenizers.Tokenizer, Any]:
    common: dict[str, Any] = {"vocab_size": vocab_size, "show_progress": False}
    # the steps and the special tokens of Google's BERT
    if kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token=OF_BERT[1]))
        made.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        names = [*OF_BERT, *(name for name in special if name not in OF_BERT)]
        return made, trainers.WordPieceTrainer(special_tokens=names, **common)
    # all 256 bytes, so that no text has an unknown token
    letters = pre_tokenizers.ByteLevel.alphabet()
    if kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            special_tokens=list(special), initial_alphabet=letters, **common
        )
    else:
        made = tokenizers.Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            special_tokens=list(special), initial_alphabet=letters, **common
        )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made, trainer


def save(made: tokenizers.Tokenizer, out: Path) -> None:
    """Write a tokenizer.json, which appears only when it is complete.

    Raises:
        BadEnvironment: the disk cannot be written.
    """
    with disk(out):
        draft = out.with_name(f".{out.name}.new")
        durable.write(draft, made.to_str(pretty=True).encode())
        draft.replace(out)
