"""The meaning of each problem code and what to do: the codes of the rules, and a table of all
others.
"""

from __future__ import annotations

from functools import cache

from mtrain.config.compose.paths import program
from mtrain.config.families import configs, ships
from mtrain.config.messages.runtime_codes import OF_WORK
from mtrain.config.rules import all_rules
from mtrain.config.rules.families import code_prefix
from mtrain.config.rules.rule import Code, Rule

FAMILIES = {
    "MT00": "a file that cannot be read as data",
    "MT01": "the command line and the schema",
    "MT02": "choices over a recipe or a run file",
    "MT04": "devices and releases of megatron-core",
    "MT05": "the GPUs of this machine, found before anything is started",
    "MT1": "layout, batch and steps against each other",
    "MT2": "the model",
    "MT3": "data",
    "MT4": "precision, kernels, optimizer and folders",
    "MT5": "runs and checkpoints",
    "MT6": "the corpus, found when it is opened",
    "MT7": "recipes, locks and imports",
}
"""Prefix of a code -> the subject of such codes."""

OTHERS = (
    Code(
        "MT001",
        "An input was refused that has no code of its own.",
        "Read the sentence next to it.",
    ),
    Code(
        "MT002",
        "A file, a folder or a recipe is not where its name says.",
        "Take one of the names that are shown.",
        example="recipe=nowhere.yaml",
    ),
    Code(
        "MT003",
        "Text is not what it must be: YAML, JSON, a script, UTF-8.",
        "Correct the line that is named.",
        says="a second document begins; one file is one document",
    ),
    Code(
        "MT004",
        "The same thing is set twice, and the later setting would win silently.",
        "Keep one of the two.",
        example="model=llama_tiny model=llama3_8b",
    ),
    Code(
        "MT005",
        "A file is too large, too deep, unfolds into too much, or has too many problems.",
        "Write less of it.",
        says="nested deeper than the limit of N levels",
    ),
    Code(
        "MT006",
        "A file is more than data: a tag, `_target_`, `hydra`.",
        "Delete the key; a recipe runs no code.",
        says="the tag !!python/name is refused: a configuration is data",
    ),
    Code(
        "MT007",
        "`${...}` is more than a reference to another key, or leads nowhere.",
        "Write the value itself.",
        example="optim.lr='${nothing.here}'",
    ),
    Code(
        "MT010",
        "An argument is neither a verb, a flag nor key=value.",
        "See --help, or take the spelling that is shown.",
        example="+optim.beta1=0.8",
    ),
    Code(
        "MT011",
        "A group has no such choice.",
        "Take one of the choices that are listed.",
        example="model=lama_tiny",
    ),
    Code(
        "MT012",
        "There is no such key.",
        f"Take the key that is shown; `{program()} explain GROUP` lists them.",
        example="model.hiden_size=256",
    ),
    Code(
        "MT013",
        "A value is of another type than its key.",
        "Write it as the type that is named.",
        example="optim.lr=fast",
    ),
    Code(
        "MT014",
        "A value is outside what its key allows.",
        "Take a value in the range that is named.",
        example="parallel.tp=0",
    ),
    Code(
        "MT015",
        "A key has no default, and nothing sets it.",
        "Set it, or choose a file that does.",
        says="is required and nothing sets it",
    ),
    Code(
        "MT016",
        "A layout in one word cannot be read.",
        "Write axes with their degrees, such as tp4pp4.",
        example="parallel=tp0",
    ),
    Code(
        "MT017",
        "A recipe has a part that recipes do not have.",
        "Write choices as `- override /GROUP: CHOICE`.",
        says=(
            "recipes do not nest; the `recipe:` block holds title, purpose, hardware, source,"
            " verified"
        ),
    ),
    Code(
        "MT018",
        "A recipe describes a part of a model and names none that the rest is from.",
        "State all keys of its architecture, or name the model it changes: `- override /model:"
        " NAME`.",
        says=(
            "a model of its own that lacks vocab_size; a recipe states them all, or names the model"
            " that it changes"
        ),
    ),
    Code(
        "MT019",
        "A recipe or a run file names a folder beyond the working folder that would be written to.",
        "Give the key on the command line, if you want it there.",
        says=(
            "is beyond the working folder; that ../runs may be written there, only the command line"
            " says"
        ),
    ),
    Code(
        "MT020",
        "A group that is chosen on the command line replaces what the recipe or the run file says"
        " of it.",
        "Say again on the command line what is to stay of the values that are named.",
        severity="warning",
        example="recipe=sft/llama_tiny_cpu data=mock",
    ),
    Code(
        "MT040",
        "No installed plug-in provides the device.",
        "Choose cpu or cuda, or install its plug-in.",
        says="no installed plug-in provides the device tpu",
    ),
    Code(
        "MT051",
        "A machine has fewer devices than ranks are to be started on it.",
        "Start fewer ranks, name more machines, or take the CPU: cluster=cpu.",
        says="needs 8 GPUs on this machine; here: 2",
    ),
    Code(
        "MT052",
        "CUDA_VISIBLE_DEVICES does not show the GPUs that it was meant to show.",
        "List each GPU once, by its number or its UUID, or unset the variable.",
        says="CUDA_VISIBLE_DEVICES=0,0 names 0 twice, and CUDA then shows no GPU",
    ),
    Code(
        "MT053",
        "Another process holds memory of a GPU that the run needs.",
        "End that process, or leave its GPU out by CUDA_VISIBLE_DEVICES.",
        says=(
            "GPU 0 (NVIDIA H200) has 3.1 GiB of 140.4 GiB free, and process 4711 (python) computes"
            " on it"
        ),
    ),
    Code(
        "MT054",
        "NVIDIA's driver is older than the CUDA that the installed torch was built for.",
        "Install a newer driver, or a torch for the CUDA that the driver serves.",
        says="driver 535.54 serves CUDA up to 12.2, and the installed torch is built for CUDA 13.0",
    ),
    Code(
        "MT055",
        "The installed torch was built without CUDA.",
        "Install a torch that was built for CUDA, or take the CPU: cluster=cpu.",
        says="the installed torch is built without CUDA",
    ),
    Code(
        "MT056",
        "The GPUs of this machine are not those that the cluster describes.",
        "Take cluster=local, or the file of the GPUs that are here.",
        severity="warning",
        says="cluster h100 is of NVIDIA H100 80GB HBM3, and the GPUs here are NVIDIA H200",
    ),
    Code(
        "MT110",
        "A launcher started another number of processes than the configuration asks for.",
        "Start as many, or leave parallel.ranks null.",
        says="the launcher started 4 processes (WORLD_SIZE), the configuration asks for 2",
    ),
    Code(
        "MT111",
        "Many more processes than cores.",
        "Choose a smaller layout, or wait.",
        severity="warning",
        example="parallel=dp64 trainer.global_batch_size=64",
    ),
    Code(
        "MT140",
        "The state of the model is larger than this machine's memory, even without activations.",
        "Name the machines it is meant for, as in cluster=h100x64, or take a smaller model.",
        severity="warning",
        example="model=llama3_70b",
    ),
    Code(
        "MT245",
        "No installed plug-in provides the family of the model.",
        "Choose gpt, or install its plug-in.",
        example="model.family=nope",
    ),
    Code(
        "MT246",
        "The family of the model has keys of its own, and none is set.",
        "Set them, or choose another family.",
        says="model.hybrid: the family hybrid is described there",
    ),
    Code(
        "MT247",
        "Text generation needs a model that continues text; an encoder does not.",
        "Take a decoder-only model, or `evaluate` this one.",
        says="model.family=bert: a model of the family bert does not continue texts",
    ),
    Code(
        "MT254",
        "The family of the model, which a plug-in adds, does not say which weights a stage has, or"
        " what it computes.",
        "Ask its author for `Family.weights` and `Family.stage`.",
        says="the family theirs does not say which weights a stage has",
    ),
    Code(
        "MT255",
        "A step of this configuration cannot be traced: its program needs values that shapes do not"
        " give.",
        "Leave out --trace: the plan counts it.",
        says="a step of it does not run on shapes only",
    ),
    Code(
        "MT256",
        "A layout is to be chosen by its time, and too little is known of the devices to say how"
        " long a step takes.",
        "Name a cluster that states its devices, such as cluster=h100x8, or a layout.",
        says=(
            "the layout is chosen by its time, which of 4 ranks on local is not known without"
            " cluster.memory_gbps"
        ),
    ),
    Code(
        "MT257",
        "The layout is to be chosen, and none fits the devices.",
        "Take more devices, devices with more memory, or a smaller model.",
        example="model=llama31_405b parallel=auto cluster=h100x8",
    ),
    Code(
        "MT258",
        "No layout is valid with the keys that are set, so none can be chosen.",
        "Set fewer keys of the layout, or make the batch a multiple of the number of devices.",
        example=(
            "model=llama3_8b parallel=auto cluster=h100x8 trainer.global_batch_size=8"
            " trainer.micro_batch_size=3"
        ),
    ),
    Code(
        "MT407",
        "A kernel is named that this machine cannot run.",
        "Name the reference or auto, or install what is missing; only auto chooses.",
        example="kernels.rope=triton",
    ),
    Code(
        "MT146",
        "What a step needs on a device, as `plan` counts it, is more than its memory. The text"
        " names the pipeline stage and its three largest parts; what the allocator is assumed to"
        " hold in pieces is left out.",
        "Take the change that is named, the cheapest with which it fits; or more tp, pp or ep, or"
        " more devices.",
        severity="warning",
        example="model=llama3_70b cluster=h100x8 parallel=single",
    ),
    Code(
        "MT147",
        "The activations of one sample, or the tokens of one step, are more than the memory of the"
        " device that is named, or of this machine where none is. What is counted is what autograd"
        " keeps of one micro-batch.",
        "Shorten data.seq_length, take a smaller batch, shard it (cp, dp), or name a larger"
        " machine.",
        example="data.seq_length=1000000 model.max_position_embeddings=1000000",
    ),
    Code(
        "MT149",
        "The model is larger than the memory of any machine.",
        "Look for a digit too many in model.hidden_size, model.num_layers, model.vocab_size and the"
        " experts.",
        example="model.hidden_size=1000000 model.num_layers=100000",
    ),
    Code(
        "MT322",
        "Nobody named data, and the model is too large for the text that every machine has: tokens"
        " are synthetic.",
        "Name your own: data=text data.path=FOLDER, or data=indexed data.path=PREFIX; else say"
        " data=mock.",
        severity="warning",
        example="model=llama3_8b",
    ),
    *OF_WORK,
)
"""Codes that no rule raises: of files, the command line, the schema, the machine, runs, data and
imports.
"""


@cache
def codes() -> dict[str, Code]:
    """Return every code in order."""
    of_rules = (code for rule in all_rules() for code in rule.codes)
    known = {code.code: code for code in (*OTHERS, *of_rules)}
    return dict(sorted(known.items()))


@cache
def kinds() -> dict[str, str]:
    """Return the beginning of a code -> its subject: `FAMILIES`, and the families of plug-ins."""
    added = {code_prefix(name): f"the model family {name}" for name in configs() if not ships(name)}
    return FAMILIES | added


def family(code: str) -> str:
    """Return the subject of a code, by its beginning."""
    return next((words for begin, words in kinds().items() if code.startswith(begin)), "")


def rules_of(code: str) -> list[Rule]:
    """Return the rules that raise a code."""
    return [rule for rule in all_rules() if code in {c.code for c in rule.codes}]


def validating(key: str) -> list[str]:
    """Return codes of the rules that read `key`."""
    return sorted({code.code for rule in all_rules() if key in rule.reads for code in rule.codes})
