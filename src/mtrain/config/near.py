"""What a misspelt or foreign key may have meant, with a value that the key takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from mtrain.config.dump import override
from mtrain.config.keys import field_of, suggest

NOTHING = "leave it out"
INSTEAD = {"bf16": "precision.dtype=bf16", "fp16": "precision.dtype=fp16"}
"""Names that have no key here, and the settings that do what they did."""
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
        return [INSTEAD[last]] if last in INSTEAD and value is not False else [NOTHING]
    known = _WORDS.get(str(value).lower(), value)
    with suppress(TypeError):
        known = CONVERTED.get(last, lambda v: v)(known)
    fitting = [override(key, known) for key in near if accepts(key, known)]
    return fitting or [default for key in near if (default := at_default(key))][:1] or [NOTHING]


def at_default(path: str) -> str:
    """The override that sets a key to its default; empty where it has none."""
    field = field_of(path)
    if field is None or field.default is PydanticUndefined:
        return ""
    return override(path, field.default)
