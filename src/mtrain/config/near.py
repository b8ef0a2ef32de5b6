"""What a misspelt or foreign key may have meant, with a value that the key takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic_core import PydanticUndefined

from mtrain.config.dump import override
from mtrain.config.keys import field_of, suggest
from mtrain.config.paths import choices_of_group
from mtrain.config.run import GROUPS

NOTHING = "leave it out"
INSTEAD: dict[str, Callable[[Any], str]] = {
    "bf16": lambda value: "precision.dtype=bf16" if value is True else NOTHING,
    "fp16": lambda value: "precision.dtype=fp16" if value is True else NOTHING,
    "betas": lambda value: f"optim.beta1={value[0]} optim.beta2={value[1]}" if _is_pair(value) else NOTHING,
}
"""Names that have no key of their own here, and the settings that do what they did."""
CONVERTED: dict[str, Callable[[Any], Any]] = {
    "untie_embeddings_and_output_weights": lambda value: not value,
    "distributed_timeout_minutes": lambda value: 60.0 * value,
}
"""Foreign names whose values mean something else under our key, and what."""
_WORDS = {
    **{"true": True, "false": False, "silu": "swiglu", "relu2": "squared_relu"},
    **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16"},
}


def accepts(path: str, value: Any) -> bool:
    """Whether the schema takes `value` at `path`, whatever the other keys are."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    field = field_of(path)
    if field is None:
        return False
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return False
    return True


def meant(path: str, value: Any) -> list[str]:
    """Overrides that an unknown key at `path` may have stood for, best first; each key takes its value.

    Where no near key takes the value, the nearest one at its default; where none is near, to leave the key out.
    """
    last = path.rpartition(".")[2].lower().replace("-", "_")
    near = suggest(path)[0]
    if not near:
        return [INSTEAD.get(last, lambda _: NOTHING)(value)]
    if near[0] in GROUPS:
        choices = (
            [value] if value in choices_of_group(near[0]) else near_choice(str(value), choices_of_group(near[0]))
        )
        return [f"{near[0]}={choice}" for choice in choices[:1]] or [NOTHING]
    known = _WORDS.get(str(value).lower(), value)
    with suppress(TypeError):
        known = CONVERTED.get(last, lambda v: v)(known)
    fitting = [override(key, known) for key in near if accepts(key, known)]
    return fitting or [default for key in near if (default := at_default(key))][:1] or [NOTHING]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(accepts("optim.beta1", v) for v in value)


def at_default(path: str) -> str:
    """The override that sets a key to its default; empty where it has none."""
    field = field_of(path)
    if field is None or field.default is PydanticUndefined:
        return ""
    return override(path, field.default)


def near_choice(word: str, choices: Sequence[str]) -> list[str]:
    """Choices that `word` may have meant, best first."""
    import difflib

    near = difflib.get_close_matches(word, choices, n=3, cutoff=0.5)
    plain = re.sub(r"[^a-z0-9]", "", word.lower())
    same = [c for c in choices if re.sub(r"[^a-z0-9]", "", c.lower()) == plain]
    begun = [c for c in choices if len(word) > 2 and c.startswith(word)]
    return list(dict.fromkeys([*same, *begun, *near]))[:3]
