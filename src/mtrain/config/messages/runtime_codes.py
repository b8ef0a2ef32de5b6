"""Codes of problems outside of the rules: with running, files and data."""

from __future__ import annotations

from mtrain.config.compose.paths import program
from mtrain.config.rules.rule import Code

OF_WORK = (
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
        says=(
            "runs/mine has no tokenizer.json: its data has no tokenizer, so no text can be"
            " generated"
        ),
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
        "Put the tokenizer_config.json of the model next to its tokenizer.json, or give a prompt"
        " without chat=true.",
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
    Code(
        "MT604",
        "The shares of the split are all zero.",
        "Give train a share.",
        says="all shares are zero",
    ),
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
        "A corpus of this name is there, was begun with other settings, or is made by another"
        " process.",
        "Name another out=, or say overwrite=true or fresh=true.",
        says="corpus.bin is there",
    ),
    Code(
        "MT623",
        "A corpus has no manifest, so its hashes and the counts of its files are not known.",
        "Use a corpus that `data tokenize` made, or data verify manifest=false.",
        says="there is no manifest next to it",
    ),
    Code(
        "MT624",
        "A key that should say whether a record is learned has a value that says something else.",
        "Say ignored_keys=KEY, or write 1 or 0.",
        says=(
            "a record says with loss whether it is learned, by 1 or true and 0 or false, and this"
            " is neither"
        ),
    ),
    Code(
        "MT640",
        "A run asks for more samples than its data gives.",
        "Train for fewer steps, or let corpora be read more often.",
        says="has 500 samples before every corpus has had its epochs, and the run needs 800",
    ),
    Code(
        "MT641",
        "A document is longer than a sample, and data.long_documents refuses those.",
        "Cut such documents or leave them out, or lengthen data.seq_length.",
        says="3 documents have more than the 4097 tokens that data.seq_length 4096 has room for",
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
        "A program trains something else than a GPT or a BERT, or does not train.",
        "Import a script that trains a GPT or a BERT.",
        says="--vocab-extra-ids is of a T5; only GPTs and BERTs are imported",
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
