"""The training command of a script: its launcher, its program, the program's words, and the kind
of model that it trains; GPTs and BERTs can be imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.megatron.arguments import Arguments
from mtrain.recipes.megatron.flags_model import PROGRAM
from mtrain.recipes.megatron.table import known_flags
from mtrain.recipes.shell.gaps import Unread, Word, shown, words_in
from mtrain.recipes.shell.reader import Call, Script

# fewer may be a coincidence: --load or --seed are flags of many programs
FEW_FLAGS = 3
"""Known flags that mark a training command whose program is unknown."""
FLAGS_FIX = "the file of a training script, or of nothing but its flags"
_PLACES = {
    "--node-rank",
    "--machine-rank",
    "--local-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--main-process-ip",
    "--main-process-port",
    "--local-addr",
    "--nodelist",
    "--relative",
    "--host",
    "--hosts",
    "-w",
    "-H",
    "-r",
}
"""Launcher flags that differ between the machines of one training."""
_REMOTE = ("ssh", "pdsh")
_STARTING = (
    "torchrun",
    "python",
    "python3",
    "deepspeed",
    "accelerate",
    "srun",
    "mpirun",
    "mpiexec",
    "env",
    "nohup",
)
_LAUNCHERS = ("torch.distributed", "torch.", "deepspeed", "accelerate")


@dataclass
class TrainingCommand:
    """The command that trains."""

    launcher: list[Word]
    """The words before the program's."""
    words: list[Word]
    notes: list[str]
    family: str = "gpt"
    """The family of the model that it trains, gpt or bert."""
    doubt: str = ""
    """Other commands that the user may mean; empty if there are no others."""


@dataclass(frozen=True)
class _Candidate:
    """A command of a script that may train."""

    call: Call
    known_flags: int
    training: TrainingCommand

    @property
    def rank(self) -> tuple[bool, int]:
        """Return the order of preference: unconditional commands first, then many flags."""
        return (not self.call.conditional, self.known_flags)


def training_command(script: Script, source: str) -> TrainingCommand:
    """Return the command with the most known flags among those that train a GPT or a BERT.

    Raises:
        ConfigError: no command trains, or the commands train other models.
    """
    best: _Candidate | None = None
    others: list[Call] = []
    rivals: list[Call] = []
    refused: list[tuple[int, str, str]] = []
    for call in script.commands:
        launcher, program, words = _parted(call.words)
        arguments = Arguments(words)
        # words that may hold flags count, too: whole commands stand in variables
        count = len((arguments.flags.keys() | arguments.maybe.keys()) & known_flags())
        does = other_than_gpt(program, arguments.flags, source) if count or program else ""
        # other families are refused only if nothing else trains: a script may also evaluate
        family = family_of(does)
        if family is None and program is not None:
            refused.append((count, f"{program} {does}", call.where))
        if family is None:
            continue
        named = program is not None and is_trainer(program, family)
        least = 1 if launcher else FEW_FLAGS
        if not named and count < least:
            continue
        others.append(call)
        if named or count >= FEW_FLAGS:
            rivals.append(call)
        notes = []
        if program is not None and not named:
            notes = [f"{program} is taken for a program that trains a {family.upper()}"]
        candidate = _Candidate(call, count, TrainingCommand(launcher, words, notes, family))
        if best is None or candidate.rank > best.rank:
            best = candidate
    if best is not None:
        return _with_rivals(best, others, rivals)
    if refused:
        _, what, where = max(refused)
        raise ConfigError([not_a_gpt(what, where)])
    return _all_variables(script, source)


def _with_rivals(
    best: _Candidate, others: Sequence[Call], rivals: Sequence[Call]
) -> TrainingCommand:
    """Return the chosen command with notes on the commands that were not chosen."""
    training = best.training
    # the same command in two branches is one command
    rest = [c for c in others if c is not best.call and c.words != best.call.words]
    training.notes += [f"{c.where}: another command with such flags is not read" for c in rest]
    # the commands of several machines are one training
    words = _without_places(best.call.words)
    different = dict.fromkeys(c.where for c in rivals if _without_places(c.words) != words)
    if different:
        training.doubt = (
            f"{best.call.where} is read, and {', '.join([*different][:5])} trains otherwise: which"
            " is meant?"
        )
    if best.call.conditional:
        where = "in a condition, a loop or a function that is not called"
        training.notes.append(f"{best.call.where}: the command stands {where}; it is read once")
    return training


def _all_variables(script: Script, source: str) -> TrainingCommand:
    """Return the flags of a file that only sets variables, for another script to use.

    Raises:
        ConfigError: there are too few flags, or those of another model.
    """
    words = [word for held in script.variables.values() for item in held for word in words_in(item)]
    arguments = Arguments(words)
    if len((arguments.flags.keys() | arguments.maybe.keys()) & known_flags()) < FEW_FLAGS:
        rule = "no flags of Megatron-LM are found in it"
        if os.path.isfile(source):
            fix = f"{program()} recipe import --capture -- bash {source}, which runs it"
        else:
            fix = FLAGS_FIX
        raise ConfigError([Problem("MT701", "", None, rule, fix, source)])
    does = other_than_gpt(None, arguments.flags, source)
    family = family_of(does)
    if family is None:
        raise ConfigError([not_a_gpt(f"it {does}", source)])
    return TrainingCommand(
        [], words, ["no command uses the flags: those of all variables are read"], family
    )


def not_a_gpt(what: str, source: str) -> Problem:
    """Return the problem of a program that trains neither a GPT nor a BERT."""
    rule = f"{what}; only GPTs and BERTs are imported"
    return Problem("MT706", "", None, rule, f"the script of a pretrain_gpt.py or {PROGRAM}", source)


def _without_places(words: Sequence[Word]) -> list[str]:
    """Return a command without the words that differ between machines: ranks and addresses."""
    launcher, _, rest = _parted(words)
    texts = list(map(shown, launcher))
    start = next(
        (i for i, text in enumerate(texts) if i and os.path.basename(text) in _STARTING), 0
    )
    out = list[str]()
    skips = False
    remote = bool(texts) and os.path.basename(texts[0]) in _REMOTE
    for text in texts[start:] if remote else texts:
        name, equals, _ = text.partition("=")
        if name.replace("_", "-") in _PLACES:
            skips = not equals
        elif skips:
            skips = False
        else:
            out.append(text)
    return [*out, *map(shown, rest)]


def _parted(words: Sequence[Word]) -> tuple[list[Word], str | None, list[Word]]:
    """Return the words of the launcher, the training program, and its words."""
    texts = list(map(shown, words))
    for index, text in enumerate(texts):
        # torch.distributed.run starts the program, which comes later
        module = (
            text == "-m" and index + 1 < len(words) and not texts[index + 1].startswith(_LAUNCHERS)
        )
        if module:
            return list(words[: index + 2]), texts[index + 1], list(words[index + 2 :])
        if text.endswith(".py"):
            return list(words[: index + 1]), text, list(words[index + 1 :])
    first = next((i for i, text in enumerate(texts) if text.startswith("--")), len(words))
    # without a program, the flags of a launcher end where the first of Megatron-LM stands
    own = next(
        (i for i, text in enumerate(texts) if text.partition("=")[0] in known_flags()), len(words)
    )
    unread = [
        i
        for i in range(first + 1, own)
        if isinstance(words[i], Unread) and not texts[i - 1].startswith("--")
    ]
    if unread and own < len(words):  # the program is unknown
        return list(words[: unread[-1] + 1]), texts[unread[-1]], list(words[unread[-1] + 1 :])
    if first and (texts[0].isidentifier() or isinstance(words[0], Unread)):
        launcher = list(words[:first])
    else:
        launcher = []
    return launcher, None, list(words[first if first < len(words) else len(launcher) :])


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
