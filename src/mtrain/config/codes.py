"""What each code of a problem means and what to do: those of the rules, and a table of all others."""

from __future__ import annotations

from functools import cache

from mtrain.config.paths import program
from mtrain.config.rules import RULES
from mtrain.config.rules.rule import Code, Rule

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

OTHERS = (
    Code("MT001", "An input was refused that has no code of its own.", "Read the sentence beside it."),
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
        "Something is said twice, and the later one would win silently.",
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
        "MT011", "A group has no such choice.", "Take one of the choices that are listed.", example="model=lama_tiny"
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
        says="recipes do not nest; the `recipe:` block holds title, purpose, hardware, source, verified",
    ),
    Code(
        "MT018",
        "A recipe describes a part of a model and names none that the rest is from.",
        "State all keys of its architecture, or name the model it changes: `- override /model: NAME`.",
        says="a model of its own that lacks vocab_size; a recipe states them all, or names the model that it changes",
    ),
    Code(
        "MT019",
        "A recipe or a run file names a folder beyond the working folder that would be written to.",
        "Give the key on the command line, if you want it there.",
        says="is beyond the working folder; that ../runs may be written there, only the command line says",
    ),
    Code(
        "MT040",
        "No installed plug-in provides the device.",
        "Choose cpu or cuda, or install its plug-in.",
        says="no installed plug-in provides the device tpu",
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
        "The state of the model alone is larger than this machine's memory.",
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
        "Text is asked for from a model that does not continue texts, such as an encoder.",
        "Take a decoder-only model, or `evaluate` this one.",
        says="model.family=bert: a model of the family bert does not continue texts",
    ),
    Code(
        "MT407",
        "A kernel is named that this machine cannot run.",
        "Name the reference or auto, or install what is missing; only auto chooses.",
        example="kernels.rope=triton",
    ),
    Code(
        "MT146",
        "The state of the model alone is larger than the memory of the devices.",
        "Spread it: parallel.distributed_optimizer=true, more tp, pp or ep, or more devices.",
        severity="warning",
        example="model=llama3_70b cluster=h100x8 parallel=single",
    ),
    Code(
        "MT147",
        "The activations of one sample, or the tokens of one step, are more than the memory of the device that is "
        "named, or of this machine where none is. What is counted is the least that any kernel needs.",
        "Shorten data.seq_length, take a smaller batch, shard it (cp, dp), or name a larger machine.",
        example="data.seq_length=1000000 model.max_position_embeddings=1000000",
    ),
    Code(
        "MT149",
        "The model is larger than the memory of any machine.",
        "Look for a digit too many in model.hidden_size, model.num_layers, model.vocab_size and the experts.",
        example="model.hidden_size=1000000 model.num_layers=100000",
    ),
    Code(
        "MT322",
        "Nobody named data, and the model is too large for the text that every machine has: tokens are synthetic.",
        "Name your own: data=text data.path=FOLDER, or data=indexed data.path=PREFIX; else say data=mock.",
        severity="warning",
        example="model=llama3_8b",
    ),
    Code(
        "MT501",
        "A run folder is taken.",
        "Go on with it, or give the new run another name.",
        says="the run folder runs/mine is there already",
    ),
    Code(
        "MT502",
        "There is no run or checkpoint to go on from.",
        "Name one that exists, or begin a new run.",
        says="runs/mine has no checkpoint yet",
    ),
    Code(
        "MT503",
        "A checkpoint is of another model.",
        "Take the model of the checkpoint, or begin a new run.",
        says="the checkpoint is of another model: 8 layers there, 4 here",
    ),
    Code(
        "MT504",
        "A key that changes the numbers differs from the run that is to go on.",
        "Take its value, or checkpoint.accept_changes=true.",
        says="changes the numbers of the resumed run: 0.001 there, 0.0001 here",
    ),
    Code(
        "MT506",
        "A run has no tokenizer, so no text can be generated.",
        "Train on text, or set data.tokenizer.",
        says="runs/mine has no tokenizer.json: its data has no tokenizer, so no text can be generated",
    ),
    Code(
        "MT507",
        "The folder that weights are to be written to is there already.",
        "Name one that is not there yet.",
        says="weights is there; export writes a new folder",
    ),
    Code(
        "MT508",
        "The layout splits sequences into more parts than the model has positions.",
        "Generate in a smaller layout: parallel=single.",
        says="sequences of this layout are multiples of 16 tokens, and 8 have a position",
    ),
    Code(
        "MT509",
        "A chat cannot be written as the model reads it.",
        "Put the tokenizer_config.json of the model beside its tokenizer.json, or give a prompt without chat=true.",
        says="runs/mine has no chat_template.jinja and no chat_template in tokenizer_config.json",
    ),
    Code(
        "MT510",
        "An optional package is not installed.",
        "Install the extra that is named.",
        says="the template of a chat needs jinja2",
    ),
    Code(
        "MT511",
        "lm-evaluation-harness cannot do a task.",
        "Name one that it lists, and bring its data.",
        says="lm-evaluation-harness ends with KeyError: 'helaswag'",
    ),
    Code(
        "MT521",
        "Adapters are not those of this run, or cannot be written.",
        "Take the keys that are named, or export a merged model.",
        says="its r is 8, and here it would be 16",
    ),
    Code(
        "MT601",
        "A text corpus cannot be read as it is.",
        "Name a folder that holds text of these endings.",
        says="no file ends in any of .py, .txt",
    ),
    Code(
        "MT602",
        "The .bin and .idx that are named cannot be opened.",
        "Name the prefix of both files.",
        says="no file corpus.idx in /data",
    ),
    Code(
        "MT603",
        "A tokenizer.json cannot be read.",
        "Name one that can.",
        says="tokenizer.json cannot be read: Permission denied",
    ),
    Code("MT604", "The shares of the split are all zero.", "Give train a share.", says="all shares are zero"),
    Code(
        "MT606",
        "The global batch cannot be split into the micro-batches of all ranks.",
        "Take a multiple of them.",
        says="must be a multiple of micro_batch_size * dp = 4 * 2 = 8",
    ),
    Code(
        "MT609",
        "A checkpoint was trained on other data, or with another tokenizer.",
        "Bring the files back, or checkpoint.accept_changes=true.",
        says="the corpus is not the one that the checkpoint was trained on",
    ),
    Code(
        "MT614",
        "The folder of images with texts cannot be read as it is.",
        "Name a folder that holds images and one .jsonl file.",
        says="holds no file that ends in .jsonl",
    ),
    Code(
        "MT615",
        "The file of chats cannot be found as it is named.",
        "Name a .jsonl file, or a folder that holds one.",
        says="holds no file that ends in .jsonl",
    ),
    Code(
        "MT621",
        "More records are left out than max_rejects.",
        "Look at the rejects file, correct the input, or give a larger max_rejects.",
        says="1001 records are left out so far, of 1200: corpus.partial/rejects.jsonl",
    ),
    Code(
        "MT622",
        "A corpus of this name is there, was begun with other settings, or is made by another process.",
        "Name another out=, or say overwrite=true or fresh=true.",
        says="corpus.bin is there",
    ),
    Code(
        "MT623",
        "A corpus has no manifest, so its hashes and the counts of its files are not known.",
        "Use a corpus that `data tokenize` made, or data verify manifest=false.",
        says="there is no manifest beside it",
    ),
    Code(
        "MT640",
        "A run asks for more samples than its data gives.",
        "Train for fewer steps, or let corpora be read more often.",
        says="has 500 samples before every corpus has had its epochs, and 800 are asked for",
    ),
    Code(
        "MT701",
        "A file that is to be imported holds no command line of Megatron-LM.",
        "Name a training script.",
        says="no flags of Megatron-LM are found in it",
    ),
    Code(
        "MT702",
        "Nothing says how many ids the tokenizer has.",
        "Say it: model.vocab_size=N.",
        says="is left to fill in: how many ids the tokenizer has",
    ),
    Code(
        "MT706",
        "A program trains something else than a GPT, or does not train.",
        "Import a script that trains a GPT.",
        says="--bert-head-type is of a BERT; only GPTs are imported",
    ),
    Code(
        "MT703",
        "A config.json is of a family that is not read.",
        "Write the model's keys into a recipe.",
        says="models of type mamba are not read",
    ),
    Code(
        "MT704",
        "A file is there already, and nothing is written over.",
        "Take another name.",
        says="mine.yaml is there already; nothing is written over",
    ),
    Code(
        "MT705",
        "A file is no lock, or its lock is broken.",
        f"Make one: {program()} recipe lock NAME -o FILE.",
        says="is no lock: its first line is not that of a lock",
    ),
)
"""Codes that no rule raises: of files, the command line, the schema, the machine, runs, data and imports."""


@cache
def codes() -> dict[str, Code]:
    """Every code in order."""
    known = {code.code: code for code in (*OTHERS, *(code for rule in RULES for code in rule.codes))}
    return dict(sorted(known.items()))


def family(code: str) -> str:
    """What codes of this kind are about."""
    return next((words for begin, words in FAMILIES.items() if code.startswith(begin)), "")


def rules_of(code: str) -> list[Rule]:
    """The rules that raise a code."""
    return [rule for rule in RULES if code in {c.code for c in rule.codes}]


def validating(key: str) -> list[str]:
    """Codes of the rules that read `key`."""
    return sorted({code.code for rule in RULES if key in rule.reads for code in rule.codes})
