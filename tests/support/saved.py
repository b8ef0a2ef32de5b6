"""Checkpoints as the ranks of a layout write them, without torch: true headers and hashes over
holes, which read as zeros.
"""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder, hashes, index
from mtrain.config.compose.dump import run_yaml
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.launching.verdict.regions import Layout

IN_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
IN_FILES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def manifest_of(run: RunConfig, step: int = 1, **state: Any) -> dict[str, Any]:
    """Return the manifest that a run of a described layout writes, without its files."""
    # Adapters are left out: only megatron-core names them.
    adapted = run.peft.kind is not None
    layout = Layout(run.model_copy(update={"peft": PeftConfig()}))
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for rank in range(run.parallel.ranks):
        name = folder.shard_name(rank)
        files[name] = {}
        for number, read in enumerate(layout.reads(rank, weights_only=adapted)):
            weight = read.name.startswith(folder.MODEL)
            dtype = IN_TORCH[run.precision.format] if weight else "float32"
            entry = tensors.setdefault(
                read.name,
                {"shape": list(layout.shapes[read.name]), "dtype": dtype, "pieces": []},
            )
            region = read.region
            piece = {
                "file": name,
                "entry": f"{read.name}@{number}",
                "offset": list(region.offset),
                "shape": list(region.shape),
                "flat": None if region.flat is None else list(region.flat),
            }
            place = [piece[key] for key in ("offset", "shape", "flat")]
            # of replicas only the first writes
            if place not in [[p[k] for k in ("offset", "shape", "flat")] for p in entry["pieces"]]:
                entry["pieces"].append(piece)
    facts = {
        "consumed_samples": step * run.trainer.batch,
        "schedule_steps": step,
        "optimizer_step": step,
        "loss_scale": None,
        "grid": layout.grid.sizes,
        "streams": folder.STREAMS,
        "digest": run.digest(),
        "data": None,
    }
    return {
        "format": folder.FORMAT,
        "step": step,
        "ranks": run.parallel.ranks,
        "state": facts | state,
        "tensors": tensors,
        "files": files,
    }


def committed(run: RunConfig, root: Path, step: int = 1, **state: Any) -> Path:
    """Write a checkpoint of a run whose tensors are holes, and return its folder."""
    body = manifest_of(run, step, **state)
    body.pop("format")
    draft = root / "draft"
    draft.mkdir(parents=True)
    (draft / folder.RUN_FILE).write_text(run_yaml(run.recorded()))
    tensors = body.pop("tensors")
    for rank, name in enumerate(body.pop("files")):
        _write_holes(draft / name, name, tensors)
        written = {
            "pieces": _pieces_in(name, tensors),
            "file": {"name": name, **hashes.wrote(draft / name)},
        }
        index.write(draft, rank, run.parallel.ranks, [written])
    for rank in range(run.parallel.ranks):
        if index.of_group(draft, rank, run.parallel.ranks) is not None:
            index.gather(draft, rank, run.parallel.ranks)
    final = root / folder.folder_name(step)
    folder.commit(draft, final, body | index.merged(draft, run.parallel.ranks))
    return final


def _pieces_in(name: str, tensors: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of a file as a rank describes them."""
    return [
        {"key": key, "global_shape": tensor["shape"], "dtype": tensor["dtype"], **piece}
        for key, tensor in tensors.items()
        for piece in tensor["pieces"]
        if piece["file"] == name
    ]


def sign(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write an edited manifest with its own true hash."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(body | {"sha256": folder.digest(body)})
    (checkpoint / folder.MANIFEST).write_text(text)


@cache
def _hash_of_zeros(nbytes: int) -> str:
    whole, rest = divmod(nbytes, hashes.BLOCK_BYTES)
    tail = hashes.hash_blocks(bytes(rest)) if rest or not whole else ""
    return hashes.hash_blocks(bytes(hashes.BLOCK_BYTES)) * whole + tail


def _write_holes(path: Path, name: str, tensors: dict[str, Any]) -> None:
    header: dict[str, Any] = {}
    hashed: dict[str, str] = {}
    at = 0
    for tensor in tensors.values():
        dtype = IN_FILES[tensor["dtype"]]
        for piece in tensor["pieces"]:
            if piece["file"] == name:
                flat = piece["flat"]
                size = prod(piece["shape"]) if flat is None else flat[1] - flat[0]
                end = at + size * hashes.WIDTHS[dtype]
                header[piece["entry"]] = {
                    "dtype": dtype,
                    "shape": [size],
                    "data_offsets": [at, end],
                }
                hashed[piece["entry"]] = _hash_of_zeros(end - at)
                at = end
    text = json.dumps({"__metadata__": hashes.metadata_of(hashed), **header}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(hashes.LENGTH_BYTES, "little") + text)
        file.truncate(hashes.LENGTH_BYTES + len(text) + at)
