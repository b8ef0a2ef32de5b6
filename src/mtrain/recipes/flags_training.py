"""Megatron-LM's flags for data, optimizer, steps, kernels and checkpoints."""

from __future__ import annotations

from mtrain.config.model import VOCAB_MULTIPLE
from mtrain.recipes.arguments import Arguments, Draft, Entry, Values, whole
from mtrain.recipes.flags import always, default_of, on, one, spelled

STYLES = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
KNOWN_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizers whose name says how many ids they have."""


def _source(a: Arguments, d: Draft) -> Draft:
    words = a.words("--data-path") or []
    out: Draft = {"data.kind": "indexed", "data.path": None, "data.blend": None, "data.blend_weights": None}
    weights = _weights(words[::2]) if len(words) % 2 == 0 else None
    prefixes = words[1::2] if weights else words
    if a.has("--mock-data") or not prefixes:
        return {**out, "data.kind": "mock"}
    if len(prefixes) == 1:
        return {**out, "data.path": prefixes[0]}
    return {**out, "data.blend": prefixes, "data.blend_weights": weights}


def _weights(words: list[str]) -> list[float] | None:
    """The weights before the prefixes of a blend; None where a word is no positive number."""
    try:
        weights = [float(word) for word in words]
    except ValueError:
        return None
    return weights if all(0 < weight < float("inf") for weight in weights) else None


def _source_words(d: Values) -> list[str]:
    blend, weights = d["data.blend"], d["data.blend_weights"]
    if d["data.kind"] == "indexed" and blend is not None:
        pairs = zip(map(spelled, weights), blend, strict=False) if weights else ((name,) for name in blend)
        return ["--data-path", *(word for pair in pairs for word in pair)]
    if d["data.kind"] == "indexed" and d["data.path"] is not None:
        return ["--data-path", d["data.path"]]
    return ["--mock-data"] if d["data.kind"] == "mock" else []


def _split(a: Arguments, d: Draft) -> Draft:
    text = a.word("--split") or "969,30,1"
    parts = [part.strip() for part in text.split(",")]
    try:
        shares = [float(part) for part in parts][:3]
    except ValueError:
        a.refuse("--split", "unreadable", "shares of train, validation and test, as 969,30,1")
        shares = [969.0, 30.0, 1.0]
    return {"data.split": shares + [0.0] * (3 - len(shares))}


def _tokens(a: Arguments, d: Draft) -> Draft:
    """Tokenizer and vocabulary: Megatron-LM pads to a multiple of `make-vocab-size-divisible-by` * tp."""
    kind, model = a.word("--tokenizer-type"), a.word("--tokenizer-model")
    out: Draft = {"data.tokenizer": None}
    if model is not None and model.endswith(".json") and d["data.kind"] == "indexed":
        out["data.tokenizer"] = model
    elif model is not None:
        a.refuse("--tokenizer-model", "not supported", "a tokenizer.json is read: data.tokenizer=PATH")
    size, padded = a.as_("--vocab-size", whole), a.as_("--padded-vocab-size", whole)
    multiple = (a.as_("--make-vocab-size-divisible-by", whole) or VOCAB_MULTIPLE) * d["parallel.tp"]
    if size is not None and kind in ("NullTokenizer", "NullMultimodalTokenizer"):
        size += 1  # its end of document is an id more
    if size is None and kind in KNOWN_VOCABULARIES:
        size = KNOWN_VOCABULARIES[kind]
        a.notes.append(f"{kind} is taken to have {size} ids; its files are not read")
    if padded is not None:
        same = size is not None and _up(size, VOCAB_MULTIPLE) == padded
        return {**out, "model.vocab_size": size if same else padded}
    return out if size is None else {**out, "model.vocab_size": vocabulary(size, multiple)}


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def vocabulary(size: int, multiple: int) -> int:
    """What `model.vocab_size` must be for an embedding that Megatron-LM pads to `multiple`."""
    padded = _up(size, max(1, multiple))
    return size if _up(size, VOCAB_MULTIPLE) == padded else padded


def _tokens_words(d: Values) -> list[str]:
    size = d["model.vocab_size"]
    padded = ["--padded-vocab-size", str(_up(size, VOCAB_MULTIPLE))]
    if d["data.kind"] == "indexed" and d["data.tokenizer"] is not None:
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", d["data.tokenizer"]]
        return [*tokenizer, "--vocab-size", str(size), *padded]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size - 1), *padded]


def _batch(a: Arguments, d: Draft) -> Draft:
    micro, batch = a.as_("--micro-batch-size", whole), a.as_("--global-batch-size", whole)
    if batch is None and micro is not None:
        batch = micro * max(1, d.get("ranks", 1) // (d["parallel.tp"] * d["parallel.pp"] * d["parallel.cp"]))
    return {"trainer.micro_batch_size": micro, **({"trainer.global_batch_size": batch} if batch else {})}


def _batch_words(d: Values) -> list[str]:
    micro = d["trainer.micro_batch_size"]
    return [
        *(["--micro-batch-size", str(micro)] if micro is not None else []),
        "--global-batch-size",
        str(d["trainer.global_batch_size"]),
    ]


def _steps(flag: str, samples: str, key: str, *, needed: bool = False) -> Entry:
    """A number of steps that may be given in samples."""

    def read(a: Arguments, d: Draft) -> Draft:
        steps, counted = a.as_(flag, whole), a.as_(samples, whole)
        if steps is None and counted:
            steps = counted // max(1, d.get("trainer.global_batch_size", 1))
        return {} if needed and not steps else {key: steps or None}

    def write(d: Values) -> list[str]:
        return [flag, str(d[key])] if d.get(key) is not None else []

    return Entry((flag, samples), (key,), read, write)


def _warmup(a: Arguments, d: Draft) -> Draft:
    key = "optim.warmup_iters"
    share = a.as_("--lr-warmup-fraction", float)
    if share is not None:
        steps = d.get("optim.decay_iters") or d.get("trainer.train_iters") or 0
        return {key: int(share * steps)}
    samples = a.as_("--lr-warmup-samples", whole)
    if samples:
        return {key: samples // max(1, d.get("trainer.global_batch_size", 1))}
    return {key: a.as_("--lr-warmup-iters", whole) or 0}


def _warmup_words(d: Values) -> list[str]:
    return ["--lr-warmup-iters", str(d["optim.warmup_iters"])] if d["optim.warmup_iters"] else []


def _clip(a: Arguments, d: Draft) -> Draft:
    norm = a.as_("--clip-grad", float)
    return {"optim.clip_grad": 1.0 if norm is None else norm or None}


def _clip_words(d: Values) -> list[str]:
    norm = d["optim.clip_grad"]
    return [] if norm == 1.0 else ["--clip-grad", spelled(norm or 0.0)]


def _offload(a: Arguments, d: Draft) -> Draft:
    share = a.as_("--optimizer-offload-fraction", float)
    if not a.has("--optimizer-cpu-offload"):
        a.refuse("--optimizer-offload-fraction", "no effect", "read only with --optimizer-cpu-offload")
        return {"optim.cpu_offload": 0.0}
    a.has("--use-precision-aware-optimizer")  # Megatron-LM wants it beside
    return {"optim.cpu_offload": 1.0 if share is None else share}


def _offload_words(d: Values) -> list[str]:
    share = d["optim.cpu_offload"]
    if not share:
        return []
    words = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return words if share == 1.0 else [*words, "--optimizer-offload-fraction", spelled(share)]


def _timeout(a: Arguments, d: Draft) -> Draft:
    minutes = a.as_("--distributed-timeout-minutes", whole)
    limit = 60.0 * minutes if minutes and minutes > 0 else 600.0
    soft = default_of("trainer.soft_timeout_s")
    return {"trainer.timeout_s": limit, "trainer.soft_timeout_s": soft if soft < limit else limit / 5}


def _timeout_words(d: Values) -> list[str]:
    minutes = d["trainer.timeout_s"] / 60
    return ["--distributed-timeout-minutes", str(int(minutes))] if minutes >= 1 and minutes % 1 == 0 else []


PROFILE = ("--profile", "--use-pytorch-profiler", "--profile-step-start", "--profile-step-end")


def _profile(a: Arguments, d: Draft) -> Draft:
    start = a.as_("--profile-step-start", whole)
    a.has("--profile-step-end")  # one step is profiled
    if not a.has("--profile"):
        return {"trainer.profile_step": None}
    if not a.has("--use-pytorch-profiler"):
        a.refuse("--profile", "not supported", "nsys profiles are started from outside")
        return {"trainer.profile_step": None}
    return {"trainer.profile_step": 10 if start is None else max(1, start)}


def _profile_words(d: Values) -> list[str]:
    step = d["trainer.profile_step"]
    if step is None:
        return []
    return ["--profile", "--use-pytorch-profiler", *("--profile-step-start", str(step)), PROFILE[3], str(step + 1)]


KERNELS = tuple(f"kernels.{name}" for name in ("norm", "attention", "linear", "experts"))
FUSED = "kernels.gradient_accumulation_fusion"


def _kernels(a: Arguments, d: Draft) -> Draft:
    kind = a.word("--transformer-impl")
    word = {"local": "reference", "transformer_engine": "te"}.get(kind or "", "auto")
    fused = word == "te" and not a.has("--no-gradient-accumulation-fusion") and d["parallel.fsdp"] == "none"
    a.has("--no-gradient-accumulation-fusion")
    return {**dict.fromkeys(KERNELS, word), FUSED: fused}


def _kernels_words(d: Values) -> list[str]:
    words = {d[key] for key in KERNELS}
    if words == {"reference"}:
        return ["--transformer-impl", "local"]
    if words != {"te"}:
        return []
    kept = [] if d[FUSED] else ["--no-gradient-accumulation-fusion"]
    return ["--transformer-impl", "transformer_engine", *kept]


def _saving(a: Arguments, d: Draft) -> Draft:
    steps = a.as_("--save-interval", whole) or a.as_("--persistent-save-interval", whole)
    if not a.has("--save"):
        return {"checkpoint.save_interval": None, "checkpoint.save_final": False}
    a.refuse("--save", "derived here", "checkpoints lie in the run folder: log.runs_dir")
    last = steps is not None and steps == d.get("trainer.train_iters")
    return {"checkpoint.save_interval": None if last else steps, "checkpoint.save_final": True}


def _saving_words(d: Values) -> list[str]:
    steps, final = d["checkpoint.save_interval"], d["checkpoint.save_final"]
    if steps is None and not final:
        return []
    return ["--save", "checkpoints", "--save-interval", str(steps or d["trainer.train_iters"])]


DATA: tuple[Entry, ...] = (
    Entry(
        ("--mock-data", "--data-path"),
        ("data.kind", "data.path", "data.blend", "data.blend_weights"),
        _source,
        _source_words,
    ),
    Entry(("--split",), ("data.split",), _split, lambda d: ["--split", ",".join(map(spelled, d["data.split"]))]),
    one("--seq-length", "data.seq_length", always=True, also=("--encoder-seq-length",)),
    one(
        "--max-position-embeddings",
        "model.max_position_embeddings",
        lambda d: d.get("data.seq_length"),
        always=True,
    ),
    on("--eod-mask-loss", "data.eod_mask_loss"),
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
    ),
)

TRAINER: tuple[Entry, ...] = (
    Entry(
        ("--micro-batch-size", "--global-batch-size"),
        ("trainer.micro_batch_size", "trainer.global_batch_size"),
        _batch,
        _batch_words,
    ),
    _steps("--train-iters", "--train-samples", "trainer.train_iters", needed=True),
    one("--eval-interval", "trainer.eval_interval", 1000, none=(0,)),
    one("--eval-iters", "trainer.eval_iters", 100),
    one("--seed", "trainer.seed", 1234),
    on("--deterministic-mode", "trainer.deterministic"),
    always("trainer.sample_tokens", 0),
    Entry(PROFILE, ("trainer.profile_step",), _profile, _profile_words),
    Entry(
        ("--distributed-timeout-minutes",),
        ("trainer.timeout_s", "trainer.soft_timeout_s"),
        _timeout,
        _timeout_words,
    ),
)

OPTIM: tuple[Entry, ...] = (
    one("--optimizer", "optim.name", "adamw", words={"adam": "adamw"}),
    one("--lr", "optim.lr", always=True),
    one("--min-lr", "optim.min_lr", 0.0),
    one("--lr-decay-style", "optim.schedule", "linear", words=STYLES),
    _steps("--lr-decay-iters", "--lr-decay-samples", "optim.decay_iters"),
    Entry(
        ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction"),
        ("optim.warmup_iters",),
        _warmup,
        _warmup_words,
    ),
    _steps("--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "optim.wsd_decay_iters"),
    one(
        "--lr-wsd-decay-style",
        "optim.wsd_decay_style",
        lambda d: "exponential" if d["optim.schedule"] == "wsd" else default_of("optim.wsd_decay_style"),
    ),
    one("--weight-decay", "optim.weight_decay", 0.01),
    one("--adam-beta1", "optim.beta1", 0.9),
    one("--adam-beta2", "optim.beta2", 0.999),
    one("--adam-eps", "optim.eps", 1e-8),
    one("--sgd-momentum", "optim.momentum", 0.9),
    Entry(("--clip-grad",), ("optim.clip_grad",), _clip, _clip_words),
    Entry(
        ("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--optimizer-offload-fraction"),
        ("optim.cpu_offload",),
        _offload,
        _offload_words,
    ),
)

REST: tuple[Entry, ...] = (
    Entry(("--transformer-impl", "--no-gradient-accumulation-fusion"), (*KERNELS, FUSED), _kernels, _kernels_words),
    Entry(
        ("--save", "--save-interval", "--persistent-save-interval"),
        ("checkpoint.save_interval", "checkpoint.save_final"),
        _saving,
        _saving_words,
    ),
    always("checkpoint.keep", None),
    one("--log-interval", "log.interval", 100),
)
