"""Encoders of each kind of tokenizer: tokenizer.json, GPT-2, BERT, tiktoken and sentencepiece."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from mtrain.config.disk.token_files import EOD_NAMES
from mtrain.data.preprocess.encoder import Encoder, Packer, TokenizerSpec, library
from mtrain.data.preprocess.gigatoken import GigatokenPacker, gigatoken_packer
from mtrain.data.preprocess.pieces import O200K, memory_of
from mtrain.data.text.tokenizer import MAX_ID, check_tokenizer, named_faults
from mtrain.errors import CorruptData


class JsonEncoder(Encoder):
    """An encoder by Hugging Face's tokenizers: tokenizer.json, or GPT-2's or BERT's files."""

    def __init__(
        self, spec: TokenizerSpec, tokenizer: tokenizers.Tokenizer, ends: Sequence[str]
    ) -> None:
        super().__init__(spec)
        self.tokenizer = tokenizer
        # Both serve batches of a model, and would truncate or pad documents here.
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
        passed_over = ""
        if self.spec.engine == "auto":
            fast, passed_over = gigatoken_packer(self, code, self.tokenizer.to_str())
            if fast is not None:
                return fast
        packer = Packer(self, code, memory_of(self.tokenizer, code, self.spec.plain))
        packer.passed_over = passed_over
        return packer


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
            f"{path}: offset {error.start}: not UTF-8, so not a tokenizer.json"
        ) from error
    check_tokenizer(path, text)
    with named_faults(str(path), "not a tokenizer.json"):
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
            raise ValueError("not a mapping of tokens to ids")
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{vocab_file}: not a vocabulary: {str(error)[:200]}") from None
    merges = list[tuple[str, str]]()
    for number, line in enumerate(_lines(merges_file), 1):
        if not line or line.startswith("#version"):
            continue
        left, space, right = line.partition(" ")
        if not space or " " in right:
            raise CorruptData(f"{merges_file}: line {number}: not a merge of two tokens")
        merges.append((left, right))
    with named_faults(merges_file, "not the merges of this vocabulary"):
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
            f"{spec.files[0]}: no line is [UNK], so it is not a vocabulary of WordPiece"
        )
    with named_faults(spec.files[0], "not a vocabulary of WordPiece"):
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


# Patterns that cut texts before tiktoken looks for tokens: Megatron-LM's v1 and v2, and OpenAI's
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
        r"\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": O200K,
}
# Pattern -> the number of tokens in OpenAI's file, and the id of its <|endoftext|>
OFFICIAL = {"gpt2": (50256, 50256), "cl100k": (100256, 100257), "o200k": (199998, 199999)}
# Special tokens that all versions of Llama 3's tokenizer.model, of 128,000 tokens, agree on
LLAMA3 = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eot_id|>": 128009,
}
MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class TiktokenEncoder(Encoder):
    """An encoder by tiktoken: a vocabulary in its own format, or in Megatron-LM's JSON."""

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__(spec)
        module = library("tiktoken", "data", f"{self.file}: a vocabulary of tiktoken")
        of_json = self.file.endswith(".json")
        ranks, special = _ranks_of_json(spec) if of_json else _ranks_of_lines(spec)
        pattern = PATTERNS.get(spec.pattern, spec.pattern)
        with named_faults(self.file, "not a vocabulary of tiktoken"):
            self._encoding = module.Encoding(
                name=Path(self.file).name,
                pat_str=pattern,
                mergeable_ranks=ranks,
                special_tokens=special,
            )
        self._special = special
        self.vocab_size = max([*ranks.values(), *special.values()], default=-1) + 1
        ends = ("</s>",) if of_json else EOD_NAMES
        self.eod = self.chosen_eod(next((special[name] for name in ends if name in special), None))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self.spec.plain:
            return [self._encoding.encode_ordinary(text) for text in texts]
        return [self._encoding.encode(text, allowed_special="all") for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        with named_faults(self.file, "ids cannot be decoded"):
            return self._encoding.decode(list(map(int, ids)))

    def id_of(self, token: str) -> int | None:
        return self._special.get(token)


def _ranks_of_lines(spec: TokenizerSpec) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return tokens and special tokens of a file whose lines are a token in base64 and its rank."""
    file = spec.files[0]
    ranks = dict[bytes, int]()
    for number, line in enumerate(Path(file).read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = _id(int(rank))
        except (ValueError, binascii.Error):
            raise CorruptData(f"{file}: line {number}: not a token in base64 and a rank") from None
    return ranks, dict(spec.special_tokens) or _special(spec.pattern, ranks)


def _special(pattern: str, ranks: dict[bytes, int]) -> dict[str, int]:
    """Return the special tokens of a file without a list of them.

    They are those of a known vocabulary, or else `<|endoftext|>` after the last token.
    """
    largest = max(ranks.values(), default=-1)
    if pattern == "cl100k" and len(ranks) == largest + 1 == min(LLAMA3.values()):
        return LLAMA3
    many, end = OFFICIAL.get(pattern, (0, 0))
    return {"<|endoftext|>": end if len(ranks) == many else largest + 1}


def _ranks_of_json(spec: TokenizerSpec) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return tokens and special tokens of Megatron-LM's JSON: special tokens have the first ids."""
    file = spec.files[0]
    first = spec.num_special_tokens
    try:
        body = json.loads(Path(file).read_bytes())
        # Megatron-LM's default is a vocabulary of 2^17 ids, special tokens included
        size = 1 << 17 if spec.vocab_size is None else spec.vocab_size
        listed = body[: max(0, size - first)]
        ranks = {
            base64.b64decode(one["token_bytes"]): _id(int(one["rank"])) + first for one in listed
        }
    except (ValueError, KeyError, TypeError, binascii.Error, RecursionError) as error:
        raise CorruptData(
            f"{file}: not a list of token_bytes and ranks: {str(error)[:200]}"
        ) from None
    names = [*MEGATRON_SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(MEGATRON_SPECIAL), first))]
    return ranks, {name: i for i, name in enumerate(names[:first])}


def _id(number: int) -> int:
    if not 0 <= number <= MAX_ID:
        raise ValueError(f"{number} is not a token id")
    return number


class SentencePieceEncoder(Encoder):
    """An encoder by sentencepiece."""

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__(spec)
        module = library("sentencepiece", "data", f"{self.file}: a model of sentencepiece")
        with named_faults(self.file, "not a model of sentencepiece"):
            self._model = module.SentencePieceProcessor(model_proto=Path(self.file).read_bytes())
            self.vocab_size = self._model.get_piece_size()
            self.unk = self._model.unk_id()
            end = self._model.eos_id()
        self.eod = self.chosen_eod(end if end >= 0 else None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), out_type=int, num_threads=1) if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        with named_faults(self.file, "ids cannot be decoded"):
            return self._model.decode(list(map(int, ids)))

    def id_of(self, token: str) -> int | None:
        number = self._model.piece_to_id(token)
        # the library answers an unknown name with the unknown token
        if number == self.unk and self._model.id_to_piece(number) != token:
            return None
        return number

    def unknown_bytes(self, text: str) -> int:
        found = zip(
            self._model.encode(text, out_type=int),
            self._model.encode(text, out_type=str),
            strict=True,
        )
        return sum(
            len(piece.replace("\u2581", " ").encode())
            for number, piece in found
            if number == self.unk
        )


LOADERS = {
    "tokenizer.json": load_tokenizer_json,
    "sentencepiece": SentencePieceEncoder,
    "tiktoken": TiktokenEncoder,
    "gpt2": load_gpt2,
    "bert": load_bert,
}


def load(spec: TokenizerSpec) -> Encoder:
    """Return the tokenizer of a spec.

    Raises:
        CorruptData: a file is not a tokenizer of its kind.
        BadEnvironment: the library of its kind is not installed.
        ConfigError: it lacks the token that the user chose to end documents.
    """
    encoder: Encoder = LOADERS[spec.kind](spec)
    if not 0 < encoder.vocab_size <= MAX_ID + 1:
        raise CorruptData(
            f"{spec.files[0]}: {encoder.vocab_size} token ids; 1 to {MAX_ID + 1} are read"
        )
    return encoder
