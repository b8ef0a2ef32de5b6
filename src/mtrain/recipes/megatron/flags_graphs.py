"""Megatron-LM's flags for CUDA graphs, whose words changed with its releases, and for offloaded
activations.
"""

from __future__ import annotations

from typing import Any

from mtrain.config.messages.keys import choices_of
from mtrain.recipes.megatron.arguments import Arguments, Draft, Entry, Values
from mtrain.recipes.megatron.flags_layout import words_of

OFFLOADED = "parallel.activation_offload.modules"
IMPL = "trainer.cuda_graph_impl"
MODULES = "trainer.cuda_graph_modules"
OLD = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
SCOPES = ("--cuda-graph-modules", "--cuda-graph-scope")


def _read(a: Arguments, d: Draft) -> Draft:
    impl = a.word("--cuda-graph-impl") or "none"
    for flag, word in OLD.items():
        impl = word if a.has(flag) else impl
    if impl not in (choices_of(IMPL) or ()):
        a.refuse(
            "--cuda-graph-impl",
            "not supported",
            f"{impl}: {IMPL} is one of {', '.join(choices_of(IMPL) or ())}",
        )
        impl = "none"
    modules: list[str] = []
    for flag in SCOPES:
        for word in (
            word for given in a.words(flag) or () for word in given.replace(",", " ").split()
        ):
            if word == "full_iteration" and impl in ("local", word):
                impl = word
            elif word in words_of(MODULES):
                modules.append(word)
            elif word != "full" and (word, impl) != ("full_iteration", "none"):
                a.refuse(
                    flag, "not supported", f"{word}: modules are {', '.join(words_of(MODULES))}"
                )
    is_read = impl in ("local", "transformer_engine")
    return {IMPL: impl, MODULES: modules if modules and is_read else None}


def _write(d: Values) -> list[str]:
    impl: str = d[IMPL]
    modules: Any = d[MODULES]
    out = ["--cuda-graph-impl", impl] if impl != "none" else []
    return out + (["--cuda-graph-modules", *modules] if modules else [])


def _offload(a: Arguments, d: Draft) -> Draft:
    flag = "--offload-modules"
    known = words_of(OFFLOADED)
    modules = [word for given in a.words(flag) or () for word in given.replace(",", " ").split()]
    for word in (word for word in modules if word not in known):
        a.refuse(flag, "not supported", f"{word}: modules are {', '.join(known)}")
    is_read = a.has("--fine-grained-activation-offloading")
    return {OFFLOADED: [word for word in modules if word in known] or None if is_read else None}


def _offload_words(d: Values) -> list[str]:
    modules: Any = d[OFFLOADED]
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
        ("--cuda-graph-impl", *SCOPES, *OLD), (IMPL, MODULES), _read, _write, switches=tuple(OLD)
    ),
)
