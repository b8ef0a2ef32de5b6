"""The pages of --help: one for the command, one for each verb and each subverb of `recipe` and
`data`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtrain.cli.data.pages import DATA, DATA_PAGES
from mtrain.cli.page import (
    DEBUG,
    HELP,
    JSON,
    MANY,
    OUT,
    OVERRIDES,
    RECIPE,
    RUN,
    SETTINGS,
    Page,
    command,
)

__all__ = ["PAGES", "SETTINGS", "SUBPAGES", "Page", "command", "flags_of", "page_of"]

PAGES: dict[str, Page] = {
    "train": Page(
        f"[train] {OVERRIDES} [FLAGS]",
        "Trains: validates the configuration, prepares the data, starts the ranks, and leaves a"
        " folder under runs/.\nIt is the verb when none is given. Under torchrun it is one rank of"
        " the run.",
        SETTINGS,
        (MANY, ("--json", "with -m: the table as JSON")),
        (
            ("train", "the default model on this machine"),
            (
                "model=llama_tiny parallel=tp2pp2 trainer.train_iters=20",
                "another layout, fewer steps",
            ),
            (
                "-m optim.lr=1e-3,3e-3 parallel=tp2,pp2",
                "four runs, and one table of what became of them",
            ),
        ),
    ),
    "check": Page(
        f"check {OVERRIDES} [FLAGS]",
        "Validates a configuration in under a second, without starting anything: every problem at"
        " once,\neach with a fix. Exit code 0 or 2.",
        SETTINGS,
        (JSON, MANY, ("--all", "every model in every layout, precision and cluster that ships")),
        (
            (
                "check model=llama3_70b parallel=tp4pp4 cluster=h100x64",
                "would this run on 64 H100?",
            ),
            ("check recipe=llama3/70b_h100x64 --json", "a recipe, for a machine"),
            (
                "check -m model=llama3_8b,llama3_70b parallel=tp4pp4,tp8 cluster=h100x64",
                "four, a line each",
            ),
        ),
    ),
    "show": Page(
        f"show {OVERRIDES} [FLAGS]",
        "Prints the resolved configuration, and who set each key.",
        SETTINGS,
        (
            JSON,
            ("--resolved", "print the bare file that run=FILE reads"),
            ("--changed", "print only what differs from the defaults, as settings"),
        ),
        (
            ("show recipe=llama3/70b_h100x64", "what a recipe sets, line by line"),
            (
                "show --resolved optim.lr=3e-4",
                "a run in one file: redirect it, and take it with run=FILE",
            ),
        ),
    ),
    "plan": Page(
        f"plan {OVERRIDES} [FLAGS] [rank=R]",
        "Parameters by kind and stage, operations of a token, and the memory of a rank of each"
        " pipeline stage by\npart, its peak, and what is left of the device; the time of a step by"
        " part, tokens a second, both MFUs,\nand what the run takes and costs; in about a second,"
        " without torch.\nWith --trace the program of one rank runs a step on shapes alone: what is"
        " alive when, and every operation.",
        (*SETTINGS, ("rank=R", "with --trace: which rank, else the first")),
        (
            JSON,
            (
                "--draw",
                "pictures below: memory by part, the pipeline's schedule, time, ranks on machines",
            ),
            ("--html FILE", "the pictures as one page, that opens without a network"),
            ("--compare RUN", "of a run that was made: what was planned beside what was measured"),
            (
                "--scale COUNTS",
                "speed, MFU and efficiency over numbers of devices, as tune lays them out",
            ),
            ("--weak", "with --scale: one batch per device, not one for all of them"),
            ("--trace", "run a step of one rank without its memory, and compare"),
            (
                "--calibrate RUN_OR_FILE... out=FILE",
                "what a CPU or GPU reaches, from measured runs and kernels, as a cluster file",
            ),
        ),
        (
            ("plan --calibrate runs/one runs/two out=box.yaml", "then: plan cluster=./box.yaml"),
            ("plan recipe=llama3/70b_h100x64", "does it fit, and what takes the memory"),
            ("plan model=llama3_8b parallel=tp2 cluster=h100x8 --json", "the same for a machine"),
            ("plan recipe=llama3/70b_h100x64 --html plan.html", "a page to look at, and to send"),
            (
                "plan --scale 96,192,...,4608 recipe=gpt/177b_h100x96",
                "strong scaling: the same batch on more devices",
            ),
            (
                "plan --weak --scale 8,64,512 model=llama3_8b cluster=h100 data=mock",
                "weak scaling; a key with as many values as numbers has one on each",
            ),
            (
                "plan --trace recipe=llama3/70b_h100x64 rank=0",
                "what the program does, in half a minute",
            ),
        ),
    ),
    "tune": Page(
        f"tune {OVERRIDES} [--out FILE] [--why-not LAYOUT] [FLAGS]",
        "The fastest layouts by the plan that keep every rule and fit the devices of the cluster,"
        " the best of each\nfamily (tp, pp, cp, ep), with the error of the plan's time: vpp, etp,"
        " sequence parallelism, micro-batch,\nrecomputation, sharding and offload of the state are"
        " chosen, too. What the command line says of them is\nkept, and its cost is said."
        " parallel=auto takes the first in every verb.",
        SETTINGS,
        (
            ("-o, --out FILE", "write the first as a choice, for parallel=FILE; never over a file"),
            (
                "--why-not LAYOUT",
                (
                    "which rule a layout breaks, what it lacks, or how slow it is: tp8pp6, 'tp8pp6"
                    " KEY=V'"
                ),
            ),
            JSON,
        ),
        (
            ("tune model=llama3_70b cluster=h100x64", "how to lay it out"),
            (
                "tune recipe=llama3/70b_h100x64 parallel.tp=8 --out mine.yaml",
                "with a tp of 8, into a file",
            ),
            ("tune model=llama3_70b cluster=h100x64 --why-not tp8pp8", "why that is not the first"),
        ),
    ),
    "prove": Page(
        f"prove {OVERRIDES}",
        "Trains the layout and one rank from the same weights on the same samples, shrunk to this"
        " machine,\nand compares losses, gradient norms, gradients and weights. The layout is"
        " resumed in the middle.\nExit code 5 where they differ; then the first module that"
        " computes something else is named.",
        SETTINGS,
        (),
        (("prove recipe=llama3/70b_h100x64", "its layout, with as many processes as fit here"),),
    ),
    "rehearse": Page(
        f"rehearse {OVERRIDES}",
        "Runs the layout on this machine, shrunk: trains, saves, resumes, exports, and compares the"
        " ends bit by bit.",
        SETTINGS,
        (),
        (
            (
                "rehearse model=llama3_70b parallel=tp4pp4 cluster=h100x64",
                "before a week on a cluster",
            ),
        ),
    ),
    "resume": Page(
        "resume RUN [KEY=VALUE ...]",
        "Goes on with a run from its newest checkpoint, with the configuration that its folder"
        " holds. A run gets\nlonger by trainer.train_iters; where that bends a learning rate that"
        " has begun to decay, mtrain says how,\nand checkpoint.accept_changes=true goes on"
        " with it.",
        (*RUN, ("KEY=VALUE", "what is to be different from here on")),
        (),
        (
            ("resume runs/NAME", "to the end that it had"),
            ("resume runs/NAME parallel=tp4", "in another layout"),
            (
                "resume runs/NAME trainer.train_iters=2000 checkpoint.accept_changes=true",
                "longer, as its decay is",
            ),
        ),
    ),
    "export": Page(
        "export RUN OUT",
        "Writes the weights of a checkpoint as whole tensors in safetensors files.",
        (*RUN, ("OUT", "a new folder")),
        (),
        (("export runs/NAME weights", "its newest checkpoint"),),
    ),
    "convert": Page(
        "convert import HF_DIR RUN [KEY=VALUE ...] | export RUN HF_DIR | inspect PATH | verify A B",
        "Takes weights from a Hugging Face folder, or with --megatron from a checkpoint of"
        " megatron-core, and gives\nthem back, tensor by tensor; no pickle is unpickled. Each"
        " conversion leaves a conversion.json: every\ntensor of both sides once, what was done with"
        " it, hashes, and how far our logits are from those of\ntransformers, where it is"
        " installed.",
        (
            ("import HF_DIR RUN", "a new run folder with the weights in a checkpoint of step 0"),
            (
                "KEY=VALUE",
                "import: what the run is to have beside the model, as in parallel=tp2 data=text",
            ),
            ("export RUN HF_DIR", "a new folder that transformers loads"),
            ("dtype=FORMAT", "export: fp32, bf16 or fp16 (as the checkpoint has them)"),
            (
                "model_type=TYPE",
                "export: the type of its config.json (the first that computes the same)",
            ),
            (
                "peft=VERSION",
                (
                    "export: the adapters alone, as peft 0.19 or 0.18 has them; without it they are"
                    " merged"
                ),
            ),
            (
                "import --megatron DIR RUN",
                "DIR: iter_0000100, or what holds it; the model is said: model=llama3_8b",
            ),
            ("export --megatron RUN DIR", "a new folder for --load of Megatron-LM"),
            (
                "layers=LAYOUT",
                "export --megatron: stacked in one tensor, or apart (stacked where all are alike)",
            ),
            (
                "inspect PATH",
                "names, shapes, formats and totals of a folder, a checkpoint or a file",
            ),
            ("verify A B", "whether two of them hold the same weights; exit code 4 where not"),
        ),
        (
            ("--json", "inspect, verify: print JSON for a machine"),
            ("--megatron", "import, export: the other side is a checkpoint of megatron-core"),
        ),
        (
            (
                "convert import --megatron checkpoints runs/mine model=llama3_8b",
                "what Megatron-LM saved",
            ),
            (
                "convert import Qwen3-0.6B runs/qwen3",
                "then: generate runs/qwen3, resume runs/qwen3",
            ),
            ("convert export runs/NAME exported", "its newest checkpoint"),
        ),
    ),
    "generate": Page(
        "generate RUN [prompt=TEXT] [tokens=N] [temperature=T] [KEY=VALUE ...] [FLAGS]",
        "Prints text that a trained model goes on with, in any layout; keys and values of what was"
        " read are kept.",
        (
            *RUN,
            ("prompt=TEXT", "what it begins with (def )"),
            (
                "prompts=FILE",
                (
                    "a prompt a line; in a .jsonl a JSON string, or an object with `prompt` or"
                    " `messages`"
                ),
            ),
            ("chat=true", "prompts are what a user says, in the chat template of the tokenizer"),
            ("tokens=N", "how many tokens it adds at most (64)"),
            ("temperature=T", "0 takes the most likely token (0.8)"),
            ("top_k=K", "draw of the K most likely tokens (0: of all)"),
            ("top_p=P", "draw of the most likely tokens that together have this probability (1)"),
            ("min_p=P", "draw of tokens with at least this share of the largest probability (0)"),
            ("seed=N", "of what is drawn after each prompt (trainer.seed)"),
            ("stop=TEXT", "end before this text; several times, or a JSON list of texts"),
            ("batch=N", "how many prompts are computed together (8)"),
            ("cache=false", "read everything again for every token"),
            ("KEY=VALUE", "another layout, kernel or number format"),
        ),
        (JSON,),
        (
            ("generate runs/NAME prompt=import tokens=100", "from its newest checkpoint"),
            (
                "generate runs/NAME prompts=questions.txt temperature=0 parallel=tp2 --json",
                "many, sharded",
            ),
            ("generate runs/NAME chat=true prompt=hello top_p=0.9 stop=END", "an answer"),
        ),
    ),
    "evaluate": Page(
        "evaluate RUN [limit=N] [tasks=NAME] [KEY=VALUE ...] [FLAGS]",
        "Prints loss, perplexity, bits per token and per byte on the validation split of the run's"
        " data,\nor of other data; with tasks, the results in those of lm-evaluation-harness (pip"
        " install 'mtrain[eval]').",
        (
            *RUN,
            ("limit=N", "over so many samples, or requests of each task (all)"),
            ("tasks=NAME", "a task, several with commas, or a .yaml of your own"),
            ("shots=N", "examples before each request of a task (what the task says)"),
            ("batch=N", "how many requests of a task are computed together (8)"),
            ("KEY=VALUE", "other data, another layout or kernel"),
        ),
        (JSON,),
        (
            ("evaluate runs/NAME", "over the whole validation split"),
            (
                "evaluate runs/NAME data.path=other limit=1000 parallel=tp2 --json",
                "other data, sharded",
            ),
            ("evaluate runs/NAME tasks=hellaswag,arc_easy limit=100", "tasks"),
        ),
    ),
    "recipe": Page(
        "recipe SUBVERB ...",
        "Configurations as short files that can be sent to somebody else. `recipe SUBVERB --help`"
        " says more.",
        (
            ("list, show", "the recipes that ship; one of them"),
            ("new", "a recipe from a command line"),
            ("diff", "what two recipes, runs or checkpoints differ in"),
            (
                "lock, verify",
                "a recipe with versions and digests in one file; whether it still holds",
            ),
            (
                "import, export",
                "from scripts of Megatron-LM or a config.json; to the flags of Megatron-LM",
            ),
        ),
        (),
        (("recipe list", "a line each"), ("recipe import train.sh -o my.yaml", "from a script")),
    ),
    "data": DATA,
    "schema": Page(
        "schema [run|recipe|GROUP|fields] [-o DIR]",
        "JSON Schema for editors. `schema fields`: every key, and what it feeds in megatron-core.",
        (("run|recipe|GROUP", "which schema; without -o one is printed, with it all are written"),),
        (("-o DIR", "write the schemas there"),),
        (
            ("schema recipe -o .", "for recipes in this folder"),
            ("schema fields", "the table of keys"),
        ),
    ),
    "choices": Page(
        "choices [GROUP]",
        "The choices of a group, each a file under conf/; without a group, those of all groups.",
        (
            (
                "GROUP",
                (
                    "model, parallel, precision, data, optim, trainer, kernels, checkpoint, log or"
                    " cluster"
                ),
            ),
        ),
        (JSON,),
        (("choices", "all of them"), ("choices cluster", "clusters, with what each is")),
    ),
    "engines": Page(
        "engines [FLAGS]",
        "Which megatron-core Python finds, which are supported, what only some have, and which"
        " patches act and why.",
        (),
        (JSON, ("--fixes", "known bugs of megatron-core, and what became of each")),
        (
            ("engines", "of this installation"),
            ("engines --fixes", "known bugs, by what became of them"),
        ),
    ),
    "completion": Page(
        "completion bash|zsh|fish",
        "Prints a script with which a shell completes verbs, flags, choices, layouts, keys, recipes"
        " and runs.",
        (("bash|zsh|fish", "the shell"),),
        (),
        (("completion bash", 'for this shell: eval "$(... completion bash)"'),),
    ),
    "explain": Page(
        f"explain KEY|GROUP|CODE {OVERRIDES}",
        "What a key means, who set it and what it reaches in megatron-core; or what a problem's"
        " code means.",
        (
            (
                "KEY|GROUP|CODE",
                "such as parallel.tp, model or MT101; without one, all groups and codes",
            ),
            *SETTINGS,
        ),
        (JSON,),
        (
            ("explain parallel.tp", "a key"),
            ("explain optim.lr recipe=llama3/70b_h100x64", "a key in a configuration"),
            ("explain MT101", "a code"),
        ),
    ),
}
SUBPAGES: dict[str, Page] = {
    "list": Page(
        "recipe list", "Every shared recipe, a line each.", (), (JSON,), (("recipe list", ""),)
    ),
    "show": Page(
        "recipe show NAME [overrides] [FLAGS]",
        "A recipe with its comments, or as one file that runs.",
        RECIPE,
        (JSON, ("--resolved", "print the file that run=FILE reads")),
        (("recipe show llama3/70b_h100x64", "as it is written"),),
    ),
    "new": Page(
        "recipe new PATH [overrides]",
        "Writes the configuration of the overrides as a recipe of at most 12 lines; never over a"
        " file.",
        (("PATH", "a file that is not there yet"), *SETTINGS),
        (),
        (
            (
                "recipe new my.yaml model=llama3_8b parallel=tp2 cluster=h100x8",
                "a recipe of your own",
            ),
        ),
    ),
    "diff": Page(
        "recipe diff A B",
        "What two recipes, runs or checkpoints differ in.",
        (("A B", "names or paths of recipes, locks, run folders or checkpoints"),),
        (JSON,),
        (("recipe diff llama3/70b_h100x64 llama3/70b_b200x64", "two that ship"),),
    ),
    "lock": Page(
        "recipe lock NAME [-o FILE] [overrides]",
        "Writes one file with the whole configuration, versions and digests.",
        RECIPE,
        (OUT,),
        (
            (
                "recipe lock llama3/70b_h100x64 -o 70b.lock.yaml",
                "for a run that must be the same next year",
            ),
        ),
    ),
    "verify": Page(
        "recipe verify FILE",
        "What differs between a lock and this machine.",
        (("FILE", "a lock"),),
        (JSON,),
        (("recipe verify 70b.lock.yaml", "exit code 0 where nothing does"),),
    ),
    "import": Page(
        "recipe import [-o FILE] [overrides] FILE ..., or --capture -- COMMAND, or -- FLAGS",
        "A recipe from a script of Megatron-LM, its model_config.yaml, a file for --yaml-cfg, or a"
        " config.json of\nHugging Face. What is not taken over is listed with the"
        " reason.\n--capture runs your own script with recorders in place of torchrun, python,"
        " srun, mpirun and their kin,\nwhich start nothing: it is exact for any shell. Without it"
        " nothing is run: assignments, arrays and\ndefaults are read, and what another statement"
        " may set is reported with its line. Exit code 2: keys are\nleft to fill in, as ???.",
        (
            (
                "COMMAND",
                "your script as you run it, such as bash pretrain.sh ARGUMENTS or sbatch job.sh",
            ),
            (
                "FILE ...",
                (
                    "files; those that another one sources first; - is standard input; a folder"
                    " with a config.json"
                ),
            ),
            ("KEY=VALUE", "what the files do not say, such as model.vocab_size=32000"),
            ("-- FLAGS", "a command line of Megatron-LM"),
        ),
        (
            ("--capture", "run the command behind --, all of it but what starts training"),
            ("--timeout S", "with --capture: seconds after which the script is ended; 120"),
            OUT,
            JSON,
        ),
        (
            ("recipe import --capture -o my.yaml -- bash pretrain.sh", "your own script"),
            ("recipe import train.sh -o my.yaml", "a script of somebody else, that is only read"),
            ("recipe import env.sh train.sh cluster=h100x64", "a script that sources another"),
            (
                "recipe import -- --num-layers 24 --hidden-size 1024 --num-attention-heads 16",
                "flags",
            ),
        ),
    ),
    "export": Page(
        "recipe export --megatron NAME [overrides]",
        "The command line of Megatron-LM that means the same, and in comments what has no flag.",
        RECIPE,
        (("--megatron", "the flags of Megatron-LM"), JSON),
        (("recipe export --megatron llama3/70b_h100x64", "for pretrain_gpt.py"),),
    ),
}
OF_SUBVERBS: Mapping[str, Mapping[str, Page]] = {"recipe": SUBPAGES, "data": DATA_PAGES}
"""Verb -> word -> page, of the verbs that have subverbs with pages."""


def flags_of(verb: str, words: Sequence[str] = ()) -> list[str]:
    """Return the flags of a verb, each spelling by itself."""
    rows = (*_page(verb, words).flags, DEBUG, HELP)
    return [name.split()[0] for spelled, _ in rows for name in spelled.split(", ")]


def _page(verb: str, words: Sequence[str]) -> Page:
    pages = OF_SUBVERBS.get(verb, {})
    sub = next((word for word in words if word in pages), "")
    return pages[sub] if sub else PAGES[verb]


def page_of(verb: str, words: Sequence[str] = ()) -> str:
    """Return the page of a verb; of `recipe` and `data` that of the subverb among `words`, if there
    is one.
    """
    return _page(verb, words).render()
