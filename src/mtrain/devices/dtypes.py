"""The torch dtypes of number formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtrain.config.engine.formats import FORMATS


def torch_dtype(word: str) -> torch.dtype:
    """Return the dtype of a tensor in a format; KeyError where there is no such format."""
    dtype: torch.dtype = getattr(torch, FORMATS[word].torch)
    return dtype


def with_dtypes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of megatron-core, the words of those that are called dtypes made dtypes."""
    return {
        # megatron-core's configs name all fields that hold a dtype so.
        k: torch_dtype(v) if k.endswith("_dtype") and v is not None else v
        for k, v in fields.items()
    }
