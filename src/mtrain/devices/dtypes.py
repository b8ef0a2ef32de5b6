"""The torch dtypes of number formats."""

from __future__ import annotations

import torch

from mtrain.config.formats import FORMATS


def torch_dtype(word: str) -> torch.dtype:
    """The dtype of a tensor in a format; KeyError where there is no such format."""
    dtype: torch.dtype = getattr(torch, FORMATS[word].torch)
    return dtype
