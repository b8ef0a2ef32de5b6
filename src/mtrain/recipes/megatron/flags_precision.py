"""Megatron-LM's flags for number formats: weights, gradients, the loss scale, GEMMs."""

from __future__ import annotations

from mtrain.config.engine.formats import FORMATS
from mtrain.recipes.megatron.arguments import Arguments, Draft, Entry, Values, whole

SOME = "--first-last-layers-bf16"
START = "--num-layers-at-start-in-bf16"
END = "--num-layers-at-end-in-bf16"
FIRST = "precision.num_layers_at_start_in_bf16"
LAST = "precision.num_layers_at_end_in_bf16"
NEEDS_FORMAT = "read only with --fp8-format or --fp4-format"
DTYPES = tuple(facts.flag for facts in FORMATS.values() if facts.flag)
PER_TOKEN = ("--calculate-per-token-loss",)
REDUCTION = ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16")
PADDING = ("--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8")
PADS = "model.moe.router_padding_for_quantization"


def _eight(d: Values) -> bool:
    return d["precision.fp8"] is not None


def _delayed(d: Values) -> bool:
    return _eight(d) and d["precision.fp8_recipe"] == "delayed"


def _some_layers(a: Arguments, d: Draft) -> Draft:
    """Return one layer at each end by default; delayed scaling excludes no layers."""
    start, end = (a.converted(flag, whole) for flag in (START, END))
    few = (_eight(d) or d["precision.fp4"] is not None) and not _delayed(d)
    if a.has(SOME) and few:
        return {
            FIRST: 1 if start is None else max(0, start),
            LAST: 1 if end is None else max(0, end),
        }
    for flag in (SOME, START, END):
        a.refuse(
            flag, "no effect", f"read only with {SOME}, {NEEDS_FORMAT.removeprefix('read only ')}"
        )
    return {FIRST: 0, LAST: 0}


def _some_layers_words(d: Values) -> list[str]:
    start = d[FIRST]
    end = d[LAST]
    return [SOME, START, str(start), END, str(end)] if start or end else []


def _dtype(a: Arguments, d: Draft) -> Draft:
    given = [
        word for word, facts in FORMATS.items() if facts.flag is not None and a.has(facts.flag)
    ]
    return {"precision.dtype": given[0] if given else "fp32"}


def _dtype_words(d: Values) -> list[str]:
    flag = FORMATS[d["precision.dtype"] or "fp32"].flag
    return [] if flag is None else [flag]


def _reduction(a: Arguments, d: Draft) -> Draft:
    key = "precision.grad_reduce_in_fp32"
    if d["precision.dtype"] == "bf16":
        a.has("--accumulate-allreduce-grads-in-fp32")  # always true with bf16
        return {key: not a.has("--grad-reduce-in-bf16")}
    a.refuse("--grad-reduce-in-bf16", "no effect", "read only with --bf16")
    return {key: a.has("--accumulate-allreduce-grads-in-fp32")}


def _reduction_words(d: Values) -> list[str]:
    in_fp32 = d["precision.grad_reduce_in_fp32"]
    if d["precision.dtype"] == "bf16":
        return [] if in_fp32 else ["--grad-reduce-in-bf16"]
    return ["--accumulate-allreduce-grads-in-fp32"] if in_fp32 else []


def _router(a: Arguments, d: Draft) -> Draft:
    kind = a.word("--moe-router-dtype")
    if kind not in (None, "fp32"):
        a.refuse(
            "--moe-router-dtype",
            "not supported",
            "changes the numbers: routers always compute in fp32",
        )
    if kind is None and d.get("model.moe.num_experts") and d["precision.dtype"] != "fp32":
        a.notes.append(
            "routers compute in fp32 here; in Megatron-LM without --moe-router-dtype, in the format"
            " of the model"
        )
    return {}


def _per_token(a: Arguments, d: Draft) -> Draft:
    # mtrain always does this; in Megatron-LM it matters only with masked tokens
    a.has("--calculate-per-token-loss")
    return {}


def _padding(a: Arguments, d: Draft) -> Draft:
    given = [flag for flag in PADDING if a.has(flag)]
    quantized = _eight(d) or d["precision.fp4"] is not None
    for flag in () if quantized else PADDING:
        a.refuse(flag, "no effect", NEEDS_FORMAT)
    return {PADS: bool(given) and quantized}


PRECISION: tuple[Entry, ...] = (
    Entry(DTYPES, ("precision.dtype",), _dtype, _dtype_words, switches=DTYPES),
    Entry(PER_TOKEN, (), _per_token, lambda d: list(PER_TOKEN), switches=PER_TOKEN),
    Entry(
        ("--moe-router-dtype",),
        (),
        _router,
        lambda d: ["--moe-router-dtype", "fp32"] if "model.moe.num_experts" in d else [],
    ),
    Entry(
        REDUCTION,
        ("precision.grad_reduce_in_fp32",),
        _reduction,
        _reduction_words,
        switches=REDUCTION,
    ),
    Entry(
        (SOME, START, END),
        (FIRST, LAST),
        _some_layers,
        _some_layers_words,
        {START: (FIRST,), END: (LAST,)},
        switches=(SOME,),
    ),
    Entry(
        PADDING, (PADS,), _padding, lambda d: [PADDING[0]] if d.get(PADS) else [], switches=PADDING
    ),
)
