"""All codes of problems, those of the rules and the others, and the reference page of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from mtrain.config.families import configs, ships
from mtrain.config.messages.describe import section_of
from mtrain.config.rules import all_rules
from mtrain.config.rules.families import code_prefix
from mtrain.config.rules.rule import Rule
from mtrain.errors import Code, outside_rules

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
HEAD = """# Codes

`python launch.py schema codes > docs/reference/codes.md` generates this page, and a test compares
it. A message begins with the text of its code and adds the numbers of the configuration, or the
cause where the text has none. `python launch.py explain CODE` prints a whole message, with a fix
that was tried. A warning does not end a command.
"""
MAX_KEYS = 4
"""Keys that a fix names; `explain CODE` lists the others."""


@cache
def codes() -> dict[str, Code]:
    """Return every code in order."""
    of_rules = {code.code: code for rule in all_rules() for code in rule.codes}
    return dict(sorted({**outside_rules(), **of_rules}.items()))


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


def codes_page() -> str:
    """Return the Markdown of `docs/reference/codes.md`."""
    return "\n".join([HEAD, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    """Yield a heading and a table for each family of codes."""
    for begin, about in FAMILIES.items():
        members = [known for code, known in codes().items() if code.startswith(begin)]
        if not members:
            continue
        yield f"## {begin}{'x' * (5 - len(begin))}: {about}\n"
        yield "| code | text | fix | example |"
        yield "|---|---|---|---|"
        for known in members:
            mild = " (warning)" if known.severity == "warning" else ""
            example = f"`{known.example}`" if known.example else ""
            cells = (f"`{known.code}`{mild}", known.text, known.help or _change(known), example)
            yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
        yield ""


def _change(code: Code) -> str:
    """Return the advice to change a key that the rules of a code read."""
    reads = dict.fromkeys(key for rule in rules_of(code.code) for key in rule.reads)
    keys = [f"`{key}`" for key in reads if section_of(key) is None][:MAX_KEYS]
    if len(keys) < 2:
        return f"Change {keys[0]}." if keys else ""
    return f"Change {', '.join(keys[:-1])} or {keys[-1]}."


def _cell(text: str) -> str:
    """Return text as a cell of a table: in one line, without a `|`."""
    return " ".join(text.split()).replace("|", "\\|")
