"""Encoding by gigatoken, from the extra of its name, for tokenizers whose features it supports.

The ids of some texts are compared with those of tokenizers nevertheless.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from mtrain.data.preprocess.encoders.base import (
    CHECKED,
    Encoder,
    OtherIds,
    Packer,
    library,
    named_faults,
)
from mtrain.data.preprocess.encoders.gigatoken_features import unsupported
from mtrain.errors import ConfigError, MtrainError, Problem

FORGETS = 64 << 20
SAMPLE = (
    "The quick brown fox.",
    "It's 12345; don't  WE'LL\n\n\tx = y**2\r\n",
    "",
    " ",
    "  a  ",
    "\n",
    "a\x00b\x0b\x1c\x85c",
    "na\u00efve caf\u00e9 cafe\u0301 \u201cquotes\u201d\u2026",
    "\u6771\u4eac\u30bf\u30ef\u30fc \ud55c\uad6d\uc5b4",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "\ufb01 \u2168 \u0663\u00b2 \u01c5",
    "<|endoftext|> </s> [SEP] <unk>",
    (
        "\u043f\u0440\u0438\u0432\u0435\u0442 \u05e9\u05dc\u05d5\u05dd"
        " \u0645\u0631\u062d\u0628\u0627"
    ),
    "x" * 300,
    "1" * 300,
    "=" * 100 + " " * 100 + "z",
)
"""Texts on which gigatoken is to have the ids of tokenizers before it is taken."""


class GigatokenPacker(Packer):
    """A packer by gigatoken, which compares some texts of every batch with the tokenizer's ids.

    gigatoken remembers all words that it met, so it is made again after `FORGETS` bytes.
    """

    engine = "gigatoken"

    def __init__(self, encoder: Encoder, code: str, body: str) -> None:
        super().__init__(encoder, code, None)
        self._library = library("gigatoken", "gigatoken", "engine=gigatoken")
        self._awkward = library("awkward", "gigatoken", "engine=gigatoken")
        self._body = body
        self._read = FORGETS
        if encoder.spec.plain:
            rule = (
                "gigatoken finds the names of special tokens in documents, and special=text wants"
                " them as text"
            )
            raise ConfigError(
                [Problem("MT603", "engine", "gigatoken", rule, "engine=tokenizers", "command line")]
            )
        if reason := unsupported(json.loads(body)):
            rule = (
                f"{encoder.file}: {reason}; gigatoken is not known to have the ids of tokenizers"
                " for it"
            )
            raise ConfigError(
                [Problem("MT603", "engine", "gigatoken", rule, "engine=tokenizers", "command line")]
            )

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Return the ids of each text.

        Raises:
            OtherIds: they are not those of the tokenizer.
        """
        if not texts:
            return []
        with named_faults(self._encoder.file, "gigatoken cannot encode"):
            if self._read >= FORGETS:
                self._made = self._library.Tokenizer.from_json(self._body)
                self._read = 0
            found = self._made.encode_batch(list(texts), parallel=False)
            ids = self._awkward.to_numpy(self._awkward.flatten(found)).astype(self._code)
            ends = (
                np.cumsum(self._awkward.to_numpy(self._awkward.num(found)), dtype=np.int64)
                * ids.itemsize
            )
        self._read += sum(map(len, texts))
        data = ids.tobytes()
        begin = 0
        out = list[bytes]()
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
            raise OtherIds(said, "  fix: engine=tokenizers fresh=true")


def gigatoken_packer(encoder: Encoder, code: str, body: str) -> tuple[Packer | None, str]:
    """Return a packer by gigatoken, or the reason not to use it.

    It must be installed, support all features of the tokenizer, and give the same ids on a sample.
    """
    # gigatoken cannot treat the names of special tokens as plain text
    if encoder.spec.plain or find_spec("gigatoken") is None:
        return None, ""
    if reason := unsupported(json.loads(body)):
        return None, f"{encoder.file}: {reason}"
    try:
        made = GigatokenPacker(encoder, code, body)
        made.pack(SAMPLE)
    except MtrainError as error:
        return None, str(error).split("\n")[0]
    return made, ""
