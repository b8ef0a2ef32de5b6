"""A folder of weights in Hugging Face's form: which tensors its files hold.

It is data; needs no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.config.resolve.model_tokenizer import OTHERS
from mtrain.convert.safetensors_file import Tensor, once, read_header
from mtrain.durable import not_read
from mtrain.errors import CorruptData

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "adapter_model.safetensors"
SWAPPED = "0.18.1"
STRAIGHT = "0.19.1"
"""Versions of `peft` that differ in the form of experts' adapters."""
PEFT_VERSIONS = {"0.19": STRAIGHT, "0.18": SWAPPED}
"""Version of `peft` in a command -> the version in the written files."""
COMPANIONS = (
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    *OTHERS,
)
"""Files of tokenizer and generation, which are copied unchanged."""
# an index is foreign text: no name in it leads out of the folder
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
MAX_INDEX_BYTES = 128 << 20
MAX_COMPANION_BYTES = 128 << 20


@dataclass(frozen=True)
class Folder:
    """The tensors of a folder by name, from one file or several."""

    path: Path
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def config(self) -> Path:
        """Return its `config.json`."""
        return self.path / CONFIG


def is_folder(path: Path) -> bool:
    """Return whether there are weights in Hugging Face's form, or their configuration."""
    return any((path / name).is_file() for name in (INDEX, WEIGHTS, CONFIG))


def open_folder(path: Path) -> Folder:
    """Return the tensors that a folder's index names, or those of its one file.

    Raises:
        CorruptData: no weights that are read, or an index and files that do not agree, by name.
    """
    if (path / INDEX).is_file():
        return Folder(path, _indexed(path, _weight_map(path / INDEX)))
    if (path / WEIGHTS).is_file():
        return Folder(path, read_header(path / WEIGHTS))
    # look for the usual names, so that the message can suggest a remedy
    pickle = next((name for name in PICKLES if (path / name).exists()), None)
    if pickle is not None:
        raise pickle_refused(path / pickle, "transformers")
    raise CorruptData(f"{path} has neither {INDEX} nor {WEIGHTS}")


def pickle_refused(file: Path, library: str) -> CorruptData:
    """Return the error of weights that `library` saved as a pickle."""
    return CorruptData(
        f"{file} is a pickle, which can run code when it is read, and is never read here: have"
        f" whoever made it save safetensors (save_pretrained of {library} does)"
    )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise CorruptData(f"{index}: larger than an index can be")
        found: Any = json.loads(index.read_text("utf-8"), object_pairs_hook=once)
        names = found["weight_map"]
    except OSError as error:
        raise not_read(index, error) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptData(f"{index} is no index of weights: {str(error)[:200]}") from None
    if not isinstance(names, dict) or not names:
        raise CorruptData(f"{index}: weight_map is no object with names")
    for file in names.values():
        if not isinstance(file, str) or not _PLAIN.fullmatch(file):
            raise CorruptData(
                f"{index}: {str(file)[:200]!r} is no plain name of a safetensors file"
            )
    return names


def _indexed(path: Path, names: dict[str, str]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for file in sorted(set(names.values())):
        # each file is compared with the index in both directions
        held = read_header(path / file)
        for name, tensor in held.items():
            if names.get(name) != file:
                raise CorruptData(
                    f"{path / file}: it holds {name[:200]}, and {INDEX} says otherwise"
                )
            out[name] = tensor
    missing = next((name for name in names if name not in out), None)
    if missing is not None:
        raise CorruptData(
            f"{path / names[missing]} does not hold {missing[:200]}, which {INDEX} says"
        )
    return out
