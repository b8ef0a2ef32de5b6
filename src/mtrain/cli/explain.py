"""`explain WORD`: what a key is, who set it and what it reaches, or what a code means.

`choices`: the files that a group has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mtrain import strict_json
from mtrain.cli.command import WIDTH
from mtrain.cli.output import refusal, say_json
from mtrain.config.compose.composer import Composed
from mtrain.config.compose.dump import spell
from mtrain.config.compose.interpolate import at
from mtrain.config.compose.paths import choices_of_group, find_config, group_names, program
from mtrain.config.engine.capabilities import of_key, where_it_is
from mtrain.config.engine.core_fields import feeds
from mtrain.config.engine.release import FIELD_VERSIONS
from mtrain.config.messages.describe import (
    EFFECTS,
    default_of,
    example_section,
    groups,
    keys_of,
    meaning,
    section_of,
    summary,
    type_of,
)
from mtrain.config.messages.keys import effect_of, field_of, suggest
from mtrain.config.messages.suggestions import near_choice
from mtrain.config.resolve.conditional import CONDITIONAL
from mtrain.config.resolve.resolution import Machine, resolve, world_size_of
from mtrain.config.resolve.watch import touches
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import GROUPS, RunConfig
from mtrain.errors import Code, ConfigError, Problem, say, say_page, sentence, visible
from mtrain.loading import checkpoints
from mtrain.recipes.diff import overrides_of
from mtrain.recipes.megatron.table import flags_of

USAGE = "explain parallel.tp [overrides], explain MT101, explain model"
_CODE = re.compile(r"[Mm][Tt][0-9]+\Z")
DEFAULT = "default"
ABSENT = "(not there: its section is null)"
# Examples are resolved for this machine, not the one at hand, so that a page is the same
# everywhere.
SMALL = Machine(cpu_cores=2, memory_bytes=8 << 30)
# A page of one code names at most so many keys.
MAX_KEYS = 12


def run(words: list[str], *, as_json: bool) -> int:
    """Explain the first word, for the configuration that the others describe; return the exit code.

    Raises:
        ConfigError: neither a key nor a code has this name, or the overrides are refused.
    """
    if not words:
        say_page(
            strict_json.dumps(_contents(), indent=2) if as_json else _contents_page(_contents())
        )
        return 0
    word = words[0].partition("=")[0]
    rest = words[1:]
    if _CODE.match(word) or _is_code(word):
        facts = _code(word.upper())
    elif field_of(word) is None:
        raise ConfigError([_unknown(word)])
    elif section_of(word) is not None:
        facts = _section(word)
    else:
        facts = _key(word, checkpoints.composed(overrides_of(rest)))
    say_page(strict_json.dumps(facts, indent=2) if as_json else _page(facts))
    return 0


def choices(words: list[str], *, as_json: bool) -> int:
    """Print the choices of the named groups, or of all, with the comments of their files.

    Raises:
        ConfigError: the group does not exist.
    """
    known = [*dict.fromkeys((*GROUPS, *group_names()))]
    for word in words:
        if word not in known:
            near = near_choice(word, known) or ["model"]
            rule = f"there is no group {word}; groups: {', '.join(known)}"
            raise refusal(rule, f"choices {near[0]}")
    listed = {
        group: {choice: about(group, choice) for choice in choices_of_group(group)}
        for group in words or known
    }
    if as_json:
        say_json(listed)
        return 0
    for group, texts in listed.items():
        width = max(map(len, texts), default=0)
        lines = [f"  {choice:<{width}}  {text}".rstrip() for choice, text in texts.items()]
        say(group, *(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines))
    return 0


def about(group: str, choice: str) -> str:
    """Return the comment at the head of a choice's file, in one line."""
    comment = []
    file = find_config(f"{group}/{choice}")
    for line in file.read_text(encoding="utf-8").splitlines() if file is not None else ():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment)


def _is_code(word: str) -> bool:
    """Return whether a word is a code, also of a plug-in."""
    from mtrain.config.messages.codes import codes

    return field_of(word) is None and word.upper() in codes()


def _unknown(word: str) -> Problem:
    near, why = suggest(word)
    rule = "there is no such key, group or code" + (f"; {why}" if why else "")
    fix = " or ".join(f"explain {key}" for key in near) or "explain, for all groups and codes"
    return Problem("MT012", word, None, rule, fix, "command line")


def _contents() -> dict[str, Any]:
    """Return the groups and codes that can be explained."""
    from mtrain.config.messages.codes import codes, kinds

    return {
        "groups": groups(),
        "codes": {
            words: [code for code in codes() if code.startswith(begin)]
            for begin, words in kinds().items()
        },
    }


def _contents_page(found: Mapping[str, Any]) -> str:
    lines = [f"usage: {program()} {USAGE}", "", "groups"]
    lines += [f"  {group:<11} {words}" for group, words in found["groups"].items()]
    lines += [
        "",
        "codes",
        *(f"  {words}: {' '.join(codes)}" for words, codes in found["codes"].items()),
    ]
    return "\n".join(lines)


def _code(code: str) -> dict[str, Any]:
    """Return the meaning of a code, its causes and its fix."""
    from mtrain.config.messages.codes import codes, family, rules_of

    if code not in codes():
        shipped = [known for known in codes() if known.startswith("MT")]
        # Codes of one area have neighbouring numbers.
        near = sorted(shipped, key=lambda known: (abs(int(known[2:]) - int(code[2:8])), known))[:8]
        rule = f"there is no such code; codes: {', '.join(near)}"
        raise refusal(rule, f"explain {near[0]}")
    known = codes()[code]
    rules = rules_of(code)
    keys = list(
        dict.fromkeys(key for rule in rules for key in rule.reads if section_of(key) is None)
    )
    change = f"change {' or '.join(keys[:4])}; `{program()} check` shows values that were tried"
    found = _raised(known)
    says = [p.message() for p in found]
    # Without a sample of its numbers a message would only repeat what the code means.
    if known.says and not says:
        says = [sentence(code, known.says)]
    return {
        "code": code,
        "about": family(code),
        "means": known.text,
        "severity": next((p.severity for p in found), known.severity),
        "keys": keys,
        "example": known.example,
        "says": list(dict.fromkeys(says)),
        "fix": next((p.fix for p in found), ""),
        "do": known.help or change,
        "raised_in": sorted({rule.file for rule in rules}),
    }


def _raised(code: Code) -> list[Problem]:
    """Return the problems of a code's example, on a fixed machine."""
    from mtrain.api import TooFewDevices, load

    if not code.example:
        return []
    try:
        found = load(shlex.split(code.example), SMALL, {}).warnings
    except (ConfigError, TooFewDevices) as error:
        found = error.problems
    return [problem for problem in found if problem.code == code.code]


def _section(path: str) -> dict[str, Any]:
    doc = " ".join((getattr(section_of(path), "__doc__", "") or "").split())
    return {"section": path, "means": doc, "keys": {key: summary(key) for key in keys_of(path)}}


def _key(path: str, composed: Composed) -> dict[str, Any]:
    """Return everything about a key in a configuration."""
    from mtrain.config.messages.codes import validating
    from mtrain.models import selection

    field = field_of(path)
    assert field is not None
    facts: dict[str, Any] = {
        "key": path,
        "means": meaning(path),
        "type": type_of(path),
        "default": default_of(path),
    }
    if path.startswith("recipe."):
        return facts
    machine = Machine.here()
    from mtrain.loading.configuration import settled

    composed, why = settled(composed, machine, world_size_of())
    made_from: dict[str, frozenset[str]] = {}
    resolved = resolve(composed.run, machine, world_size_of(), made_from, why)
    chain = _chain(path, composed, resolved, why)
    decided = _decided(path, made_from)
    facts |= {
        "value": _inside(resolved.to_dict(), path),
        "set_by": chain[-1]["source"],
        "chain": chain,
        "changes": _changes(path, decided),
        "decides": decided,
        "needs": next((key.needs for key in CONDITIONAL if key.path == path), ""),
        "feeds": _fed(path, resolved),
        "release": [where_it_is(row) for row in of_key(path)],
        "flags": list(flags_of().get(path, ())),
        "validated_by": validating(path),
        "selects": selection.choices(resolved) if path == selection.KEY else [],
    }
    return facts


def _decided(path: str, made_from: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the unset keys that were derived from this one and change a number."""
    followers = [key for key, reads in made_from.items() if key != path and touches(reads, [path])]
    return [key for key in followers if effect_of(key) is not Effect.RUNTIME]


def _changes(path: str, decided: Sequence[str]) -> str:
    """Describe the effect of a key, and a graver one through keys that it decides."""
    own = effect_of(path)
    gravest = list(Effect).index
    through = min(map(effect_of, decided), key=gravest, default=own)
    changes_weights = own not in (Effect.PARALLELISM, Effect.RUNTIME)
    # Changing a key may change others that nobody set, and those the result of the run.
    if changes_weights or gravest(through) >= gravest(own):
        return EFFECTS[own]
    return f"{EFFECTS[through]}, by the keys that it decides; where those are set, {EFFECTS[own]}"


def _fed(path: str, run: RunConfig) -> list[str]:
    """Return the fields that a key feeds; nothing if another key prevents the model."""
    # Another key of the configuration may prevent the model.
    with suppress(ValueError):
        found = feeds(_with_section(run, path)).get(path, [])
        return [
            f"{name} ({FIELD_VERSIONS[name]})" if name in FIELD_VERSIONS else name for name in found
        ]
    return []


def _chain(
    path: str, composed: Composed, resolved: RunConfig, why: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the origins of a key, lowest precedence first; the last one holds."""
    out = [{"source": DEFAULT, "value": default_of(path)}]
    for setting in composed.history:
        if setting.path == path:
            out.append({"source": setting.source, "value": spell(setting.value)})
        elif path.startswith(f"{setting.path}.") and setting.value is None:
            # The section of the key was set to null.
            out.append({"source": setting.source, "value": ABSENT})
        elif setting.path.startswith(f"{path}."):
            out.append(
                {
                    "source": setting.source,
                    "value": f"{setting.path[len(path) + 1 :]}: {spell(setting.value)}",
                }
            )
    if path in why:
        out.append({"source": why[path], "value": _inside(resolved.to_dict(), path)})
    return out


def _inside(values: Any, path: str) -> str:
    value = at(values, path, ABSENT)
    return ABSENT if value is ABSENT else spell(value)


def _with_section(run: RunConfig, path: str) -> RunConfig:
    """Return the run with the section of a key in place, so that reads can be watched."""
    for part in ("model.moe", "model.mla"):
        name = part.partition(".")[2]
        if path.startswith(f"{part}.") and getattr(run.model, name) is None:
            section = section_of(part)
            assert section is not None
            inner = section.model_validate(example_section(section))
            return run.model_copy(update={"model": run.model.model_copy(update={name: inner})})
    return run


def _page(facts: Mapping[str, Any]) -> str:
    """Return facts as a page of plain text."""
    if "section" in facts:
        width = max(len(key) for key in facts["keys"])
        return "\n".join(
            [facts["means"], *(f"  {key:<{width}}  {text}" for key, text in facts["keys"].items())]
        )
    head = next(iter(facts.values()))
    lines = [head if "about" not in facts else f"{head} ({facts['about']})"]
    for name, value in list(facts.items())[1:]:
        if name == "about" or value in ("", []):
            continue
        if name == "chain":
            rows = [f"{row['source']}: {row['value']}" for row in value] if len(value) > 1 else []
        elif name in ("says", "flags", "selects"):
            rows = list(value)
        elif name in ("keys", "decides") and len(value) > MAX_KEYS:
            rows = [f"{', '.join(value[:MAX_KEYS])} and {len(value) - MAX_KEYS} more"]
        else:
            rows = [", ".join(value) if isinstance(value, list) else value]
        for index, row in enumerate(rows):
            lines.append(visible(f"  {name.replace('_', ' ') if index == 0 else '':<9} {row}"))
    return "\n".join(lines)
