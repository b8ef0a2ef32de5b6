"""What each code of a problem means and what to do: from where it is raised, and a table for the rest."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from mtrain.config.paths import program
from mtrain.config.raised import Place, raised_in

CODE = re.compile(r"[\"'](MT[0-9]{3})[\"']")
_ROOT = Path(__file__).resolve().parents[1]

FAMILIES = {
    "MT00": "a file that cannot be read as data",
    "MT01": "the command line and the schema",
    "MT04": "devices",
    "MT1": "layout, batch and steps against each other",
    "MT2": "the model",
    "MT3": "data",
    "MT4": "precision, kernels, optimizer and folders",
    "MT5": "runs and checkpoints",
    "MT6": "the corpus, found when it is opened",
    "MT7": "recipes, locks and imports",
}
"""Begin of a code -> what codes of that kind are about."""

WORDS: dict[str, tuple[str, str]] = {
    "MT001": ("An input was refused that has no code of its own.", "Read the sentence beside it."),
    "MT002": ("A file, a folder or a recipe is not where its name says.", "Take one of the names that are shown."),
    "MT003": ("Text is not what it must be: YAML, JSON, a script, UTF-8.", "Mend the line that is named."),
    "MT004": ("Something is said twice, and the later one would win silently.", "Keep one of the two."),
    "MT005": ("A file is too large, too deep, unfolds into too much, or has too many problems.", "Write less of it."),
    "MT006": ("A file is more than data: a tag, `_target_`, `hydra`.", "Delete the key; a recipe runs no code."),
    "MT007": ("`${...}` is more than a reference to another key, or leads nowhere.", "Write the value itself."),
    "MT010": (
        "An argument is neither a verb, a flag nor key=value.",
        "See --help, or take the spelling that is shown.",
    ),
    "MT011": ("A group has no such choice.", "Take one of the choices that are listed."),
    "MT012": ("There is no such key.", f"Take the key that is shown; `{program()} explain GROUP` lists them."),
    "MT013": ("A value is of another type than its key.", "Write it as the type that is named."),
    "MT014": ("A value is outside what its key allows.", "Take a value in the range that is named."),
    "MT015": ("A key has no default, and nothing sets it.", "Set it, or choose a file that does."),
    "MT016": ("A layout in one word cannot be read.", "Write axes with their degrees, such as tp4pp4."),
    "MT017": ("A recipe has a part that recipes do not have.", "Write choices as `- override /GROUP: CHOICE`."),
    "MT018": (
        "A recipe describes a part of a model and names none that the rest is from.",
        "State all keys of its architecture, or name the model it changes: `- override /model: NAME`.",
    ),
    "MT019": (
        "A recipe or a run file names a folder beyond the working folder that would be written to.",
        "Give the key on the command line, if you want it there.",
    ),
    "MT040": ("No installed plug-in provides the device.", "Choose cpu or cuda, or install its plug-in."),
    "MT110": (
        "A launcher started another number of processes than the configuration asks for.",
        "Start as many, or leave parallel.ranks null.",
    ),
    "MT111": ("Many more processes than cores.", "Choose a smaller layout, or wait."),
    "MT142": (
        "What the stages are written to hold does not fit the layout or the model.",
        "Write as many stages as pp * vpp, with all layers of the model, or leave the cut to mtrain.",
    ),
    "MT140": (
        "The state of the model alone is larger than this machine's memory.",
        "Name the machines it is meant for, as in cluster=h100x64, or take a smaller model.",
    ),
    "MT407": (
        "A kernel is named that this machine cannot run.",
        "Name the reference or auto, or install what is missing; only auto chooses.",
    ),
    "MT408": (
        "torch's grouped product does not take these experts.",
        "Leave kernels.experts to auto, or make sizes and format such as the sentence says.",
    ),
    "MT461": (
        "An implementation of Adam is named that does not update what this run trains.",
        "Leave kernels.optimizer to auto, which takes one that does.",
    ),
    "MT146": (
        "The state of the model alone is larger than the memory of the devices.",
        "Spread it: parallel.distributed_optimizer=true, more tp, pp or ep, or more devices.",
    ),
    "MT147": (
        "The activations of one sample, or the tokens of one step, are more than the memory of the device that is "
        "named, or of this machine where none is. What is counted is the least that any kernel needs.",
        "Shorten data.seq_length, take a smaller batch, spread it (cp, dp), or name a larger machine.",
    ),
    "MT149": (
        "The model is larger than the memory of any machine.",
        "Look for a digit too many in model.hidden_size, model.num_layers, model.vocab_size and the experts.",
    ),
    "MT322": (
        "Nobody named data, and the model is too large for the text that every machine has: tokens are synthetic.",
        "Name your own: data=text data.path=FOLDER, or data=indexed data.path=PREFIX; else say data=mock.",
    ),
    "MT501": ("A run folder is taken.", "Go on with it, or give the new run another name."),
    "MT502": ("There is no run or checkpoint to go on from.", "Name one that exists, or begin a new run."),
    "MT503": ("A checkpoint is of another model.", "Take the model of the checkpoint, or begin a new run."),
    "MT504": (
        "A key that changes the numbers differs from the run that is to go on.",
        "Take its value, or checkpoint.accept_changes=true.",
    ),
    "MT506": ("A run has no tokenizer, so no text can be generated.", "Train on text, or set data.tokenizer."),
    "MT507": ("The folder that weights are to be written to is there already.", "Name one that is not there yet."),
    "MT508": (
        "The layout cuts sequences into more parts than the model has positions.",
        "Generate in a smaller layout: parallel=single.",
    ),
    "MT601": ("A text corpus cannot be read as it is.", "Name a folder that holds text of these endings."),
    "MT602": ("The .bin and .idx that are named cannot be opened.", "Name the prefix of both files."),
    "MT603": ("A tokenizer.json cannot be read.", "Name one that can."),
    "MT604": ("The shares of the split are all zero.", "Give train a share."),
    "MT605": ("A split has too few tokens for one sample.", "Shorten data.seq_length, or give the split more."),
    "MT606": ("The global batch cannot be cut into the micro-batches of all ranks.", "Take a multiple of them."),
    "MT607": ("The tokenizer has more ids than the model has rows.", "Enlarge model.vocab_size."),
    "MT608": ("No end-of-document token is known to mask.", "Turn the mask off, or name a tokenizer."),
    "MT609": (
        "A checkpoint was trained on other data, or with another tokenizer.",
        "Bring the files back, or checkpoint.accept_changes=true.",
    ),
    "MT611": (
        "The .bin and .idx do not add up, or are none.",
        "Write them again, or name the prefix of others; an index names dtype, sequences and documents.",
    ),
    "MT612": (
        "Token ids are outside the model's vocabulary.",
        "Enlarge model.vocab_size, or tokenize the text anew.",
    ),
    "MT613": ("A file is no tokenizer.json.", "Name one that Hugging Face's tokenizers wrote."),
    "MT701": ("A file that is to be imported holds no command line of Megatron-LM.", "Name a training script."),
    "MT702": ("Nothing says how many ids the tokenizer has.", "Say it: model.vocab_size=N."),
    "MT706": ("A program trains something else than a GPT, or does not train.", "Import a script that trains a GPT."),
    "MT703": ("A config.json is of a family that is not read.", "Write the model's keys into a recipe."),
    "MT704": ("A file is there already, and nothing is written over.", "Take another name."),
    "MT705": ("A file is no lock, or its lock is broken.", f"Make one: {program()} recipe lock NAME -o FILE."),
}
"""Code -> what it means and what to do, where the function that raises it is not enough."""


@cache
def codes() -> dict[str, tuple[Path, ...]]:
    """Every code that the source can raise, with the files it stands in."""
    out: dict[str, list[Path]] = {}
    for file in sorted(_ROOT.rglob("*.py")):
        if file != Path(__file__).resolve():
            for code in set(CODE.findall(file.read_text(encoding="utf-8"))):
                out.setdefault(code, []).append(file)
    return {code: tuple(out[code]) for code in sorted(out)}


def family(code: str) -> str:
    """What codes of this kind are about."""
    return next((words for begin, words in FAMILIES.items() if code.startswith(begin)), "")


def places(code: str) -> list[Place]:
    """Where and why a code is raised."""
    return [p for file in codes().get(code, ()) for p in raised_in(file, file.relative_to(_ROOT).as_posix(), code)]


def validating(key: str) -> list[str]:
    """Codes of the rules whose problem is about `key`."""
    rules = _ROOT / "config/rules"
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(rules.glob("*.py"))}
    return [
        code
        for file, text in texts.items()
        if f'"{key}"' in text
        for code in sorted(set(CODE.findall(text)))
        if any(place.key == key for place in raised_in(file, file.name, code))
    ]
