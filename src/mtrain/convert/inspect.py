"""Names, shapes and formats of weights, from headers and manifests, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.ckpt.folder import MODEL, read_manifest
from mtrain.config.compose.paths import MANIFEST
from mtrain.convert.huggingface.folder import ADAPTERS, is_folder, open_folder
from mtrain.convert.megatron.torch_dist import is_torch_dist, open_torch_dist
from mtrain.convert.raw_arrays import IN_SAFETENSORS
from mtrain.convert.safetensors_file import BYTES, read_header
from mtrain.models.gpt.torch_dist import is_weight


class Held(NamedTuple):
    """A tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def held(path: Path) -> list[Held]:
    """Return the tensors of a safetensors file, of a folder of them or of adapters, of a
    checkpoint's model or of a checkpoint of megatron-core with its optimizer, by name.

    Raises:
        CorruptData: it is of another kind, or damaged.
    """
    if path.is_file():
        return [Held(t.name, t.dtype, t.shape) for _, t in sorted(read_header(path).items())]
    # only mtrain's checkpoints have a manifest
    if (path / MANIFEST).is_file():
        tensors = read_manifest(path, verify=False)["tensors"]
        found = (
            (key.removeprefix(MODEL), entry)
            for key, entry in sorted(tensors.items())
            if key.startswith(MODEL)
        )
        return [
            Held(key, IN_SAFETENSORS.get(e["dtype"], e["dtype"]), tuple(e["shape"]))
            for key, e in found
        ]
    if is_torch_dist(path) and not is_folder(path):
        return [
            Held(name, t.dtype, t.shape)
            for name, t in sorted(open_torch_dist(path, is_weight).tensors.items())
        ]
    if (path / ADAPTERS).is_file() and not is_folder(path):
        return held(path / ADAPTERS)
    return [Held(t.name, t.dtype, t.shape) for _, t in sorted(open_folder(path).tensors.items())]


def totals(tensors: Sequence[Held]) -> dict[str, Any]:
    """Return how many tensors, numbers and bytes there are, and tensors by number format."""
    sizes = [(prod(t.shape), BYTES.get(t.dtype, 0)) for t in tensors]
    return {
        "tensors_total": len(tensors),
        "numbers": sum(numbers for numbers, _ in sizes),
        # as in memory: headers and padding of files do not count
        "bytes": sum(numbers * width for numbers, width in sizes),
        "formats": dict(Counter(t.dtype for t in tensors).most_common()),
    }
