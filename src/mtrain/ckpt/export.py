"""The weights of a checkpoint as whole tensors, independent of layouts and optimizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mtrain.ckpt import folder, shards
from mtrain.ckpt.store import Checkpoint
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.mcore.layers.merging import Whole, is_adapter, merged, names_beside, one_hot_of

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    files: tuple[Path, ...]
    tensors: int
    elements: int
    """Numbers in all tensors: the model's parameters and any balancing biases of routers."""
    padding: str
    """Treatment of the vocabulary's padding rows, in words; empty without padding."""


def weight_keys(checkpoint: Checkpoint) -> list[str]:
    """Return names of the model's own tensors, in order, without adapters."""
    held = checkpoint.manifest["tensors"]
    return sorted(key for key in held if key.startswith(folder.MODEL) and not is_adapter(key))


def _merged(checkpoint: Checkpoint, key: str, run: RunConfig) -> torch.Tensor:
    """Return a whole weight, with its adapter where it has one."""
    weight = checkpoint.whole(key)
    names = names_beside(key)
    held = checkpoint.manifest["tensors"]
    if names is None or names.a not in held:
        return weight
    parts = (checkpoint.whole(name) if name in held else None for name in names)
    adapter = Whole(*parts)  # type: ignore[arg-type]
    return merged(weight, adapter, one_hot_of(key, adapter, run.model), run.peft.scale)


def export(checkpoint: Checkpoint, out: Path, tokenizer: Path | None = None) -> Exported:
    """Write the weights of `checkpoint` to the new folder `out` as safetensors files and an index.

    A tensor has its name in megatron-core and its whole shape; layers are counted over the whole
    model, experts are the first axis of theirs, and tables of token ids have the padded vocabulary:
    the index says how many ids there are, and whether padding was masked in the losses. The folder
    also gets `run.yaml`, and the tokenizer if there is one. One file is in memory at a time.
    Adapters are merged into their weights. The folder appears when everything is in it.

    Raises:
        CorruptData: the checkpoint's pieces do not make up a tensor.
        FileExistsError: `out` is there.
    """
    if out.exists():
        raise FileExistsError(out)
    # An export that is killed leaves this name, which no reader takes for an export.
    draft = out.with_name(f".exporting-{out.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    run = read_run_file(checkpoint.path / folder.RUN_FILE)
    entries: dict[str, Any] = checkpoint.manifest["tensors"]
    groups = list(
        folder.by_file(weight_keys(checkpoint), lambda key: _nbytes(entries[key]), SHARD_BYTES)
    )
    placed: dict[str, str] = {}
    total_bytes = 0
    elements = 0
    for i, keys in enumerate(groups, 1):
        name = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        tensors = {key.removeprefix(folder.MODEL): _merged(checkpoint, key, run) for key in keys}
        shards.write(draft / name, tensors, {"format": "pt", "step": str(checkpoint.step)})
        placed |= dict.fromkeys(tensors, name)
        total_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
        elements += sum(t.numel() for t in tensors.values())
    model = run.model
    ids = {
        key: getattr(model, key) for key in ("vocab_size", "padded_vocab_size", "mask_padded_vocab")
    }
    folder.write_json(
        draft / INDEX, {"metadata": {"total_size": total_bytes, **ids}, "weight_map": placed}
    )
    # Merged weights are those of a model without adapters, and so is its configuration.
    if run.peft.kind is None:
        shutil.copyfile(checkpoint.path / folder.RUN_FILE, draft / folder.RUN_FILE)
    else:
        (draft / folder.RUN_FILE).write_text(
            run_yaml(run.model_copy(update={"peft": PeftConfig()}))
        )
    if tokenizer is not None:
        shutil.copyfile(tokenizer, draft / tokenizer.name)
    draft.rename(out)
    return Exported(tuple(sorted(out.iterdir())), len(placed), elements, model.padding_in_words)


def read(exported: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of an exported folder by name, a file at a time."""
    from safetensors.torch import load_file

    index = json.loads((exported / INDEX).read_text())
    for name in sorted(set(index["weight_map"].values())):
        yield from load_file(exported / name).items()


def _nbytes(entry: dict[str, Any]) -> int:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return int(prod(entry["shape"])) * dtype.itemsize
