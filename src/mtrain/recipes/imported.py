"""What a command line or a file of another system becomes, and what of it has no place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain.config.compose.composer import compose
from mtrain.config.compose.overrides import read_overrides
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.compose.yaml_reader import parse
from mtrain.config.machine.devices import CPU, CUDA
from mtrain.config.messages.keys import effect_of, field_of
from mtrain.config.messages.validate import validate
from mtrain.config.resolve.conditional import CONDITIONAL
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.delta import section
from mtrain.recipes.megatron.arguments import Arguments, Draft, Unplaced, read_all
from mtrain.recipes.megatron.entries import default_of
from mtrain.recipes.megatron.flags_unmapped import FITTING, OTHERS
from mtrain.recipes.megatron.processes import Asked, World
from mtrain.recipes.megatron.table import flags_of, known_flags, switches, table
from mtrain.recipes.secrets import HIDDEN, Secrets, names_secret
from mtrain.recipes.shell.gaps import Word, shown

_KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+\Z")
MAX_GUESSES = 40
"""Flags that are compared with every one that is known."""
WHOLE = "recipe.verified"
"""The key that is left open where flags that nobody knows may be missing: a person has to look."""
_REQUIRED = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
CHANGES = "changes the numbers"
"""Begins the text of a flag that is not taken over, and whose training is another without it."""
MARK = "# mtrain: "
"""Begins a line that `export` writes for a key without a flag."""


@dataclass
class Imported:
    """A configuration made of somebody else's."""

    run: RunConfig
    unplaced: list[Unplaced] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was assumed or found out, in sentences."""
    open: dict[str, str] = field(default_factory=dict)
    """Keys that are left to fill in, with the reason; their values in `run` mean nothing."""


def read_flags(
    words: Iterable[Word], world: World | None, unsaid: str = ""
) -> tuple[Arguments, Draft, dict[str, str]]:
    """Return every entry of the table, read as its keys are asked for; the keys that say nothing
    left out.

    Args:
        words: what stands behind the program.
        world: the processes that are started; `unsaid`: why they are not known.

    Returns:
        the flags, the keys, and the keys that change what is trained and are not known, with the
        reason.
    """
    a = Arguments(words, switches())
    loose = next((word for word in a.loose if not word.absent), None)
    length = () if "--seq-length" in a.flags else ("model.max_position_embeddings",)
    for key in (*_REQUIRED, *length) if loose is not None else ():
        a.maybe |= {
            flag: loose for flag in flags_of()[key] if loose is not None and flag not in a.flags
        }
    left = {"ranks": unsaid} if unsaid else {}
    d = read_all(a, table(), {"ranks": world.ranks if world else 1}, left)
    del d["ranks"]
    for part, key, flag in (
        ("moe", "model.moe.num_experts", "--num-experts"),
        ("mla", "model.mla", "--multi-latent-attention"),
        ("mup", "model.mup", "--use-mup"),
        ("linear_attention", "model.linear_attention", "--experimental-attention-variant"),
        ("dsa", "model.dsa", "--experimental-attention-variant"),
    ):
        present = d.get(key) is not None if part == "moe" else d.pop(key) is not None
        if part == "moe" and key in left and not present:
            d[key] = max(2, d.get("parallel.ep") or 1)
            present = True
        if not present:
            _drop(a, d, f"model.{part}.", flag)
            d[f"model.{part}"] = None
            left = {
                name: why for name, why in left.items() if not name.startswith(f"model.{part}.")
            }
    return a, d, {key: why for key, why in left.items() if _matters(key)}


def _matters(key: str) -> bool:
    """Return whether a key changes the network, the layout, the numbers or the data."""
    return key != "ranks" and (key.startswith("data.") or effect_of(key) is not Effect.RUNTIME)


def leave_open(a: Arguments, d: Draft, left: dict[str, str]) -> None:
    """Add what words that may hold any flag leave open, and sets keys that must have a value to
    some.
    """
    loose = [word for word in a.loose if not word.absent]
    lost = [f"{word.text} may hold any flag: it {word.why}" for word in loose]
    known = known_flags()
    strange = [flag for flag in a.flags if flag not in known and not names_secret(flag)]
    lost += (
        [f"{', '.join(strange[:5])}: no flag of Megatron-LM that is known here"] if strange else []
    )
    lost += [
        f"{flag} may be given: it {word.why}" for flag, word in a.maybe.items() if flag not in known
    ]
    if lost:
        left[WHOLE] = "; ".join(lost)
    for key in left.keys() - {*_REQUIRED, WHOLE, "model.vocab_size", "model.moe.num_experts"}:
        field = field_of(key)
        d[key] = 1 if field is not None and field.is_required() else default_of(key)
    heads = d.get("model.num_attention_heads") or d.get("model.num_query_groups") or 1
    values = (d.get("parallel.pp", 1) * d.get("parallel.vpp", 1), 64 * heads, heads)
    for key, value in zip(_REQUIRED, values, strict=True):
        if key in left and d.get(key) is None:
            d[key] = value


def unread_words(a: Arguments) -> list[Unplaced]:
    """Return words that may hold flags, as flags that were not taken over."""
    found = [
        Unplaced(w.text, "", "unreadable", f"may hold any flag: {w.why}")
        for w in a.loose
        if not w.absent
    ]
    return found + [
        Unplaced(flag, "", "unreadable", f"may be given: {word.why}")
        for flag, word in a.maybe.items()
        if flag not in a.flags
    ]


def absent_words(a: Arguments) -> list[str]:
    """Notes on words that are nothing unless the environment, or an argument, says something."""
    gaps = dict.fromkeys(gap for word in a.loose if word.absent for gap in word.gaps)
    return [
        f"{gap.where}: {gap.text} {gap.why}: flags that it may hold are not read" for gap in gaps
    ]


def _drop(a: Arguments, d: Draft, prefix: str, needed: str) -> None:
    """Take the keys of a section that is not there out, and says so of their flags."""
    for key in [key for key in d if key.startswith(prefix)]:
        del d[key]
        for flag in flags_of().get(key, ()):
            if flag != needed:
                a.refuse(flag, "no effect", f"read only with {needed}")


def backend_of(a: Arguments, d: Draft, launched: Asked | None, left: dict[str, str]) -> None:
    """The machines: CPUs under gloo, else GPUs; where nothing starts several processes, nothing is
    set.

    What is not known of the processes that a launcher starts is added to the keys that are `left`
    open.
    """
    gloo = a.word("--distributed-backend") == "gloo"
    if launched is None and not gloo:
        return
    launched = launched or Asked(1, 1)
    d["cluster.device"] = CPU.name if gloo else CUDA.name
    if gloo:
        found = {"parallel.ranks": launched.world.ranks if launched.world is not None else None}
    else:
        found = {"cluster.devices_per_node": launched.per_node}
    found["cluster.nodes"] = launched.nodes
    d |= {key: number for key, number in found.items() if number is not None}
    left |= {key: launched.why for key, number in found.items() if number is None}


def build(
    d: Draft, a: Arguments, extra: Sequence[str], source: str, said: Draft | None = None
) -> RunConfig:
    """Return the configuration of keys that were read; those that an export `said` in lines, and
    `extra` overrides, on top.

    Raises:
        ConfigError: a key that is required is missing, or a value is refused; the flag is named.
    """
    overrides = read_overrides(extra)
    problems = list(overrides.problems)
    if overrides.recipe is not None or overrides.run is not None:
        problems.append(
            Problem(
                "MT010", "", None, "what is imported stands on nothing else", "leave recipe= out"
            )
        )
    if problems:
        raise ConfigError(problems)
    values = _beneath(d, overrides.choices)
    for key, value in d.items():
        if key.partition(".")[0] not in overrides.choices:
            put(values, key, value)
    for key, value in {**(said or {}), **overrides.values}.items():
        put(values, key, value)
    run, problems = validate(values, lambda path: _where(path, a, source))
    if run is None:
        raise ConfigError([_with_reason(problem, a) for problem in problems])
    return _quiet(run, a)


def _with_reason(problem: Problem, a: Arguments) -> Problem:
    """Return a problem of a key that is missing, with the reason where its flag is there."""
    if problem.code != "MT015":
        return problem
    flag = next((flag for flag in flags_of().get(problem.path, ()) if flag in a.unplaced), None)
    rule = f"{problem.rule}: {flag} {a.unplaced[flag].text}" if flag else problem.rule
    if "--yaml-cfg" in a.flags:
        rule += "; the file of --yaml-cfg is not read: import that file"
    return replace(problem, rule=rule)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of nested mappings; a section that is null is made."""
    *parents, last = key.split(".")
    node = values
    for name in parents:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = value


def _beneath(d: Draft, choices: Mapping[str, str]) -> dict[str, Any]:
    """What the keys without a flag are: the schema's defaults for model and layout, else those of
    the choices.
    """
    picked = {
        "data": d.get("data.kind") or "mock",
        "precision": d.get("precision.dtype") or "auto",
        **choices,
    }
    words = [f"{group}={choice}" for group, choice in picked.items()]
    values = compose(words).run.to_dict()
    for group in ("model", "parallel"):
        if group not in choices:
            values[group] = {}
    return values


def _where(path: str, a: Arguments, source: str) -> str:
    given = [flag for flag in flags_of().get(path, ()) if flag in a.flags]
    return f"{source}: {given[0]}" if given else source


def _quiet(run: RunConfig, a: Arguments) -> RunConfig:
    """`run` with the keys that reach nothing here at rest: Megatron-LM reads over them too."""
    values = run.to_dict()
    for key in CONDITIONAL:
        if key.value(run) != key.off and not key.active(run):
            put(values, key.path, key.off)
            for flag in flags_of().get(key.path, ()):
                a.refuse(flag, "no effect", f"says nothing without {key.needs}")
    return RunConfig.model_validate(values)


def leftovers(a: Arguments) -> list[Unplaced]:
    """Return every flag that was not taken over, in the order of the command line."""
    guesses = MAX_GUESSES
    for flag in a.flags:
        if flag in a.asked:
            continue
        why, text = OTHERS.get(flag, ("unknown", ""))
        fitting = FITTING.get(flag, {}).get(" ".join(map(shown, a.flags[flag])))
        if fitting is not None:
            a.refuse(flag, "no effect", fitting)
        elif why != "unknown":
            a.refuse(flag, why, text)
        elif flag in known_flags():
            a.refuse(flag, "no effect", "another flag says the same, and is read before it")
        else:
            guesses -= 1
            near = _near_flag(flag) if guesses >= 0 else ""
            hint = f"; did you mean {near}?" if near else ""
            a.refuse(flag, "unknown", f"is no flag of Megatron-LM that is known here{hint}")
    return [a.unplaced[flag] for flag in a.flags if flag in a.unplaced]


def changing(found: Sequence[Unplaced]) -> list[str]:
    """Return sentences on flags without which something else is trained."""
    texts: dict[str, list[str]] = {}
    for item in found:
        if item.why == "not supported" and item.text.startswith(CHANGES):
            texts.setdefault(item.text, []).append(f"{item.flag} {item.value}".strip())
    return [f"{', '.join(flags)} is not taken over, and {text}" for text, flags in texts.items()]


def _near_flag(flag: str) -> str:
    return "".join(
        difflib.get_close_matches(flag[:80].replace("_", "-"), known_flags(), n=1, cutoff=0.8)
    )


def blacked_out(found: list[Unplaced], secrets: Secrets) -> list[Unplaced]:
    """Return the same without a secret: values of flags that nobody knows are not shown at all."""
    out = []
    for item in found:
        why = item.why
        text = secrets.hide(item.text)
        value = HIDDEN if item.value else ""
        if item.flag in known_flags():
            value = secrets.hide(item.value)
        elif names_secret(item.flag):
            why = "secret"
            text = "a secret has no place in a recipe"
        out.append(Unplaced(item.flag, value, why, text))
    return out


def without_secrets(d: Draft, a: Arguments, secrets: Secrets) -> None:
    """Take every value that holds a secret out of what was read."""
    for key, value in list(d.items()):
        if isinstance(value, str) and secrets.within(value):
            del d[key]
            for flag in flags_of().get(key, ()):
                a.refuse(flag, "secret", f"its value holds a secret; {key} is left as it was")


def residue(text: str, source: str) -> Draft:
    """What the lines say that an export wrote for keys without a flag: each a key and a value in
    YAML.

    Raises:
        ConfigError: a line is none of that kind.
    """
    out: Draft = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(MARK):
            continue
        key, equals, value = line[len(MARK) :].partition("=")
        if not equals or not _KEY.match(key):
            rule = f"a line that begins with `{MARK}` holds KEY=VALUE"
            raise ConfigError([Problem("MT003", "", None, rule, "delete it", f"{source}:{number}")])
        out[key] = parse(f"value: {value}", f"{source}:{number}").values["value"]
    return out


def name_of(path: Path) -> str:
    """Return a model's name made of a file's."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", path.stem).strip("_.-")
    return stem or "imported"


def as_published(run: RunConfig) -> RunConfig:
    """Return the run with what is known of the training of its model, where that ships under some
    name.
    """
    for choice in choices_of_group("model"):
        known: Any = section("model", choice)
        here = {key: getattr(run.model, key) for key in ("name", "published", "kv_channels")}
        if known.head_dim == run.model.head_dim and known.model_copy(update=here) == run.model:
            model = run.model.model_copy(update={"published": known.published})
            return run.model_copy(update={"model": model})
    return run


def same_shape(d: Draft) -> str | None:
    """Return the shipped model of the same layers and widths; of several the one that is nearest in
    all else.
    """
    shape = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
    )
    best: tuple[int, str] | None = None
    for choice in choices_of_group("model"):
        model = section("model", choice)
        far = sum(d[f"model.{key}"] != value for key, value in model if f"model.{key}" in d)
        if all(getattr(model, key) == d.get(f"model.{key}") for key in shape) and (
            best is None or far < best[0]
        ):
            best = (far, choice)
    return best[1] if best is not None else None
