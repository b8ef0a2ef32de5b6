"""`schema [run|recipe|GROUP] [-o DIR]`: JSON Schema for editors; `schema fields`, `schema codes`:
reference pages of the documentation.
"""

from __future__ import annotations

import os
from pathlib import Path

from mtrain import strict_json
from mtrain.cli.options import read_options
from mtrain.config.compose.paths import program
from mtrain.config.messages.codes_page import codes_page
from mtrain.config.messages.fields_page import page
from mtrain.config.messages.json_schema import COMMENT, KINDS, json_schema
from mtrain.config.messages.suggestions import near_choice
from mtrain.errors import BadEnvironment, ConfigError, Problem, say, say_page

OUT = {"-o": "--output", "--output": "--output"}
PAGES = {"fields": page, "codes": codes_page}
"""Words that print a page instead of a schema: every key with its fields, and every code."""
MAX_OLD_BYTES = 1 << 22


def run(argv: list[str], *, debug: bool) -> int:
    """Print one schema, or writes those that are asked for (all, if none is named) into a folder;
    or the table.

    Raises:
        ConfigError: there is no schema of that name, or a file in the way is no schema that was
            made so.
        BadEnvironment: the folder cannot be written.
    """
    options = read_options(argv, (), OUT)
    if len(options.words) == 1 and options.words[0] in PAGES and not options.values:
        say_page(PAGES[options.words[0]]())
        return 0
    for word in options.words:
        if word not in KINDS:
            near = near_choice(word, KINDS) or ["recipe"]
            rule = (
                f"there is no schema of {word}; schemas: {', '.join(KINDS)}; pages, each as the"
                f" only word: {', '.join(PAGES)}"
            )
            raise ConfigError(
                [Problem("MT010", "", None, rule, f"schema {near[0]}", "command line")]
            )
    folder = options.values.get("--output")
    if folder is None:
        say_page(strict_json.dumps(json_schema((options.words or ["run"])[0]), indent=2))
        return 0
    for kind in options.words or KINDS:
        path = Path(folder) / f"{kind}.schema.json"
        _write(path, strict_json.dumps(json_schema(kind), indent=1) + "\n")
        say(f"wrote {path}")
    say_page("an editor with a YAML language server uses it in files that begin with")
    say_page("# yaml-language-server: $schema=recipe.schema.json")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a schema, over an older one and nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not _ours(path):
            rule = f"{path} is there already, and no schema that `{program()} schema` made"
            raise ConfigError(
                [Problem("MT704", "", None, rule, "-o another folder", "command line")]
            )
        draft = path.with_name(f".{path.name}")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise BadEnvironment(f"{path} cannot be written: {error.strerror}") from None


def _ours(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size > MAX_OLD_BYTES:
        return False
    return COMMENT[:22] in path.read_text(encoding="utf-8", errors="replace")[:400]
