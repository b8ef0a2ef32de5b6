"""The kind of model that a program of Megatron-LM trains, by its name, folder and flags; GPTs and
BERTs can be imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from mtrain.recipes.shell.gaps import Word, shown

GPT = ("pretrain_gpt", "pretrain_gpt_core", "run_simple_mcore_train_loop", "finetune_gpt")

_TRAINED: dict[str, str] = {
    **dict.fromkeys(("t5", "ul2"), "trains a T5, an encoder and a decoder"),
    "bert": "trains a BERT, an encoder",
    "retro": "trains a RETRO, a GPT that attends to retrieved text",
    **dict.fromkeys(("mamba", "hybrid"), "trains a model with state-space layers"),
    **dict.fromkeys(
        ("vlm", "avlm", "vl", "nvlm", "multimodal", "mimo", "llava", "omni", "mllama"),
        "trains a model of images and text",
    ),
    **dict.fromkeys(
        ("dino", "vision", "vit", "inpaint", "clip", "siglip"), "trains a vision model"
    ),
    **dict.fromkeys(
        ("ict", "biencoder", "orqa", "realm", "colbert"), "trains encoders for retrieval"
    ),
    **dict.fromkeys(("rl", "rlhf", "ppo", "grpo"), "trains by reinforcement learning"),
    **dict.fromkeys(("dpo", "orpo", "kto", "simpo", "reward", "rm"), "trains by preferences"),
    **dict.fromkeys(
        ("posttrain", "posttraining", "alignment"), "trains a model on after pretraining"
    ),
    **dict.fromkeys(("diffusion", "dit", "flux"), "trains a diffusion model"),
}
_OTHER: dict[str, str] = {
    **dict.fromkeys(("inference", "generation", "generate", "server", "serve"), "generates text"),
    **dict.fromkeys(
        ("evaluate", "evaluation", "eval", "mmlu", "validate", "tasks"), "evaluates a model"
    ),
    **dict.fromkeys(("checkpoint", "convert", "converter", "export"), "converts checkpoints"),
    **dict.fromkeys(("preprocess", "tokenize", "merge"), "prepares data"),
    **dict.fromkeys(("prune", "quantize", "distill"), "changes a model that was trained"),
}
"""Word of a program's name -> its purpose, if the name does not speak of training."""
TRAINS = {
    "pretrain",
    "train",
    "training",
    "finetune",
    "pretraining",
    "finetuning",
    "sft",
    "posttrain",
}
OTHER_WORDS = frozenset((*_OTHER, "tokenizer", "vocab"))
"""Words in the names of programs that do not train."""
_FOLDERS = {
    "t5",
    "bert",
    "retro",
    "mamba",
    "hybrid",
    "multimodal",
    "mimo",
    "vision",
    "rl",
    "tasks",
    "inference",
    "llava",
}
"""Words of a folder that describe its content, such as `multimodal/train.py`."""

_FLAGS: tuple[tuple[str, str], ...] = (
    (r"img-[hw]|patch-dim|vision-.*|language-model-type|freeze-(LM|ViT)|image-tag-type", "vlm"),
    (r"dino-.*|iter-per-epoch", "dino"),
    (r"perform-rl-step|grpo-.*|rl-.*|langrl-.*|ppo-.*", "rl"),
    (r"(dpo|orpo|kto|simpo|reward)-.*|ref-load|is-pairwise-dataset", "dpo"),
    (r"hybrid-(override|layer)-pattern|hybrid-(attention|mlp)-ratio|is-hybrid-model", "mamba"),
    (r"decoder-num-layers|decoder-seq-length|vocab-extra-ids", "t5"),
    (r"bert-no-binary-head", "bert"),
    (r"retro-(?!.*workdir).*|bert-(load|embedder-type)", "retro"),
    (r"ict-.*|biencoder-.*|query-in-block-prob", "ict"),
    (
        r"num-tokens-to-generate|out-seq-length|sample-(in|out)put-file|inference-max-requests",
        "generation",
    ),
)
"""Flags that only programs of one kind read, and a word for the kind."""
_ANY = re.compile(f"--({'|'.join(pattern for pattern, _ in _FLAGS)})\\Z")


def other_than_gpt(program: str | None, flags: Mapping[str, list[Word]], source: str = "") -> str:
    """Return what a program does if not training a GPT, such as `trains a T5, ...`; empty for a
    GPT.

    Args:
        program: the path of the program, or the name of a module; None if only its flags are known.
        flags: its flags with their values.
        source: the file that holds the flags; the folder of a `model_config.yaml` shows its
            purpose.
    """
    folders: set[str] = set()
    name: set[str] = set()
    if program is not None:
        parts = [part for part in re.split(r"[/.]", program.removesuffix(".py")) if part]
        name = _words(parts[-1:])
        folders = _words(parts[-3:-1])
    elif source.endswith((".yaml", ".yml")):
        folders = _words(source.split("/")[-3:-1])
    purpose = _named(name, name)
    # a folder tells only where the name does not: examples/bert/pretrain_gpt.py trains a GPT
    if not purpose and "gpt" not in name | folders:
        purpose = _named(folders & _FOLDERS, name)
    return purpose or _by_flags(flags)


def family_of(does: str) -> str | None:
    """Return the `model.family` for a result of `other_than_gpt`; None if not imported."""
    if not does:
        return "gpt"
    return "bert" if does.startswith(_TRAINED["bert"]) else None


def is_trainer(program: str, family: str) -> bool:
    """Return whether a program is one of Megatron-LM's that train a family."""
    programs = {"gpt": GPT, "bert": ("pretrain_bert",)}[family]
    return program.rpartition("/")[2].removesuffix(".py").rpartition(".")[2] in programs


def _words(parts: Iterable[str]) -> set[str]:
    """Return the words of names, also without the number at their end: `retro2` is `retro`."""
    cut = [word for part in parts for word in re.split(r"[^a-z0-9]+", part.lower()) if word]
    return {*cut, *(word.rstrip("0123456789") for word in cut)}


def _named(words: set[str], name: set[str]) -> str:
    # pretrain_... never evaluates or converts
    purposes = _TRAINED if name & TRAINS else _OTHER | _TRAINED
    return next((does for word, does in purposes.items() if word in words), "")


def _by_flags(flags: Mapping[str, list[Word]]) -> str:
    # 0 and None are how scripts turn such a feature off
    telling = [f for f in flags if _ANY.match(f) and flags[f] not in (["0"], ["0.0"], ["None"])]
    for pattern, word in _FLAGS if telling else ():
        matching = [f for f in telling if re.fullmatch(f"--({pattern})", f)]
        if matching:
            return f"{(_TRAINED | _OTHER)[word]} ({', '.join(matching[:3])})"
    spec, kind, stage = (
        " ".join(map(shown, flags.get(flag, ())))
        for flag in ("--spec", "--tokenizer-type", "--stage")
    )
    if stage and stage not in ("pretrain", "pt"):
        return f"trains a model on after pretraining (--stage {stage})"
    if "mamba" in spec or "hybrid" in spec:
        return f"{_TRAINED['mamba']} (--spec {spec})"
    if kind.startswith("BertWordPiece"):
        return f"{_TRAINED['bert']} (--tokenizer-type {kind})"
    return ""
