"""`engines`: which megatron-core is here, which are supported, what only some have, and the patches
that act.
"""

from __future__ import annotations

from typing import Any

from mtrain import strict_json
from mtrain.cli.options import read_options
from mtrain.cli.tables import table
from mtrain.config.engine import release
from mtrain.config.engine.capabilities import CAPABILITIES, is_here
from mtrain.config.engine.fields import FIELD_VERSIONS
from mtrain.config.messages.fields_page import fed
from mtrain.errors import ConfigError, Problem, say_page


def run(argv: list[str], *, debug: bool) -> int:
    """Print what is known of this installation's megatron-core; the exit code.

    Raises:
        ConfigError: a word that means nothing here.
    """
    options = read_options(argv, ("--fixes",))
    if options.words:
        rule = f"{options.words[0]}: engines takes no words"
        raise ConfigError([Problem("MT010", "", None, rule, "engines", "command line")])
    if "--fixes" in options.flags:
        rows = _fixes()
        say_page(strict_json.dumps(rows, indent=2) if options.as_json else _fixes_page(rows))
        return 0
    facts = _facts()
    say_page(strict_json.dumps(facts, indent=2) if options.as_json else _page(facts))
    return 0


def _facts() -> dict[str, Any]:
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
    """Field that only some releases have -> the keys that feed it."""
    found: dict[str, list[str]] = {}
    for key, fields in fed().items():
        for field in fields:
            if field in FIELD_VERSIONS:
                found.setdefault(field, []).append(key)
    return found


def _page(facts: dict[str, Any]) -> str:
    active = [row for row in facts["patches"] if row["is_active"]]
    kept = "" if facts["is_supported"] else ", which is none of the supported"
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
    lines += ["", "what only some releases can do", *table(able, left=3)]
    lines += [
        "",
        (
            f"patches of megatron-core: {len(active)} of {len(facts['patches'])} act, on"
            f" {facts['device']}"
        ),
    ]
    for row in facts["patches"]:
        mended = f"; {row['upstream']} mends it" if row["upstream"] else ""
        lines.append(
            f"  {row['name']}:"
            f" {'not needed, ' + row['why_not'] if row['why_not'] else 'acts'}{mended}"
        )
        lines.append(f"    {row['where']}: {row['reason']}")
    return "\n".join(lines)
