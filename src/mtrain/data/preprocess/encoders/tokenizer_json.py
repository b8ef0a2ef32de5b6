"""A tokenizer.json, and the older vocabularies of which Hugging Face's tokenizers makes one:
GPT-2's and BERT's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from mtrain.config.disk.token_files import EOD_NAMES
from mtrain.data.preprocess.encoders.base import Encoder, Packer, named_faults
from mtrain.data.preprocess.encoders.bulk_pieces import memory_of
from mtrain.data.preprocess.encoders.gigatoken import GigatokenPacker, gigatoken_packer
from mtrain.data.preprocess.encoders.spec import TokenizerSpec
from mtrain.data.text.tokenizer import MAX_ID, check_tokenizer
from mtrain.errors import CorruptData


class JsonEncoder(Encoder):
    """A tokenizer.json, or a vocabulary that Hugging Face's tokenizers makes one of."""

    def __init__(
        self, spec: TokenizerSpec, tokenizer: tokenizers.Tokenizer, ends: Sequence[str]
    ) -> None:
        super().__init__(spec)
        self.tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = spec.plain
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod = self.chosen_eod(
            next((i for i in map(tokenizer.token_to_id, ends) if i is not None), None)
        )
        model = json.loads(tokenizer.to_str())["model"]
        named = model.get("unk_token")
        self.unk = tokenizer.token_to_id(named) if isinstance(named, str) else model.get("unk_id")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            e.ids for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        with named_faults(self.file, "ids cannot be decoded"):
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def unknown_bytes(self, text: str) -> int:
        found = self.tokenizer.encode(text, add_special_tokens=False)
        spans = [
            span
            for number, span in zip(found.ids, found.offsets, strict=True)
            if number == self.unk
        ]
        return sum(len(text[a:b].encode()) for a, b in spans)

    def packer(self, code: str) -> Packer:
        if self.spec.engine == "gigatoken":
            return GigatokenPacker(self, code, self.tokenizer.to_str())
        why = ""
        if self.spec.engine == "auto":
            fast, why = gigatoken_packer(self, code, self.tokenizer.to_str())
            if fast is not None:
                return fast
        made = Packer(self, code, memory_of(self.tokenizer, code, self.spec.plain))
        made.passed_over = why
        return made


def load_tokenizer_json(spec: TokenizerSpec) -> Encoder:
    """Return the encoder of a tokenizer.json.

    Documents end with the `eos_token` of the tokenizer_config.json next to it, or a token of a
    known name.
    """
    path = Path(spec.files[0])
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CorruptData(
            f"{path}: offset {error.start}: not UTF-8, so no tokenizer.json"
        ) from error
    check_tokenizer(path, text)
    with named_faults(str(path), "no tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        return JsonEncoder(spec, tokenizer, [*_end_in_settings(path), *EOD_NAMES])


def _end_in_settings(path: Path) -> list[str]:
    """Return the `eos_token` of the tokenizer_config.json next to a tokenizer.json."""
    settings = path.with_name("tokenizer_config.json")
    if not settings.is_file() or settings.stat().st_size > 1 << 24:
        return []
    try:
        token = json.loads(settings.read_bytes())["eos_token"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def load_gpt2(spec: TokenizerSpec) -> Encoder:
    """Return the encoder of a `vocab.json` and `merges.txt`, with GPT-2's pre-tokenizer."""
    from tokenizers import decoders, models, pre_tokenizers

    vocab_file, merges_file = spec.files
    try:
        vocab = json.loads(Path(vocab_file).read_bytes())
        if not isinstance(vocab, dict) or not all(
            type(i) is int and 0 <= i <= MAX_ID for i in vocab.values()
        ):
            raise ValueError("no mapping of tokens to ids")
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{vocab_file}: no vocabulary: {str(error)[:200]}") from None
    merges = list[tuple[str, str]]()
    for number, line in enumerate(_lines(merges_file), 1):
        if not line or line.startswith("#version"):
            continue
        left, space, right = line.partition(" ")
        if not space or " " in right:
            raise CorruptData(f"{merges_file}: line {number}: is no merge of two tokens")
        merges.append((left, right))
    with named_faults(merges_file, "no merges of this vocabulary"):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if EOD_NAMES[0] in vocab:
            tokenizer.add_special_tokens(
                [tokenizers.AddedToken(EOD_NAMES[0], normalized=False, special=True)]
            )
    return JsonEncoder(spec, tokenizer, EOD_NAMES)


def load_bert(spec: TokenizerSpec) -> Encoder:
    """Return the encoder of a `vocab.txt` of BERT's WordPiece, one token a line."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(_lines(spec.files[0]))}
    if "[UNK]" not in vocab:
        raise CorruptData(
            f"{spec.files[0]}: no line says [UNK], so it is no vocabulary of WordPiece"
        )
    with named_faults(spec.files[0], "no vocabulary of WordPiece"):
        tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=spec.lower_case)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        names = [name for name in ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]") if name in vocab]
        tokenizer.add_special_tokens(
            [tokenizers.AddedToken(name, normalized=False, special=True) for name in names]
        )
    return JsonEncoder(spec, tokenizer, ("[SEP]",))


def _lines(file: str) -> list[str]:
    try:
        text = Path(file).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CorruptData(f"{file}: offset {error.start}: not UTF-8") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
