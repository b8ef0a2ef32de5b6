"""`schema`: JSON Schema for editors, and reference pages of keys and codes."""

from __future__ import annotations

import os
from pathlib import Path

from mtrain import strict_json
from mtrain.cli.output import refusal, say_json
from mtrain.config.compose.paths import program
from mtrain.config.messages.codes import codes_page
from mtrain.config.messages.fields_page import page as fields_page
from mtrain.config.messages.json_schema import COMMENT, KINDS, json_schema
from mtrain.config.messages.suggestions import near_choice
from mtrain.errors import BadEnvironment, say, say_page

# words that print a page instead of a schema
PAGES = {"fields": fields_page, "codes": codes_page}
MAX_OLD_BYTES = 1 << 22


def run(words: list[str], *, output: str | None) -> int:
    """Print one schema, write schemas into a folder, or print a page.

    Raises:
        ConfigError: there is no schema of that name, or a file in the way is not a schema that
            mtrain made.
        BadEnvironment: the folder cannot be written.
    """
    if len(words) == 1 and words[0] in PAGES and output is None:
        say_page(PAGES[words[0]]())
        return 0
    for word in words:
        if word not in KINDS:
            near = near_choice(word, KINDS) or ["recipe"]
            pages = f"pages, each as the only word: {', '.join(PAGES)}"
            rule = f"there is no schema of {word}; schemas: {', '.join(KINDS)}; {pages}"
            raise refusal(rule, f"schema {near[0]}")
    if output is None:
        say_json(json_schema((words or ["run"])[0]))
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
            raise refusal(rule, "-o another folder", "MT704")
        # An editor that watches the file never sees half of it.
        draft = path.with_name(f".{path.name}")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise BadEnvironment(f"{path} cannot be written: {error.strerror}") from None


def _is_ours(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size > MAX_OLD_BYTES:
        return False
    # Only the start of the comment: other releases of mtrain may end it in another way.
    return COMMENT[:22] in path.read_text(encoding="utf-8", errors="replace")[:400]
