"""A vocabulary of tiktoken, by its library, which is in the extra `data`: its own lines, or
Megatron-LM's JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path

from mtrain.config.disk.token_files import EOD_NAMES
from mtrain.data.preprocess.encoders.base import Encoder, library, named_faults
from mtrain.data.preprocess.encoders.spec import TokenizerSpec
from mtrain.data.text.tokenizer import MAX_ID
from mtrain.errors import CorruptData

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
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""How texts are cut before tiktoken looks for tokens: Megatron-LM's v1 and v2, and OpenAI's."""
OFFICIAL = {"gpt2": (50256, 50256), "cl100k": (100256, 100257), "o200k": (199998, 199999)}
"""Of a pattern: tokens that the published file has, and the id of its <|endoftext|>."""
LLAMA3 = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eot_id|>": 128009,
}
"""Special tokens of Llama 3's tokenizer.model, which has 128000 tokens, that are the same in all of
its versions.
"""
MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class TiktokenEncoder(Encoder):
    """A vocabulary of tiktoken: its own lines, or Megatron-LM's JSON."""

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__(spec)
        module = library("tiktoken", "data", f"{self.file}: a vocabulary of tiktoken")
        of_json = self.file.endswith(".json")
        ranks, special = _ranks_of_json(spec) if of_json else _ranks_of_lines(spec)
        pattern = PATTERNS.get(spec.pattern, spec.pattern)
        with named_faults(self.file, "no vocabulary of tiktoken"):
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
            raise CorruptData(
                f"{file}: line {number}: is not a token in base64 and a rank"
            ) from None
    return ranks, dict(spec.special_tokens) or _special(spec.pattern, ranks)


def _special(pattern: str, ranks: dict[bytes, int]) -> dict[str, int]:
    """Return the special tokens of a file that says none: those that are known of it, or one behind
    its tokens.
    """
    largest = max(ranks.values(), default=-1)
    if pattern == "cl100k" and len(ranks) == largest + 1 == min(LLAMA3.values()):
        return LLAMA3
    many, end = OFFICIAL.get(pattern, (0, 0))
    return {"<|endoftext|>": end if len(ranks) == many else largest + 1}


def _ranks_of_json(spec: TokenizerSpec) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return tokens and special tokens of Megatron-LM's form: a list of ranks, behind the ids of
    special tokens.
    """
    file = spec.files[0]
    first = spec.num_special_tokens
    try:
        body = json.loads(Path(file).read_bytes())
        most = len(body) if spec.vocab_size is None else spec.vocab_size - first
        listed = body[: max(0, min(most, (1 << 17) - first if spec.vocab_size is None else most))]
        ranks = {
            base64.b64decode(one["token_bytes"]): _id(int(one["rank"])) + first for one in listed
        }
    except (ValueError, KeyError, TypeError, binascii.Error, RecursionError) as error:
        raise CorruptData(f"{file}: no list of token_bytes and ranks: {str(error)[:200]}") from None
    names = [*MEGATRON_SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(MEGATRON_SPECIAL), first))]
    return ranks, {name: i for i, name in enumerate(names[:first])}


def _id(number: int) -> int:
    if not 0 <= number <= MAX_ID:
        raise ValueError(f"{number} is no token id")
    return number
