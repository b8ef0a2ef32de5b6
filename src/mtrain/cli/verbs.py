"""The verbs and flags of the command line, and what each does."""

VERBS = {
    "train": "train (the verb when none is given)",
    "check": "validate a configuration in under a second, without starting anything",
    "show": "print the resolved configuration and who set each key",
    "plan": (
        "parameters, operations, memory of a rank and time of a step by part, without starting"
        " anything"
    ),
    "tune": (
        "the fastest layouts of a model on a cluster by the plan; writes the best as a choice of"
        " parallel"
    ),
    "prove": (
        "train the layout and one rank from the same start, shrunk to this machine, and compare"
    ),
    "rehearse": "run the layout on this machine, shrunk: train, save, resume, export, compare",
    "resume": "go on with a run: resume RUN_FOLDER [overrides]",
    "export": "write the weights of a checkpoint as whole tensors: export RUN_FOLDER OUT_FOLDER",
    "convert": (
        "weights of Hugging Face and Megatron in and out: convert import|export|inspect|verify"
    ),
    "generate": "write text with a trained model: generate RUN_FOLDER",
    "evaluate": (
        "loss, perplexity and bits per byte of a checkpoint, or its results in tasks: evaluate"
        " RUN_FOLDER"
    ),
    "data": "text to tokens, and what tokens are: data --help",
    "recipe": "list, show, new, diff, lock, verify, import, export: recipe --help",
    "choices": "the choices of a group, each a file: choices model",
    "schema": (
        "JSON Schema for editors: schema [run|recipe|GROUP] [-o DIR]; schema fields: all keys, what"
        " each feeds"
    ),
    "engines": (
        "which megatron-core is here, what only some releases have, which patches act and why"
    ),
    "completion": "a script that completes verbs, choices and keys: completion bash|zsh|fish",
    "explain": (
        "what a key means, who set it and what it reaches; or a code: explain parallel.tp, explain"
        " MT101"
    ),
}
OWN_WORDS = (
    "tune",
    "recipe",
    "data",
    "explain",
    "schema",
    "choices",
    "engines",
    "completion",
    "__complete",
)
"""Verbs that read their arguments themselves."""
TARGETED = ("resume", "export", "generate", "evaluate")
"""Verbs whose first word is the folder that they are about."""
SUBVERBED = ("convert", "recipe", "data")
"""Verbs whose first word says what they do with the paths behind it."""
JSON_VERBS = ("generate", "evaluate", "convert")
"""Verbs on a checkpoint whose answer a machine may read."""
FLAGS = {
    "--json": "print JSON for a machine, where the page of a verb has it",
    "--trace": "plan: run a step of one rank (rank=R) on shapes alone, and compare",
    "--resolved": "show: print the bare file that run=FILE reads",
    "--changed": (
        "show: print only what differs from the defaults, as settings, each with who set it"
    ),
    "--megatron": "convert import, export: the other side is a checkpoint of megatron-core",
    "--draw": "plan: pictures of memory, schedule, time and machines",
    "--calibrate": (
        "plan: what a CPU or GPU reaches, from what was measured: --calibrate RUN_OR_FILE..."
        " out=FILE"
    ),
    "--all": "check: every model in every layout, precision and cluster that ships",
    "--compare": (
        "plan: what was planned of a finished run beside what was measured: --compare RUN_FOLDER"
    ),
    "--html": "plan: a page with the pictures, that opens without a network: --html FILE",
    "--scale": "plan: speed, MFU and efficiency over numbers of devices: --scale 96,192,...,4608",
    "--weak": "plan --scale: a fixed batch for each device, not for all of them",
    "--config-dir": (
        "a folder of your own choices, as DIR/model/mine.yaml and DIR/recipes/mine.yaml; or"
        " MTRAIN_CONF"
    ),
    "--multirun": "train, check: one run for each of KEY=A,B or KEY=range(1,4); -m for short",
    "--debug": "print the traceback of an error",
    "--help": "print this page",
    "--version": "print the version",
}
CONFIG_DIR = "--config-dir"
VALUED = {"--html": "FILE", "--compare": "RUN_FOLDER", "--scale": "96,192,...,4608"}
"""Flags with a value -> what it is."""
OF_ALL = frozenset({"--json", "--multirun", "--debug", "--help", "--version"})
"""Flags that every verb takes, or refuses itself; the pages say which verbs have the others."""
ANSWERS = ("--compare", "--trace", "--calibrate", "--html", "--draw")
"""Flags of `plan`, each of which asks for something else."""
SHORT = {"-h": "--help", "-m": "--multirun"}
WORDS = {"help": "--help", "version": "--version"}
"""Words in the place of a verb -> the flag that they are."""
HELP = ("--help", "-h")
