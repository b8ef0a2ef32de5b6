"""The kinds of tokenizers, each with what loads it.

Libraries that not everybody needs are extras.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrain.data.preprocess.encoders.base import Encoder, library, named_faults
from mtrain.data.preprocess.encoders.spec import TokenizerSpec
from mtrain.data.preprocess.encoders.tiktoken_vocabulary import TiktokenEncoder
from mtrain.data.preprocess.encoders.tokenizer_json import load_bert, load_gpt2, load_tokenizer_json
from mtrain.data.text.tokenizer import MAX_ID
from mtrain.errors import CorruptData


class SentencePieceEncoder(Encoder):
    """A model of sentencepiece, by its library."""

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__(spec)
        module = library("sentencepiece", "data", f"{self.file}: a model of sentencepiece")
        with named_faults(self.file, "no model of sentencepiece"):
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
        return None if number == self.unk and self._model.id_to_piece(number) != token else number

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
        CorruptData: a file is not what it should be.
        BadEnvironment: the library of its kind is not installed.
        ConfigError: it has no token that is chosen to end documents.
    """
    encoder: Encoder = LOADERS[spec.kind](spec)
    if not 0 < encoder.vocab_size <= MAX_ID + 1:
        raise CorruptData(
            f"{spec.files[0]}: {encoder.vocab_size} token ids; 1 to {MAX_ID + 1} are read"
        )
    return encoder
