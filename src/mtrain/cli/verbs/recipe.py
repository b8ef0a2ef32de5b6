"""`recipe`: configurations as short files that can be sent to somebody else."""

from __future__ import annotations

import click

from mtrain.cli.command import OUTPUT, RECIPE, SETTINGS, Subverbs, as_json, valued
from mtrain.cli.offers import locks, named_recipes, named_recipes_and_settings

output = valued("-o", "--output", metavar="FILE", text=OUTPUT)


@click.group(
    "recipe",
    cls=Subverbs,
    short_help="list, show, new, diff, lock, verify, import, export: recipe --help",
    usage="recipe SUBVERB ...",
    help=(
        "Handle configurations as short files that can be sent to somebody else. `recipe SUBVERB"
        " --help` says more."
    ),
    arguments=(
        ("list, show", "the recipes that ship; one of them"),
        ("new", "a recipe from a command line"),
        ("diff", "the differences between two recipes, runs or checkpoints"),
        ("lock, verify", "a recipe with versions and digests in one file; whether it still holds"),
        (
            "import, export",
            "from scripts of Megatron-LM or a config.json; to the flags of Megatron-LM",
        ),
    ),
    examples=(("recipe list", "a line each"), ("recipe import train.sh -o my.yaml", "a script")),
    path_at=1,
)
def recipe() -> None:
    """Group the subverbs."""


@recipe.command(
    "list",
    usage="recipe list",
    help="Print every shared recipe, a line each.",
    examples=(("recipe list", ""),),
)
@as_json
def list_(words: list[str], as_json: bool) -> int:
    """Print every shared recipe."""
    from mtrain.cli.recipe import listing

    return listing.list_(as_json=as_json)


@recipe.command(
    "show",
    usage="recipe show NAME [overrides] [FLAGS]",
    help="Print a recipe with its comments, or as one file that runs.",
    arguments=(RECIPE,),
    examples=(("recipe show llama3/70b_h100x64", "as it is written"),),
    offers=named_recipes_and_settings,
)
@as_json
@click.option("--resolved", is_flag=True, help="print the file that run=FILE reads")
def show(words: list[str], as_json: bool, resolved: bool) -> int:
    """Print a recipe."""
    from mtrain.cli.recipe import listing

    return listing.show(words, resolved=resolved, as_json=as_json)


@recipe.command(
    "new",
    usage="recipe new PATH [overrides]",
    help="Write the configuration of the overrides as a recipe of at most 12 lines, to a new file.",
    arguments=(("PATH", "a file that does not exist yet"), *SETTINGS),
    examples=(
        ("recipe new my.yaml model=llama3_8b parallel=tp2 cluster=h100x8", "a recipe of your own"),
    ),
)
def new(words: list[str]) -> int:
    """Write a recipe."""
    from mtrain.cli.recipe import new as subverb

    return subverb.new(words)


@recipe.command(
    "diff",
    usage="recipe diff A B",
    help="Print the differences between two recipes, runs or checkpoints.",
    arguments=(("A B", "names or paths of recipes, locks, run folders or checkpoints"),),
    examples=(("recipe diff llama3/70b_h100x64 llama3/70b_b200x64", "two that ship"),),
    offers=named_recipes,
)
@as_json
def diff(words: list[str], as_json: bool) -> int:
    """Print the differences between two configurations."""
    from mtrain.cli.recipe import diff as subverb

    return subverb.diff(words, as_json=as_json)


@recipe.command(
    "lock",
    usage="recipe lock NAME [-o FILE] [overrides]",
    help="Write one file with the whole configuration, versions and digests.",
    arguments=(RECIPE,),
    examples=(
        (
            "recipe lock llama3/70b_h100x64 -o 70b.lock.yaml",
            "for a run that must be the same next year",
        ),
    ),
    offers=named_recipes_and_settings,
)
@output
def lock(words: list[str], output: str | None) -> int:
    """Write a lock."""
    from mtrain.cli.recipe import lock as subverb

    return subverb.lock(words, output=output)


@recipe.command(
    "verify",
    usage="recipe verify FILE",
    help="Print the differences between a lock and this machine.",
    arguments=(("FILE", "a lock"),),
    examples=(("recipe verify 70b.lock.yaml", "exit code 0 if nothing differs"),),
    offers=locks,
)
@as_json
def verify(words: list[str], as_json: bool) -> int:
    """Print the differences between a lock and this machine."""
    from mtrain.cli.recipe import lock as subverb

    return subverb.verify(words, as_json=as_json)


@recipe.command(
    "import",
    usage="recipe import [-o FILE] [overrides] FILE ..., or --capture -- COMMAND, or -- FLAGS",
    help=(
        "Make a recipe from a script of Megatron-LM, its model_config.yaml, a file for --yaml-cfg,"
        " or a config.json of\nHugging Face. Every setting without a place in the recipe is listed"
        " with the reason.\n--capture runs your own script with recorders in place of torchrun,"
        " python, srun, mpirun and similar programs,\nwhich start nothing: it is exact for any"
        " shell. Without it nothing runs: assignments, arrays and\ndefaults are read, and any other"
        " statement that may set a value is reported with its line. Exit code 2: keys\nremain to be"
        " filled in, as ???."
    ),
    arguments=(
        (
            "COMMAND",
            "your script as you run it, such as bash pretrain.sh ARGUMENTS or sbatch job.sh",
        ),
        (
            "FILE ...",
            "files, sourced ones first; - is standard input; or a folder with a config.json",
        ),
        ("KEY=VALUE", "values that the files lack, such as model.vocab_size=32000"),
        ("-- FLAGS", "a command line of Megatron-LM"),
    ),
    examples=(
        ("recipe import --capture -o my.yaml -- bash pretrain.sh", "your own script"),
        ("recipe import train.sh -o my.yaml", "a script of somebody else, which is only read"),
        ("recipe import env.sh train.sh cluster=h100x64", "a script that sources another"),
        ("recipe import -- --num-layers 24 --hidden-size 1024 --num-attention-heads 16", "flags"),
    ),
)
@click.option(
    "--capture", is_flag=True, help="run the command after --, all of it but the training itself"
)
@valued("--timeout", metavar="S", text="with --capture: end the script after so many seconds; 120")
@output
@as_json
def import_(
    words: list[str],
    capture: bool,
    timeout: str | None,
    output: str | None,
    as_json: bool,
    command: list[str] | None = None,
) -> int:
    """Make a recipe from files or from the words after `--`, which are `command`."""
    from mtrain.cli.recipe import exchange

    return exchange.import_(
        words, command, capture=capture, timeout=timeout, output=output, as_json=as_json
    )


@recipe.command(
    "export",
    usage="recipe export --megatron NAME [overrides]",
    help="Print the equivalent flags of Megatron-LM, and in comments every key without a flag.",
    arguments=(RECIPE,),
    examples=(("recipe export --megatron llama3/70b_h100x64", "for pretrain_gpt.py"),),
    offers=named_recipes_and_settings,
)
@click.option("--megatron", is_flag=True, help="the flags of Megatron-LM")
@as_json
def export(words: list[str], megatron: bool, as_json: bool) -> int:
    """Print the command line of Megatron-LM."""
    from mtrain.cli.recipe import exchange

    return exchange.export(words, as_json=as_json)
