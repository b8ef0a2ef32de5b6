"""Small tokenizers of every kind, documents, and the corpus that megatron-core's builder makes of
them.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock; don't panic!",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n",
    "",
    "naïve café — “quotes” … 東京タワー привет мир \U0001f600 ok",
    "   leading and trailing   \n\n ",
    "<|endoftext|> is a name, [SEP] too; </s>\r\nA\tB\x0b\x0cC",
    "I'LL we've THEY'RE 'single' ''double'' a'b x'S",
    "\n",
)
EOD = "<|endoftext|>"


def documents(many: int, seed: int = 0) -> list[str]:
    """Return texts of random length, made of TEXTS and of words; some are empty."""
    rng = np.random.default_rng(seed)
    words = " ".join(TEXTS).split(" ")
    out = []
    for _ in range(many):
        picked = rng.choice(len(words), rng.integers(0, 60))
        between = [" ", " ", " ", "\n", "  ", ", ", ".\n\n"]
        text = "".join(words[i] + between[int(rng.integers(len(between)))] for i in picked)
        out.append(text if rng.random() > 0.1 else TEXTS[int(rng.integers(len(TEXTS)))])
    return out


def jsonl(path: Path, texts: Sequence[Any], key: str = "text") -> Path:
    """Write one record per line."""
    path.write_text(
        "".join(json.dumps({key: text, "id": i}) + "\n" for i, text in enumerate(texts))
    )
    return path


def bpe(folder: Path, vocab_size: int = 400) -> Path:
    """Return a tokenizer.json: byte-level BPE, id 0 ends documents."""
    from mtrain.data.text import tokenizer as trained

    path = folder / "tokenizer.json"
    trained.train_bpe(documents(200, 1), vocab_size).save(str(path))
    return path


def gpt2(folder: Path) -> Path:
    """Write `vocab.json` and `merges.txt`."""
    body = json.loads(bpe(folder).read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(body["vocab"]))
    merges = [one if isinstance(one, str) else " ".join(one) for one in body["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


def bert(folder: Path) -> Path:
    """Write `vocab.txt`."""
    letters = sorted(
        {
            letter
            for text in TEXTS
            for letter in text.lower()
            if letter.isalnum() or letter in ".,;'!"
        }
    )
    words = ["the", "quick", "brown", "fox", "##ing", "over", "lazy", "dog", "is", "name"]
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *words,
        *letters[:40],
        *(f"##{one}" for one in letters[:40]),
    ]
    path = folder / "vocab.txt"
    path.write_text("\n".join(dict.fromkeys(tokens)) + "\n")
    return path


def sentencepiece(folder: Path) -> Path:
    """Write a sentencepiece model."""
    import sentencepiece as library

    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text in documents(200, 1) if text),
        model_writer=model,
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = folder / "spm.model"
    path.write_bytes(model.getvalue())
    return path


def tiktoken(folder: Path) -> Path:
    """Write a tiktoken vocabulary: bytes, and a few longer tokens."""
    longer = (
        b"th",
        b"the",
        b" the",
        b"in",
        b"ing",
        b" a",
        b"qu",
        b"ck",
        b"fo",
        b"fox",
        b"  ",
        b"\n\n",
    )
    tokens = [*(bytes([i]) for i in range(256)), *longer]
    path = folder / "small.tiktoken"
    path.write_text(
        "".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    )
    return path


MAKERS = {
    "bpe": bpe,
    "gpt2": gpt2,
    "bert": bert,
    "sentencepiece": sentencepiece,
    "tiktoken": tiktoken,
}


def ids_of(kind: str, path: Path) -> Any:
    """Return the ids that a library gives a text with a tokenizer, and its end of document, without
    our code.
    """
    import tokenizers

    if kind == "bpe":
        made = tokenizers.Tokenizer.from_file(str(path))
        return (lambda text: made.encode(text, add_special_tokens=False).ids), made.token_to_id(EOD)
    if kind == "gpt2":
        import transformers

        fast = transformers.GPT2TokenizerFast(  # type: ignore[attr-defined]
            vocab=str(path / "vocab.json"), merges=str(path / "merges.txt")
        )
        return (
            lambda text: fast.convert_tokens_to_ids(fast.tokenize(text))
        ), fast.convert_tokens_to_ids(EOD)
    if kind == "bert":
        import transformers

        lower = transformers.BertTokenizerFast(vocab=str(path), do_lower_case=True)  # type: ignore[attr-defined]
        return (lambda text: lower.convert_tokens_to_ids(lower.tokenize(text))), lower.sep_token_id
    if kind == "sentencepiece":
        import sentencepiece as pieces

        model = pieces.SentencePieceProcessor(model_file=str(path))
        return model.encode_as_ids, model.eos_id()
    from tiktoken import Encoding

    lines = [line.split() for line in path.read_text().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    pattern = (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"""
        r""" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
        r"""\s*[\r\n]|\s+(?!\S)|\s"""
    )
    encoding = Encoding(
        "small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)}
    )
    return (lambda text: encoding.encode(text, allowed_special="all")), len(ranks)


def megatron_builder() -> Any:
    """Return megatron-core's `IndexedDatasetBuilder`.

    The adapter is installed first: megatron-core without it is bound to CUDA, and forks of this
    process could not run on a CPU.
    """
    from mtrain import mcore
    from mtrain.devices import registry

    mcore.install(registry.get("cpu"))
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    return IndexedDatasetBuilder


def with_builder(
    prefix: Path, texts: Sequence[Any], encode: Any, eod: int | None, dtype: Any
) -> None:
    """Write documents as Megatron-LM's preprocess_data.py does, with megatron-core's builder."""
    builder = megatron_builder()(f"{prefix}.bin", dtype=dtype)
    for text in texts:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in text if isinstance(text, list) else [text]:
            if found := encode(sentence):
                ids += found
                lengths.append(len(found))
        if ids and eod is not None:
            ids.append(eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")


def same_files(one: Path, other: Path) -> bool:
    """Return whether `.bin` and `.idx` of two prefixes have equal bytes."""
    return all(
        Path(f"{one}{end}").read_bytes() == Path(f"{other}{end}").read_bytes()
        for end in (".bin", ".idx")
    )
