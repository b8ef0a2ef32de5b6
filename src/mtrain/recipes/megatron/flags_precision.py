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


def _eight(values: Values) -> bool:
    return values["precision.fp8"] is not None


def _delayed(values: Values) -> bool:
    return _eight(values) and values["precision.fp8_recipe"] == "delayed"


def _some_layers(arguments: Arguments, draft: Draft) -> Draft:
    """Return one layer at each end by default; delayed scaling excludes no layers."""
    start, end = (arguments.converted(flag, whole) for flag in (START, END))
    # without a low-precision format there is nothing to exclude layers from
    few = (_eight(draft) or draft["precision.fp4"] is not None) and not _delayed(draft)
    if arguments.has(SOME) and few:
        return {
            FIRST: 1 if start is None else max(0, start),
            LAST: 1 if end is None else max(0, end),
        }
    for flag in (SOME, START, END):
        arguments.refuse(
            flag, "no effect", f"read only with {SOME}, {NEEDS_FORMAT.removeprefix('read only ')}"
        )
    return {FIRST: 0, LAST: 0}


def _some_layers_words(values: Values) -> list[str]:
    start = values[FIRST]
    end = values[LAST]
    return [SOME, START, str(start), END, str(end)] if start or end else []


def _dtype(arguments: Arguments, draft: Draft) -> Draft:
    given = [
        word
        for word, facts in FORMATS.items()
        if facts.flag is not None and arguments.has(facts.flag)
    ]
    return {"precision.dtype": given[0] if given else "fp32"}


def _dtype_words(values: Values) -> list[str]:
    flag = FORMATS[values["precision.dtype"] or "fp32"].flag
    return [] if flag is None else [flag]


def _reduction(arguments: Arguments, draft: Draft) -> Draft:
    key = "precision.grad_reduce_in_fp32"
    if draft["precision.dtype"] == "bf16":
        arguments.has("--accumulate-allreduce-grads-in-fp32")  # always true with bf16
        return {key: not arguments.has("--grad-reduce-in-bf16")}
    arguments.refuse("--grad-reduce-in-bf16", "no effect", "read only with --bf16")
    return {key: arguments.has("--accumulate-allreduce-grads-in-fp32")}


def _reduction_words(values: Values) -> list[str]:
    in_fp32 = values["precision.grad_reduce_in_fp32"]
    if values["precision.dtype"] == "bf16":
        return [] if in_fp32 else ["--grad-reduce-in-bf16"]
    return ["--accumulate-allreduce-grads-in-fp32"] if in_fp32 else []


def _router(arguments: Arguments, draft: Draft) -> Draft:
    kind = arguments.word("--moe-router-dtype")
    if kind not in (None, "fp32"):
        arguments.refuse(
            "--moe-router-dtype",
            "not supported",
            "changes the numbers: routers always compute in fp32",
        )
    if kind is None and draft.get("model.moe.num_experts") and draft["precision.dtype"] != "fp32":
        arguments.notes.append(
            "routers compute in fp32 here; in Megatron-LM without --moe-router-dtype, in the format"
            " of the model"
        )
    return {}


def _per_token(arguments: Arguments, draft: Draft) -> Draft:
    # mtrain always does this; in Megatron-LM it matters only with masked tokens
    arguments.has("--calculate-per-token-loss")
    return {}


def _padding(arguments: Arguments, draft: Draft) -> Draft:
    given = [flag for flag in PADDING if arguments.has(flag)]
    quantized = _eight(draft) or draft["precision.fp4"] is not None
    for flag in () if quantized else PADDING:
        arguments.refuse(flag, "no effect", NEEDS_FORMAT)
    return {PADS: bool(given) and quantized}


PRECISION: tuple[Entry, ...] = (
    Entry(DTYPES, ("precision.dtype",), _dtype, _dtype_words, switches=DTYPES),
    Entry(PER_TOKEN, (), _per_token, lambda values: list(PER_TOKEN), switches=PER_TOKEN),
    Entry(
        ("--moe-router-dtype",),
        (),
        _router,
        # mtrain's routers always compute so
        lambda values: ["--moe-router-dtype", "fp32"] if "model.moe.num_experts" in values else [],
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
        PADDING,
        (PADS,),
        _padding,
        lambda values: [PADDING[0]] if values.get(PADS) else [],
        switches=PADDING,
    ),
)
