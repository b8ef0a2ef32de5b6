"""`engines`: the installed megatron-core, the supported releases, and the patches that act."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mtrain.cli.output import refusal, say_json, table
from mtrain.config.engine import release
from mtrain.config.engine.capabilities import CAPABILITIES, is_here
from mtrain.config.engine.release import FIELD_VERSIONS
from mtrain.config.messages.fields_page import fed
from mtrain.errors import say_page


def run(words: list[str], *, as_json: bool, fixes: bool) -> int:
    """Print what is known of this installation's megatron-core.

    Raises:
        ConfigError: a word that has no meaning here.
    """
    if words:
        raise refusal(f"{words[0]}: engines takes no words", "engines")
    facts: Any = _facts_of_fixes() if fixes else _facts()
    if as_json:
        say_json(facts)
    else:
        say_page("\n".join(_lines_of_fixes(facts) if fixes else _lines(facts)))
    return 0


def _facts_of_fixes() -> list[dict[str, Any]]:
    from mtrain.mcore.patches.patch import known_bugs

    return [asdict(fix) for fix in known_bugs()]


def _facts() -> dict[str, Any]:
    # A launcher must not load torch, which devices and patches know: they are imported here only.
    from mtrain.devices import registry
    from mtrain.mcore.patches.apply import standing

    found = release.release()
    folder = release.folder()
    device = registry.get("auto")
    keys: dict[str, list[str]] = {}
    for key, fields in fed().items():
        for field in fields:
            keys.setdefault(field, []).append(key)
    return {
        "installed": release.words(found) if found else None,
        "folder": str(folder) if folder else None,
        "is_supported": found is not None and release.is_supported(found),
        "supported": [release.words(known) for known in release.SUPPORTED],
        "device": device.name,
        "fields": [
            {"field": field, "versions": str(FIELD_VERSIONS[field]), "keys": keys[field]}
            for field in sorted(keys.keys() & FIELD_VERSIONS.keys())
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


def _lines_of_fixes(rows: list[dict[str, Any]]) -> list[str]:
    """Return the known bugs by the way mtrain handles them."""
    lines = []
    for became in dict.fromkeys(row["became"] for row in rows):
        those = [row for row in rows if row["became"] == became]
        lines.append(f"{became}: {len(those)}")
        for row in those:
            by = f", {row['by']}" if row["by"] else ""
            since = "; 0.19.2 has the change" if row["is_in_0_19"] else ""
            lines.append(f"  {row['number']}: {row['about']}{by}{since}")
            # Both are optional in the list of bugs.
            reason = ": ".join(filter(None, (row["where"], row["why"])))
            lines += [f"    {reason}"] if reason else []
    return lines


def _lines(facts: dict[str, Any]) -> list[str]:
    here = "not installed"
    if facts["folder"]:
        unsupported = "" if facts["is_supported"] else ", which is not supported"
        here = f"{facts['installed']}{unsupported}, in {facts['folder']}"
    fields = [(row["field"], row["versions"], ", ".join(row["keys"])) for row in facts["fields"]]
    able = [
        (row["when"], row["versions"], "here" if row["is_here"] else "not here")
        for row in facts["capabilities"]
    ]
    active = sum(row["is_active"] for row in facts["patches"])
    lines = [
        f"megatron-core  {here}",
        f"supported      {', '.join(facts['supported'])}, and later ones of their series",
        "",
        "fields of megatron-core that only some releases have, and the keys that feed them",
        *table(fields, left=3),
        "",
        "capabilities of only some releases",
        *table(able, left=3),
        "",
        f"patches of megatron-core: {active} of {len(facts['patches'])} act, on {facts['device']}",
    ]
    for row in facts["patches"]:
        fixed = f"; {row['upstream']} fixes it" if row["upstream"] else ""
        state = f"not needed, {row['why_not']}" if row["why_not"] else "acts"
        lines.append(f"  {row['name']}: {state}{fixed}")
        lines.append(f"    {row['where']}: {row['reason']}")
    return lines
