"""Megatron-LM's flags for data, the tokenizer, batches and steps."""

from __future__ import annotations

import itertools
import re

from mtrain.config.resolve.batches import Stage, linear, samples_of, steps_within
from mtrain.config.schema.model import VOCAB_MULTIPLE
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.megatron.arguments import (
    Arguments,
    Draft,
    Entry,
    Values,
    always,
    one,
    spelled,
    whole,
)

# keys of the training data; those of the other splits follow
SOURCES = tuple(f"data.{key}" for key in ("path", "blend", "blend_weights"))
OF_SPLITS = {"--valid-data-path": "validation", "--test-data-path": "test"}


def _source(arguments: Arguments, draft: Draft) -> Draft:
    prefixes, weights = _corpora(arguments, "--train-data-path")
    if not prefixes:
        prefixes, weights = _corpora(arguments, "--data-path")
    out: Draft = {"data.kind": "indexed", **dict.fromkeys(SOURCES)}
    for flag, name in OF_SPLITS.items():
        own, shares = _corpora(arguments, flag)
        out |= {f"data.{name}_blend": own or None, f"data.{name}_weights": shares}
    if arguments.has("--mock-data"):
        # synthetic data do not depend on a path that is unknown
        arguments.doubts = {
            flag: why for flag, why in arguments.doubts.items() if flag in arguments.maybe
        }
    elif not prefixes and (arguments.has("--data-path") or arguments.has("--train-data-path")):
        return out  # the value of a flag is unknown
    if arguments.has("--mock-data") or not prefixes:
        return {**dict.fromkeys(out), "data.kind": "mock"}
    if len(prefixes) == 1:
        return {**out, "data.path": prefixes[0]}
    return {**out, "data.blend": prefixes, "data.blend_weights": weights}


def _corpora(arguments: Arguments, flag: str) -> tuple[list[str], list[float] | None]:
    """Return the prefixes that a flag names, and their weights."""
    words = arguments.words(flag) or []
    # Megatron-LM reads weights and prefixes in turn, if the number of words is even
    weights = _weights(words[::2]) if words and len(words) % 2 == 0 else None
    return (words[1::2] if weights else words), weights


def _weights(words: list[str]) -> list[float] | None:
    """Return the weights of a blend; None if a word is not a positive number."""
    try:
        weights = [float(word) for word in words]
    except ValueError:
        return None
    return weights if all(0 < weight < float("inf") for weight in weights) else None


def _source_words(values: Values) -> list[str]:
    if values["data.kind"] != "indexed":
        return ["--mock-data"] if values["data.kind"] == "mock" else []
    out: list[str] = []
    for flag, name in OF_SPLITS.items():
        out += _words(flag, values[f"data.{name}_blend"], values[f"data.{name}_weights"])
    # with corpora of other splits, Megatron-LM reads those of training from this flag
    own = "--train-data-path" if out else "--data-path"
    path = values["data.path"]
    return [
        *(
            _words(own, values["data.blend"], values["data.blend_weights"])
            or _words(own, path and [path], None)
        ),
        *out,
    ]


def _words(flag: str, prefixes: list[str] | None, weights: list[float] | None) -> list[str]:
    """Return a flag with prefixes, each after its weight; empty without prefixes."""
    if not prefixes:
        return []
    if not weights:
        return [flag, *prefixes]
    pairs = zip(map(spelled, weights), prefixes, strict=False)
    return [flag, *(word for pair in pairs for word in pair)]


def _split(arguments: Arguments, draft: Draft) -> Draft:
    text = arguments.word("--split") or "969,30,1"
    # Megatron-LM ignores quotes and brackets
    parts = re.findall(r"[.0-9]+", text)
    try:
        # more numbers are ignored, fewer are zeros
        shares = [float(part) for part in parts][:3]
    except ValueError:
        shares = []
    if not any(shares):
        arguments.refuse(
            "--split", "unreadable", "shares of train, validation and test, as 969,30,1"
        )
        shares = [969.0, 30.0, 1.0]
    return {"data.split": shares + [0.0] * (3 - len(shares))}


def _split_words(values: Values) -> list[str]:
    """Return the flag for the split; separate corpora of the splits leave no data to split."""
    separate = values["data.validation_blend"] or values["data.test_blend"]
    return [] if separate else ["--split", ",".join(map(spelled, values["data.split"]))]


def _tokens(arguments: Arguments, draft: Draft) -> Draft:
    """Return tokenizer and vocabulary, padded as by `make-vocab-size-divisible-by` * tp."""
    kind = arguments.word("--tokenizer-type")
    model = arguments.word("--tokenizer-model")
    out: Draft = {"data.tokenizer": None}
    if model is not None and model.endswith(".json") and draft["data.kind"] == "indexed":
        out["data.tokenizer"] = model
    elif model is not None:
        arguments.refuse(
            "--tokenizer-model", "not supported", "a tokenizer.json is read: data.tokenizer=PATH"
        )
    size = arguments.converted("--vocab-size", whole)
    padded = arguments.converted("--padded-vocab-size", whole)
    if size is not None and kind in ("NullTokenizer", "NullMultimodalTokenizer"):
        size += 1  # its end of document takes one more id
    known = ids_of(kind, model)
    if size is None and padded is None and known is not None:
        size = known[0]
        name = model if kind == "HuggingFaceTokenizer" else kind
        arguments.notes.append(
            f"{name} is taken to have {size} ids ({known[1]}); its files are not read"
        )
    # the size is set, so that an unknown tokenizer leaves nothing open
    if size is not None or padded is not None:
        arguments.doubts.pop("--tokenizer-model", None)
    # the padded size is what Megatron-LM builds; the other only if it pads to the same
    if padded is not None:
        same = size is not None and _up(size, VOCAB_MULTIPLE) == padded
        return {**out, "model.vocab_size": size if same else padded}
    if size is None:
        return out
    multiple = arguments.converted("--make-vocab-size-divisible-by", whole) or VOCAB_MULTIPLE
    return {**out, "model.vocab_size": vocabulary(size, multiple * draft["parallel.tp"])}


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def vocabulary(size: int, multiple: int) -> int:
    """Return the `model.vocab_size` of an embedding that Megatron-LM pads to `multiple`."""
    padded = _up(size, max(1, multiple))
    return size if _up(size, VOCAB_MULTIPLE) == padded else padded


def _tokens_words(values: Values) -> list[str]:
    size = values["model.vocab_size"]
    padded = ["--padded-vocab-size", str(_up(size, VOCAB_MULTIPLE))]
    if values["data.kind"] == "indexed" and values["data.tokenizer"] is not None:
        tokenizer = [
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            values["data.tokenizer"],
        ]
        return [*tokenizer, "--vocab-size", str(size), *padded]
    # NullTokenizer adds an end of document to the ids that it is given
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size - 1), *padded]


RAMP = "trainer.rampup_batch_size"
LISTED = "trainer.batch_size_schedule"
STEPPED = "--step-batch-size-schedule"
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _batch(arguments: Arguments, draft: Draft) -> Draft:
    micro = arguments.converted("--micro-batch-size", whole)
    batch = arguments.converted("--global-batch-size", whole)
    if batch is None and micro is not None:
        # Megatron-LM's default: one micro-batch on each data-parallel rank
        batch = micro * max(
            1,
            draft.get("ranks", 1)
            // (draft["parallel.tp"] * draft["parallel.pp"] * draft["parallel.cp"]),
        )
    elif batch is None and "--micro-batch-size" in arguments.doubts:
        arguments.doubts.setdefault("--global-batch-size", arguments.doubts["--micro-batch-size"])
    listed = _stepped(arguments, draft)
    if listed:
        if arguments.has("--global-batch-size") and batch != listed[-1][1]:
            arguments.refuse(
                "--global-batch-size", "no effect", f"the last size of {STEPPED} counts"
            )
        batch = listed[-1][1]
    elif listed is not None:
        batch = listed[0][1]
    return {
        "trainer.micro_batch_size": micro,
        **({"trainer.global_batch_size": batch} if batch else {}),
        RAMP: None if listed else _ramp(arguments, batch),
        LISTED: [[size, end] for (_, size), (end, _) in itertools.pairwise(listed or ())] or None,
    }


def _stepped(arguments: Arguments, draft: Draft) -> list[tuple[int, int]] | None:
    """Return the stages of `--step-batch-size-schedule`: the consumed tokens at which each begins,
    and its batch size.

    Raises:
        ConfigError: the flag cannot be read. Without it the run would differ.
    """
    words = arguments.words(STEPPED)
    if words is None:
        return None
    # the list may be one word or several
    text = " ".join(words).replace(",", " ")
    try:
        pairs = sorted(
            (_counted(begin), _counted(size))
            for begin, _, size in (e.partition(":") for e in text.split())
        )
    except (ValueError, OverflowError):
        pairs = []
    seq_length = draft.get("data.seq_length") or 1
    # Megatron-LM counts samples, so that a stage begins with a whole one
    stages = [(tokens // seq_length * seq_length, size) for tokens, size in pairs]
    grows = all(one[0] < two[0] for one, two in itertools.pairwise(stages))
    if not stages or stages[0][0] or not grows or any(size < 1 for _, size in stages):
        rule = f"{STEPPED} {text[:60]!r} is no list of TOKENS:SIZE that begins at 0 and grows"
        raise ConfigError([Problem("MT014", LISTED, None, rule, f'{STEPPED} "0:16 2.4B:320"', "")])
    if len(stages) > 1:
        arguments.notes.append(
            "the learning rate follows steps; Megatron-LM's follows samples while steps grow"
        )
    return stages


def _counted(text: str) -> int:
    """Return a number written as `2.4B` or `16`."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if unit > 1 else text) * unit)


def _ramp(arguments: Arguments, batch: int | None) -> list[int] | None:
    """Return the ramp of `--rampup-batch-size`; None if it begins at the full size."""
    words = arguments.words("--rampup-batch-size")
    if words is None:
        return None
    try:
        first, increment, samples = map(whole, words)
    except (ValueError, OverflowError):
        arguments.refuse(
            "--rampup-batch-size",
            "unreadable",
            "takes three whole numbers: first size, increment, samples",
        )
        return None
    # a ramp that begins at its end
    if first == batch or not samples:
        return None
    arguments.notes.append(
        "the learning rate follows steps; Megatron-LM's follows samples while steps grow"
    )
    return [first, increment, samples]


def _batch_words(values: Values) -> list[str]:
    micro = values["trainer.micro_batch_size"]
    ramp = values[RAMP]
    listed = values[LISTED]
    words = ["--micro-batch-size", str(micro)] if micro is not None else []
    if values["trainer.global_batch_size"] is None:
        return words
    last = str(values["trainer.global_batch_size"])
    begins = [0, *(stage.first * (values["data.seq_length"] or 1) for stage in plan_of(values)[1:])]
    if listed and all(one < two for one, two in itertools.pairwise(begins)):
        sizes = [*(size for size, _ in listed), last]
        # Megatron-LM accepts no --global-batch-size with it
        return [
            *words,
            STEPPED,
            " ".join(f"{begin}:{size}" for begin, size in zip(begins, sizes, strict=True)),
        ]
    return [
        *words,
        "--global-batch-size",
        last,
        *(["--rampup-batch-size", *map(str, ramp)] if ramp else []),
    ]


def plan_of(values: Values) -> tuple[Stage, ...]:
    """Return the batch sizes of the steps."""
    size = max(1, values.get("trainer.global_batch_size") or 1)
    if values.get(LISTED):
        begins = [
            0,
            *(-(-end // (values.get("data.seq_length") or 1)) for _, end in values[LISTED]),
        ]
        return tuple(map(Stage, begins, [*(n for n, _ in values[LISTED]), size]))
    return linear(values[RAMP], size) if values.get(RAMP) else (Stage(0, size),)


def steps(
    flag: str, samples: str, key: str, *, needed: bool = False, at_the_end: bool = False
) -> Entry:
    """Return an entry for a number of steps that may be counted in samples, and must be if the
    batch size grows.

    The steps are the first ones of the run, or with `at_the_end` have the full size.
    """

    def read(arguments: Arguments, draft: Draft) -> Draft:
        count = arguments.converted(flag, whole)
        counted = arguments.converted(samples, whole)
        if count is None and counted:
            count = steps_within(plan_of(draft)[-1:] if at_the_end else plan_of(draft), counted)
        return {} if needed and not count else {key: count or None}

    def write(values: Values) -> list[str]:
        if values.get(key) is None:
            return []
        # with a ramp, Megatron-LM requires samples in place of steps
        if not values.get(RAMP):
            return [flag, str(values[key])]
        plan = plan_of(values)[-1:] if at_the_end else plan_of(values)
        return [samples, str(samples_of(plan, values[key]))]

    return Entry((flag, samples), (key,), read, write)


DATA: tuple[Entry, ...] = (
    Entry(
        ("--mock-data", "--data-path", "--train-data-path", *OF_SPLITS),
        (
            "data.kind",
            *SOURCES,
            *(f"data.{name}_{key}" for name in OF_SPLITS.values() for key in ("blend", "weights")),
        ),
        _source,
        _source_words,
        {
            "--mock-data": ("data.kind", "data.path"),
            "--data-path": ("data.path",),
            "--train-data-path": ("data.path",),
            **{flag: (f"data.{name}_blend",) for flag, name in OF_SPLITS.items()},
        },
        switches=("--mock-data",),
    ),
    Entry(("--split",), ("data.split",), _split, _split_words),
    one(
        "--max-position-embeddings",
        "model.max_position_embeddings",
        lambda values: values.get("data.seq_length"),
        always=True,
    ),
    Entry(
        (
            "--tokenizer-type",
            "--tokenizer-model",
            "--vocab-size",
            "--padded-vocab-size",
            "--make-vocab-size-divisible-by",
        ),
        ("data.tokenizer", "model.vocab_size"),
        _tokens,
        _tokens_words,
        {
            "data.kind": (),
            **dict.fromkeys(
                (
                    "--tokenizer-type",
                    "--tokenizer-model",
                    "--vocab-size",
                    "--padded-vocab-size",
                    "parallel.tp",
                ),
                ("model.vocab_size",),
            ),
        },
    ),
    always("model.mask_padded_vocab", False),
)

TRAINER: tuple[Entry, ...] = (
    Entry(
        ("--micro-batch-size", "--global-batch-size", "--rampup-batch-size", STEPPED),
        ("trainer.micro_batch_size", "trainer.global_batch_size", RAMP, LISTED),
        _batch,
        _batch_words,
        {
            "--micro-batch-size": ("trainer.micro_batch_size",),
            "--rampup-batch-size": (RAMP,),
            STEPPED: (LISTED, "trainer.global_batch_size"),
            **dict.fromkeys(
                ("--global-batch-size", "parallel.tp", "parallel.pp", "parallel.cp", "ranks"),
                ("trainer.global_batch_size",),
            ),
        },
    ),
    steps("--train-iters", "--train-samples", "trainer.train_iters", needed=True),
    always("trainer.sample_tokens", 0),
)


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
"""Pattern of a model's name -> ids (its tokenizer's `len`), and the source."""
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
