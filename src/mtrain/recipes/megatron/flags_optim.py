"""Megatron-LM's flags for the optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtrain.config.messages.keys import choices_of
from mtrain.config.optimizers import OPTIMIZERS, readers
from mtrain.config.resolve.batches import samples_of, steps_within
from mtrain.config.schedules import SCHEDULES
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
from mtrain.recipes.megatron.flags_training import RAMP, plan_of, steps

STYLES = {
    curve.megatron_name: name
    for name, curve in SCHEDULES.items()
    if curve.megatron_name not in (None, name)
}
"""Megatron-LM's word for a curve -> mtrain's, if they differ."""


def _warmup(arguments: Arguments, draft: Draft) -> Draft:
    key = "optim.warmup_iters"
    # Megatron-LM reads the share before steps and samples
    share = arguments.converted("--lr-warmup-fraction", float)
    if share is not None:
        steps = draft.get("optim.decay_iters") or draft.get("trainer.train_iters") or 0
        return {key: int(share * steps)}
    samples = arguments.converted("--lr-warmup-samples", whole)
    if samples:
        return {key: steps_within(plan_of(draft), samples)}
    return {key: arguments.converted("--lr-warmup-iters", whole) or 0}


def _warmup_words(values: Values) -> list[str]:
    count = values["optim.warmup_iters"]
    if not count:
        return []
    if values[RAMP]:
        return ["--lr-warmup-samples", str(samples_of(plan_of(values), count))]
    return ["--lr-warmup-iters", str(count)]


def _clip(arguments: Arguments, draft: Draft) -> Draft:
    norm = arguments.converted("--clip-grad", float)
    # 0 turns clipping off, which is null here
    return {"optim.clip_grad": 1.0 if norm is None else norm or None}


def _clip_words(values: Values) -> list[str]:
    norm = values["optim.clip_grad"]
    return [] if norm == 1.0 else ["--clip-grad", spelled(norm or 0.0)]


def _offload(arguments: Arguments, draft: Draft) -> Draft:
    share = arguments.converted("--optimizer-offload-fraction", float)
    if not arguments.has("--optimizer-cpu-offload"):
        arguments.refuse(
            "--optimizer-offload-fraction", "no effect", "read only with --optimizer-cpu-offload"
        )
        return {"optim.cpu_offload": 0.0}
    return {"optim.cpu_offload": 1.0 if share is None else share}


KEPT = ("optim.exp_avg_dtype", "optim.exp_avg_sq_dtype")
REMAINDERS = "optim.store_param_remainders"
MAIN = "optim.main_params_dtype"
AWARE = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype")


def _aware(arguments: Arguments, draft: Draft) -> Draft:
    """Return low-precision optimizer state; fp32 main weights become remainders of bf16 ones."""
    out: Draft = {**dict.fromkeys(KEPT, "fp32"), REMAINDERS: False, MAIN: "fp32"}
    aware = arguments.has(AWARE[0])
    if (
        not aware
        or draft["optim.name"] not in readers("exp_avg_dtype")
        or draft["optim.cpu_offload"]
    ):
        return out  # Megatron-LM also requires the flag for offloading
    for flag, key in zip(AWARE[1:], KEPT, strict=True):
        word = arguments.word(flag) or "fp32"
        if word in choices_of(key):
            out[key] = word
        else:
            arguments.refuse(flag, "not supported", f"{key} is one of {', '.join(choices_of(key))}")
    if arguments.word("--main-params-dtype") not in (None, "fp32"):
        arguments.refuse(
            "--main-params-dtype", "not supported", "changes the numbers: main weights are fp32"
        )
    if draft["precision.dtype"] == "bf16" and not draft["precision.grad_reduce_in_fp32"]:
        word = "bf16"
    else:
        word = "fp32"
    if arguments.word("--main-grads-dtype") not in (None, word):
        arguments.refuse(
            "--main-grads-dtype", "derived here", f"gradients are read as they are reduced: {word}"
        )
    # only then Megatron-LM stores the lower halves of fp32 weights next to bf16 ones
    half = draft["precision.dtype"] == "bf16" and draft.get("parallel.distributed_optimizer", False)
    return {**out, REMAINDERS: half}


def _aware_words(values: Values) -> list[str]:
    kept = [
        (flag, values[key])
        for flag, key in zip(AWARE[1:], KEPT, strict=True)
        if values[key] != "fp32"
    ]
    if not kept and not values[REMAINDERS]:
        return []
    # the flag has to agree with the format in which gradients are reduced
    reduced = values["precision.dtype"] == "bf16" and not values["precision.grad_reduce_in_fp32"]
    words = [AWARE[0], *(word for pair in kept for word in pair)]
    return [*words, "--main-grads-dtype", "bf16"] if reduced else words


def _offload_words(values: Values) -> list[str]:
    share = values["optim.cpu_offload"]
    if not share:
        return []
    # Megatron-LM refuses the first without the second
    words = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return words if share == 1.0 else [*words, "--optimizer-offload-fraction", spelled(share)]


WORDS = {
    spec.megatron_name: name for name, spec in OPTIMIZERS.items() if spec.megatron_name is not None
}
"""Megatron-LM's word for an optimizer -> mtrain's."""


def _name(arguments: Arguments, draft: Draft) -> Draft:
    word = arguments.word("--optimizer") or "adam"
    if word not in WORDS:
        arguments.refuse("--optimizer", "not supported", f"Megatron-LM's are {', '.join(WORDS)}")
    return {"optim.name": WORDS.get(word, WORDS["adam"])}


def _name_words(values: Values) -> list[str]:
    word = OPTIMIZERS[values["optim.name"]].megatron_name
    return [] if word is None or word == "adam" else ["--optimizer", word]


_STYLE = one("--lr-decay-style", "optim.schedule", "linear", words=STYLES)


def _style_words(d: Values) -> Sequence[str]:
    """Return no words for a curve that Megatron-LM does not have: the export reports the key."""
    if SCHEDULES[d["optim.schedule"]].megatron_name is None:
        return []
    return _STYLE.write(d)


OPTIM: tuple[Entry, ...] = (
    Entry(("--optimizer",), ("optim.name",), _name, _name_words),
    one("--lr", "optim.lr", always=True),
    one("--min-lr", "optim.min_lr", 0.0),
    replace(_STYLE, write=_style_words),
    steps("--lr-decay-iters", "--lr-decay-samples", "optim.decay_iters"),
    Entry(
        ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction"),
        ("optim.warmup_iters",),
        _warmup,
        _warmup_words,
    ),
    steps(
        "--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "optim.wsd_decay_iters", at_the_end=True
    ),
    always("optim.schedule_counts", "past_updates"),
    one("--weight-decay", "optim.weight_decay", 0.01),
    Entry(("--clip-grad",), ("optim.clip_grad",), _clip, _clip_words),
    Entry(
        ("--optimizer-cpu-offload", "--optimizer-offload-fraction"),
        ("optim.cpu_offload",),
        _offload,
        _offload_words,
        switches=("--optimizer-cpu-offload",),
    ),
    Entry(
        (*AWARE, "--main-params-dtype", "--main-grads-dtype"),
        (*KEPT, REMAINDERS, MAIN),
        _aware,
        _aware_words,
        {
            **{flag: (key,) for flag, key in zip(AWARE[1:], KEPT, strict=True)},
            "--main-params-dtype": (MAIN,),
        },
        switches=AWARE[:1],
    ),
)
