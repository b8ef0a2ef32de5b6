"""Encoding with gigatoken, for tokenizers whose features it is known to support.

The features are a list of allowed ones. gigatoken 0.10 ignores some keys of a tokenizer.json, such
as `single_word`, and a sample shows a difference only if it has the right words. Each entry here
was compared with tokenizers on random texts (`tests/unit/test_fast_features.py`); a file with any
other feature is encoded by tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import numpy as np

from mtrain.data.preprocess.encoder import CHECKED, Encoder, OtherIds, Packer, library
from mtrain.data.text.tokenizer import named_faults
from mtrain.errors import ConfigError, MtrainError

# The space in the vocabularies of sentencepiece
SPACE = "\u2581"
NOTHING = (None, "")
TOP = [
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
]
TOKEN = ["id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"]
BPE = [
    "type",
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
]
# The most added tokens whose pairs are compared; published tokenizers have at most some thousands
MOST_COMPARED = 4096
Step = Mapping[str, Any]


def unsupported(body: Mapping[str, Any]) -> str:
    """Return the first feature of a tokenizer.json for which gigatoken may differ, or ""."""
    return next(_reasons(body), "")


def _reasons(body: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown("the file", body, TOP)
    model = body.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        yield f"its model is {kind}, and only BPE was compared"
        return
    yield from _model(model, body.get("added_tokens") or ())
    if model.get("byte_fallback"):
        yield from _of_sentencepiece(body)
    else:
        yield from _of_bytes(body)
    yield from _added(body.get("added_tokens") or (), normalized=body.get("normalizer") is not None)


def _unknown(what: str, values: Step, known: Collection[str]) -> Iterator[str]:
    # a key of a later version of tokenizers may change the ids
    unknown = [key for key in values if key not in known]
    if unknown:
        yield f"{what} has a key {unknown[0]}, which is not known"


def _model(model: Step, added: Sequence[Step]) -> Iterator[str]:
    yield from _unknown("its model", model, (*BPE, "vocab", "merges"))
    if model.get("dropout"):
        yield f"its merges are left out by chance (dropout {model['dropout']})"
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key) not in NOTHING:
            yield f"its model has {key} {model[key]!r}"
    products = {"".join(_pair(merge)) for merge in model["merges"]}
    if model.get("byte_fallback"):
        bytes_ = {f"<0x{value:02X}>" for value in range(256)}
        if not bytes_ <= model["vocab"].keys():
            yield "its vocabulary lacks a token for some byte"
        if model.get("ignore_merges"):
            yield (
                "its model takes whole words that are tokens (ignore_merges), and has tokens of"
                " bytes"
            )
        if bytes_ & products:
            yield f"a merge makes {min(bytes_ & products)}, which stands for a byte"
        return
    letters = set(_letters())
    if not letters <= model["vocab"].keys():
        yield "its vocabulary lacks a letter for some byte"
    named = {token.get("content") for token in added}
    odd = next(
        (token for token in model["vocab"] if token not in named and not letters.issuperset(token)),
        None,
    )
    if odd is not None:
        yield f"its vocabulary has {odd[:40]!r}, which is not written in the letters of bytes"


def _pair(merge: Any) -> Sequence[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _letters() -> Iterator[str]:
    """Yield the letter for each byte.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    # printable bytes map to themselves, and the others to letters from 256 on, in order
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = 256
    for value in range(256):
        if value in plain:
            yield chr(value)
        else:
            yield chr(other)
            other += 1


def _steps(step: Any, inner: str) -> list[Step]:
    """Return the steps of a normalizer or pre-tokenizer, one by one."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [one for each in step.get(inner) or () for one in _steps(each, inner)]
    return [step]


def _of_bytes(body: Step) -> Iterator[str]:
    """Yield the reasons against a BPE on bytes, such as GPT-2's and tiktoken's vocabularies."""
    for step in _steps(body.get("normalizer"), "normalizers"):
        if step != {"type": "NFC"}:
            yield f"its normalizer is {_named(step)}"
    steps = _steps(body.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel":
        yield "its pre-tokenizer does not end with ByteLevel"
        return
    yield from _unknown(
        "its pre-tokenizer ByteLevel",
        steps[-1],
        ["type", "add_prefix_space", "trim_offsets", "use_regex"],
    )
    if steps[-1].get("add_prefix_space", True):
        yield "its pre-tokenizer puts a space in front (add_prefix_space)"
    # either ByteLevel cuts words, or one other step does
    if steps[-1].get("use_regex", True) is not (len(steps) == 1):
        yield "its pre-tokenizer cuts words twice, or not at all (use_regex)"
    for step in steps[:-1]:
        how = (step.get("behavior"), step.get("invert", False))
        regex = isinstance(step.get("pattern"), dict) and list(step["pattern"]) == ["Regex"]
        if (
            step.get("type") != "Split"
            or not regex
            or how not in (("Isolated", False), ("Removed", True))
        ):
            yield f"its pre-tokenizer has {_named(step)}"
        yield from _unknown(
            "a Split of its pre-tokenizer", step, ("type", "pattern", "behavior", "invert")
        )


def _of_sentencepiece(body: Step) -> Iterator[str]:
    """Yield the reasons against a BPE of sentencepiece with tokens of bytes."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    front = {"type": "Prepend", "prepend": SPACE}
    steps = _steps(body.get("normalizer"), "normalizers")
    if steps not in ([], [spaces], [front, spaces]):
        odd = next((step for step in steps if step not in (spaces, front)), steps[0])
        yield f"its normalizer has {_named(odd)}"
    cuts = _steps(body.get("pre_tokenizer"), "pretokenizers")
    merged = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    metaspace = {"type": "Metaspace", "replacement": SPACE}
    schemes = [{**metaspace, "prepend_scheme": scheme} for scheme in ("always", "first", "never")]
    metaspaces = [{**one, "split": split} for one in schemes for split in (True, False)]
    if steps and cuts not in ([], [merged]):
        yield f"its pre-tokenizer has {_named(cuts[0])} after a normalizer that writes spaces"
    elif not steps and not (len(cuts) == 1 and cuts[0] in metaspaces):
        cut = f"its pre-tokenizer has {_named(cuts[0])}" if cuts else "it has no pre-tokenizer"
        yield f"{cut}, and it has no normalizer"


def _named(step: Step) -> str:
    settings = {
        key: value for key, value in step.items() if key not in ("type", "precompiled_charsmap")
    }
    return f"{step.get('type')}{f' {settings}' if settings else ''}"[:120]


def _added(tokens: Sequence[Step], *, normalized: bool) -> Iterator[str]:
    """Yield the reasons against the added tokens, which are cut out of a text before all else."""
    for token in tokens:
        name = repr(token.get("content"))[:60]
        yield from _unknown(f"its token {name}", token, TOKEN)
        for key in ("single_word", "lstrip", "rstrip"):
            if token.get(key):
                yield f"its token {name} has {key}"
        if token.get("normalized") and normalized:
            yield f"its token {name} is found in text that is normalized"
        if not token.get("content"):
            yield "it has an added token without characters"
    if len(tokens) > MOST_COMPARED:
        yield f"it has {len(tokens)} added tokens"
        return
    # tokenizers looks for each kind in a separate pass, so two kinds may want the same letters
    kinds = {
        str(t.get("content")): (bool(t.get("special")), bool(t.get("normalized"))) for t in tokens
    }
    for kind, other in combinations(set(kinds.values()), 2):
        ones = [content for content, each in kinds.items() if each == kind]
        others = [content for content, each in kinds.items() if each == other]
        if met := _meeting(ones, others):
            yield (
                f"its tokens {met[0]!r} and {met[1]!r} may share letters, and are of different"
                " kinds"
            )


def _meeting(ones: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return two tokens of which one contains the other, or that overlap at their ends."""
    for left, right in ((ones, others), (others, ones)):
        begins: dict[str, str] = {
            content[:n]: content for content in right for n in range(1, len(content) + 1)
        }
        for content in left:
            for at in range(len(content)):
                if content[at:] in begins:
                    return content, begins[content[at:]]
        whole = set(right)
        for content in left:
            spans = (
                content[a:b] for a in range(len(content)) for b in range(a + 1, len(content) + 1)
            )
            if found := next((span for span in spans if span in whole), None):
                return content, found
    return None


# Characters after which gigatoken's memory of words is dropped
FORGETS = 64 << 20
# Texts for which gigatoken must give the ids of tokenizers before `auto` chooses it
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


class GigatokenPacker(Packer):
    """A packer by gigatoken, which compares some texts of every batch with the tokenizer's ids.

    gigatoken remembers every word, so it is made again after `FORGETS` characters.
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
                "cannot encode with special=text because gigatoken always reads the name of a"
                " special token as that token"
            )
            raise ConfigError.of(
                "MT603", "engine", "gigatoken", rule, "engine=tokenizers", "command line"
            )
        if reason := unsupported(json.loads(body)):
            rule = (
                f"cannot encode with {encoder.file} because {reason}, and gigatoken may give other"
                " ids than tokenizers for that"
            )
            raise ConfigError.of(
                "MT603", "engine", "gigatoken", rule, "engine=tokenizers", "command line"
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
            encoded = self._made.encode_batch(list(texts), parallel=False)
            ids = self._awkward.to_numpy(self._awkward.flatten(encoded)).astype(self._code)
            counts = self._awkward.to_numpy(self._awkward.num(encoded))
            ends = np.cumsum(counts, dtype=np.int64) * ids.itemsize
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
        # many texts at first, and one of every later batch: a difference stops the build
        many = max(1, CHECKED - self._checked)
        self._checked += many
        if packed[:many] != self._whole(texts[:many]):
            raise OtherIds(
                f"{self._encoder.file}: gigatoken gives other ids than tokenizers for a text",
                "  fix: engine=tokenizers fresh=true",
            )


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
