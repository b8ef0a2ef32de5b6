"""The number of ids of known tokenizers, from which Megatron-LM pads if no flag sets it.

No file of a tokenizer is read.
"""

from __future__ import annotations

import re

TYPES: dict[str, tuple[int, str]] = {
    "BertWordPieceLowerCase": (30522, "vocab.txt of BERT, uncased"),
    "BertWordPieceCase": (28996, "vocab.txt of BERT, cased"),
    "GPT2BPETokenizer": (50257, "GPT-2's vocab.json: 256 bytes, 50,000 merges, an end of text"),
    "Llama2Tokenizer": (32000, "tokenizer.model of Llama 2"),
    "TikTokenizer": (131072, "Megatron-LM's CustomTikTokenizer without --vocab-size: 2**17"),
}
"""Value of `--tokenizer-type` -> ids, and the source of the number."""

_MODELS: tuple[tuple[str, int, str], ...] = (
    (r"deepseek-r1-distill-qwen", 151665, "tokenizer.json of Qwen2.5"),
    (r"deepseek-r1-distill-llama", 128256, "tokenizer.json of Llama 3"),
    (
        r"(meta-)?llama-?3(\.[123])?(?![.\d])(?!.*vision)",
        128256,
        "tokenizer.json of Llama 3: 128,000 and 256 special",
    ),
    (
        r"(meta-)?llama-?2(?!\d)|tinyllama|vicuna-(7|13)b|llama-(7|13|30|65)b",
        32000,
        "tokenizer.model of Llama 2",
    ),
    (
        r"mixtral-8x7b|mixtral-8x22b-v0\.1|mistral-7b-(instruct-)?v0\.[12]",
        32000,
        "tokenizer.model v1 of Mistral",
    ),
    (
        r"mixtral-8x22b-instruct|mistral-7b-(instruct-)?v0\.3",
        32768,
        "tokenizer.model v3 of Mistral",
    ),
    (r"mistral-nemo", 131072, "Tekken, the tokenizer of Mistral NeMo"),
    (r"qwen-?3(?![.\d])(?!-omni)", 151669, "tokenizer.json of Qwen3: 151,643 and 26 added"),
    (r"qwen-?2\.5", 151665, "tokenizer.json of Qwen2.5: 151,643 and 22 added"),
    (
        r"qwen-?(2|1\.5)(?![.\d])(?!-(vl|audio))",
        151646,
        "tokenizer.json of Qwen2: 151,643 and 3 added",
    ),
    (
        r"deepseek-(coder-)?v2(?![.\d])",
        100002,
        "tokenizer.json of DeepSeek-V2: 100,000 and 2 added",
    ),
    (r"deepseek-(v3|r1)(\.[12])?(?![.\d])(?!-distill)", 128815, "tokenizer.json of DeepSeek-V3"),
    (r"kimi-k2|moonlight-16b", 163840, "tiktoken.model of Moonshot: 163,584 and 256 special"),
    (r"gpt-oss-(20|120)b", 200019, "o200k_harmony up to its last special token"),
    (r"gemma-(2-)?(2|7|9|27)b", 256000, "tokenizer.model of Gemma"),
    (r"gpt-neox-20b|pythia-[0-9.]+[mb]", 50277, "tokenizer.json of GPT-NeoX"),
    (r"(?<![-_])gpt2(-medium|-large|-xl)?/?\Z", 50257, "GPT-2's vocab.json"),
    (r"bigscience/bloom", 250680, "tokenizer.json of BLOOM"),
    (r"falcon-(7|40)b", 65024, "tokenizer.json of Falcon"),
    (r"yi-(6|9|34)b", 64000, "tokenizer.model of Yi"),
)
"""Pattern of a model's name on Hugging Face -> ids (the `len` of its tokenizer, as Megatron-LM
takes it), and the source.
"""
_EXTENDED = re.compile("chinese|japanese|korean|arabic|vocab|extend|expand")
"""Words in the names of models that were trained further with a larger tokenizer."""
# a name begins a part of a path: `my-llama-3` counts, `xllama-3` does not
_BY_NAME = tuple(
    (re.compile(rf"(?:^|[/_-])(?:{name})(?![a-z0-9])"), n, source) for name, n, source in _MODELS
)


def ids_of(kind: str | None, model: str | None) -> tuple[int, str] | None:
    """Return the number of ids of a tokenizer, and its source; None if the tokenizer is unknown.

    Args:
        kind: the value of `--tokenizer-type`.
        model: the value of `--tokenizer-model`: a name on Hugging Face, or a path that holds one.
    """
    if kind in TYPES:
        return TYPES[kind]
    if kind != "HuggingFaceTokenizer" or model is None or _EXTENDED.search(model.lower()):
        return None
    return next(((n, source) for name, n, source in _BY_NAME if name.search(model.lower())), None)
