"""The reference of a conversion: the logits that transformers computes, if it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.convert.huggingface.folder import CONFIG
from mtrain.models.registry import family_of, probed
from mtrain.recipes.huggingface.families import ALIASES
from mtrain.recipes.huggingface.importer import read_json


def is_installed() -> bool:
    """Return whether transformers is installed."""
    return find_spec("transformers") is not None


def save_logits(folder: Path, ids: list[int], out: Path, model: ModelConfig) -> None:
    """Save transformers' logits after each of `ids`, fp32 [tokens, vocabulary] or, with a value
    head, [tokens, 1], as plain numbers.

    The family of `model` names the class of transformers that loads the folder, and its inputs
    besides tokens. transformers reads the configuration without running code that it names.
    """
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    values = read_json(folder / CONFIG, str(folder / CONFIG))
    kind = values.pop("model_type")
    plain: dict[str, Any] = {
        # fused attention rounds differently
        "attn_implementation": "eager",
        "local_files_only": True,
        "trust_remote_code": False,
    }
    # publishers name models that are another family's by their own name
    if kind in ALIASES and kind not in transformers.CONFIG_MAPPING:
        plain["config"] = _as_known(kind, values)
    name = "AutoModelForSequenceClassification" if model.head else family_of(model).auto_class
    auto = getattr(transformers, name)
    loaded = auto.from_pretrained(folder, dtype=torch.float32, **plain)
    ids, _, more = probed(model, ids)
    given = {"input_ids": torch.tensor([ids])}
    if loaded.config.is_encoder_decoder:
        # both read the same tokens, as in our model without encoder input
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        if model.head:
            # its own forward gives the number of the last token only
            hidden = loaded.eval().base_model(**given, **more).last_hidden_state
            found = loaded.score(hidden)
        else:
            found = loaded.eval()(**given, **more).logits
    found[0].float().numpy().tofile(out)


def _as_known(kind: str, values: dict[str, Any]) -> Any:
    """Return the configuration of a `model_type` unknown to transformers, as its family's."""
    from transformers import AutoConfig

    plain = {
        key: value
        for key, value in values.items()
        if key not in ("auto_map", "quantization_config")
    }
    return AutoConfig.for_model(ALIASES[kind], **plain)
