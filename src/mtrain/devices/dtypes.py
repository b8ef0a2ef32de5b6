"""The torch dtypes of number formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtrain.config.engine.formats import FORMATS


def torch_dtype(word: str) -> torch.dtype:
    """Return the dtype of a tensor in a format.

    Raises:
        KeyError: there is no such format.
    """
    dtype: torch.dtype = getattr(torch, FORMATS[word].torch)
    return dtype


def with_dtypes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of megatron-core with torch dtypes in place of the words for them."""
    # megatron-core's configs give every field that holds a dtype this ending
    dtypes = {
        k: torch_dtype(v) for k, v in fields.items() if k.endswith("_dtype") and v is not None
    }
    return {**fields, **dtypes}
