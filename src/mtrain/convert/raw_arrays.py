"""Raw arrays: the numbers of a tensor as integers of their width.

A conversion moves bits without interpreting them, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.convert.safetensors_file import BYTES

if TYPE_CHECKING:
    import torch

RawArray = np.ndarray[Any, np.dtype[Any]]
IN_TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
}
"""Number format as safetensors names it -> as torch and our checkpoints do."""
IN_SAFETENSORS = {theirs: name for name, theirs in IN_TORCH.items()}
FLOATS = frozenset(name for name, theirs in IN_TORCH.items() if "float" in theirs)
# types that numpy and torch share: one memory is both
_OF_WIDTH = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def empty(shape: Sequence[int], dtype: str) -> RawArray:
    """Return memory for numbers of a format."""
    return np.empty(tuple(shape), _OF_WIDTH[BYTES[dtype]])


def buffer_of(words: RawArray) -> memoryview:
    """Return the bytes of contiguous words, not copied."""
    # a memoryview of no numbers cannot be cast
    flat: Any = words.reshape(-1).view(np.uint8) if words.size else b""
    return memoryview(flat)


def converted(words: RawArray, dtype: str, to: str) -> RawArray:
    """Return numbers of a format in another one; imports torch where they differ."""
    # most conversions move bits, and none of them waits for the import of torch
    if dtype == to:
        return words
    import torch

    wanted: torch.dtype = getattr(torch, IN_TORCH[to])
    return of_tensor(as_tensor(np.ascontiguousarray(words), dtype).to(wanted))[0]


def as_tensor(words: RawArray, dtype: str) -> torch.Tensor:
    """Return the same memory as a tensor of a format; imports torch."""
    import torch

    return torch.from_numpy(words).view(getattr(torch, IN_TORCH[dtype]))


def of_tensor(tensor: torch.Tensor) -> tuple[RawArray, str]:
    """Return the same memory as words, and the format of a tensor on the CPU."""
    import torch

    name = IN_SAFETENSORS[str(tensor.dtype).removeprefix("torch.")]
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    found: RawArray = tensor.detach().view(width).numpy()
    return found, name
