"""The flags of a command line as keys, and the flags and keys that stay open."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mtrain.config.machine.devices import CPU, CUDA
from mtrain.config.messages.keys import effect_of, field_of
from mtrain.config.schema.base import Effect
from mtrain.recipes.imported import REQUIRED, WHOLE
from mtrain.recipes.megatron.arguments import Arguments, Draft, Unplaced, default_of, read_all
from mtrain.recipes.megatron.flags_unmapped import FITTING, OTHERS
from mtrain.recipes.megatron.processes import Requested, World
from mtrain.recipes.megatron.table import flags_of, known_flags, switches, table
from mtrain.recipes.secrets import HIDDEN, Secrets, names_secret
from mtrain.recipes.shell.gaps import Word, shown

MAX_GUESSES = 40
"""Unknown flags that are compared with every known flag for a suggestion."""


def read_flags(
    words: Iterable[Word], world: World | None, why_unknown: str = ""
) -> tuple[Arguments, Draft, dict[str, str]]:
    """Return every entry of the table, read on the first use of its keys, without the keys that
    have no effect.

    Args:
        words: the words after the program.
        world: the started processes; `why_unknown`: why they are unknown.

    Returns:
        the flags, the keys, and the unknown keys that matter for the training, with the reason.
    """
    arguments = Arguments(words, switches())
    loose = next((word for word in arguments.loose if not word.absent), None)
    # such a word may hold any flag that is required and missing
    if loose is not None:
        required = [*REQUIRED]
        if "--seq-length" not in arguments.flags:
            required.append("model.max_position_embeddings")
        flags = [
            flag for key in required for flag in flags_of()[key] if flag not in arguments.flags
        ]
        arguments.maybe |= dict.fromkeys(flags, loose)
    left = {"ranks": why_unknown} if why_unknown else {}
    draft = read_all(arguments, table(), {"ranks": world.ranks if world else 1}, left)
    del draft["ranks"]
    for part, key, flag in (
        ("moe", "model.moe.num_experts", "--num-experts"),
        ("mla", "model.mla", "--multi-latent-attention"),
        ("mup", "model.mup", "--use-mup"),
        ("linear_attention", "model.linear_attention", "--experimental-attention-variant"),
        ("dsa", "model.dsa", "--experimental-attention-variant"),
    ):
        present = draft.get(key) is not None if part == "moe" else draft.pop(key) is not None
        if part == "moe" and key in left and not present:
            # a number that stands in: a model with experts, as many as ranks that share them
            draft[key] = max(2, draft.get("parallel.ep") or 1)
            present = True
        if not present:
            _drop(arguments, draft, f"model.{part}.", flag)
            draft[f"model.{part}"] = None
            left = {
                name: why for name, why in left.items() if not name.startswith(f"model.{part}.")
            }
    return arguments, draft, {key: why for key, why in left.items() if _matters(key)}


def _matters(key: str) -> bool:
    """Return whether a key changes the network, the layout, the numbers or the data."""
    return key != "ranks" and (key.startswith("data.") or effect_of(key) is not Effect.RUNTIME)


def leave_open(arguments: Arguments, draft: Draft, left: dict[str, str]) -> None:
    """Add the keys that words with unknown flags leave open, and give required keys a value."""
    loose = [word for word in arguments.loose if not word.absent]
    lost = [f"{word.text} may hold any flag: it {word.why}" for word in loose]
    known = known_flags()
    strange = [flag for flag in arguments.flags if flag not in known and not names_secret(flag)]
    lost += [f"{', '.join(strange[:5])}: no known flag of Megatron-LM"] if strange else []
    lost += [
        f"{flag} may be given: it {word.why}"
        for flag, word in arguments.maybe.items()
        if flag not in known
    ]
    if lost:
        left[WHOLE] = "; ".join(lost)
    for key in left.keys() - {*REQUIRED, WHOLE, "model.vocab_size", "model.moe.num_experts"}:
        field = field_of(key)
        draft[key] = 1 if field is not None and field.is_required() else default_of(key)
    heads = draft.get("model.num_attention_heads") or draft.get("model.num_query_groups") or 1
    # numbers that stand in pass the checks of layout and heads
    values = (draft.get("parallel.pp", 1) * draft.get("parallel.vpp", 1), 64 * heads, heads)
    for key, value in zip(REQUIRED, values, strict=True):
        if key in left and draft.get(key) is None:
            draft[key] = value


def unread_words(arguments: Arguments) -> list[Unplaced]:
    """Return words that may hold flags, as flags that were not imported."""
    unread = [
        Unplaced(w.text, "", "unreadable", f"may hold any flag: {w.why}")
        for w in arguments.loose
        if not w.absent
    ]
    return unread + [
        Unplaced(flag, "", "unreadable", f"may be given: {word.why}")
        for flag, word in arguments.maybe.items()
        if flag not in arguments.flags
    ]


def absent_words(arguments: Arguments) -> list[str]:
    """Return notes on words that are empty unless the environment, or an argument, sets them."""
    gaps = dict.fromkeys(gap for word in arguments.loose if word.absent for gap in word.gaps)
    return [
        f"{gap.where}: {gap.text} {gap.why}: flags that it may hold are not read" for gap in gaps
    ]


def _drop(arguments: Arguments, draft: Draft, prefix: str, needed: str) -> None:
    """Remove the keys of a missing section, and refuse their flags."""
    for key in [key for key in draft if key.startswith(prefix)]:
        del draft[key]
        for flag in flags_of().get(key, ()):
            if flag != needed:
                arguments.refuse(flag, "no effect", f"read only with {needed}")


def set_cluster(
    arguments: Arguments, draft: Draft, launched: Requested | None, left: dict[str, str]
) -> None:
    """Set the machines: CPUs under gloo, otherwise GPUs; set none if nothing starts several
    processes.

    Unknown numbers of processes are added to the keys that are `left` open.
    """
    gloo = arguments.word("--distributed-backend") == "gloo"
    if launched is None and not gloo:
        return
    launched = launched or Requested(1, 1)
    draft["cluster.device"] = CPU.name if gloo else CUDA.name
    # CPUs are not counted for each machine
    if gloo:
        numbers: dict[str, int | None] = {
            "parallel.ranks": launched.world.ranks if launched.world is not None else None
        }
    else:
        numbers = {"cluster.devices_per_node": launched.per_node}
    numbers["cluster.nodes"] = launched.nodes
    draft |= {key: number for key, number in numbers.items() if number is not None}
    left |= {key: launched.why for key, number in numbers.items() if number is None}


def unplaced_flags(arguments: Arguments) -> list[Unplaced]:
    """Return every flag that was not imported, in the order of the command line."""
    guesses = MAX_GUESSES
    for flag in arguments.flags:
        if flag in arguments.consulted:
            continue
        why, text = OTHERS.get(flag, ("unknown", ""))
        fitting = FITTING.get(flag, {}).get(" ".join(map(shown, arguments.flags[flag])))
        if fitting is not None:
            arguments.refuse(flag, "no effect", fitting)
        elif why != "unknown":
            arguments.refuse(flag, why, text)
        # its entry did not consult it
        elif flag in known_flags():
            arguments.refuse(flag, "no effect", "another flag sets the same, and is read before it")
        else:
            # each comparison with all known flags takes milliseconds
            guesses -= 1
            suggestion = _suggestion(flag) if guesses >= 0 else ""
            hint = f"; did you mean {suggestion}?" if suggestion else ""
            arguments.refuse(flag, "unknown", f"is no known flag of Megatron-LM{hint}")
    return [arguments.unplaced[flag] for flag in arguments.flags if flag in arguments.unplaced]


def _suggestion(flag: str) -> str:
    return "".join(
        difflib.get_close_matches(flag[:80].replace("_", "-"), known_flags(), n=1, cutoff=0.8)
    )


def blacked_out(flags: list[Unplaced], secrets: Secrets) -> list[Unplaced]:
    """Return the flags without secrets: values of unknown flags are not shown at all."""
    out = []
    for item in flags:
        why = item.why
        text = secrets.hide(item.text)
        # the value of an unknown flag may be a password
        value = HIDDEN if item.value else ""
        if item.flag in known_flags():
            value = secrets.hide(item.value)
        elif names_secret(item.flag):
            why = "secret"
            text = "a secret has no place in a recipe"
        out.append(Unplaced(item.flag, value, why, text))
    return out


def without_secrets(draft: Draft, arguments: Arguments, secrets: Secrets) -> None:
    """Remove every value that holds a secret from the keys."""
    for key, value in list(draft.items()):
        if isinstance(value, str) and secrets.within(value):
            del draft[key]
            for flag in flags_of().get(key, ()):
                arguments.refuse(
                    flag, "secret", f"its value holds a secret; {key} is left as it was"
                )
