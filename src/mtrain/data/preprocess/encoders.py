"""Tokenizers of five kinds as one: texts become ids, packed in the dtype of the corpus.

Libraries of kinds that not everybody needs are extras. What a library raises, or fails with, names the file.
"""

from __future__ import annotations

import base64
import binascii
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mtrain.config.token_files import EOD_NAMES
from mtrain.data.preprocess.pieces import Pieces, pieces_of
from mtrain.data.preprocess.spec import TokenizerSpec
from mtrain.data.token_json import MAX_ID, check_tokenizer
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, MtrainError, Problem

CODES = {"uint16": "H", "int32": "i"}
FORGETS = 64 << 20
SAMPLE = (
    *(
        "The quick brown fox.",
        "It's 12345; don't  WE'LL\n\n\tx = y**2\r\n",
        "",
        " ",
        "  a  ",
        "\n",
        "a\x00b\x0b\x1c\x85c",
    ),
    *(
        "na\u00efve caf\u00e9 cafe\u0301 \u201cquotes\u201d\u2026",
        "\u6771\u4eac\u30bf\u30ef\u30fc \ud55c\uad6d\uc5b4",
        "\U0001f600\U0001f468\u200d\U0001f469",
        "\ufb01 \u2168 \u0663\u00b2 \u01c5",
    ),
    *(
        "<|endoftext|> </s> [SEP] <unk>",
        "\u043f\u0440\u0438\u0432\u0435\u0442 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
        "x" * 300,
        "1" * 300,
        "=" * 100 + " " * 100 + "z",
    ),
)
"""Texts on which gigatoken is to have the ids of tokenizers before it is taken."""
CHECKED = 32
"""Texts whose pieces are compared with the whole, by each process."""


@contextmanager
def faults_named(file: str, what: str) -> Iterator[None]:
    """What a library raises, which is bare Exception or, where its own code fails, no Exception at all."""
    try:
        yield
    except (MtrainError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorruptData(f"{file}: {what}: {' '.join(str(error).split())[:300]}") from None


def library(name: str, extra: str, what: str) -> Any:
    """A module of an extra.

    Raises:
        BadEnvironment: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        said = f"{what} needs {name.partition('.')[0]}, which is not installed"
        raise BadEnvironment(said, f"  fix: pip install 'mtrain[{extra}]'") from error


class Encoder(ABC):
    """A tokenizer that is loaded."""

    vocab_size: int
    """One more than the largest id."""
    eod: int | None
    """Id that ends a document; None: none is known."""
    unk: int | None = None
    """Id of what is not in the vocabulary."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.spec, self.file = spec, spec.files[0]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around them."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens with their names."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """Id of a token; None: there is none of the name."""

    def unknown_bytes(self, text: str) -> int:
        """Bytes of a text that the unknown token stands for."""
        return 0

    def packer(self, code: str) -> Packer:
        """What packs texts as items of an `array` code."""
        return Packer(self, code, None)

    def chosen_eod(self, found: int | None) -> int | None:
        """The id of the token that was chosen to end documents, or what the tokenizer says.

        Raises:
            ConfigError: there is no token of the chosen name.
        """
        name = self.spec.eod_token
        if name is None:
            return found
        number = self.id_of(name)
        if number is None:
            rule = f"{self.file} has no token of this name"
            raise ConfigError(
                [Problem("MT603", "eod_token", name, rule, "eod_token=NAME of a token", "command line")]
            )
        return number


class Packer:
    """Texts to the bytes of their ids."""

    engine = "tokenizers"
    """The library that encodes, of those that encode with a tokenizer.json."""

    def __init__(self, encoder: Encoder, code: str, pieces: Pieces | None) -> None:
        self._encoder, self._code, self._pieces = encoder, code, pieces
        self._checked = 0

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text.

        Raises:
            CorruptData: the tokenizer cannot encode one, or an id does not fit the dtype.
        """
        if self._pieces is None:
            return self._whole(texts)
        with faults_named(self._encoder.file, "a text cannot be encoded"):
            packed = self._pieces.pack(texts)
        if self._checked < CHECKED:
            self._checked += len(texts[:CHECKED])
            if packed[:CHECKED] != self._whole(texts[:CHECKED]):
                self._pieces = None  # a library that cuts in another way than it is known to
                return self._whole(texts)
        return packed

    def _whole(self, texts: Sequence[str]) -> list[bytes]:
        with faults_named(self._encoder.file, "a text cannot be encoded"):
            found = self._encoder.encode(texts)
        try:
            return [array(self._code, ids).tobytes() for ids in found]
        except OverflowError:
            worst = max(max(ids, default=0) for ids in found)
            raise CorruptData(
                f"{self._encoder.file}: token id {worst} does not fit the dtype of the corpus"
            ) from None


class OfGigatoken(Packer):
    """Texts by gigatoken, which is some ten times as fast; texts of every batch are compared with the tokenizer's own.

    It remembers all words that it met, so it is made again after `FORGETS` bytes.
    """

    engine = "gigatoken"

    def __init__(self, encoder: Encoder, code: str, body: str) -> None:
        super().__init__(encoder, code, None)
        self._library = library("gigatoken", "gigatoken", "engine=gigatoken")
        self._awkward = library("awkward", "gigatoken", "engine=gigatoken")
        self._body, self._read = body, FORGETS
        if encoder.spec.plain:
            rule = "gigatoken finds the names of special tokens in documents, and special=text wants them as text"
            raise ConfigError([Problem("MT603", "engine", "gigatoken", rule, "engine=tokenizers", "command line")])

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text.

        Raises:
            CorruptData: they are not those of the tokenizer.
        """
        if not texts:
            return []
        with faults_named(self._encoder.file, "gigatoken cannot encode"):
            if self._read >= FORGETS:
                self._made, self._read = self._library.Tokenizer.from_json(self._body), 0
            found = self._made.encode_batch(list(texts), parallel=False)
            ids = self._awkward.to_numpy(self._awkward.flatten(found)).astype(self._code)
            ends = np.cumsum(self._awkward.to_numpy(self._awkward.num(found)), dtype=np.int64) * ids.itemsize
        self._read += sum(map(len, texts))
        data, begin, out = ids.tobytes(), 0, list[bytes]()
        for end in ends.tolist():
            out.append(data[begin:end])
            begin = end
        self._compare(texts, out)
        return out

    def _compare(self, texts: Sequence[str], packed: list[bytes]) -> None:
        many = max(1, CHECKED - self._checked)
        self._checked += many
        if packed[:many] != self._whole(texts[:many]):
            said = f"{self._encoder.file}: gigatoken gives other ids than tokenizers for a text"
            raise CorruptData(said, "  fix: engine=tokenizers fresh=true")


class OfJson(Encoder):
    """A tokenizer.json, or a vocabulary that Hugging Face's tokenizers makes one of."""

    def __init__(self, spec: TokenizerSpec, tokenizer: tokenizers.Tokenizer, ends: Sequence[str]) -> None:
        super().__init__(spec)
        self.tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = spec.plain
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod = self.chosen_eod(next((i for i in map(tokenizer.token_to_id, ends) if i is not None), None))
        model = json.loads(tokenizer.to_str())["model"]
        named = model.get("unk_token")
        self.unk = tokenizer.token_to_id(named) if isinstance(named, str) else model.get("unk_id")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        with faults_named(self.file, "ids cannot be decoded"):
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def unknown_bytes(self, text: str) -> int:
        found = self.tokenizer.encode(text, add_special_tokens=False)
        spans = [span for number, span in zip(found.ids, found.offsets, strict=True) if number == self.unk]
        return sum(len(text[a:b].encode()) for a, b in spans)

    def packer(self, code: str) -> Packer:
        if self.spec.engine == "gigatoken":
            return OfGigatoken(self, code, self.tokenizer.to_str())
        if self.spec.engine == "auto" and not self.spec.plain and find_spec("gigatoken") is not None:
            with suppress(MtrainError):
                fast = OfGigatoken(self, code, self.tokenizer.to_str())
                fast.pack(SAMPLE)
                return fast
        return Packer(self, code, pieces_of(self.tokenizer, code, self.spec.plain))


class OfSentencePiece(Encoder):
    """A model of sentencepiece, by its library."""

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__(spec)
        module = library("sentencepiece", "data", f"{self.file}: a model of sentencepiece")
        with faults_named(self.file, "no model of sentencepiece"):
            self._model = module.SentencePieceProcessor(model_proto=Path(self.file).read_bytes())
            self.vocab_size = self._model.get_piece_size()
            self.unk = self._model.unk_id()
            end = self._model.eos_id()
        self.eod = self.chosen_eod(end if end >= 0 else None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), out_type=int, num_threads=1) if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(map(int, ids)))

    def id_of(self, token: str) -> int | None:
        number = self._model.piece_to_id(token)
        return None if number == self.unk and self._model.id_to_piece(number) != token else number

    def unknown_bytes(self, text: str) -> int:
        found = zip(self._model.encode(text, out_type=int), self._model.encode(text, out_type=str), strict=True)
        return sum(len(piece.replace("\u2581", " ").encode()) for number, piece in found if number == self.unk)


PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
        r"\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""How texts are cut before tiktoken looks for tokens: Megatron-LM's v1 and v2, and OpenAI's."""
OFFICIAL = {"gpt2": (50256, 50256), "cl100k": (100256, 100257), "o200k": (199998, 199999)}
"""Of a pattern: tokens that the published file has, and the id of its <|endoftext|>."""
MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class OfTiktoken(Encoder):
    """A vocabulary of tiktoken: its own lines, or Megatron-LM's JSON."""

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__(spec)
        module = library("tiktoken", "data", f"{self.file}: a vocabulary of tiktoken")
        of_json = self.file.endswith(".json")
        ranks, special = _ranks_of_json(spec) if of_json else _ranks_of_lines(spec)
        pattern = PATTERNS.get(spec.pattern, spec.pattern)
        with faults_named(self.file, "no vocabulary of tiktoken"):
            self._encoding = module.Encoding(
                name=Path(self.file).name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
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
        with faults_named(self.file, "ids cannot be decoded"):
            return self._encoding.decode(list(map(int, ids)))

    def id_of(self, token: str) -> int | None:
        return self._special.get(token)


def _ranks_of_lines(spec: TokenizerSpec) -> tuple[dict[bytes, int], dict[str, int]]:
    """Tokens and special tokens of a file whose lines are a token in base64 and its rank."""
    file, ranks = spec.files[0], dict[bytes, int]()
    for number, line in enumerate(Path(file).read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = _id(int(rank))
        except (ValueError, binascii.Error):
            raise CorruptData(f"{file}: line {number}: is not a token in base64 and a rank") from None
    largest = max(ranks.values(), default=-1)
    official = OFFICIAL.get(spec.pattern, (0, 0))
    end = official[1] if len(ranks) == official[0] else largest + 1
    return ranks, dict(spec.special_tokens) or {"<|endoftext|>": end}


def _ranks_of_json(spec: TokenizerSpec) -> tuple[dict[bytes, int], dict[str, int]]:
    """Tokens and special tokens of Megatron-LM's form: a list of ranks, behind the ids of special tokens."""
    file, first = spec.files[0], spec.num_special_tokens
    try:
        body = json.loads(Path(file).read_bytes())
        most = len(body) if spec.vocab_size is None else spec.vocab_size - first
        listed = body[: max(0, min(most, (1 << 17) - first if spec.vocab_size is None else most))]
        ranks = {base64.b64decode(one["token_bytes"]): _id(int(one["rank"])) + first for one in listed}
    except (ValueError, KeyError, TypeError, binascii.Error, RecursionError) as error:
        raise CorruptData(f"{file}: no list of token_bytes and ranks: {str(error)[:200]}") from None
    names = [*MEGATRON_SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(MEGATRON_SPECIAL), first))]
    return ranks, {name: i for i, name in enumerate(names[:first])}


def _id(number: int) -> int:
    if not 0 <= number <= MAX_ID:
        raise ValueError(f"{number} is no token id")
    return number


def _of_json_file(spec: TokenizerSpec) -> Encoder:
    path = Path(spec.files[0])
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CorruptData(f"{path}: offset {error.start}: not UTF-8, so no tokenizer.json") from error
    check_tokenizer(path, text)
    with faults_named(str(path), "no tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        return OfJson(spec, tokenizer, [*_end_in_settings(path), *EOD_NAMES])


def _end_in_settings(path: Path) -> list[str]:
    """The `eos_token` of a tokenizer_config.json beside a tokenizer.json."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file() or beside.stat().st_size > 1 << 24:
        return []
    try:
        token = json.loads(beside.read_bytes())["eos_token"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def _of_gpt2(spec: TokenizerSpec) -> Encoder:
    """`vocab.json` and `merges.txt`, cut as GPT-2 cuts."""
    from tokenizers import decoders, models, pre_tokenizers

    vocab_file, merges_file = spec.files
    try:
        vocab = json.loads(Path(vocab_file).read_bytes())
        if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i <= MAX_ID for i in vocab.values()):
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
    with faults_named(merges_file, "no merges of this vocabulary"):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if EOD_NAMES[0] in vocab:
            tokenizer.add_special_tokens([tokenizers.AddedToken(EOD_NAMES[0], normalized=False, special=True)])
    return OfJson(spec, tokenizer, EOD_NAMES)


def _of_bert(spec: TokenizerSpec) -> Encoder:
    """`vocab.txt`, a token a line: BERT's normalization, cutting and WordPiece."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(_lines(spec.files[0]))}
    if "[UNK]" not in vocab:
        raise CorruptData(f"{spec.files[0]}: no line says [UNK], so it is no vocabulary of WordPiece")
    with faults_named(spec.files[0], "no vocabulary of WordPiece"):
        tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=spec.lower_case)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        names = [name for name in ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]") if name in vocab]
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in names])
    return OfJson(spec, tokenizer, ("[SEP]",))


def _lines(file: str) -> list[str]:
    try:
        text = Path(file).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CorruptData(f"{file}: offset {error.start}: not UTF-8") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


LOADERS = {
    "tokenizer.json": _of_json_file,
    "sentencepiece": OfSentencePiece,
    "tiktoken": OfTiktoken,
    "gpt2": _of_gpt2,
    "bert": _of_bert,
}


def load(spec: TokenizerSpec) -> Encoder:
    """The tokenizer of a spec.

    Raises:
        CorruptData: a file is not what it should be.
        BadEnvironment: the library of its kind is not installed.
        ConfigError: it has no token that is chosen to end documents.
    """
    encoder: Encoder = LOADERS[spec.kind](spec)
    if not 0 < encoder.vocab_size <= MAX_ID + 1:
        raise CorruptData(f"{spec.files[0]}: {encoder.vocab_size} token ids; 1 to {MAX_ID + 1} are read")
    return encoder
