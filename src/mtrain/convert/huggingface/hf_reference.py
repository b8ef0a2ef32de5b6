"""What transformers computes of a folder, where it is installed: the judge of a conversion."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.convert.huggingface.folder import CONFIG
from mtrain.models.registry import family_of, probed
from mtrain.recipes.huggingface.families import ALIASES
from mtrain.recipes.huggingface.importer import read_json


def installed() -> bool:
    """Return whether there is a transformers to ask."""
    return find_spec("transformers") is not None


def save_logits(folder: Path, ids: list[int], out: Path, model: ModelConfig) -> None:
    """Save transformers' logits after each of `ids`, fp32 [tokens, vocabulary], as plain numbers.

    The family of `model` names the class of transformers that loads the folder, and what it reads
    beside tokens. Its configuration is read by transformers itself, and no code that it names is
    run.
    """
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    said = read_json(folder / CONFIG, str(folder / CONFIG))
    kind = said.pop("model_type")
    plain: dict[str, Any] = {
        "attn_implementation": "eager",
        "local_files_only": True,
        "trust_remote_code": False,
    }
    if kind in ALIASES and kind not in transformers.CONFIG_MAPPING:
        plain["config"] = _as_known(kind, said)
    auto = getattr(transformers, family_of(model).auto_class)
    loaded = auto.from_pretrained(folder, dtype=torch.float32, **plain)
    ids, _, more = probed(model, ids)
    given = {"input_ids": torch.tensor([ids])}
    if (
        loaded.config.is_encoder_decoder
    ):  # both read the same tokens, as ours do where the encoder is given none
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        found = loaded.eval()(**given, **more).logits
    found[0].float().numpy().tofile(out)


def _as_known(kind: str, said: dict[str, Any]) -> Any:
    """Return the configuration of a folder whose `model_type` transformers has no name for, as the
    family's that it is.
    """
    from transformers import AutoConfig

    plain = {
        key: value for key, value in said.items() if key not in ("auto_map", "quantization_config")
    }
    return AutoConfig.for_model(ALIASES[kind], **plain)
