"""The reference page of all codes: the cause of each problem and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.messages.codes import FAMILIES, codes, rules_of
from mtrain.config.messages.describe import section_of
from mtrain.config.rules.rule import Code

HEAD = """# Codes

`python launch.py schema codes > docs/reference/codes.md` generates this page, and a test compares
it. `python launch.py explain CODE` prints the same for one code, with a message and a fix that was
tried. A warning does not end a command.
"""
MAX_KEYS = 4
"""Keys that a fix names; `explain CODE` lists the others."""


def codes_page() -> str:
    """Return the Markdown of `docs/reference/codes.md`."""
    return "\n".join([HEAD, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    """Yield a heading and a table for each family of codes."""
    left = dict(codes())
    for begin, about in FAMILIES.items():
        members = {code: known for code, known in left.items() if code.startswith(begin)}
        if not members:
            continue
        yield f"## {begin}{'x' * (5 - len(begin))}: {about}\n"
        yield "| code | cause | fix | example |"
        yield "|---|---|---|---|"
        for code, known in members.items():
            del left[code]
            mild = " (warning)" if known.severity == "warning" else ""
            example = f"`{known.example}`" if known.example else ""
            cells = (f"`{code}`{mild}", known.summary, _fix(known), example)
            yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
        yield ""


def _fix(code: Code) -> str:
    """Return what to do: the help of a code, or the keys that its rules read."""
    if code.help:
        return code.help
    reads = dict.fromkeys(key for rule in rules_of(code.code) for key in rule.reads)
    keys = [f"`{key}`" for key in reads if section_of(key) is None][:MAX_KEYS]
    if len(keys) < 2:
        return f"Change {keys[0]}." if keys else ""
    return f"Change {', '.join(keys[:-1])} or {keys[-1]}."


def _cell(text: str) -> str:
    """Return text as a cell of a table: in one line, without a bar of its own."""
    return " ".join(text.split()).replace("|", "\\|")
