"""`engines`: the installed megatron-core, the supported releases, and the patches that act."""

from __future__ import annotations

from typing import Any

import click

from mtrain import strict_json
from mtrain.cli.command import Verb, as_json, refusal
from mtrain.cli.offers import nothing
from mtrain.errors import say_page


@click.command(
    "engines",
    cls=Verb,
    short_help="the installed megatron-core, what only some releases have, which patches act",
    usage="engines [FLAGS]",
    help=(
        "Print which megatron-core Python finds, which releases are supported, what only some have,"
        " and which patches\nact and why."
    ),
    examples=(
        ("engines", "of this installation"),
        ("engines --fixes", "known bugs, by the way mtrain handles them"),
    ),
    offers=nothing,
)
@as_json
@click.option(
    "--fixes", is_flag=True, help="known bugs of megatron-core, and how mtrain handles each"
)
def engines(words: list[str], as_json: bool, fixes: bool) -> int:
    """Print what is known of this installation's megatron-core.

    Raises:
        ConfigError: a word that has no meaning here.
    """
    if words:
        raise refusal(f"{words[0]}: engines takes no words", "engines")
    if fixes:
        rows = _fixes()
        say_page(strict_json.dumps(rows, indent=2) if as_json else _fixes_page(rows))
        return 0
    facts = _facts()
    say_page(strict_json.dumps(facts, indent=2) if as_json else _page(facts))
    return 0


def _facts() -> dict[str, Any]:
    from mtrain.config.engine import release
    from mtrain.config.engine.capabilities import CAPABILITIES, is_here
    from mtrain.config.engine.fields import FIELD_VERSIONS
    from mtrain.devices import registry
    from mtrain.mcore.patches.apply import standing

    found = release.release()
    folder = release.folder()
    device = registry.get("auto")
    return {
        "installed": release.words(found) if found else None,
        "folder": str(folder) if folder else None,
        "is_supported": found is not None and release.is_supported(found),
        "supported": [release.words(known) for known in release.SUPPORTED],
        "device": device.name,
        "fields": [
            {"field": field, "versions": str(FIELD_VERSIONS[field]), "keys": keys}
            for field, keys in sorted(_keys_of_fields().items())
        ],
        "capabilities": [
            {
                "kind": row.kind,
                "when": row.when,
                "versions": str(row.versions),
                "is_here": is_here(row, found),
                "about": row.about,
            }
            for row in CAPABILITIES
        ],
        "patches": [
            {
                "name": patch.name,
                "is_active": not why_not,
                "why_not": why_not,
                "versions": str(patch.versions),
                "upstream": patch.upstream,
                "where": patch.where,
                "reason": patch.reason,
            }
            for patch, why_not in standing(device, found)
        ],
    }


def _fixes() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from mtrain.mcore.patches.known_bugs import known_bugs

    return [asdict(fix) for fix in known_bugs()]


def _fixes_page(rows: list[dict[str, Any]]) -> str:
    lines = []
    for became in dict.fromkeys(row["became"] for row in rows):
        those = [row for row in rows if row["became"] == became]
        lines += [f"{became}: {len(those)}"]
        for row in those:
            by = f", {row['by']}" if row["by"] else ""
            since = "; 0.19.2 has the change" if row["is_in_0_19"] else ""
            lines.append(f"  {row['number']}: {row['about']}{by}{since}")
            place = f"{row['where']}: " if row["where"] else ""
            lines += [f"    {place}{row['why']}".rstrip(": ")] if place or row["why"] else []
    return "\n".join(lines)


def _keys_of_fields() -> dict[str, list[str]]:
    """Return, for each field that only some releases have, the keys that feed it."""
    from mtrain.config.engine.fields import FIELD_VERSIONS
    from mtrain.config.messages.fields_page import fed

    found: dict[str, list[str]] = {}
    for key, fields in fed().items():
        for field in fields:
            if field in FIELD_VERSIONS:
                found.setdefault(field, []).append(key)
    return found


def _page(facts: dict[str, Any]) -> str:
    from mtrain.cli.tables import table

    active = [row for row in facts["patches"] if row["is_active"]]
    kept = "" if facts["is_supported"] else ", which is not supported"
    here = (
        f"{facts['installed']}{kept}, in {facts['folder']}" if facts["folder"] else "not installed"
    )
    lines = [
        f"megatron-core  {here}",
        f"supported      {', '.join(facts['supported'])}, and later ones of their series",
    ]
    rows = [(row["field"], row["versions"], ", ".join(row["keys"])) for row in facts["fields"]]
    lines += [
        "",
        "fields of megatron-core that only some releases have, and the keys that feed them",
        *table(rows, left=3),
    ]
    able = [
        (row["when"], row["versions"], "here" if row["is_here"] else "not here")
        for row in facts["capabilities"]
    ]
    lines += ["", "capabilities of only some releases", *table(able, left=3)]
    lines += [
        "",
        (
            f"patches of megatron-core: {len(active)} of {len(facts['patches'])} act, on"
            f" {facts['device']}"
        ),
    ]
    for row in facts["patches"]:
        fixed = f"; {row['upstream']} fixes it" if row["upstream"] else ""
        lines.append(
            f"  {row['name']}:"
            f" {'not needed, ' + row['why_not'] if row['why_not'] else 'acts'}{fixed}"
        )
        lines.append(f"    {row['where']}: {row['reason']}")
    return "\n".join(lines)
