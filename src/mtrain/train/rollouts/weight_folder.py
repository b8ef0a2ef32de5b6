"""Weights for a server: folders on a disk that it reads, and the routes that make it read them.

Written against the documented routes of vLLM 0.33 (under VLLM_SERVER_DEV_MODE=1) and SGLang 0.5.
Nothing is pickled: files are safetensors. vLLM's routes of tensors (/init_weight_transfer_engine,
/start_weight_update, /update_weights, /finish_weight_update) are not used: their back ends are
NCCL, which needs the devices of both sides in one group, and one that unpickles.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from mtrain import strict_json
from mtrain.ckpt.contents import IN_FILE, on_host
from mtrain.ckpt.new_file import Writer
from mtrain.train.rollouts import hf_server
from mtrain.train.rollouts.client import Client

FILE_BYTES = 2_000_000_000
"""Bytes of tensors that are held before a file is written."""
INDEX = "model.safetensors.index.json"


def write(weights: Iterable[tuple[str, torch.Tensor]], out: Path, base: Path | None) -> None:
    """Write tensors by their names into a new folder, with the JSON files of the folder `base`
    next to them; it has its name once all is in it.

    Raises:
        OSError: it cannot be written.
        ValueError: two tensors have one name.
    """
    draft = out.with_name(f".{out.name}.draft")
    # Of a run that ended while it wrote.
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in sorted(base.glob("*.json")) if base is not None else ():
        if file.name != INDEX:
            shutil.copyfile(file, draft / file.name)
    placed: dict[str, str] = {}
    total = 0
    for number, held in enumerate(_files(weights), 1):
        name = f"model-{number:05d}.safetensors"
        with Writer(draft / name, [key for key, _ in held]) as writer:
            for key, tensor in held:
                if key in placed:
                    raise ValueError(f"two weights are {key}")
                writer.write(key, IN_FILE[tensor.dtype], tensor.shape, on_host(tensor))
                placed[key] = name
                total += tensor.nbytes
            writer.close({"format": "pt"})
    body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (draft / INDEX).write_text(strict_json.dumps(body), encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    draft.rename(out)


def _files(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the tensors of each file, in host memory."""
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        # The memory may be that of the next tensor.
        held.append((name, tensor.detach().cpu().clone()))
        size += tensor.nbytes
        if size >= FILE_BYTES:
            yield held
            held = []
            size = 0
    if held:
        yield held


def by_vllm(client: Client, folder: Path, version: str) -> str | None:
    """Make a vLLM server read its weights from a folder; it reports no version."""
    client.call("/pause", {})
    given = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    client.call("/collective_rpc", given)
    # Keys and values of prompts that it holds are those of the weights before.
    client.call("/reset_prefix_cache", {})
    client.call("/resume", {})
    return None


def by_sglang(client: Client, folder: Path, version: str) -> str | None:
    """Make an SGLang server read its weights from a folder; return the version it reports then."""
    client.call("/pause_generation", {"mode": "abort"})
    given = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
    client.call("/update_weights_from_disk", given)
    client.call("/continue_generation", {})
    return version


def by_transformers(client: Client, folder: Path, version: str) -> str | None:
    """Make the process of transformers read its weights; return the version it reports then."""
    client.call(hf_server.LOAD, {"path": str(folder), "version": version})
    return version


READ_BY: dict[str, Callable[[Client, Path, str], str | None]] = {
    "openai": by_vllm,
    "sglang": by_sglang,
    "transformers": by_transformers,
}
"""The routes by the dialect of a server."""
