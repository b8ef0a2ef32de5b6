"""`schema`: JSON Schema for editors, and reference pages of keys and codes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mtrain import strict_json
from mtrain.cli.command import Verb, refusal, valued
from mtrain.cli.offers import schemas
from mtrain.config.compose.paths import program
from mtrain.errors import BadEnvironment, ConfigError, Problem, say, say_page

PAGES = ("fields", "codes")
"""Words that print a page instead of a schema: every key with its fields, and every code."""
MAX_OLD_BYTES = 1 << 22


@click.command(
    "schema",
    cls=Verb,
    short_help="JSON Schema for editors; schema fields: every key and the fields that it feeds",
    usage="schema [run|recipe|GROUP|fields|codes] [-o DIR]",
    help=(
        "Print JSON Schema for editors. `schema fields`: every key, and what it feeds in"
        " megatron-core.\n`schema codes`: every code, with cause and fix."
    ),
    arguments=(
        (
            "run|recipe|GROUP",
            "a schema to print, or with -o to write; -o without a word: all",
        ),
    ),
    examples=(
        ("schema recipe -o .", "for recipes in this folder"),
        ("schema fields", "the table of keys"),
        ("schema codes", "the table of codes"),
    ),
    offers=schemas,
)
@valued("-o", "--output", metavar="DIR", text="write the schemas to this folder")
def schema(words: list[str], output: str | None) -> int:
    """Print one schema, write schemas into a folder, or print a page.

    Raises:
        ConfigError: there is no schema of that name, or a file in the way is not a schema that
            mtrain made.
        BadEnvironment: the folder cannot be written.
    """
    from mtrain.config.messages.codes import codes_page
    from mtrain.config.messages.fields_page import page
    from mtrain.config.messages.json_schema import KINDS, json_schema
    from mtrain.config.messages.suggestions import near_choice

    if len(words) == 1 and words[0] in PAGES and output is None:
        say_page(page() if words[0] == "fields" else codes_page())
        return 0
    for word in words:
        if word not in KINDS:
            near = near_choice(word, KINDS) or ["recipe"]
            rule = (
                f"there is no schema of {word}; schemas: {', '.join(KINDS)}; pages, each as the"
                f" only word: {', '.join(PAGES)}"
            )
            raise refusal(rule, f"schema {near[0]}")
    if output is None:
        say_page(strict_json.dumps(json_schema((words or ["run"])[0]), indent=2))
        return 0
    for kind in words or KINDS:
        path = Path(output) / f"{kind}.schema.json"
        _write(path, strict_json.dumps(json_schema(kind), indent=1) + "\n")
        say(f"wrote {path}")
    say_page("an editor with a YAML language server uses it in files that begin with")
    say_page("# yaml-language-server: $schema=recipe.schema.json")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a schema, over an older one and nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not _is_ours(path):
            rule = f"{path} exists, and is no schema from `{program()} schema`"
            raise ConfigError(
                [Problem("MT704", "", None, rule, "-o another folder", "command line")]
            )
        draft = path.with_name(f".{path.name}")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise BadEnvironment(f"{path} cannot be written: {error.strerror}") from None


def _is_ours(path: Path) -> bool:
    from mtrain.config.messages.json_schema import COMMENT

    if not path.is_file() or path.stat().st_size > MAX_OLD_BYTES:
        return False
    return COMMENT[:22] in path.read_text(encoding="utf-8", errors="replace")[:400]
