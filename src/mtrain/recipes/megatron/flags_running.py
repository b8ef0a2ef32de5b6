"""Megatron-LM's flags for timeouts, profiles, kernels, checkpoints, graphs and offloading."""

from __future__ import annotations

from typing import Any

from mtrain.config.messages.keys import choices_of
from mtrain.recipes.megatron.arguments import (
    Arguments,
    Draft,
    Entry,
    Values,
    always,
    default_of,
    list_choices,
    whole,
)


def _timeout(arguments: Arguments, draft: Draft) -> Draft:
    minutes = arguments.converted("--distributed-timeout-minutes", whole)
    # 10 minutes are Megatron-LM's default
    limit = 60.0 * minutes if minutes and minutes > 0 else 600.0
    # it warns before the limit ends the run, so it has to be shorter
    soft = default_of("trainer.soft_timeout_s")
    return {
        "trainer.timeout_s": limit,
        "trainer.soft_timeout_s": soft if soft < limit else limit / 5,
    }


def _timeout_words(values: Values) -> list[str]:
    minutes = values["trainer.timeout_s"] / 60
    if minutes >= 1 and minutes % 1 == 0:
        return ["--distributed-timeout-minutes", str(int(minutes))]
    return []


PROFILE = (
    "--profile",
    "--use-pytorch-profiler",
    "--profile-step-start",
    "--profile-step-end",
    "--profile-ranks",
)
RANKS = "trainer.profile_ranks"


def _profile(arguments: Arguments, draft: Draft) -> Draft:
    start = arguments.converted("--profile-step-start", whole)
    ranks = arguments.words("--profile-ranks") or ["0"]
    arguments.has("--profile-step-end")  # one step is profiled
    none = {"trainer.profile_step": None, RANKS: default_of(RANKS)}
    if not arguments.has("--profile"):
        return none
    if not arguments.has("--use-pytorch-profiler"):
        arguments.refuse("--profile", "not supported", "nsys profiles are started from outside")
        return none
    if not all(word.isdecimal() for word in ranks):
        arguments.refuse("--profile-ranks", "unreadable", "takes ranks, which are whole numbers")
        return none
    return {
        "trainer.profile_step": 10 if start is None else max(1, start),
        RANKS: [int(word) for word in ranks],
    }


def _profile_words(values: Values) -> list[str]:
    step = values["trainer.profile_step"]
    if step is None:
        return []
    words = [
        "--profile",
        "--use-pytorch-profiler",
        "--profile-step-start",
        str(step),
        "--profile-step-end",
        str(step + 1),
    ]
    ranks = values[RANKS]
    if list(ranks) != list(default_of(RANKS)):
        return [*words, "--profile-ranks", *map(str, ranks)]
    return words


KERNELS = "kernels.default"
FUSED = "kernels.gradient_accumulation_fusion"


def _kernels(arguments: Arguments, draft: Draft) -> Draft:
    kind = arguments.word("--transformer-impl")
    # Megatron-LM's local layers are plain torch, like the reference
    word = {"local": "reference", "transformer_engine": "te"}.get(kind or "", "auto")
    # Unset, both fuse where a buffer for the gradients stays.
    apart = arguments.has("--no-gradient-accumulation-fusion")
    return {KERNELS: word, FUSED: False if apart else None}


def _kernels_words(values: Values) -> list[str]:
    if values[KERNELS] == "reference":
        return ["--transformer-impl", "local"]
    if values[KERNELS] != "te":
        return []
    kept = ["--no-gradient-accumulation-fusion"] if values[FUSED] is False else []
    return ["--transformer-impl", "transformer_engine", *kept]


def _saving(arguments: Arguments, draft: Draft) -> Draft:
    steps = arguments.converted("--save-interval", whole) or arguments.converted(
        "--persistent-save-interval", whole
    )
    if not arguments.has("--save"):
        return {"checkpoint.save_interval": 0, "checkpoint.save_final": False}
    arguments.refuse("--save", "derived here", "checkpoints lie in the run folder: log.runs_dir")
    # an interval of the whole training means only the final checkpoint
    last = steps is not None and steps == draft.get("trainer.train_iters")
    return {"checkpoint.save_interval": 0 if last else steps, "checkpoint.save_final": True}


def _saving_words(values: Values) -> list[str]:
    steps = values["checkpoint.save_interval"]
    final = values["checkpoint.save_final"]
    if not steps and not final:
        return []
    return ["--save", "checkpoints", "--save-interval", str(steps or values["trainer.train_iters"])]


RUNNING: tuple[Entry, ...] = (
    Entry(PROFILE, ("trainer.profile_step", RANKS), _profile, _profile_words, switches=PROFILE[:2]),
    Entry(
        ("--distributed-timeout-minutes",),
        ("trainer.timeout_s", "trainer.soft_timeout_s"),
        _timeout,
        _timeout_words,
    ),
    Entry(
        ("--transformer-impl", "--no-gradient-accumulation-fusion"),
        (KERNELS, FUSED),
        _kernels,
        _kernels_words,
        switches=("--no-gradient-accumulation-fusion",),
    ),
    Entry(
        ("--save", "--save-interval", "--persistent-save-interval"),
        ("checkpoint.save_interval", "checkpoint.save_final"),
        _saving,
        _saving_words,
    ),
    always("checkpoint.keep", None),
)


OFFLOADED = "parallel.activation_offload.modules"
GRAPH_IMPL = "trainer.cuda_graph_impl"
GRAPH_MODULES = "trainer.cuda_graph_modules"
OLD_GRAPH_FLAGS = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
GRAPH_MODULE_FLAGS = ("--cuda-graph-modules", "--cuda-graph-scope")


def _graphs(arguments: Arguments, draft: Draft) -> Draft:
    impl = arguments.word("--cuda-graph-impl") or "none"
    for flag, word in OLD_GRAPH_FLAGS.items():
        impl = word if arguments.has(flag) else impl
    if impl not in (choices_of(GRAPH_IMPL) or ()):
        arguments.refuse(
            "--cuda-graph-impl",
            "not supported",
            f"{impl}: {GRAPH_IMPL} is one of {', '.join(choices_of(GRAPH_IMPL) or ())}",
        )
        impl = "none"
    modules: list[str] = []
    for flag in GRAPH_MODULE_FLAGS:
        for word in (
            word
            for given in arguments.words(flag) or ()
            for word in given.replace(",", " ").split()
        ):
            # a module in some releases, and an implementation in others
            if word == "full_iteration" and impl in ("local", word):
                impl = word
            elif word in list_choices(GRAPH_MODULES):
                modules.append(word)
            elif word != "full" and (word, impl) != ("full_iteration", "none"):
                arguments.refuse(
                    flag,
                    "not supported",
                    f"{word}: modules are {', '.join(list_choices(GRAPH_MODULES))}",
                )
    # graphs of a whole iteration have no modules
    is_read = impl in ("local", "transformer_engine")
    return {GRAPH_IMPL: impl, GRAPH_MODULES: modules if modules and is_read else None}


def _graphs_words(values: Values) -> list[str]:
    impl: str = values[GRAPH_IMPL]
    modules: Any = values[GRAPH_MODULES]
    out = ["--cuda-graph-impl", impl] if impl != "none" else []
    return out + (["--cuda-graph-modules", *modules] if modules else [])


def _offload(arguments: Arguments, draft: Draft) -> Draft:
    flag = "--offload-modules"
    known = list_choices(OFFLOADED)
    modules = [
        word for given in arguments.words(flag) or () for word in given.replace(",", " ").split()
    ]
    for word in (word for word in modules if word not in known):
        arguments.refuse(flag, "not supported", f"{word}: modules are {', '.join(known)}")
    is_read = arguments.has("--fine-grained-activation-offloading")
    return {OFFLOADED: [word for word in modules if word in known] or None if is_read else None}


def _offload_words(values: Values) -> list[str]:
    modules: Any = values[OFFLOADED]
    return (
        ["--fine-grained-activation-offloading", "--offload-modules", *modules] if modules else []
    )


GRAPHS: tuple[Entry, ...] = (
    Entry(
        ("--fine-grained-activation-offloading", "--offload-modules"),
        (OFFLOADED,),
        _offload,
        _offload_words,
        switches=("--fine-grained-activation-offloading",),
    ),
    Entry(
        ("--cuda-graph-impl", *GRAPH_MODULE_FLAGS, *OLD_GRAPH_FLAGS),
        (GRAPH_IMPL, GRAPH_MODULES),
        _graphs,
        _graphs_words,
        switches=tuple(OLD_GRAPH_FLAGS),
    ),
)
