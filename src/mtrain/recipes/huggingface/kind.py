"""One `model_type` of Hugging Face: how it is read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import Family, Json


@dataclass(frozen=True)
class Kind:
    """One `model_type`."""

    reads: Family
    writes: Callable[[ModelConfig], Json]
    """What its `config.json` says of a model beyond the keys that are copied.

    Raises KeyError, ValueError, TypeError or AttributeError where it can say no such model.
    """
    architecture: Callable[[ModelConfig], str]
    """The class of transformers that loads the folder of a model."""

    @property
    def family(self) -> str:
        """`model.family` of the models that it describes."""
        return str(self.reads.fixed.get("model.family", "gpt"))
